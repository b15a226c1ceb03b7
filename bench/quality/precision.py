"""Precision and where it goes, at equal bytes, on a model's own attention; no server runs.

A rule says how many planes each unit of a prefix gets (`impress_sglang.precision`):

    uniform B     all elements have B bits: 4, 6 or 8, or 5, where every other unit has 6
    query B       B bits on average, by the attention of the question (reverse water-filling)
    history B     the same by the attention of earlier questions, which a store could know
    shared B      as query, but on top of what earlier questions have raised: a resident prefix
    random B      B bits on average, to units that a die chooses
    drop R        nothing but the share R of each head's tokens, exactly, found by keys of 4 bits

A unit are the tokens of a head that fill a block of 4 KiB; the base has 4 bits. `bytes` are what is
read of a prefix that nothing is known of, as a share of 16-bit KVs: ranges, base and planes; for
`drop`, the 4-bit keys and all blocks with a wanted row.

Tasks with options: `agreement` is the share of questions with the answer of exact KVs, `change` the
mean change of an option's log-likelihood, in nats, after the mean over the options is taken off.
`wikitext2`: `change` is the KL to the exact KVs in nats per token of a continuation, and
`agreement` that of the most likely next token. Hidden states are those of the rule, through all
layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.core.data import Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, MODEL, SEED, Option, one_of
from bench.core.report import Result, Table, plain
from bench.core.session import step
from bench.quality.lab import AttentionLab, PrefixKV, attention_after
from bench.quality.tasks import TASKS, Item, TaskOptions, make_task
from impress_sglang.importance.selection import per_head_tokens, retained_tokens
from impress_sglang.precision.allocation import allocate_planes, planes_of, unit_weights
from impress_sglang.precision.codec import (
    BASE_BITS,
    LEVELS,
    PLANE_BITS,
    Codes,
    code_keys,
    code_values,
    restore,
)
from impress_sglang.precision.layout import CodeLayout

CONTINUATIONS = "wikitext2"
BLOCK_BYTES = 4096
# Of 16-bit KVs, what the bytes are a share of.
EXACT_BITS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A rule of `--rules`: `number` is mean bits, or the share of tokens of `drop`."""

    kind: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From `KIND NUMBER`."""
        kind, _, number = text.partition(" ")
        if not number or (kind not in _PLANES and kind != "drop"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a rule")
        return cls(kind, float(number))

    def __str__(self) -> str:
        return f"{self.kind} {self.number:g}"


@dataclasses.dataclass(slots=True)
class CodedPrefix:
    """A prefix in codes, and what earlier questions say of it.

    `history` are mean token weights [L, G, m] of the requests so far; `raised` by rule and layer
    the planes that are there.
    """

    exact: PrefixKV
    keys: list[Codes]
    values: list[Codes]
    history: Tensor
    requests: int = 0
    raised: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, exact: PrefixKV) -> CodedPrefix:
        """Code all layers."""
        shape = (len(exact.keys), exact.keys[0].shape[1], exact.num_tokens)
        keys, values = map(code_keys, exact.keys), map(code_values, exact.values)
        return cls(exact, list(keys), list(values), torch.zeros(shape))

    def layout(self, layer: int) -> CodeLayout:
        """Of a layer."""
        (tokens, heads, key_dim), value_dim = (
            self.exact.keys[layer].shape,
            self.exact.values[layer].shape[2],
        )
        return CodeLayout(tokens, heads, key_dim, value_dim, BLOCK_BYTES)

    def restored(self, layer: int, planes: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [m, G, D] where tokens have these planes, int64 [G, m]."""
        levels = planes.T[..., None]
        found = []
        for codes in (self.keys[layer], self.values[layer]):
            rows = restore(codes, LEVELS[0])
            for number, bits in enumerate(LEVELS[1:], 1):
                if (planes >= number).any():
                    rows = torch.where(levels >= number, restore(codes, bits), rows)
            found.append(rows)
        return found[0], found[1]


def _by_query(rule: Rule, prefix: CodedPrefix, layer: int, weights: Tensor, unit: int) -> Tensor:
    own = unit_weights(weights, unit)
    return allocate_planes(own, planes_of(rule.number, own.numel()))


def _uniform(rule: Rule, prefix: CodedPrefix, layer: int, weights: Tensor, unit: int) -> Tensor:
    heads, units = unit_weights(weights, unit).shape
    count = planes_of(rule.number, heads * units)
    least, more = divmod(count, heads * units)
    planes = torch.full((heads * units,), least)
    planes[torch.linspace(0, heads * units - 1, more).round().long()] += 1
    return planes.view(heads, units)


def _random(rule: Rule, prefix: CodedPrefix, layer: int, weights: Tensor, unit: int) -> Tensor:
    die = torch.Generator().manual_seed(layer * 1000003 + prefix.exact.num_tokens)
    noise = torch.rand(unit_weights(weights, unit).shape, generator=die)
    return allocate_planes(noise, planes_of(rule.number, noise.numel()))


