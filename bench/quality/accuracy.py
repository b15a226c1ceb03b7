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

In brackets are 95% intervals of a paired bootstrap over questions, not over prefixes. `mean` is
that over the tasks.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.data import kv_bytes_per_token, load_tokenize, model_folder
from bench.core.options import ASKING, Option, one_of
from bench.core.report import Column, Result, Row, Table, interval
from bench.core.servers import SPARE_TOKENS, Server, Servers, servers, store_flags
from bench.core.session import BenchFailed, step
from bench.quality.tasks import MIN_PREFIX_TOKENS, NORMALISED, TASKS, Item, Task, make_task
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.options import BITS, BITS_TEXT, CODED_POLICIES, EXACTLY, PART_POLICIES

Floats = NDArray[np.float64]
REFERENCE = "recompute"
MEAN = "mean"
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


class Way(NamedTuple):
    """How a system is asked: for a share of the prefix's tokens, or for all in so many `bits`, as
    requests share them; None leaves it to the server, which answers exactly."""

    system: str
    retention: float | None = None
    bits: float | None = None

    @property
    def approximate(self) -> bool:
        """Whether it must read a part of the prefix, or all of it in few bits."""
        return self.bits is not None or (self.retention or 1.0) < 1.0

    @property
    def custom(self) -> dict[str, Any]:
        """The request's `custom_params`."""
        if self.retention is None:
            return {}
        custom: dict[str, Any] = {"impress_retention": self.retention}
        if not self.approximate:
            custom["impress_bits"] = EXACTLY
        elif self.bits in BITS:
            # Those of a basis are what a server gives that has one.
            custom["impress_bits"] = self.bits
        return custom


class System(NamedTuple):
    """A name, and the policy and other flags of its server; `rate`: of its codes, if any."""

    name: str
    policy: str
    more: tuple[str, ...] = ()
    rate: float | None = None

    @property
    def exact(self) -> bool:
        """Whether its policy uses prefixes only as they were computed."""
        return self.policy not in (*CODED_POLICIES, *PART_POLICIES)

    def ways(self, retentions: Sequence[float]) -> list[Way]:
        """How it is asked; exact answers of a server store more than the prefixes, so come last."""
        if self.exact:
            return [Way(self.name)]
        if self.rate is not None:
            fewer = [Way(f"{self.name}@{self.rate:g}", 1.0, self.rate)]
        else:
            fewer = [Way(self.name, own) for own in sorted(retentions) if own < 1]
        return [*fewer, *([Way(self.name, 1.0)] if 1 in retentions else [])]


POLICIES = {REFERENCE: "recompute", "as": "as", "h2o": "as+h2o+lru", "paper": "paper"}
SYSTEMS = {name: System(name, own) for name, own in POLICIES.items()}
CODED = "impress"
USUAL = ("h2o", "paper", "impress")
ASKED = ("piqa", "copa", "openbookqa", "squad")
OPTIONS = (
    Option(
        "systems", USUAL, "beside recompute", quick=("impress",), parse=one_of((*SYSTEMS, CODED))
    ),
    Option("retentions", (0.25,), "shares that paper and h2o use; 1 is exact", parse=_share),
    Option("bits", (BITS[0],), "of all of the prefix, each on a server of its own", parse=_bits),
    Option("tasks", ASKED, f"of {', '.join(TASKS)}", quick=("copa",), parse=one_of(TASKS)),
    Option("prefixes", 2, "per task", quick=1),
    Option("examples", 100, "questions per task", quick=6),
    Option("shots", 10, "examples per prefix"),
    Option("passages", 10, "per prefix of squad"),
    Option("basis", None, "file of a basis: also a server with it, in its bits", parse=Path),
    Option("concurrency", 4, "requests under way"),
    *ASKING,
)
TASK_OPTIONS = ("prefixes", "shots", "passages", "examples", "seed")


