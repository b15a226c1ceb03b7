"""What precision a prefix needs, and where: answers on KVs in a few bits, at equal bytes.

    python -m bench precision
    python -m bench precision --task rte --prefix-tokens 2000 --json run.json
    python -m bench precision --rules "uniform 5,query 5,random 5,query 5 unit=16"
    python -m bench precision --task wikitext2 --key-bias 300 --rules "query 5,query 5 floor=0.33"

A rule says how many planes each unit of a prefix gets (`impress_sglang.precision`):

    uniform B     all elements have B bits: 4, 6 or 8, or 5, where every other unit has 6
    query B       B bits on average, by the attention of the question (reverse water-filling)
    history B     the same by the attention of earlier questions, which a store could know
    shared B      as query, but on top of what earlier questions have raised: a resident prefix
    random B      B bits on average, to units that a die chooses
    drop R        nothing but the share R of each head's tokens, exactly, found by keys of 4 bits

After a rule, `unit=N` takes units of N tokens in place of those that fill a block of 4 KiB, and
`queries=N` only the last N tokens of a question to allocate by; `floor=E` (of `query`) raises the
base of KV heads whose output errs by more than E, as a writer measures it. The base has 4 bits.
`bytes` are what is read of a prefix that nothing is known of, as a share of 16-bit KVs: ranges,
base and planes; for `drop`, the 4-bit keys and all blocks of 4 KiB with a wanted row.

Tasks with options: `agreement` is the share of questions with the answer of exact KVs, `shift` the
mean change of an option's log-likelihood, in nats, after the mean over the options is taken off.
`wikitext2`: `KL` to the exact KVs in nats per token of a continuation, and `agreement` of the most
likely next token. Hidden states are those of the rule, through all layers. No server runs.

`--key-bias B` makes a model that does not bear 4 bits: a KV head of some layers gets a bias of B in
one channel of its keys, and their queries one that sees it. Once rotated, it widens the ranges of
the keys, and shifts logits by the distance. The biases of Qwen2.5-7B have norms of 605 and 921 in
its first and last layer. `model_loss` is what the model loses per token of the prefixes, in nats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.core.machine import describe_machine
from bench.core.servers import BenchFailed
from bench.core.session import Tokenize, load_tokenize
from bench.policies.comparison import step
from bench.policies.serving_options import DEFAULT_DATA
from bench.quality.data import read_rows
from bench.quality.lab import (
    AttentionLab,
    PrefixKV,
    attending,
    attention_after,
    causal_attention,
    compute_prefix,
)
from bench.quality.tasks import TASKS, Item, TaskOptions, make_task
from demo.model import DemoModelMissing, model_path
from impress_sglang.importance.selection import per_head_tokens, retained_tokens
from impress_sglang.precision.allocation import allocate_planes, planes_of, unit_weights
from impress_sglang.precision.codec import (
    BASE_BITS,
    GROUP_TOKENS,
    LEVELS,
    NUM_PLANES,
    PLANE_BITS,
    Codes,
    code_keys,
    code_values,
    restore,
)
from impress_sglang.precision.floors import MEASURED_QUERIES, FloorMeter, LayerQueries
from impress_sglang.precision.layout import CodeLayout

CONTINUATIONS = "wikitext2"
DEFAULT_RULES = "drop 0.25,uniform 4,uniform 5,uniform 6,uniform 8,random 5,history 5,shared 5"
DEFAULT_RULES += ",query 4.5,query 5,query 5 unit=16"
BLOCK_BYTES = 4096
# Of a prefix, how many tokens tell what the model loses.
LOSS_TOKENS = 512
# A channel that turns slowly enough to be seen, and fast enough to widen the ranges of a group.
BIASED_CHANNEL = 2
QUERY_BIAS = 1.5
# Of 16-bit KVs, what the bytes are a share of.
EXACT_BITS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A rule of `--rules`: `number` is mean bits, or the share of tokens of `drop`."""

    kind: str
    number: float
    unit: int | None = None
    queries: int | None = None
    floor: float | None = None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From `KIND NUMBER [unit=N] [queries=N] [floor=E]`."""
        words = text.split()
        options = dict(word.partition("=")[::2] for word in words[2:])
        if len(words) < 2 or (words[0] not in _PLANES and words[0] != "drop"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a rule")
        known = {"unit": int, "queries": int, "floor": float}
        if not options.keys() <= known.keys() or ("floor" in options and words[0] != "query"):
            raise argparse.ArgumentTypeError(f"{text!r} has an unknown option")
        numbers = {name: known[name](value) for name, value in options.items()}
        return cls(words[0], float(words[1]), **numbers)

    def __str__(self) -> str:
        unit = "" if self.unit is None else f" unit={self.unit}"
        queries = "" if self.queries is None else f" queries={self.queries}"
        floor = "" if self.floor is None else f" floor={self.floor:g}"
        return f"{self.kind} {self.number:g}{unit}{queries}{floor}"


@dataclasses.dataclass(slots=True)
class CodedPrefix:
    """A prefix in codes, and what earlier questions say of it.

    `history` are mean token weights [L, G, m] of the requests so far; `raised` by rule and layer
    the planes that are there; `queries` are those of its last tokens, of each layer.
    """

    exact: PrefixKV
    keys: list[Codes]
    values: list[Codes]
    history: Tensor
    queries: list[LayerQueries]
    requests: int = 0
    _floors: dict[tuple[float, int], Tensor] = dataclasses.field(default_factory=dict)
    raised: dict[tuple[str, int], Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, exact: PrefixKV, queries: list[LayerQueries]) -> CodedPrefix:
        """Code all layers."""
        shape = (len(exact.keys), exact.keys[0].shape[1], exact.num_tokens)
        keys, values = map(code_keys, exact.keys), map(code_values, exact.values)
        return cls(exact, list(keys), list(values), torch.zeros(shape), queries)

    def floors(self, bearable: float | None, layer: int) -> Tensor:
        """Planes that belong to the base of each head, int64 [G]."""
        if bearable is None:
            return torch.zeros(self.keys[layer].codes.shape[1], dtype=torch.int64)
        if (bearable, layer) not in self._floors:
            meter = FloorMeter(bearable, budget_s=math.inf)
            found = meter.rule(self.queries.__getitem__, 0)(
                layer, self.exact.keys[layer], self.exact.values[layer]
            )
            self._floors[bearable, layer] = torch.from_numpy(found).long()
        return self._floors[bearable, layer]

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


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What a rule may know of a question in a layer: weights [G, m] of the prefix's tokens."""

    prefix: CodedPrefix
    layer: int
    weights: Tensor


