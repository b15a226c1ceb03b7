"""Answers with a part of a prefix, or all of it in few bits: accuracy, agreement and bytes.

Each system gets a server with an empty store, which computes the prefixes and stores them; then the
device pool is emptied, and questions are asked that read their prefix back from SSD. Options are
scored by the sum of the log-probabilities of their tokens. They are part of the prompt, so a rule
that drops tokens sees what it will be asked for, as it would not while it decodes. A request that
did not use its prefix as asked ends the run. Chunk caches are off, so bytes are those of the store.
`impress` uses all of a prefix, in --bits; requests share it in the device pool, and the bytes are
those of the first one of each prefix. The name of such a system ends with @ and the bits.
With --basis there is a server with that basis besides.

accuracy     share of right answers; *points* is the difference to `recompute`
agreement    share of the answers that `recompute` gives
shift        mean change of an option's log-likelihood, less the mean over the options, in nats
read, needed bytes read from SSD, and bytes of the rows that were asked for, over those of the
             whole prefix, without requests that found it in the device pool

In brackets are 95% intervals of a paired bootstrap over questions, not over prefixes. `paper-4` is
the mean over the paper's tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.core.data import kv_bytes_per_token, load_tokenize, model_folder
from bench.core.options import ASKING, Option, one_of
from bench.core.report import Column, Result, Row, Table, interval
from bench.core.servers import SPARE_TOKENS, Server, Servers, servers, store_flags
from bench.core.session import step
from bench.quality.asking import Answer, Asked, ask, centred_shift, chosen_option
from bench.quality.tasks import MIN_PREFIX_TOKENS, PAPER_TASKS, TASKS, Task, TaskOptions, make_task
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.options import BITS, BITS_TEXT, CODED_POLICIES, PART_POLICIES

Floats = NDArray[np.float64]
REFERENCE = "recompute"
PAPER_MEAN, OTHER_MEAN = "paper-4", "mean"
# Bytes are those of the store, and what is stored are the prefixes only.
COMMON_FLAGS = (
    "--impress-reorder-interval=0",
    "--impress-approximation-depth=0",
    f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 1")
    return value


def _bits(text: str) -> float:
    if (value := float(text)) not in BITS:
        raise argparse.ArgumentTypeError(f"must be {BITS_TEXT}")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A name, and the policy and other flags of its server; `rate`: of its basis, if it has one."""

    name: str
    policy: str
    more: tuple[str, ...] = ()
    rate: float | None = None

    @property
    def exact(self) -> bool:
        """Whether its policy uses prefixes only as they were computed."""
        return self.policy not in (*CODED_POLICIES, *PART_POLICIES)

    def ways(self, retentions: Sequence[float], bits: Sequence[float]) -> list[Asked]:
        """How it is asked; exact answers of a server store more than the prefixes, so come last."""
        if self.exact:
            return [Asked(self.name, None, approximate=False)]
        if self.rate is not None:
            return [Asked(f"{self.name}@{self.rate:g}", 1.0, approximate=True, bits=self.rate)]
        if self.policy in PART_POLICIES:
            fewer = [Asked(self.name, r, approximate=True) for r in sorted(retentions) if r < 1]
        else:
            fewer = [Asked(f"{self.name}@{own:g}", 1.0, approximate=True, bits=own) for own in bits]
        exact = [Asked(self.name, 1.0, approximate=False)] if 1 in retentions else []
        return [*fewer, *exact]


