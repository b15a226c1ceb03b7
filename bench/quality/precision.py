"""What few bits of a prefix do to what a model says after it, without a server.

The model computes each prefix exactly, its KVs are rounded by a rule, and the model goes on from
there, for each question or text by itself. Rules, and the bits of their names per element:

    coded 5      as the store codes prefixes
    blind 5      the same, by the ranges of channels alone, where no queries are known
    uniform 5    the same ranges, and as many bits for every element
    question 5   4 bits, and 6 or 8 for blocks of 16 tokens of a KV head that a question attends to
    foresight 5  the same, by what the question attends to and the text that follows it
    basis 4      by the basis of --basis at this rate, which `impress calibrate` made
    drop 0.25    such a share of the tokens, exactly: for each KV head those that a question attends
                 to most (H2O)

`question` and `drop` know what a server knows when it loads a prefix: the prompt, not the answer.

The first tokens of a prefix, which are attention sinks, stay exact under all but `drop`.

bytes     of codes and ranges, over those in 16 bits
KL        of the next tokens' distributions, of text that follows prefixes of wikitext2, or of the
          files of --text, each of one kind, in nats; its first tokens are the question
shift     mean change of an option's log-likelihood, less the mean over the options, in nats, of
          questions about passages
same      share of questions of which the same option is the likeliest
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.core.data import load_tokenize, model_folder, read_rows
from bench.core.options import Option
from bench.core.report import Column, Result, Row, Table
from bench.core.session import BenchFailed, step
from bench.quality.asking import centred_shift
from bench.quality.tasks import SQUAD, Item, TaskOptions, make_task
from impress_sglang.cli.calibrate import KVs, Prompts, coded_kvs
from impress_sglang.codec.basis import RATES, Basis
from impress_sglang.codec.fit import SINK_TOKENS
from impress_sglang.codec.levels import MAX_BITS
from impress_sglang.precision.codec import (
    CODE_BITS,
    GROUP_TOKENS,
    LEVELS,
    Codes,
    code_keys,
    code_values,
    restore,
)

# Of the last tokens of a prefix; see `precision.floors`.
MEASURED_QUERIES = 16
# What is raised by itself under `question`, and its bits with no, one and two planes.
BLOCK_TOKENS = 16
BLOCK_BITS = (4, 6, 8)
KINDS = ("coded", "blind", "uniform", "basis", "question", "foresight", "drop")
# Those that ask no question.
ALIKE = KINDS[:4]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How KVs are rounded; `bits` per element, of `drop` the share of tokens that stay."""

    kind: str
    bits: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `KIND BITS`."""
        kind, _, bits = text.partition(" ")
        try:
            rule = cls(kind, float(bits))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not KIND BITS") from None
        possible = {
            "coded": rule.bits in LEVELS,
            "blind": rule.bits in LEVELS,
            "uniform": rule.bits in range(1, CODE_BITS + 1),
            "question": BLOCK_BITS[0] <= rule.bits <= BLOCK_BITS[-1],
            "foresight": BLOCK_BITS[0] <= rule.bits <= BLOCK_BITS[-1],
            "drop": 0 < rule.bits <= 1,
            "basis": 0 < rule.bits <= MAX_BITS,
        }
        if not possible.get(kind, False):
            raise argparse.ArgumentTypeError(f"there is no rule {text!r}")
        return rule

    def __str__(self) -> str:
        return f"{self.kind} {self.bits:g}"


RULES = (
    "coded 5",
    "coded 6",
    "coded 8",
    "blind 5",
    "uniform 4",
    "uniform 5",
    "uniform 6",
    "uniform 8",
)
OPTIONS = (
    Option(
        "rules",
        tuple(Rule.parse(own) for own in (*RULES, "question 5", "foresight 5", "drop 0.25")),
        f"of {', '.join(KINDS)}, with bits",
        quick=tuple(Rule.parse(own) for own in ("coded 5", "uniform 5")),
        parse=Rule.parse,
    ),
    Option("prefixes", 5, "of each task", quick=1),
    Option("prefix-tokens", 1500, "of text", quick=300),
    Option("follow-tokens", 144, "of the text that follows", quick=40),
    Option("question-tokens", 24, "of these, what is the question", quick=8),
    Option("passages", 10, "per prefix of squad", quick=3),
    Option("questions", 40, "about them", quick=2),
    Option("seed", 5, "draws prefixes and questions"),
    Option("text", (), "files of text, each of one kind, in place of wikitext2", parse=Path),
    Option("data", None, "a folder with whole data sets", parse=Path),
    Option("model", None, "folder of another model", parse=Path),
    Option("basis", (), "files of bases for rules `basis`", parse=Path),
)


def run(args: argparse.Namespace) -> Result:
    """Measure all rules on both tasks."""
    if args.question_tokens >= args.follow_tokens:
        raise BenchFailed("--question-tokens must be fewer than --follow-tokens")
    torch.set_grad_enabled(False)
    folder = model_folder(args.model)
    rates = (own.keeping(bits) for own in map(Basis.load, args.basis) for bits in RATES)
    bases = {round(own.rate, 2): own for own in rates}
    unknown = [own for own in args.rules if own.kind == "basis" and own.bits not in bases]
    if unknown:
        raise BenchFailed(f"no file of --basis has the rate of {', '.join(map(str, unknown))}")
    reader = Reader(folder, bases)
    with step("text"):
        divergences = _text(args, folder, reader)
    with step("passages"):
        shifts, same = _passages(args, folder, reader)
    rows: list[Row] = [
        {
            "rule": str(rule),
            "bytes": reader.bytes_of(rule),
            "KL": round(statistics.fmean(own[rule] for own in divergences.values()), 5),
            "KL_of": {kind: round(own[rule], 5) for kind, own in divergences.items()},
            "shift": round(shifts[rule], 4),
            "same": round(same[rule], 4),
        }
        for rule in args.rules
    ]
    columns = (
        Column("rule", "rule"),
        Column("bytes", "bytes", "{:.3f}"),
        Column("KL", "KL", "{:.5f}"),
        *(Column(kind, _divergence_of(kind), "{:.5f}") for kind in divergences if args.text),
        Column("shift", "shift", "{:.3f}"),
        Column("same", "same", "{:.1%}"),
    )
    return Result({"model": folder.name, "rows": rows}, [Table(columns, rows, folder.name)])


class Reader:
    """A model that reads on behind prefixes whose KVs were rounded."""

    def __init__(self, folder: Path, bases: Mapping[float, Basis]) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def attend(module: Any, query: Tensor, *more: Any, **how: Any) -> Any:
            self.queries.append(query[0].transpose(0, 1))
            return sdpa_attention_forward(module, query, *more, **how)

        AttentionInterface.register("noting", attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="noting"
        ).eval()
        self._turner, self._bases = Prompts(self.model), bases
        self.queries: list[Tensor] = []
        """Of each layer of the last pass, [n, Hq, D]."""
        self._sizes, self._length = (0, 0, 0), 0

    def prefix(self, tokens: Sequence[int]) -> Prefix:
        """Compute a prefix."""
        self.queries.clear()
        cache = self._read(None, tokens)
        kvs = [(own.keys[0].transpose(0, 1), own.values[0].transpose(0, 1)) for own in cache.layers]
        heads, key_dim, value_dim = *kvs[0][0].shape[1:], kvs[0][1].shape[2]
        self._sizes, self._length = (heads, key_dim, value_dim), len(tokens)
        return Prefix(kvs, [own[-MEASURED_QUERIES:] for own in self.queries], self.by_basis)

    def by_basis(self, kvs: KVs, rate: float) -> KVs:
        """What KVs of a prefix are restored to by the basis with this rate; sinks are exact."""
        turned = [(self._turner.turned(keys, back=True), values) for keys, values in kvs]
        found = coded_kvs(self._bases[rate], turned)
        return [(self._turner.turned(keys, back=False), values) for keys, values in found]

    def follow(self, kvs: Sequence[tuple[Tensor, Tensor]], tokens: Sequence[int]) -> Tensor:
        """Log-probabilities of the tokens behind each of these, [n, vocabulary]."""
        self.queries.clear()
        return self._logits(kvs, tokens)[0].log_softmax(-1)

    def bytes_of(self, rule: Rule) -> float:
        """Bytes of a whole group of tokens, over those in 16 bits."""
        if rule.kind == "drop":
            return rule.bits
        if rule.kind == "basis":
            own = self._bases[rule.bits]
            features = sum(heads * dim for heads, dim in own.shapes) * own.num_layers
            return round(own.token_bytes / (2 * features), 4)
        heads, key_dim, value_dim = self._sizes
        ranges = 2 * heads * (2 * key_dim + 2 * GROUP_TOKENS)
        # A byte for each channel says which bits are where.
        ranges += heads * key_dim if rule.kind in ("coded", "blind") else 0
        elements = GROUP_TOKENS * heads * (key_dim + value_dim)
        return round((elements * rule.bits / 8 + ranges) / (2 * elements), 4)

    def _read(self, kvs: Sequence[tuple[Tensor, Tensor]] | None, tokens: Sequence[int]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, own in enumerate(kvs or ()):
            keys, values = (one.transpose(0, 1)[None].contiguous() for one in own)
            cache.update(keys, values, layer)
        # Where tokens were dropped, positions go on behind all of them.
        first, held = self._length if kvs else 0, len(kvs[0][0]) if kvs else 0
        seen = torch.ones(len(tokens), held + len(tokens), dtype=torch.bool).tril(held)
        self._last = self.model(
            torch.tensor([list(tokens)]),
            past_key_values=cache,
            position_ids=torch.arange(first, first + len(tokens))[None],
            attention_mask=seen[None, None],
        )
        return cache

    def _logits(self, kvs: Sequence[tuple[Tensor, Tensor]], tokens: Sequence[int]) -> Tensor:
        self._read(kvs, tokens)
        return self._last.logits


class Prefix:
    """The KVs of a prefix, [(keys, values)] of each layer, [m, G, D], and their codes."""

    def __init__(
        self,
        kvs: KVs,
        queries: Sequence[Tensor],
        by_basis: Callable[[KVs, float], KVs],
    ) -> None:
        """`queries` of each layer [n, Hq, D]: those of the last tokens."""
        self.kvs = kvs
        self._by_basis = by_basis
        self._codes: list[tuple[Codes, Codes]] = []
        # The last rule that asks no question.
        self._rounded: tuple[Rule | None, list[tuple[Tensor, Tensor]]] = None, []
        for (keys, values), own in zip(kvs, queries, strict=True):
            energy = own.unflatten(1, (keys.shape[1], -1)).square().mean((0, 2))
            self._codes.append((code_keys(keys, energy), code_values(values)))

    def rounded(self, rule: Rule, questions: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer by a rule; `questions` are its queries, [n, Hq, D]."""
        if rule.kind not in ALIKE:
            return list(self._layers(rule, questions))
        if self._rounded[0] != rule:
            found = (
                self._by_basis(self.kvs, rule.bits)
                if rule.kind == "basis"
                else list(self._layers(rule, questions))
            )
            self._rounded = rule, found
        return self._rounded[1]

    def _layers(self, rule: Rule, questions: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for layer, (codes, own) in enumerate(zip(self._codes, self.kvs, strict=True)):
            if rule.kind == "drop":
                k = round(rule.bits * len(own[0]))
                best = _shares(questions[layer], own[0]).sum((1, 2)).topk(k).indices.sort().values
                yield (
                    own[0].gather(0, best.T[..., None].expand(-1, -1, own[0].shape[2])),
                    own[1].gather(0, best.T[..., None].expand(-1, -1, own[1].shape[2])),
                )
                continue
            rounded = self._rounded_layer(rule, codes, own, questions, layer)
            for found, exact in zip(rounded, own, strict=True):
                # As the store keeps them.
                found[:SINK_TOKENS] = exact[:SINK_TOKENS]
            yield rounded

    def _rounded_layer(
        self,
        rule: Rule,
        codes: tuple[Codes, Codes],
        own: tuple[Tensor, Tensor],
        questions: Sequence[Tensor],
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        if rule.kind in ("coded", "blind"):
            keys = codes[0] if rule.kind == "coded" else code_keys(own[0])
            return restore(keys, int(rule.bits)), restore(codes[1], int(rule.bits))
        if rule.kind == "uniform":
            return _uniform(codes[0], int(rule.bits)), _uniform(codes[1], int(rule.bits))
        count = (rule.bits - BLOCK_BITS[0]) / (BLOCK_BITS[1] - BLOCK_BITS[0])
        planes = _planes(_weights(questions[layer], own[0]), count)
        return _raised(codes[0], planes), _raised(codes[1], planes)


def _shares(queries: Tensor, keys: Tensor) -> Tensor:
    """What the queries [n, Hq, D] give to each token of a prefix, [G, n, Hq / G, m]."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("nghd,mgd->gnhm", grouped, keys) * keys.shape[2] ** -0.5
    return logits.softmax(-1)


def _weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Squared attention weights of blocks of tokens, [G, blocks]."""
    by_token = _shares(queries, keys).square().sum((1, 2))
    padded = functional.pad(by_token, (0, -by_token.shape[1] % BLOCK_TOKENS))
    return padded.unflatten(1, (-1, BLOCK_TOKENS)).sum(2)


def _planes(weights: Tensor, mean: float) -> Tensor:
    """Planes of blocks [G, blocks], `mean` on average, where an error weighs most."""
    gains = torch.stack([weights, weights / 16]).flatten()
    best = gains.topk(int(mean * weights.numel())).indices % weights.numel()
    return torch.bincount(best, minlength=weights.numel()).view_as(weights)


def _uniform(codes: Codes, bits: int) -> Tensor:
    """What codes stand for of which the upper bits are known, of every element."""
    low, step = codes.low.float(), codes.step.float()
    if low.ndim == 3:
        groups = torch.arange(len(codes.codes)) // GROUP_TOKENS
        low, step = low[groups], step[groups]
    else:
        low, step = low[..., None], step[..., None]
    cell = 2 ** (CODE_BITS - bits)
    return ((codes.codes // cell).float() * cell + (cell - 1) / 2) * step + low


def _raised(codes: Codes, planes: Tensor) -> Tensor:
    by_token = planes.repeat_interleave(BLOCK_TOKENS, 1)[:, : len(codes.codes)].T[..., None]
    rows = _uniform(codes, BLOCK_BITS[0])
    for count, bits in enumerate(BLOCK_BITS[1:], 1):
        rows = torch.where(by_token >= count, _uniform(codes, bits), rows)
    return rows


def _text(args: argparse.Namespace, folder: Path, reader: Reader) -> dict[str, dict[Rule, float]]:
    """Of each kind of text the mean divergence of each rule."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in args.text}
    if not texts:
        texts["wikitext2"] = "\n".join(row["text"] for row in read_rows(args.data, "wikitext2"))
    tokenize, found = load_tokenize(folder), {}
    for kind, text in texts.items():
        tokens = tokenize(text)
        if len(tokens) < args.prefix_tokens + args.follow_tokens:
            raise BenchFailed(f"{kind} has only {len(tokens)} tokens; give more of it")
        found[kind] = _divergences(args, tokens, reader)
    return found


def _divergences(
    args: argparse.Namespace, tokens: Sequence[int], reader: Reader
) -> dict[Rule, float]:
    length, asked = args.prefix_tokens + args.follow_tokens, args.question_tokens
    found: dict[Rule, list[float]] = {rule: [] for rule in args.rules}
    rng = random.Random(args.seed)
    for _ in range(args.prefixes):
        start = rng.randrange(len(tokens) - length + 1)
        prefix = reader.prefix(tokens[start:][: args.prefix_tokens])
        text = tokens[start + args.prefix_tokens : start + length]
        exact = reader.follow(prefix.kvs, text)[asked:]
        queries = [own.clone() for own in reader.queries]
        for rule in args.rules:
            seen = [own if rule.kind == "foresight" else own[:asked] for own in queries]
            other = reader.follow(prefix.rounded(rule, seen), text)[asked:]
            found[rule].append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    return {rule: statistics.fmean(own) for rule, own in found.items()}


def _divergence_of(kind: str) -> Callable[[Row], float]:
    return lambda row: row["KL_of"][kind]


def _passages(
    args: argparse.Namespace, folder: Path, reader: Reader
) -> tuple[dict[Rule, float], dict[Rule, float]]:
    """Shift, and share of the same options, of each rule."""
    size = TaskOptions(args.prefixes, 0, None, args.passages, args.questions, args.seed)
    task = make_task(SQUAD, args.data, load_tokenize(folder), size)
    exact: list[list[float]] = []
    found: dict[Rule, list[list[float]]] = {rule: [] for rule in args.rules}
    for number, tokens in enumerate(task.prefixes):
        prefix = reader.prefix(tokens)
        items = [own for own in task.items if own.prefix == number]
        for item in items:
            exact.append([_loglik(reader, prefix.kvs, item, own) for own in item.options])
        for rule in args.rules:
            found[rule] += [_logliks(reader, prefix, rule, item) for item in items]
    shifts = {rule: centred_shift(own, exact) for rule, own in found.items()}
    best = [int(np.argmax(own)) for own in exact]
    same = {
        rule: statistics.fmean(int(np.argmax(a)) == b for a, b in zip(own, best, strict=True))
        for rule, own in found.items()
    }
    return shifts, same


def _logliks(reader: Reader, prefix: Prefix, rule: Rule, item: Item) -> list[float]:
    """Of the options, where the prefix is rounded by what is known before they are asked for."""
    if rule.kind != "foresight":
        if rule.kind not in ALIKE:
            reader.follow(prefix.kvs, item.question)
        kvs = prefix.rounded(rule, list(reader.queries))
        return [_loglik(reader, kvs, item, option) for option in item.options]
    found = []
    for option in item.options:
        reader.follow(prefix.kvs, [*item.question, *option])
        kvs = prefix.rounded(rule, list(reader.queries))
        found.append(_loglik(reader, kvs, item, option))
    return found


def _loglik(
    reader: Reader, kvs: Sequence[tuple[Tensor, Tensor]], item: Item, option: Sequence[int]
) -> float:
    logs = reader.follow(kvs, [*item.question, *option])[len(item.question) - 1 : -1]
    return float(logs[torch.arange(len(option)), torch.tensor(option)].sum())