def _by_query(rule: Rule, asked: Question, weights: Tensor, unit: int) -> Tensor:
    own = unit_weights(weights, unit)
    floors = asked.prefix.floors(rule.floor, asked.layer)[:, None].expand_as(own)
    room = NUM_PLANES * own.numel() - int(floors.sum())
    return allocate_planes(own, min(planes_of(rule.number, own.numel()), room), floors)


def _uniform(rule: Rule, asked: Question, weights: Tensor, unit: int) -> Tensor:
    heads, units = unit_weights(weights, unit).shape
    count = planes_of(rule.number, heads * units)
    least, more = divmod(count, heads * units)
    planes = torch.full((heads * units,), least)
    planes[torch.linspace(0, heads * units - 1, more).round().long()] += 1
    return planes.view(heads, units)


def _random(rule: Rule, asked: Question, weights: Tensor, unit: int) -> Tensor:
    die = torch.Generator().manual_seed(asked.layer * 1000003 + asked.prefix.exact.num_tokens)
    noise = torch.rand(unit_weights(weights, unit).shape, generator=die)
    return allocate_planes(noise, planes_of(rule.number, noise.numel()))


def _by_history(rule: Rule, asked: Question, weights: Tensor, unit: int) -> Tensor:
    return _by_query(rule, asked, asked.prefix.history[asked.layer], unit)


