"""Identification rules on real attention, at the same questions and the same retention.

    python -m bench.identification
    python -m bench.identification --task rte --prefix-tokens 2000 --questions 8 --json run.json

For each question about a prefix, and in each layer, every rule chooses the tokens of each KV head.
Hidden states are those of full attention, so rules are compared on equal terms. Per rule:

    bytes    what it reads, as a share of the prefix's KVs, counted by token and head
    mass     share of the prefix's attention that the chosen tokens have; 5%: its 5th percentile
    recall   share of each KV head's own top k (H2O's) among the chosen tokens
    error    of the attention's output, relative to its length: what the layers after it see

The first `--history` questions about a prefix are not measured: rules that need earlier questions,
calibrated thresholds and retention per layer are fitted on them. No server runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.attention_lab import AttentionLab, PrefixKV, attending, attention_after, compute_prefix
from bench.comparison import step
from bench.identification_rules import (
    Blend,
    CalibratedVote,
    Exact,
    History,
    LayerView,
    Positional,
    Prior,
    Probing,
    RandomRule,
    RecentRule,
    ServerRule,
    Sketch,
    SpreadVote,
    StudiedRule,
    by_value_norm,
    follow_surprise,
    keeping_last,
    largest_weight,
    last_tokens,
    log_importance,
    pooled,
    with_prior,
)
from bench.machine import describe_machine
from bench.quality_tasks import TASKS, Item, Task, TaskOptions, make_task
from bench.servers import BenchFailed
from bench.serving_options import DEFAULT_DATA
from bench.session import load_tokenize
from demo.model import DemoModelMissing, model_path
from impress_sglang.importance.identify import (
    H2ORule,
    PaperRule,
    probe_kv_heads,
)
from impress_sglang.importance.scores import column_sums
from impress_sglang.importance.selection import (
    mean_jaccard,
    per_head_tokens,
    retained_tokens,
    top_tokens,
)

STUDIED_BITS = (2, 3, 4, 8)
ALPHAS = (0.2, 0.4, 0.6, 0.8)
PROBE_HEADS = 3
# Choices of probe KV heads that are tried.
MOST_PROBES = 4
# Of layers, in the calibrated rule, that read all keys.
FALLBACK_SHARE = 0.5
# A layer's share of tokens, in retention per layer, changes in such steps.
BUDGET_STEP = 0.01
LEAST_BUDGET = 0.02
_RECORDED = ("task", "prefixes", "prefix_tokens", "passages", "questions", "history", "ratios")
_RECORDED += ("kv_bits", "seed", "threads")


@dataclasses.dataclass(slots=True)
class Measured:
    """What one rule showed at one retention, a value per layer, question and head."""

    bytes: list[float] = dataclasses.field(default_factory=list)
    mass: list[Tensor] = dataclasses.field(default_factory=list)
    recall: list[float] = dataclasses.field(default_factory=list)
    error: list[float] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict[str, float]:
        """Means, and the 5th percentile of the mass."""
        mass = torch.stack(self.mass)
        return {
            "bytes": round(sum(self.bytes) / len(self.bytes), 4),
            "mass": round(float(mass.mean()), 4),
            "mass_5": round(float(mass.flatten().quantile(0.05)), 4),
            "recall": round(sum(self.recall) / len(self.recall), 4),
            "error": round(sum(self.error) / len(self.error), 4),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """What the history of a prefix gives: by ratio and layer.

    `thresholds` are the similarities below which the calibrated rule reads all keys; `budgets` the
    retention of each layer that keeps most attention mass at an equal total.
    """

    thresholds: dict[float, list[float]]
    budgets: dict[float, list[float]]


class Study:
    """Measures all rules on the questions of one prefix after another."""

    def __init__(self, lab: AttentionLab, ratios: Sequence[float], kv_bits: int) -> None:
        self.results: dict[tuple[float, str], Measured] = {}
        self._lab = lab
        self._ratios = tuple(ratios)
        self._kv_bits = kv_bits
        self._probes = probe_kv_heads(lab.num_query_heads, lab.num_kv_heads, PROBE_HEADS)

    def run(
        self, prefix: PrefixKV, history: Sequence[list[int]], asked: Sequence[list[int]]
    ) -> None:
        """Fit on the questions `history` about a prefix, then measure on `asked`."""
        sketches = {bits: [_sketched(keys, bits) for keys in prefix.keys] for bits in STUDIED_BITS}
        past, views = History(), []
        for question in history:
            views += [_Kept.of(view) for view in self._views(prefix, sketches, question, past)]
        fitted = _fit(views, self._ratios, self._lab)
        rules = self._rules(fitted)
        for question in asked:
            for view in self._views(prefix, sketches, question, past, rules):
                del view

    def _rules(self, fitted: Fitted) -> dict[str, StudiedRule]:
        bits = self._kv_bits
        return {
            "h2o": ServerRule(H2ORule()),
            **{f"paper, alpha {alpha:g}": ServerRule(PaperRule(alpha)) for alpha in ALPHAS},
            **self._other_probes(),
            "paper, probes spread": SpreadVote(0.6),
            "paper, calibrated": CalibratedVote(fitted.thresholds),
            "prior": Prior(),
            "prior + surprise": Blend(),
            **{f"sketch {width} bits": Sketch(width, bits) for width in STUDIED_BITS},
            "sketch 2 bits + prior": Sketch(2, bits, with_prior),
            "sketch 4 bits + last 32": Sketch(4, bits, keeping_last(32)),
            "sketch 4 bits, by layer": _ByLayer(Sketch(4, bits), fitted.budgets),
            "h2o, last 16 new": Exact(last_tokens(16)),
            "h2o, largest weight": Exact(largest_weight),
            "h2o, x value norm": Exact(by_value_norm),
            "h2o, pooled 5": Exact(pooled(5)),
            "recent": Positional(RecentRule()),
            "random": Positional(RandomRule(sinks=True)),
            "random-nosink": Positional(RandomRule(sinks=False)),
        }

    def _other_probes(self) -> dict[str, StudiedRule]:
        """The paper's rule with each other KV head as the probe, and with one head more."""
        rule, heads = ServerRule(PaperRule(0.6)), self._lab.num_kv_heads
        choices = [tuple(range(len(self._probes) + 1))] if len(self._probes) < heads else []
        if len(self._probes) == 1:
            choices += [(head,) for head in range(heads)]
        return {
            f"paper, probe KV heads {'+'.join(map(str, chosen))}": Probing(rule, chosen)
            for chosen in choices[:MOST_PROBES]
            if chosen != self._probes
        }

    def _views(
        self,
        prefix: PrefixKV,
        sketches: Mapping[int, list[Tensor]],
        question: list[int],
        past: History,
        rules: Mapping[str, StudiedRule] | None = None,
    ) -> Iterator[LayerView]:
        """The layers of a question, which then belongs to the past; `rules` are measured."""
        lab, views = self._lab, []
        surprise: list[Tensor | None] = [None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            old_keys, old_values = prefix.keys[layer], prefix.values[layer]
            weights = _weights(q, torch.cat([old_keys, k]), scaling, prefix.num_tokens)
            scores = {
                bits: column_sums(q, keys[layer], old_keys[:0], k, scaling)
                for bits, keys in sketches.items()
            }
            view = LayerView(
                layer,
                prefix.num_tokens,
                lab.group_size,
                self._probes,
                weights[..., : prefix.num_tokens],
                scores,
                old_values.norm(dim=-1).T,
                past,
            )
            if past.questions:
                view.surprise = surprise[0] = follow_surprise(surprise[0], view)
            if rules is not None:
                self._measure(view, weights, torch.cat([old_values, v]), rules)
            views.append(view)
            return attention_after(old_keys, old_values, q, k, v, scaling)

        with attending(attend):
            lab.hidden_states(question, prefix.num_tokens)
        logs = [log_importance(view.own_scores(), len(question)) for view in views]
        yield from views
        past.add(torch.stack(logs))

    def _measure(
        self, view: LayerView, weights: Tensor, values: Tensor, rules: Mapping[str, StudiedRule]
    ) -> None:
        num_tokens, groups = view.num_tokens, values.shape[1]
        by_group = weights.unflatten(0, (groups, view.group_size))
        values_by_head = values.transpose(0, 1)[:, None]
        exact = by_group @ values_by_head
        total = by_group[..., :num_tokens].sum(-1)
        for ratio in self._ratios:
            k = retained_tokens(num_tokens, ratio)
            own = per_head_tokens(view.exact_scores(), view.group_size, k)
            best = torch.zeros(groups, num_tokens).scatter_(1, own, 1.0)
            for name, rule in rules.items():
                tokens = rule.select(view, k)
                chosen = torch.zeros(groups, num_tokens)
                chosen.scatter_(1, tokens.expand(groups, -1), 1.0)
                kept = by_group.clone()
                kept[..., :num_tokens] *= chosen[:, None, None]
                output = (kept @ values_by_head) / kept.sum(-1, keepdim=True)
                error = (output - exact).norm(dim=-1) / exact.norm(dim=-1)
                found = self.results.setdefault((ratio, name), Measured())
                share = tokens.shape[1] / num_tokens
                found.bytes.append(share + rule.extra_bytes(view, tokens.shape[1], tokens))
                found.mass.append((kept[..., :num_tokens].sum(-1) / total).mean(-1).flatten())
                found.recall.append(float((chosen * best).sum() / best.sum()))
                found.error.append(float(error.mean()))


@dataclasses.dataclass(frozen=True, slots=True)
class _ByLayer:
    """Another rule, with a retention per layer."""

    rule: StudiedRule
    budgets: dict[float, list[float]]

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`; the number of tokens is the layer's."""
        ratio = min(self.budgets, key=lambda known: abs(known - k / view.num_tokens))
        own = retained_tokens(view.num_tokens, self.budgets[ratio][view.layer])
        return self.rule.select(view, own)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return self.rule.extra_bytes(view, k, tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """Of a layer at a question of the history, what fitting needs."""

    layer: int
    probe_scores: Tensor
    own_scores: Tensor
    num_new: int

    @classmethod
    def of(cls, view: LayerView) -> _Kept:
        """Without the weights, which are large."""
        num_new = view.weights.shape[1] * view.group_size
        return cls(view.layer, view.probe_scores(), view.own_scores(), num_new)


def _fit(views: Sequence[_Kept], ratios: Sequence[float], lab: AttentionLab) -> Fitted:
    by_layer: list[list[_Kept]] = [[] for _ in range(lab.num_layers)]
    for view in views:
        by_layer[view.layer].append(view)
    num_tokens = views[0].own_scores.shape[1]
    thresholds, curves = {}, [_mass_curve(kept) for kept in by_layer]
    for ratio in ratios:
        k = retained_tokens(num_tokens, ratio)
        similar = [
            torch.tensor([mean_jaccard(top_tokens(v.probe_scores, k), num_tokens) for v in kept])
            for kept in by_layer
        ]
        thresholds[ratio] = [float(values.quantile(FALLBACK_SHARE)) for values in similar]
    return Fitted(thresholds, {ratio: _budgets(curves, ratio) for ratio in ratios})


def _mass_curve(kept: Sequence[_Kept]) -> Tensor:
    """Mean attention mass per query token of the best tokens of a layer, by their number: [m]."""
    curves = []
    for view in kept:
        ordered = view.own_scores.sort(-1, descending=True).values.cumsum(-1)
        curves.append(ordered.mean(0) / view.num_new)
    return torch.stack(curves).mean(0)


def _budgets(curves: Sequence[Tensor], ratio: float) -> list[float]:
    """Retention of each layer that keeps most mass at the total of `ratio` for each: greedy."""
    num_tokens, shares = len(curves[0]), [min(LEAST_BUDGET, ratio)] * len(curves)

    def mass(layer: int, share: float) -> float:
        return float(curves[layer][retained_tokens(num_tokens, min(share, 1.0)) - 1])

    gains = [mass(i, share + BUDGET_STEP) - mass(i, share) for i, share in enumerate(shares)]
    while sum(shares) + BUDGET_STEP <= ratio * len(shares) + 1e-9:
        best = max(range(len(gains)), key=gains.__getitem__)
        shares[best] = min(1.0, shares[best] + BUDGET_STEP)
        full = shares[best] >= 1.0
        gains[best] = (
            -math.inf if full else mass(best, shares[best] + BUDGET_STEP) - mass(best, shares[best])
        )
    return shares


def _weights(queries: Tensor, keys: Tensor, scaling: float, num_prefix: int) -> Tensor:
    """Attention weights of new tokens, float32 [Hq, n, m + n]."""
    num_new = len(queries)
    grouped = keys.transpose(0, 1).repeat_interleave(queries.shape[1] // keys.shape[1], 0)
    logits = queries.transpose(0, 1) @ grouped.transpose(1, 2) * scaling
    hidden = torch.ones(num_new, num_prefix + num_new, dtype=torch.bool).triu(num_prefix + 1)
    return logits.masked_fill_(hidden, -math.inf).softmax(-1)


def _sketched(keys: Tensor, bits: int) -> Tensor:
    """Keys [m, G, D] rounded to equal steps between the extremes of each channel."""
    low, high = keys.amin(0), keys.amax(0)
    width = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return ((keys - low) / width).round() * width + low


def make_tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """A table per retention, the rule with the least error first."""
    for ratio in dict.fromkeys(row["retention"] for row in rows):
        title = f"retention {ratio:.0%}"
        table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=(0, 1))
        table.add_column("rule", no_wrap=True)
        for heading in ("bytes", "error", "mass", "5%", "recall"):
            table.add_column(heading, justify="right")
        own = [row for row in rows if row["retention"] == ratio]
        for row in sorted(own, key=lambda row: row["error"]):
            shown = [row[key] for key in ("bytes", "error", "mass", "mass_5", "recall")]
            table.add_row(row["rule"], *(f"{value:.3f}" for value in shown))
        yield table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    progress = Console(stderr=True, highlight=False)
    try:
        result = _run(args, progress)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    out = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    for table in make_tables(result["rules"]):
        out.print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    model = (args.model or model_path()).resolve()
    with step(console, "loading the model"):
        lab = AttentionLab.load(model, args.threads)
        task = _make_task(args, model)
    study = Study(lab, args.ratios, args.kv_bits)
    for place, token_ids in enumerate(task.prefixes):
        items = [item for item in task.items if item.prefix == place]
        questions = [item.question + list(_answer(item)) for item in items]
        with step(console, f"prefix {place}: {len(token_ids)} tokens, {len(items)} questions"):
            prefix = compute_prefix(lab, token_ids)
            study.run(prefix, questions[: args.history], questions[args.history :])
    return {
        "command": _command_of(args),
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "prefix_lengths": [len(prefix) for prefix in task.prefixes],
        "rules": [
            {"retention": ratio, "rule": name, **measured.as_dict()}
            for (ratio, name), measured in study.results.items()
        ],
    }


def _answer(item: Item) -> Sequence[int]:
    """The right answer's tokens: a server sees them with the question when it scores options."""
    return item.options[item.gold] if item.options else ()


def _make_task(args: argparse.Namespace, model: Path) -> Task:
    options = TaskOptions(
        prefixes=args.prefixes,
        shots=0,
        prefix_tokens=args.prefix_tokens,
        passages=args.passages,
        examples=args.prefixes * (args.history + args.questions),
        seed=args.seed,
    )
    return make_task(args.task, args.data, load_tokenize(model), options)


def _command_of(args: argparse.Namespace) -> str:
    words = ["python -m bench.identification"]
    for name in _RECORDED:
        value = getattr(args, name)
        shown = ",".join(f"{ratio:g}" for ratio in value) if isinstance(value, list) else value
        words.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(words)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo's)")
    parser.add_argument("--data", default=str(DEFAULT_DATA), help="folder with the data sets")
    parser.add_argument("--task", choices=sorted(TASKS), default="squad")
    parser.add_argument("--prefixes", type=int, default=2)
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="of few-shot tasks")
    parser.add_argument("--passages", type=int, default=12, help="of squad")
    parser.add_argument("--questions", type=int, default=8, help="measured, per prefix")
    parser.add_argument("--history", type=int, default=5, help="questions before them, per prefix")
    parser.add_argument(
        "--ratios",
        type=lambda text: [float(ratio) for ratio in text.split(",")],
        default=[0.1, 0.25, 0.5],
        help="retentions (default: 0.1,0.25,0.5)",
    )
    parser.add_argument(
        "--kv-bits", type=int, default=16, help="of a stored element: a sketch's share of the bytes"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(arguments)
    if args.history < 1 or args.questions < 1:
        parser.error("--history and --questions must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
