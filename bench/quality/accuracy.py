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
read         bytes read from SSD over those of the whole prefix, without requests that found it in
             the device pool

Intervals of 95% are of a paired bootstrap over questions, not over prefixes. `mean` is that over
the tasks.
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
from bench.core.report import Result, Row, Table, interval
from bench.core.servers import SPARE_TOKENS, Server, Servers, servers, store_flags
from bench.core.session import BenchFailed, step
from bench.quality.tasks import MIN_PREFIX_TOKENS, NORMALISED, TASKS, Item, Task, make_task
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.config import BITS, EXACTLY

Floats = NDArray[np.float64]
REFERENCE = "recompute"
MEAN = "mean"
# Bytes are those of the store, and what is stored are the prefixes only.
COMMON_FLAGS = (
    "--impress-reorder-interval=0",
    "--impress-approximation-depth=0",
    f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
)


class Way(NamedTuple):
    """How a system is asked: for a share of the prefix's tokens, or for all of it in so many
    `bits`, as requests share them; else exactly."""

    system: str
    retention: float = 1.0
    bits: float | None = None

    @property
    def approximate(self) -> bool:
        """Whether it must read a part of the prefix, or all of it in few bits."""
        return self.bits is not None or self.retention < 1.0

    @property
    def custom(self) -> dict[str, Any]:
        """The request's `custom_params`."""
        if self.system == REFERENCE:
            return {}
        custom: dict[str, Any] = {"impress_retention": self.retention}
        if not self.approximate:
            custom["impress_bits"] = EXACTLY
        elif self.bits in BITS:
            # Those of a basis are what a server gives that has one.
            custom["impress_bits"] = self.bits
        return custom


class System(NamedTuple):
    """A name, the policy and other flags of its server, and how it is asked."""

    name: str
    policy: str
    more: tuple[str, ...]
    ways: Sequence[Way]


PARTS = {"h2o": "as+h2o+lru", "paper": "paper"}
SYSTEMS = (*PARTS, "impress")
ASKED = ("piqa", "copa", "openbookqa", "squad")
OPTIONS = (
    Option("systems", (*SYSTEMS,), "beside recompute", ("impress",), one_of((REFERENCE, *SYSTEMS))),
    Option("retentions", (0.25,), "shares that paper and h2o use; 1 is exact"),
    Option("bits", (BITS[0],), "of all of the prefix, each on a server of its own"),
    Option("tasks", ASKED, f"of {', '.join(TASKS)}", quick=("copa",), parse=one_of(TASKS)),
    Option("prefixes", 2, "per task", quick=1),
    Option("examples", 100, "questions per task", quick=6),
    Option("basis", None, "file of a basis: also a server with it, in its bits", parse=Path),
    *ASKING,
)
AT_ONCE = 4


class Measured(NamedTuple):
    """Answers of a system to a task: of each question the log-likelihoods of its options in nats.

    `read`: of each request that read from SSD bytes per token of its prefix.
    """

    way: Way
    task: Task
    logliks: list[list[float]]
    read: list[float]

    @property
    def choices(self) -> list[int]:
        """Place of each question's answer, the first of equals, [n]."""
        found = []
        for item, logliks in zip(self.task.items, self.logliks, strict=True):
            sizes = item.option_bytes if self.task.name in NORMALISED else (1,) * len(logliks)
            values = [loglik / max(1, size) for loglik, size in zip(logliks, sizes, strict=True)]
            found.append(values.index(max(values)))
        return found

    @property
    def right(self) -> Floats:
        """1 for each right answer, [n]."""
        return np.equal(self.choices, [item.gold for item in self.task.items]).astype(float)

    @property
    def centred(self) -> list[Floats]:
        """Log-likelihoods less the mean over the options, [n][options]."""
        return [np.array(logliks) - np.mean(logliks) for logliks in self.logliks]


def run(args: argparse.Namespace) -> Result:
    """Ask all systems."""
    systems = [System(REFERENCE, "recompute", (), [Way(REFERENCE)])]

    def add(name: str, more: tuple[str, ...], ways: Sequence[Way]) -> None:
        # Exact answers of a server store more than the prefixes, so come last.
        exact = [Way(name)] if 1 in args.retentions else []
        systems.append(System(name, PARTS.get(name, "impress"), more, [*ways, *exact]))

    for name in args.systems:
        if name in PARTS:
            add(name, (), [Way(name, share) for share in sorted(args.retentions) if share < 1])
    for bits in args.bits if "impress" in args.systems else ():
        flags = f"--impress-bits={bits:g}", "--impress-keep=both"
        add("impress", flags, [Way(f"impress@{bits:g}", bits=bits)])
    if args.basis is not None:
        rate = round(Basis.load(args.basis).rate, 2)
        add("basis", (f"--impress-basis={args.basis}",), [Way(f"basis@{rate:g}", bits=rate)])
    model = model_folder(args.model)
    tokenize = load_tokenize(model)
    tasks = [make_task(name, tokenize, args) for name in args.tasks]
    with servers(args) as pool:
        found = [
            measured
            for system in systems
            for measured in _measure(args, pool, model, system, tasks)
        ]
    size = kv_bytes_per_token(model, args.dtype)
    with step("intervals"):
        rows = make_rows(found, size, args.seed)
    figures = {
        "model": model.name,
        "kv_bytes_per_token": size,
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
                "system": measured.way.system,
                "retention": measured.way.retention,
                "task": measured.task.name,
                "choices": measured.choices,
                "logliks": [[round(x, 5) for x in logliks] for logliks in measured.logliks],
            }
            for measured in found
        ],
    }
    lengths = {task.name: sorted(map(len, task.prefixes)) for task in tasks}
    told = ", ".join(f"{name} {sizes[0]}-{sizes[-1]}" for name, sizes in lengths.items())
    caption = f"{model.name}; tokens of prefixes: {told}"
    return Result(figures, [Table(rows, COLUMNS, caption)])