POLICIES = {REFERENCE: "recompute", "as": "as", "h2o": "as+h2o+lru", "paper": "paper"}
SYSTEMS = {name: System(name, policy) for name, policy in POLICIES.items()} | {
    "impress": System("impress", "impress"),
}
USUAL = ("h2o", "paper", "impress")
ASKED = ("piqa", "copa", "openbookqa", "squad")
OPTIONS = (
    Option("systems", USUAL, "beside recompute", quick=("impress",), parse=one_of(SYSTEMS)),
    Option("retentions", (0.25,), "shares that paper and h2o use; 1 is exact", parse=_share),
    Option("bits", (BITS[0],), "that impress has of all of the prefix", parse=_bits),
    Option("tasks", ASKED, f"of {', '.join(TASKS)}", quick=("copa",), parse=one_of(TASKS)),
    Option("prefixes", 2, "per task", quick=1),
    Option("examples", 100, "questions per task", quick=6),
    Option("shots", 10, "examples per prefix"),
    Option("prefix-tokens", None, "as many shots as fit into so many instead", parse=int),
    Option("passages", 10, "per prefix of squad"),
    Option("basis", None, "file of a basis: also a server with it, in its bits", parse=Path),
    Option("concurrency", 4, "requests under way"),
    *ASKING,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Answers of a system to a task; `retention` is 1 for exact systems."""

    asked: Asked
    task: Task
    answers: list[Answer]

    @property
    def retention(self) -> float:
        """Share of the prefix that was used."""
        return 1.0 if self.asked.retention is None else self.asked.retention

    @property
    def logliks(self) -> list[list[float]]:
        """Of each option of each question, [n][options]."""
        return [answer.logliks for answer in self.answers]

    @property
    def choices(self) -> list[int]:
        """Place of each question's answer, [n]."""
        pairs = zip(self.task.items, self.logliks, strict=True)
        return [chosen_option(self.task.name, item, logliks) for item, logliks in pairs]

    @property
    def right(self) -> Floats:
        """1 for each right answer, [n]."""
        gold = [item.gold for item in self.task.items]
        return np.array([float(a == b) for a, b in zip(self.choices, gold, strict=True)])

    def agreement(self, reference: Measured) -> Floats:
        """1 for each question with the same choice as the reference, [n]."""
        pairs = zip(self.choices, reference.choices, strict=True)
        return np.array([float(one == other) for one, other in pairs])


def run(args: argparse.Namespace) -> Result:
    """Ask all systems."""
    names = [REFERENCE, *(name for name in args.systems if name != REFERENCE)]
    systems = [SYSTEMS[name] for name in names]
    if args.basis is not None:
        rate = round(Basis.load(args.basis).rate, 2)
        flag = f"--impress-basis={args.basis}"
        systems.append(System("basis", "impress", (flag,), rate))
    model = model_folder(args.model)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(TaskOptions)}
    options, tokenize = TaskOptions(**given), load_tokenize(model)
    tasks = [make_task(name, args.data, tokenize, options) for name in args.tasks]
    with servers(args) as pool:
        measured = [
            measurement
            for system in systems
            for measurement in _measure(args, pool, model, system, tasks)
        ]
    size = kv_bytes_per_token(model, args.dtype)
    with step("intervals"):
        rows = make_rows(measured, size, args.seed)
    figures = {
        "model": model.name,
        "kv_bytes_per_token": size,
        "options": given,
        "systems": [dataclasses.asdict(system) for system in systems],
        "server_flags": args.server_flag,
        "tasks": [
            {
                "name": task.name,
                "prefix_tokens": [len(prefix) for prefix in task.prefixes],
                "prefix_of_question": [item.prefix for item in task.items],
                "gold": [item.gold for item in task.items],
            }
            for task in tasks
        ],
        "rows": rows,
        "answers": [
            {
                "system": measurement.asked.system,
                "retention": measurement.retention,
                "task": measurement.task.name,
                "choices": measurement.choices,
                "logliks": [[round(x, 5) for x in own] for own in measurement.logliks],
            }
            for measurement in measured
        ],
    }
    lengths = {task.name: sorted(map(len, task.prefixes)) for task in tasks}
    told = ", ".join(f"{name} {own[0]}-{own[-1]}" for name, own in lengths.items())
    caption = f"{model.name}; tokens of prefixes: {told}; [..] are 95% intervals"
    order = list(dict.fromkeys(row["task"] for row in rows))
    rows = sorted(rows, key=lambda row: order.index(row["task"]))
    return Result(figures, [Table(COLUMNS, rows, caption)])


def _measure(
    args: argparse.Namespace, pool: Servers, model: Path, system: System, tasks: Sequence[Task]
) -> list[Measured]:
    """Ask one system all questions in each way."""
    store = pool.folder / f"store-{system.name}"
    # Every request under way may have its prefix for itself.
    slots = (args.concurrency + 1) * max(task.longest for task in tasks) + SPARE_TOKENS
    flags = [
        f"--max-total-tokens={slots}",
        f"--max-running-requests={max(2, args.concurrency)}",
        *COMMON_FLAGS,
        *store_flags(store),
        f"--impress-policy={system.policy}",
        *system.more,
        *args.server_flag,
    ]
    with pool.running(system.name, model, args.dtype, *flags) as server:
        _store(server, system, tasks)
        measured = []
        for asked in system.ways(args.retentions, args.bits):
            for task in tasks:
                with step(f"{asked.system} {asked.retention or ''}: {task.name}"):
                    answers = ask(server, task, asked, args.concurrency)
                measured.append(Measured(asked, task, answers))
        server.check_log()
    shutil.rmtree(store, ignore_errors=True)
    return measured