class Measured(NamedTuple):
    """Answers of a system to a task: of each question the log-likelihoods of its options in nats,
    and `meta_info["impress"]` of each of its requests."""

    way: Way
    task: Task
    logliks: list[list[float]]
    reports: list[list[Row]]

    @property
    def key(self) -> tuple[str, float]:
        """The system, and the share of the prefix that was used."""
        return self.way.system, self.way.retention or 1.0

    @property
    def choices(self) -> list[int]:
        """Place of each question's answer, [n]."""
        pairs = zip(self.task.items, self.logliks, strict=True)
        return [chosen_option(self.task.name, item, logliks) for item, logliks in pairs]

    @property
    def right(self) -> Floats:
        """1 for each right answer, [n]."""
        return _equal(self.choices, [item.gold for item in self.task.items])


def run(args: argparse.Namespace) -> Result:
    """Ask all systems."""
    names = dict.fromkeys((REFERENCE, *args.systems))
    systems = [SYSTEMS[name] for name in names if name != CODED]
    for bits in args.bits if CODED in names else ():
        flags = f"--impress-bits={bits:g}", "--impress-keep=both"
        systems.append(System(CODED, CODED, flags, bits))
    if args.basis is not None:
        rate = round(Basis.load(args.basis).rate, 2)
        systems.append(System("basis", "impress", (f"--impress-basis={args.basis}",), rate))
    model = model_folder(args.model)
    tokenize = load_tokenize(model)
    tasks = [make_task(name, tokenize, args) for name in args.tasks]
    with servers(args) as pool:
        found = [own for system in systems for own in _measure(args, pool, model, system, tasks)]
    size = kv_bytes_per_token(model, args.dtype)
    with step("intervals"):
        rows = make_rows(found, size, args.seed)
    figures = {
        "model": model.name,
        "kv_bytes_per_token": size,
        "options": {name: getattr(args, name) for name in TASK_OPTIONS},
        "systems": [system._asdict() for system in systems],
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
            dict(zip(("system", "retention"), own.key, strict=True))
            | {
                "task": own.task.name,
                "choices": own.choices,
                "logliks": [[round(x, 5) for x in logliks] for logliks in own.logliks],
            }
            for own in found
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
        # The same prefix may belong to two tasks. Where a part of a stored beginning would be used,
        # what comes after it is not stored.
        exact = Way(system.name, None if system.exact else 1.0).custom
        for prefix in sorted({tuple(prefix) for task in tasks for prefix in task.prefixes}):
            server.store(prefix, custom=exact)
        found = []
        for way in system.ways(args.retentions):
            for task in tasks:
                with step(f"{way.system} {way.retention or ''}: {task.name}"):
                    found.append(_ask_all(server, task, way, args.concurrency))
        server.check_log()
    shutil.rmtree(store, ignore_errors=True)
    return found


def _ask_all(server: Server, task: Task, way: Way, concurrency: int) -> Measured:
    with ThreadPoolExecutor(concurrency) as pool:
        pairs = pool.map(
            lambda item: _ask(server, task.prefixes[item.prefix], item, way), task.items
        )
        logliks, reports = zip(*pairs, strict=True)
    return Measured(way, task, list(logliks), list(reports))


def _ask(
    server: Server, prefix: Sequence[int], item: Item, way: Way
) -> tuple[list[float], list[Row]]:
    """A request for each option.

    Raises:
        BenchFailed: one failed, or was not served as asked.
    """
    logliks, reports = [], []
    for option in item.options:
        answer = server.generate(
            [*prefix, *item.question, *option],
            custom=way.custom,
            return_logprob=True,
            # The first entry belongs to the last token of the question and has no value. An
            # earlier start would also keep SGLang from using the whole prefix.
            logprob_start_len=len(prefix) + len(item.question) - 1,
        )
        meta = answer["meta_info"]
        logliks.append(option_loglik(meta, option))
        check_path(meta["impress"], len(prefix), way)
        reports.append(meta["impress"])
    return logliks, reports


def option_loglik(meta_info: Mapping[str, Any], option: Sequence[int]) -> float:
    """Log-likelihood of an option in nats.

    Raises:
        BenchFailed: the log-probabilities are not those of the option's tokens.
    """
    entries = meta_info["input_token_logprobs"][1:]
    if (tokens := [entry[1] for entry in entries]) != list(option):
        raise BenchFailed(f"asked for log-probabilities of {list(option)}, got those of {tokens}")
    total = math.fsum(entry[0] for entry in entries)
    if not math.isfinite(total):
        raise BenchFailed(f"the log-probabilities of an option sum up to {total}")
    return total


def chosen_option(task: str, item: Item, logliks: Sequence[float]) -> int:
    """Place of the most likely option, the first of equals; per byte if the task is normalised."""
    sizes = item.option_bytes if task in NORMALISED else (1,) * len(logliks)
    values = [value / max(1, size) for value, size in zip(logliks, sizes, strict=True)]
    return values.index(max(values))


def centred_shift(
    logliks: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> float:
    """Mean absolute difference of centred option log-likelihoods, [n][options], in nats."""
    pairs = zip(map(np.array, logliks), map(np.array, reference), strict=True)
    return float(np.mean([np.abs(a - a.mean() - b + b.mean()).mean() for a, b in pairs]))


def check_path(report: Mapping[str, Any], prefix_tokens: int, way: Way) -> None:
    """Check that a request used its prefix as the system must.

    Raises:
        BenchFailed: it did not; the message says what came instead.
    """
    path, stored, loaded = (report[name] for name in ("path", "stored_tokens", "loaded_tokens"))
    if not way.approximate:
        right = not report["approximate"] and (path != "ssd" or loaded == stored)
    elif way.bits is not None:
        # Of its class: who finds the prefix resident, or the beginning that it shares with others,
        # has loaded no more than the rest.
        right = report["approximate"] and stored + report["resident_tokens"] >= prefix_tokens
        right = right and report["bits"] >= way.bits - 0.5
    else:
        assert way.retention is not None
        # The same rounding as the server's, which forgives 0.1 * 30 > 3.
        wanted = max(1, math.ceil(way.retention * stored - 1e-9))
        right = path == "ssd" and stored >= prefix_tokens and loaded == wanted
    if not right:
        raise BenchFailed(f"{way}, with a prefix of {prefix_tokens} tokens, got {report}")


def make_rows(measured: Sequence[Measured], kv_bytes: int, seed: int) -> list[Row]:
    """A row per system, retention and task, and those of their mean last."""
    by_key = {(*own.key, own.task.name): own for own in measured}
    names = list(dict.fromkeys(own.task.name for own in measured))
    groups = [([own], own.task.name) for own in measured]
    if len(names) > 1:
        for key in dict.fromkeys(own.key for own in measured):
            groups.append(([by_key[*key, name] for name in names], MEAN))
    rows = []
    for parts, name in groups:
        references = [by_key[REFERENCE, 1.0, part.task.name] for part in parts]
        rows.append(_make_row(list(zip(parts, references, strict=True)), name, kv_bytes, seed))
    return rows


def _make_row(
    pairs: Sequence[tuple[Measured, Measured]], title: str, kv_bytes: int, seed: int
) -> Row:
    """A row over one task, or the mean over several, each with the same weight: answers, and those
    of the reference."""
    parts = [part for part, _ in pairs]
    system, retention = parts[0].key
    agreements = [_equal(part.choices, other.choices) for part, other in pairs]
    differences = [100 * (part.right - other.right) for part, other in pairs]
    return {
        "system": system,
        "retention": retention,
        "task": title,
        "n": sum(len(part.logliks) for part in parts),
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
        for item, reports in zip(measured.task.items, measured.reports, strict=True)
        for report in reports
        if report["path"] == "ssd"
    ]
    return float(np.mean(shares)) if shares else None


def _equal(one: Sequence[int], other: Sequence[int]) -> Floats:
    """1 for each place where both are the same, [n]."""
    return (np.array(one) == np.array(other)).astype(float)


def _with_interval(name: str, strata: Sequence[Floats], seed: int) -> Row:
    low, high = interval(strata, seed)
    mean = float(np.mean([values.mean() for values in strata]))
    return {name: round(mean, 4), f"{name}_interval": [round(low, 4), round(high, 4)]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 5) if known else None


def _interval(name: str, scale: float = 1.0, sign: str = "+") -> Any:
    def cell(row: Row) -> str:
        own = [scale * value for value in (row[name], *row[f"{name}_interval"])]
        return "{} [{}, {}]".format(*(f"{value:{sign}.1f}" for value in own))

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