def _measure(
    args: argparse.Namespace, pool: Servers, model: Path, system: System, tasks: Sequence[Task]
) -> list[Measured]:
    """Ask one system all questions in each way."""
    store = pool.folder / f"store-{system.name}"
    # Every request under way may have its prefix for itself.
    slots = (AT_ONCE + 1) * max(task.longest for task in tasks) + SPARE_TOKENS
    flags = [
        f"--max-total-tokens={slots}",
        f"--max-running-requests={AT_ONCE}",
        *COMMON_FLAGS,
        *store_flags(store),
        f"--impress-policy={system.policy}",
        *system.more,
        *args.server_flag,
    ]
    with pool.running(system.name, model, args.dtype, *flags) as server:
        # The same prefix may belong to two tasks. Where a part of a stored beginning would be used,
        # what comes after it is not stored.
        exact = Way(system.name).custom
        for prefix in sorted({tuple(prefix) for task in tasks for prefix in task.prefixes}):
            server.store(prefix, custom=exact)
        found = []
        for way in system.ways:
            for task in tasks:
                with step(f"{way.system} {way.retention}: {task.name}"):
                    found.append(ask_all(server, task, way))
        server.check_log()
    shutil.rmtree(store, ignore_errors=True)
    return found


def ask_all(server: Server, task: Task, way: Way) -> Measured:
    """Ask all questions of a task."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = pool.map(
            lambda item: _ask(server, task.prefixes[item.prefix], item, way), task.items
        )
        logliks, reads = zip(*pairs, strict=True)
    return Measured(way, task, list(logliks), [report for of_item in reads for report in of_item])


def _ask(
    server: Server, prefix: Sequence[int], item: Item, way: Way
) -> tuple[list[float], list[float]]:
    """A request for each option.

    Raises:
        BenchFailed: one failed, or was not served as asked.
    """
    logliks, reads = [], []
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
        check_path(report := meta["impress"], len(prefix), way)
        reads += [report["ssd_bytes"] / len(prefix)] if report["path"] == "ssd" else []
    return logliks, reads


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
        # The same rounding as the server's, which forgives 0.1 * 30 > 3.
        wanted = max(1, math.ceil(way.retention * stored - 1e-9))
        right = path == "ssd" and stored >= prefix_tokens and loaded == wanted
    if not right:
        raise BenchFailed(f"{way}, with a prefix of {prefix_tokens} tokens, got {report}")


def make_rows(measured: Sequence[Measured], kv_bytes: int, seed: int) -> list[Row]:
    """A row per system, retention and task, and last those of the mean over several tasks, each
    with the same weight."""
    by_key = {(*result.way[:2], result.task.name): result for result in measured}
    names = list(dict.fromkeys(result.task.name for result in measured))
    groups = [([result], result.task.name) for result in measured]
    if len(names) > 1:
        for key in dict.fromkeys(result.way[:2] for result in measured):
            groups.append(([by_key[*key, name] for name in names], MEAN))
    rows = []
    for parts, name in groups:
        exact = [by_key[REFERENCE, 1.0, part.task.name] for part in parts]
        pairs = list(zip(parts, exact, strict=True))
        differences = [100 * (result.right - other.right) for result, other in pairs]
        agreements = [
            np.equal(result.choices, other.choices).astype(float) for result, other in pairs
        ]
        shifts = [
            np.mean([abs(a - b).mean() for a, b in zip(result.centred, other.centred, strict=True)])
            for result, other in pairs
        ]
        read = [np.mean(result.read) / kv_bytes for result in parts if result.read]
        row = {
            "system": parts[0].way.system,
            "retention": parts[0].way.retention,
            "task": name,
            "n": sum(len(part.logliks) for part in parts),
            "accuracy": round(float(np.mean([part.right.mean() for part in parts])), 5),
            "shift_nats": round(float(np.mean(shifts)), 5),
            "read": round(float(np.mean(read)), 5) if read else None,
        }
        row |= _with_interval("difference_points", differences, seed)
        rows.append(row | _with_interval("agreement", agreements, seed))
    return rows


def _with_interval(name: str, strata: Sequence[Floats], seed: int) -> Row:
    low, high = interval(strata, seed)
    mean = float(np.mean([values.mean() for values in strata]))
    return {name: round(mean, 4), f"{name}_interval": [round(low, 4), round(high, 4)]}


COLUMNS = (
    *("system", "retention", "task", "n", "accuracy", "difference_points"),
    *("difference_points_interval", "agreement", "agreement_interval", "shift_nats", "read"),
)