def _store(server: Server, system: System, tasks: Sequence[Task]) -> None:
    """Let the server compute the prefixes, and so store them."""
    # The same prefix may belong to two tasks.
    for prefix in sorted({tuple(prefix) for task in tasks for prefix in task.prefixes}):
        # Where a part of a stored beginning would be used, what comes after it is not stored.
        exact = {} if system.exact else Asked(system.name, 1.0, approximate=False).custom
        server.generate(prefix, custom=exact)
        # Waits for the write, and empties the device pool.
        server.flush()


def make_rows(measured: Sequence[Measured], kv_bytes: int, seed: int) -> list[Row]:
    """A row per system, retention and task, and those of their mean last."""
    by_key = {(m.asked.system, m.retention, m.task.name): m for m in measured}
    rows = [_make_row([m], m.task.name, by_key, kv_bytes, seed) for m in measured]
    names = list(dict.fromkeys(m.task.name for m in measured))
    paper = set(PAPER_TASKS) <= set(names)
    title, averaged = (PAPER_MEAN, list(PAPER_TASKS)) if paper else (OTHER_MEAN, names)
    if len(averaged) > 1:
        for system, retention in dict.fromkeys((m.asked.system, m.retention) for m in measured):
            parts = [by_key[system, retention, name] for name in averaged]
            rows.append(_make_row(parts, title, by_key, kv_bytes, seed))
    return rows


def _make_row(
    parts: Sequence[Measured],
    title: str,
    by_key: Mapping[tuple[str, float, str], Measured],
    kv_bytes: int,
    seed: int,
) -> Row:
    """A row over one task, or the mean over several, each with the same weight."""
    asked, retention = parts[0].asked, parts[0].retention
    references = [by_key[REFERENCE, 1.0, part.task.name] for part in parts]
    pairs = list(zip(parts, references, strict=True))
    agreements = [part.agreement(reference) for part, reference in pairs]
    differences = [100 * (part.right - reference.right) for part, reference in pairs]
    return {
        "system": asked.system,
        "retention": retention,
        "task": title,
        "n": sum(len(part.answers) for part in parts),
        "accuracy": _mean([float(part.right.mean()) for part in parts]),
        "shift_nats": _mean([centred_shift(own.logliks, exact.logliks) for own, exact in pairs]),
        "read": _mean([byte_share(part, kv_bytes, "ssd_bytes") for part in parts]),
        "needed": _mean([byte_share(part, kv_bytes, "ssd_needed_bytes") for part in parts]),
        **_with_interval("difference_points", differences, seed),
        **_with_interval("agreement", agreements, seed),
    }


def byte_share(measured: Measured, kv_bytes: int, counter: str) -> float | None:
    """Mean bytes of requests that read from SSD over those of their whole prefix; None of none."""
    shares = [
        report[counter] / (len(measured.task.prefixes[item.prefix]) * kv_bytes)
        for item, answer in zip(measured.task.items, measured.answers, strict=True)
        for report in answer.reports
        if report["path"] == "ssd"
    ]
    return float(np.mean(shares)) if shares else None


def _with_interval(name: str, strata: Sequence[Floats], seed: int) -> Row:
    low, high = interval(strata, seed)
    mean = float(np.mean([values.mean() for values in strata]))
    return {name: round(mean, 4), f"{name}_interval": [round(low, 4), round(high, 4)]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 5) if known else None


def _interval(name: str, scale: float = 1.0, sign: str = "+") -> Any:
    def cell(row: Row) -> str | None:
        if row.get(name) is None:
            return None
        low, high = row[f"{name}_interval"]
        form = f"{sign}.1f"
        return f"{scale * row[name]:{form}} [{scale * low:{form}}, {scale * high:{form}}]"

    return cell


COLUMNS = (
    Column("system", "system"),
    Column("kept", "retention", "{:.0%}"),
    Column("task", "task"),
    Column("n", "n"),
    Column("accuracy", "accuracy", "{:.1%}"),
    Column("points", _interval("difference_points")),
    Column("agreement %", _interval("agreement", 100, "")),
    Column("shift", "shift_nats", "{:.3f}"),
    Column("read", "read", "{:.1%}"),
    Column("needed", "needed", "{:.1%}"),
)