def _shared(rule: Rule, asked: Question, weights: Tensor, unit: int) -> Tensor:
    place, own = (str(rule), asked.layer), _by_query(rule, asked, weights, unit)
    before = asked.prefix.raised.get(place, torch.zeros_like(own))
    asked.prefix.raised[place] = torch.maximum(before, own)
    return asked.prefix.raised[place]


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
            with attending(attend):
                logits = self._lab.logits(question + part, prefix.exact.num_tokens)
            found.append(logits.log_softmax(-1))
        return found, statistics.fmean(shares)

    def _load(
        self, rule: Rule | None, prefix: CodedPrefix, layer: int, seen: tuple[Tensor, Tensor, float]
    ) -> tuple[tuple[Tensor, Tensor], float]:
        exact = prefix.exact.keys[layer], prefix.exact.values[layer]
        layout, base = prefix.layout(layer), restore(prefix.keys[layer], BASE_BITS)
        if rule is not None and rule.floor is not None:
            floors = prefix.floors(rule.floor, layer)[:, None].expand(-1, len(base))
            base = prefix.restored(layer, floors)[0]
        queries, new_keys, scaling = seen
        weights = _weights(queries, torch.cat([base, new_keys]), scaling, len(base))
        if rule is None:
            squares = self._by_head(weights.square().sum(1))
            prefix.history[layer] += (squares - prefix.history[layer]) / (prefix.requests + 1)
            prefix.requests += layer == self._lab.num_layers - 1
            return exact, 1.0
        if rule.kind == "drop":
            return self._dropped(rule, exact, weights.sum(1))
        unit = rule.unit or layout.unit_tokens
        asking = weights if rule.queries is None else weights[:, -rule.queries :]
        squares = self._by_head(asking.square().sum(1))
        planes = _PLANES[rule.kind](rule, Question(prefix, layer, squares), squares, unit)
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


@dataclasses.dataclass(slots=True)
class Measured:
    """Of one rule, a value per question or continuation."""

    bytes: list[float] = dataclasses.field(default_factory=list)
    agreement: list[float] = dataclasses.field(default_factory=list)
    change: list[float] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict[str, float]:
        """Means."""
        fields = dataclasses.asdict(self)
        return {name: round(statistics.fmean(values), 4) for name, values in fields.items()}


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


