"""What a run of `bench accuracy` found: a row per system, retention and task, and their mean.

A row of the mean is over the tasks with options, each with the same weight: `paper-4` where all
four of the paper's were asked, else `mean`. Intervals are 95%, from `quality_scores.mean_interval`:
over questions, for the prefixes that were drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from bench.quality.client import Answer, Asked
from bench.quality.options import REFERENCE
from bench.quality.scores import Floats, Score, centred_shift, mean_interval, score
from bench.quality.tasks import PAPER_TASKS, TASKS, Task

Row = dict[str, Any]
RANDOM = "random"
PAPER_MEAN = "paper-4"
OTHER_MEAN = "mean"
# What a mean row averages over tasks.
_AVERAGED = ("accuracy", "shift_nats", "read", "needed", "fallback_share", "milliseconds")


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Answers of a system to a task; `retention` is 1 for exact systems."""

    asked: Asked
    task: Task
    retention: float
    answers: list[Answer]
    scores: list[Score]

    @property
    def values(self) -> Floats:
        """Score of each question, [n]."""
        return np.array([score.value for score in self.scores])


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSize:
    """What shares are relative to."""

    layers: int
    kv_bytes_per_token: int


def measure(asked: Asked, task: Task, answers: list[Answer]) -> Measured:
    """Score the answers to a task."""
    scores = [score(task, item, answer) for item, answer in zip(task.items, answers, strict=True)]
    retention = asked.retention if asked.retention is not None else 1.0
    return Measured(asked, task, retention, answers, scores)


def agreement(measured: Measured, reference: Measured) -> Floats:
    """1 for each question with the same choice as the reference, [n]."""
    pairs = zip(measured.scores, reference.scores, strict=True)
    return np.array([float(one.choice == other.choice) for one, other in pairs])


def byte_shares(measured: Measured, size: ModelSize, counter: str) -> float | None:
    """Mean bytes of requests over those of their whole prefix.

    Requests that found the prefix in the device pool, as those of exact systems do once one has
    loaded it, are left out.

    Args:
        measured: answers of a system to a task.
        size: of the model.
        counter: ssd_bytes (read) or ssd_needed_bytes (rows that were asked for).

    Returns:
        The mean share, None if no request used a stored prefix.
    """
    shares = [
        report[counter] / (len(measured.task.prefixes[item.prefix]) * size.kv_bytes_per_token)
        for item, answer in zip(measured.task.items, measured.answers, strict=True)
        for report in answer.reports
        if report["path"] == "ssd"
    ]
    return float(np.mean(shares)) if shares else None


def make_rows(measured: Sequence[Measured], size: ModelSize, seed: int) -> list[Row]:
    """All rows, those of the means last.

    Args:
        measured: every system, retention and task; the reference is among them.
        size: of the model.
        seed: of the intervals.
    """
    by_key = {(m.asked.system, m.retention, m.task.name): m for m in measured}
    rows = [_make_row([m], m.task.name, by_key, size, seed) for m in measured]
    title, averaged = averaged_tasks(list(dict.fromkeys(m.task.name for m in measured)))
    if len(averaged) > 1:
        for system, retention in dict.fromkeys((m.asked.system, m.retention) for m in measured):
            parts = [by_key[system, retention, name] for name in averaged]
            rows.append(_make_row(parts, title, by_key, size, seed))
    return rows


def averaged_tasks(names: Sequence[str]) -> tuple[str, list[str]]:
    """Name of the mean over these tasks, and those of them that are in it."""
    if set(PAPER_TASKS) <= set(names):
        return PAPER_MEAN, list(PAPER_TASKS)
    return OTHER_MEAN, [name for name in names if name in TASKS and not TASKS[name].new_tokens]


def answers_of(measured: Sequence[Measured]) -> list[Row]:
    """Every answer, from which rows and intervals can be computed again."""
    return [
        {
            "system": m.asked.system,
            "retention": m.retention,
            "task": m.task.name,
            "scores": [round(score.value, 4) for score in m.scores],
            "choices": [score.choice for score in m.scores],
            "logliks": [[round(x, 5) for x in answer.logliks] for answer in m.answers],
        }
        for m in measured
    ]