def _by_history(rule: Rule, prefix: CodedPrefix, layer: int, weights: Tensor, unit: int) -> Tensor:
    return _by_query(rule, prefix, layer, prefix.history[layer], unit)


def _shared(rule: Rule, prefix: CodedPrefix, layer: int, weights: Tensor, unit: int) -> Tensor:
    place, own = (str(rule), layer), _by_query(rule, prefix, layer, weights, unit)
    before = prefix.raised.get(place, torch.zeros_like(own))
    prefix.raised[place] = torch.maximum(before, own)
    return prefix.raised[place]


_PLANES = {
    "uniform": _uniform,
    "query": _by_query,
    "history": _by_history,
    "shared": _shared,
    "random": _random,
}


class Study:
    """Answers of one rule after another about a prefix."""

    def __init__(self, lab: AttentionLab) -> None:
        self._lab = lab

    def coded(self, token_ids: Sequence[int]) -> CodedPrefix:
        """Compute a prefix, and code it."""
        return CodedPrefix.of(self._lab.prefix(token_ids))

    def run(
        self, rule: Rule | None, prefix: CodedPrefix, question: list[int], more: list[list[int]]
    ) -> tuple[list[Tensor], float]:
        """Log-probabilities after each token of `question + more[i]`, and the share of bytes read.

        Each is a request of its own, as it is for a server; None is the exact KVs.
        """
        shares: list[float] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            rows, share = self._load(rule, prefix, layer, (q, k, scaling))
            shares.append(share)
            return attention_after(*rows, q, k, v, scaling)

        found = []
        for part in more or [[]]:
            logits = self._lab.logits(question + part, prefix.exact.num_tokens, attend)
            found.append(logits.log_softmax(-1))
        return found, statistics.fmean(shares)

    def _load(
        self, rule: Rule | None, prefix: CodedPrefix, layer: int, seen: tuple[Tensor, Tensor, float]
    ) -> tuple[tuple[Tensor, Tensor], float]:
        exact = prefix.exact.keys[layer], prefix.exact.values[layer]
        layout, base = prefix.layout(layer), restore(prefix.keys[layer], BASE_BITS)
        queries, new_keys, scaling = seen
        weights = _weights(queries, torch.cat([base, new_keys]), scaling, len(base))
        if rule is None:
            squares = self._by_head(weights.square().sum(1))
            prefix.history[layer] += (squares - prefix.history[layer]) / (prefix.requests + 1)
            prefix.requests += layer == self._lab.num_layers - 1
            return exact, 1.0
        if rule.kind == "drop":
            return self._dropped(rule, exact, weights.sum(1))
        unit = layout.unit_tokens
        squares = self._by_head(weights.square().sum(1))
        planes = _PLANES[rule.kind](rule, prefix, layer, squares, unit)
        own = planes.repeat_interleave(unit, 1)[:, : len(base)]
        fixed = layout.base_bytes / _exact_bytes(layout)
        share = fixed + float(own.float().mean()) * PLANE_BITS / EXACT_BITS
        return prefix.restored(layer, own), share

    def _dropped(
        self, rule: Rule, exact: tuple[Tensor, Tensor], scores: Tensor
    ) -> tuple[tuple[Tensor, Tensor], float]:
        keys, values = exact
        k = retained_tokens(len(keys), rule.number)
        chosen = per_head_tokens(scores, self._lab.group_size, k).T
        heads = torch.arange(keys.shape[1])
        rows_of_block = BLOCK_BYTES // (keys.shape[2] * EXACT_BITS // 8)
        blocks = sum(len((own // rows_of_block).unique()) for own in chosen.T) * rows_of_block
        share = BASE_BITS / EXACT_BITS / 2 + blocks / (len(keys) * keys.shape[1])
        return (keys[chosen, heads], values[chosen, heads]), share

    def _by_head(self, of_query_heads: Tensor) -> Tensor:
        return of_query_heads.unflatten(0, (-1, self._lab.group_size)).sum(1)


def _exact_bytes(layout: CodeLayout) -> int:
    width = layout.key_dim + layout.value_dim
    return layout.num_tokens * layout.num_heads * width * EXACT_BITS // 8


def _weights(queries: Tensor, keys: Tensor, scaling: float, num_prefix: int) -> Tensor:
    """Attention weights that new tokens give to a prefix, float32 [Hq, n, m]."""
    num_new = len(queries)
    by_head = keys.transpose(0, 1).repeat_interleave(queries.shape[1] // keys.shape[1], 0)
    logits = queries.transpose(0, 1) @ by_head.transpose(1, 2) * scaling
    hidden = torch.ones(num_new, num_prefix + num_new, dtype=torch.bool).triu(num_prefix + 1)
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)[..., :num_prefix]


def answer(item: Item, found: Sequence[Tensor]) -> Tensor:
    """Log-likelihoods of the options, less their mean, float32 [options]."""
    first = len(item.question) - 1
    likelihoods = [
        logs[first + torch.arange(len(option)), torch.tensor(option)].sum()
        for option, logs in zip(item.options, found, strict=True)
    ]
    own = torch.stack(likelihoods)
    return own - own.mean()


def measure_answers(
    study: Study, prefix: CodedPrefix, items: Sequence[Item], rules: Sequence[Rule]
) -> Iterator[tuple[Rule, float, float, float]]:
    """Of each question and rule: bytes, agreement and shift."""
    for item in items:
        options = [list(option) for option in item.options]
        # What a rule of history knows are the questions before.
        results = [(rule, *study.run(rule, prefix, item.question, options)) for rule in rules]
        exact = answer(item, study.run(None, prefix, item.question, options)[0])
        for rule, found, share in results:
            own = answer(item, found)
            agrees = float(own.argmax() == exact.argmax())
            yield rule, share, agrees, float((own - exact).abs().mean())


def measure_continuation(
    study: Study, prefix: CodedPrefix, tokens: list[int], rules: Sequence[Rule]
) -> Iterator[tuple[Rule, float, float, float]]:
    """Of a continuation and each rule: bytes, agreement of the next token and KL."""
    results = [(rule, *study.run(rule, prefix, tokens, [])) for rule in rules]
    exact = study.run(None, prefix, tokens, [])[0][0]
    for rule, (own,), share in results:
        agreement = (own.argmax(-1) == exact.argmax(-1)).float().mean()
        divergence = (exact.exp() * (exact - own)).sum(-1).mean()
        yield rule, share, float(agreement), float(divergence)


OPTIONS = (
    Option("task", "squad", "or wikitext2", parse=one_of((*TASKS, CONTINUATIONS))),
    Option("prefixes", 2, "that are asked about", quick=1),
    Option("prefix-tokens", 2000, "of each; not of squad", quick=300),
    Option("passages", 12, "of squad", quick=4),
    Option("questions", 8, "per prefix", quick=1),
    Option("continuation", 256, "tokens, of wikitext2", quick=16),
    Option(
        "rules",
        tuple(
            Rule.parse(text)
            for text in (
                *("drop 0.25", "uniform 4", "uniform 5", "uniform 6", "uniform 8", "random 5"),
                *("history 5", "shared 5", "query 4.5", "query 5"),
            )
        ),
        "to compare",
        quick=(Rule("random", 5), Rule("query", 5)),
        parse=Rule.parse,
    ),
    DATA,
    MODEL,
    SEED,
)


def run(args: argparse.Namespace) -> Result:
    """Measure all rules."""
    model = model_folder(args.model)
    with step("loading the model"):
        study = Study(AttentionLab.load(model))
    results: dict[Rule, list[tuple[float, ...]]] = {rule: [] for rule in args.rules}
    for token_ids, found in _parts(args, study, load_tokenize(model)):
        with step(f"prefix of {len(token_ids)} tokens"):
            for rule, *values in found:
                results[rule].append(tuple(values))
    rows = []
    for rule, measured in results.items():
        means = [round(statistics.fmean(values), 4) for values in zip(*measured, strict=True)]
        names = ("bytes", "agreement", "change")
        rows.append({"rule": str(rule), **dict(zip(names, means, strict=True))})
    return Result({"task": args.task, "rules": rows}, [Table(plain(*rows[0]), rows)])


def _parts(
    args: argparse.Namespace, study: Study, tokenize: Tokenize
) -> Iterator[tuple[list[int], Iterator[tuple[Rule, float, float, float]]]]:
    """Prefixes, and what is measured on each."""
    if args.task == CONTINUATIONS:
        for token_ids, rest in _articles(args, tokenize):
            prefix = study.coded(token_ids)
            yield token_ids, measure_continuation(study, prefix, rest, args.rules)
        return
    options = TaskOptions(
        prefixes=args.prefixes,
        shots=0,
        prefix_tokens=args.prefix_tokens,
        passages=args.passages,
        examples=args.prefixes * args.questions,
        seed=args.seed,
    )
    task = make_task(args.task, args.data, tokenize, options)
    for place, token_ids in enumerate(task.prefixes):
        items = [item for item in task.items if item.prefix == place]
        yield token_ids, measure_answers(study, study.coded(token_ids), items, args.rules)


def _articles(
    args: argparse.Namespace, tokenize: Tokenize
) -> Iterator[tuple[list[int], list[int]]]:
    """Prefixes of `--prefix-tokens` tokens and their continuations."""
    text = "".join(str(row["text"]) for row in read_rows(args.data, CONTINUATIONS))
    length = args.prefix_tokens + args.continuation
    # Four characters are about a token; where the text begins is drawn by the seed.
    die = torch.Generator().manual_seed(args.seed)
    for _ in range(args.prefixes):
        begin = int(torch.randint(len(text) - 8 * length, (1,), generator=die))
        tokens = tokenize(text[begin : begin + 8 * length])[:length]
        yield tokens[: args.prefix_tokens], tokens[args.prefix_tokens :]