def make_prefix(lab: AttentionLab, token_ids: list[int]) -> tuple[CodedPrefix, float]:
    """A prefix with the queries of its last tokens, and what the model loses per token of it."""
    queries: dict[int, LayerQueries] = {}

    def note(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        queries[layer] = LayerQueries(q[-MEASURED_QUERIES:].clone(), scaling)
        return causal_attention(layer, q, k, v, scaling)

    with attending(note):
        told = token_ids[-LOSS_TOKENS:]
        logits = lab.logits(told)[:-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(told[1:]))
        lab.hidden_states(token_ids)
    own = [queries[layer] for layer in range(lab.num_layers)]
    return CodedPrefix.of(compute_prefix(lab, token_ids), own), float(loss)


def add_key_bias(lab: AttentionLab, bias: float, layers: Sequence[int]) -> None:
    """Give a KV head of some layers a bias in one channel, and its queries one that sees it."""
    for layer in layers:
        attention = lab.model.base_model.layers[layer].self_attn
        for projection, heads, size in (
            (attention.k_proj, 1, bias),
            (attention.q_proj, lab.group_size, QUERY_BIAS),
        ):
            own = torch.zeros(projection.out_features)
            own[BIASED_CHANNEL :: attention.head_dim][:heads] = size
            projection.bias = torch.nn.Parameter(own)


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


def _measure(
    args: argparse.Namespace, console: Console
) -> tuple[dict[Rule, Measured], dict[str, Any]]:
    """Of each rule; and of the model its loss and the share of heads that each floor raises."""
    model = (args.model or model_path()).resolve()
    results = {rule: Measured() for rule in args.rules}
    with step(console, "loading the model"):
        lab, tokenize = AttentionLab.load(model, args.threads), load_tokenize(model)
    if args.key_bias:
        add_key_bias(lab, args.key_bias, args.biased_layers)
    study, losses = Study(lab), []
    raised: dict[str, list[float]] = {
        f"{rule.floor:g}": [] for rule in args.rules if rule.floor is not None
    }

    def prefix_of(token_ids: list[int]) -> CodedPrefix:
        prefix, loss = make_prefix(lab, token_ids)
        losses.append(loss)
        for floor, shares in raised.items():
            own = [prefix.floors(float(floor), layer) > 0 for layer in range(lab.num_layers)]
            shares.append(float(torch.stack(own).float().mean()))
        return prefix

    def found() -> tuple[dict[Rule, Measured], dict[str, Any]]:
        shares = {floor: round(statistics.fmean(own), 4) for floor, own in raised.items()}
        return results, {"model_loss": round(statistics.fmean(losses), 3), "raised_heads": shares}

    def note(found: Iterator[tuple[Rule, float, float, float]]) -> None:
        for rule, share, agreement, change in found:
            own = results[rule]
            own.bytes.append(share)
            own.agreement.append(agreement)
            own.change.append(change)

    if args.task == CONTINUATIONS:
        for place, (token_ids, rest) in enumerate(_articles(args, tokenize)):
            with step(console, f"article {place}: {len(token_ids)} + {len(rest)} tokens"):
                note(measure_continuation(study, prefix_of(token_ids), rest, args.rules))
        return found()
    task = make_task(args.task, args.data, tokenize, _task_options(args))
    for place, token_ids in enumerate(task.prefixes):
        items = [item for item in task.items if item.prefix == place]
        with step(console, f"prefix {place}: {len(token_ids)} tokens, {len(items)} questions"):
            note(measure_answers(study, prefix_of(token_ids), items, args.rules))
    return found()


def _task_options(args: argparse.Namespace) -> TaskOptions:
    return TaskOptions(
        prefixes=args.prefixes,
        shots=0,
        prefix_tokens=args.prefix_tokens,
        passages=args.passages,
        examples=args.prefixes * args.questions,
        seed=args.seed,
    )


def make_table(rows: Sequence[dict[str, Any]], task: str) -> Table:
    """The rules, in their order."""
    table = Table(box=box.SIMPLE, padding=(0, 1))
    table.add_column("rule", no_wrap=True)
    for heading in ("bytes", "agreement", "KL" if task == CONTINUATIONS else "shift"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["rule"], f"{row['bytes']:.3f}", f"{row['agreement']:.3f}", f"{row['change']:.4f}"
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    progress = Console(stderr=True, highlight=False)
    began = time.monotonic()
    try:
        results, of_model = _measure(args, progress)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    rows = [{"rule": str(rule), **measured.as_dict()} for rule, measured in results.items()]
    out = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    out.print(make_table(rows, args.task))
    out.print(f"loss {of_model['model_loss']}, heads raised {of_model['raised_heads']}")
    if args.json:
        shown = {name: value for name, value in vars(args).items() if name in _RECORDED}
        if args.key_bias:
            shown["key_bias"] = args.key_bias
            shown["biased_layers"] = ",".join(map(str, args.biased_layers))
        result = {
            "command": "python -m bench precision "
            + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in shown.items())
            + f' --rules "{",".join(map(str, args.rules))}"',
            "machine": describe_machine(),
            "seconds": round(time.monotonic() - began),
            "group_tokens": GROUP_TOKENS,
            "planes": NUM_PLANES,
            **of_model,
            "rules": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


_RECORDED = ("task", "prefixes", "prefix_tokens", "passages", "questions", "continuation", "seed")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo's)")
    parser.add_argument("--data", default=str(DEFAULT_DATA), help="folder with the data sets")
    parser.add_argument("--task", choices=sorted([*TASKS, CONTINUATIONS]), default="squad")
    parser.add_argument("--prefixes", type=int, default=2)
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="not of squad")
    parser.add_argument("--passages", type=int, default=12, help="of squad")
    parser.add_argument("--questions", type=int, default=8, help="per prefix")
    parser.add_argument("--continuation", type=int, default=256, help="tokens, of wikitext2")
    parser.add_argument(
        "--rules",
        type=lambda text: [Rule.parse(rule) for rule in text.split(",")],
        default=DEFAULT_RULES,
        help=f"default: {DEFAULT_RULES}",
    )
    parser.add_argument("--key-bias", type=float, default=0.0, help="0: the model as it is")
    parser.add_argument(
        "--biased-layers",
        type=lambda text: [int(layer) for layer in text.split(",")],
        default="4,12,20",
        help="layers with the bias (default: 4,12,20)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch (default: all cores)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(arguments)
    return args


if __name__ == "__main__":
    sys.exit(main())