def make_table(rows: Sequence[Row], caption: str) -> Table:
    """The table for the terminal; brackets are 95% intervals."""
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left", padding=(0, 1))
    for heading in ("system", "kept", "task"):
        table.add_column(heading, no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    ordered = sorted(
        rows, key=lambda row: list(dict.fromkeys(r["task"] for r in rows)).index(row["task"])
    )
    for row, following in zip(ordered, [*ordered[1:], None], strict=True):
        last = following is None or following["task"] != row["task"]
        table.add_row(
            row["system"],
            f"{row['retention']:.0%}",
            row["task"],
            *(cell(row) for cell in _COLUMNS.values()),
            end_section=last,
        )
    return table


def _make_row(
    parts: Sequence[Measured],
    title: str,
    by_key: Mapping[tuple[str, float, str], Measured],
    size: ModelSize,
    seed: int,
) -> Row:
    """A row over one task, or the mean over several."""
    system, retention = parts[0].asked.system, parts[0].retention
    references = [by_key[REFERENCE, 1.0, part.task.name] for part in parts]
    agreements = [agreement(*pair) for pair in zip(parts, references, strict=True)]
    differences = [
        100 * (part.values - reference.values)
        for part, reference in zip(parts, references, strict=True)
    ]
    each = [_plain_figures(*pair, size) for pair in zip(parts, references, strict=True)]
    row: Row = {
        "system": system,
        "retention": retention,
        "task": title,
        "n": sum(len(part.scores) for part in parts),
        **{name: _mean([figures[name] for figures in each]) for name in _AVERAGED},
        **_with_interval("difference_points", differences, seed),
        **_with_interval("agreement", agreements, seed),
    }
    if parts[0].task.generates:
        row["exact_match"] = _mean([float(score.exact) for part in parts for score in part.scores])
    rivals = [by_key.get((RANDOM, retention, part.task.name)) for part in parts]
    if parts[0].asked.approximate and system != RANDOM and all(rivals):
        over = [
            100 * (mine - agreement(rival, reference))
            for mine, rival, reference in zip(agreements, rivals, references, strict=True)
            if rival is not None
        ]
        row |= _with_interval("agreement_over_random_points", over, seed)
    return row


def _plain_figures(measured: Measured, reference: Measured, size: ModelSize) -> Row:
    reports = [report for answer in measured.answers for report in answer.reports]
    shift = None
    if not measured.task.generates:
        shift = centred_shift(
            [answer.logliks for answer in measured.answers],
            [answer.logliks for answer in reference.answers],
        )
    return {
        "accuracy": float(measured.values.mean()),
        "shift_nats": shift,
        "read": byte_shares(measured, size, "ssd_bytes"),
        "needed": byte_shares(measured, size, "ssd_needed_bytes"),
        "fallback_share": float(np.mean([r["layers_by_fallback"] for r in reports])) / size.layers,
        "milliseconds": float(np.mean([answer.milliseconds for answer in measured.answers])),
    }


def _with_interval(name: str, strata: Sequence[Floats], seed: int) -> Row:
    low, high = mean_interval(strata, seed)
    mean = float(np.mean([values.mean() for values in strata]))
    return {name: round(mean, 4), f"{name}_interval": [round(low, 4), round(high, 4)]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 5) if known else None


def _percent(name: str) -> Any:
    return lambda row: "-" if row.get(name) is None else f"{100 * row[name]:.1f}%"


def _interval(name: str, scale: float = 1.0, sign: str = "+") -> Any:
    def cell(row: Row) -> str:
        if row.get(name) is None:
            return "-"
        low, high = row[f"{name}_interval"]
        form = f"{sign}.1f"
        return f"{scale * row[name]:{form}} \\[{scale * low:{form}}, {scale * high:{form}}]"

    return cell


_COLUMNS = {
    "n": lambda row: str(row["n"]),
    "accuracy": _percent("accuracy"),
    "points": _interval("difference_points"),
    "agreement %": _interval("agreement", 100, ""),
    "over random": _interval("agreement_over_random_points"),
    "shift": lambda row: "-" if row["shift_nats"] is None else f"{row['shift_nats']:.3f}",
    "read": _percent("read"),
    "needed": _percent("needed"),
    "fallback": _percent("fallback_share"),
    "ms": lambda row: f"{row['milliseconds']:,.0f}",
}
