"""Rows of the data sets that `bench accuracy` asks about: from a folder, or from a model hub.

A folder has `NAME/*.jsonl` with the fields below; `hf:NAME[,NAME]` or `hf:all` takes the data sets
in `HUB` with the library `datasets` and gives rows with the same fields.

    piqa             goal, sol1, sol2, label (0 or 1)
    rte              premise, hypothesis, label (entailment or not_entailment)
    copa             premise, question (cause or effect), choice1, choice2, label (0 or 1)
    openbookqa       question, choices (texts), label (place of the right one)
    squad_xquad_en   context, question, answers (texts)
    gsm8k            question, answer (reasoning, then "#### number")
    bbh              cot_prompts.jsonl: task, prompt; test.jsonl: task, input, target
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.core.servers import BenchFailed

Row = Mapping[str, Any]
HUB_MARK = "hf:"
_PROMPTS = "cot_prompts.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class HubSource:
    """Where the hub has a data set, and how one of its rows becomes one of ours."""

    name: str
    config: str | None
    split: str
    convert: Callable[[Row], dict[str, Any]]


def read_rows(data: str, name: str) -> list[Row]:
    """All rows of the data set `name`, in their order.

    Args:
        data: a folder, or `hf:NAME[,NAME]`.
        name: a data set of the module's docstring; rows of `bbh` also get their task's prompt.

    Raises:
        BenchFailed: there is no such data set, or `datasets` is missing or cannot load it.
    """
    if data.startswith(HUB_MARK):
        return _read_hub(data, name)
    files = [path for path in sorted((Path(data) / name).glob("*.jsonl")) if path.name != _PROMPTS]
    if not files:
        raise BenchFailed(f"no data set {name!r} (a folder with .jsonl files) in {data}")
    rows = [row for file in files for row in _read_lines(file)]
    return _with_prompts(rows, Path(data) / name / _PROMPTS) if name == "bbh" else rows


def hub_datasets(data: str) -> list[str]:
    """Names of our data sets that `hf:NAME[,NAME]` or `hf:all` has."""
    asked = data.removeprefix(HUB_MARK).split(",")
    return [
        name
        for name, source in HUB.items()
        if "all" in asked or {source.name, source.name.rsplit("/", 1)[-1]} & set(asked)
    ]


def _with_prompts(rows: list[Row], file: Path) -> list[Row]:
    if not file.is_file():
        raise BenchFailed(f"task bbh needs {file}")
    prompts = {row["task"]: row["prompt"] for row in _read_lines(file)}
    return [{**row, "prompt": prompts[row["task"]]} for row in rows]


def _read_lines(file: Path) -> list[Row]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _read_hub(data: str, name: str) -> list[Row]:
    if name not in hub_datasets(data):
        known = ", ".join(f"{source.name} ({ours})" for ours, source in HUB.items())
        raise BenchFailed(f"--data {data} has no {name}; known are hf:all and hf: with {known}")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise BenchFailed(f"--data {data} needs `pip install datasets`") from error
    source = HUB[name]
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # Of many kinds: network, access, format.
        raise BenchFailed(f"cannot load {source.name} from the hub: {error}") from error
    return [source.convert(row) for row in rows]


def _piqa(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("goal", "sol1", "sol2", "label")}


def _rte(row: Row) -> dict[str, Any]:
    return {
        "premise": row["premise"],
        "hypothesis": row["hypothesis"],
        "label": ("entailment", "not_entailment")[row["label"]],
    }


def _copa(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("premise", "question", "choice1", "choice2", "label")}


def _openbookqa(row: Row) -> dict[str, Any]:
    return {
        "question": row["question_stem"],
        "choices": list(row["choices"]["text"]),
        "label": list(row["choices"]["label"]).index(row["answerKey"].strip()),
    }


def _squad(row: Row) -> dict[str, Any]:
    return {
        "context": row["context"],
        "question": row["question"],
        "answers": list(row["answers"]["text"]),
    }


def _gsm8k(row: Row) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"]}


HUB: dict[str, HubSource] = {
    "piqa": HubSource("ybisk/piqa", None, "validation", _piqa),
    "rte": HubSource("aps/super_glue", "rte", "train+validation", _rte),
    "copa": HubSource("aps/super_glue", "copa", "train+validation", _copa),
    "openbookqa": HubSource("allenai/openbookqa", "main", "train+validation", _openbookqa),
    "squad_xquad_en": HubSource("rajpurkar/squad", None, "validation", _squad),
    "gsm8k": HubSource("openai/gsm8k", "main", "test", _gsm8k),
}
