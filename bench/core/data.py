"""Data sets, models and tokenizers.

`bench/data` has excerpts of data sets, and their licences; `--data DIR` takes `DIR/NAME/*.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.core.session import ROOT, BenchFailed

EXCERPTS = ROOT / "bench" / "data"
SEPARATOR = "\n\n"
Row = Mapping[str, Any]
Tokenize = Callable[[str], list[int]]


class Question(NamedTuple):
    """A question, which ends where its answer begins, with options."""

    text: str
    options: tuple[str, ...]
    gold: int

    @property
    def answer(self) -> str:
        """The right option."""
        return self.options[self.gold]

    @property
    def shot(self) -> str:
        """The question with its right answer."""
        return f"{self.text} {self.answer}"


def read_rows(folder: Path | None, name: str) -> list[Row]:
    """All rows of the data set `name` of a folder, or of the excerpts, in their order.

    Raises:
        BenchFailed: there is no such data set.
    """
    files = sorted((folder or EXCERPTS).glob(f"{name}/*.jsonl"))
    if not files:
        where = folder or "the excerpts; give --data DIR with it"
        raise BenchFailed(f"no data set {name!r} (a folder with .jsonl files) in {where}")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.strip()]


def _copa(row: Row) -> Question:
    """Two causes or effects; the question is the sentence up to the conjunction."""
    because = {"cause": "because", "effect": "therefore"}[row["question"]]
    options = (row["choice1"], row["choice2"])
    lowered = tuple(option[0].lower() + option[1:] for option in options)
    return Question(f"{row['premise'].strip().rstrip('.')} {because}", lowered, row["label"])


def _rte(row: Row) -> Question:
    """Whether the hypothesis follows from the premise."""
    text = f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:"
    return Question(text, ("True", "False"), int(row["label"] != "entailment"))


def _asked(question: str, options: Iterable[str], gold: int) -> Question:
    return Question(f"Question: {question}\nAnswer:", tuple(options), gold)


READERS: dict[str, Callable[[Row], Question]] = {
    "piqa": lambda r: _asked(r["goal"], (r["sol1"].strip(), r["sol2"].strip()), r["label"]),
    "rte": _rte,
    "copa": _copa,
    "openbookqa": lambda r: _asked(r["question"], r["choices"], r["label"]),
}


def model_folder(model: Path | None) -> Path:
    """The folder of a model, by default the demo's.

    Raises:
        BenchFailed: the package with its weights is not installed.
    """
    from demo.model import DemoModelMissing, model_path

    try:
        return (model or model_path()).resolve()
    except DemoModelMissing as error:
        raise BenchFailed(str(error)) from error


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return int(config["num_hidden_layers"] * 2 * kv_heads * head_dim * item_bytes)


def load_tokenize(model: Path) -> Tokenize:
    """Text to token ids, without special tokens, by a model's tokenizer.

    Raises:
        BenchFailed: the model has none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise BenchFailed(f"no tokenizer in {model}: {error}") from error

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return tokenize
