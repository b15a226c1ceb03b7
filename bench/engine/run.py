"""TTFT of the paper's systems at the sizes of real models, on this machine, without SGLang.

    python -m bench engine --quick
    python -m bench engine --model opt-13b --ssd-dir /nvme --json run.json
    python -m bench engine --figure 16 --models opt-6.7b,opt-13b --datasets rte,copa

A small engine runs layers with a model's shapes and random weights (`bench.engine.model`), and
drives storage, tiers, identification and policies as the server does: match, open, and in each
layer probe, select, load, attend; reading ahead; saving what was computed. Files are real ones in
--ssd-dir, read with O_DIRECT where there is that; --ssd-mbps slows the drive down. All systems of a
cell serve the same requests one at a time, on the same prefixes and with the same attention.

Weights are random, so attention would be flat; keys and queries are planted instead
(`bench.engine.workload`), while the projections that would give them are computed all the same. A
prefix is stored when it is first computed ("cold"); measured requests leave nothing behind. The
warm-up loads but runs no model; it is long, because the first questions want chunks that none
before them wanted, which no policy can have cached. Loading is never replaced by computing; both
are still estimated, which takes time. Cache sizes are shares of the KVs of all prefixes, by default
those of the paper (section 6.1: 10 GB on the device and 32 GB on the host for 55 to 65 GB).

--figure 3, 16, 17, 23 and 25 choose the systems, models and sizes of the paper's figures; --shrink
shortens their prefixes. Its data sets stand for lengths and a retention only. The policy `impress`
loads all tokens in few bits, whatever the retention.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from bench.engine import report
from bench.engine.model import (
    IDENTITY,
    Engine,
    EngineFailed,
    Model,
    StoredEngine,
    compute_and_store,
    store_planted,
)
from bench.engine.workload import (
    MODELS,
    POPULARITIES,
    Planter,
    Request,
    WorkloadOptions,
    make_workload,
    measure_planting,
)
from bench.policies.stores import STORED_BY, store_kind
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ImpressError
from impress_sglang.importance.identify import probe_kv_heads
from impress_sglang.management.policies import Policy, Wish, make_policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.options import POLICIES
from impress_sglang.storage.directory import MARKER
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.warm_up import warm_up

COMPARED = (
    "recompute",
    "as",
    "as+h2o+lru",
    "as+h2o+lfu",
    "paper+itf",
    "paper+itf+reorder",
    "paper",
    "impress",
)
# Section 6.1: 10 GB of device and 32 GB of host cache for 55, 57, 64 and 65 GB of KVs.
DEVICE_SHARE = 10 / 60.25
HOST_SHARE = 32 / 60.25
# Mean tokens of a prefix (4.8k to 5.7k, in proportion to the sizes of the sets) and retention
# (sections 6.1 and 6.2).
DATASETS = {
    "piqa": (4800, 0.25),
    "rte": (5000, 0.25),
    "copa": (5600, 0.5),
    "openbookqa": (5700, 0.25),
}
SHORTEST_PREFIX = 2000
# Below it a shortened prefix would have no chunks to choose from.
LEAST_TOKENS = 64
FIGURE_POLICIES = {
    16: ("recompute", "as", "as+h2o+lru", "as+h2o+lfu", "paper", "impress"),
    17: ("as", "as+h2o+lru", "as+h2o+lfu", "paper", "impress"),
    23: ("as+h2o+lfu", "paper", "impress"),
    25: ("as+h2o+lfu", "paper", "impress"),
}
FIGURE_MODELS = {
    3: ("opt-6.7b",),
    16: ("opt-6.7b", "opt-13b", "opt-30b"),
    17: ("opt-6.7b", "opt-13b", "opt-30b"),
    23: ("opt-6.7b",),
    25: ("llama-2-7b", "llama-2-13b"),
}
FIGURE_DATASETS = {
    16: tuple(DATASETS),
    17: ("rte",),
    # The paper does not say which one.
    23: ("openbookqa",),
    25: ("piqa", "copa"),
}
FIGURE_LENGTHS = (128, 512, 2048, 8192)
FIGURE_CHUNKS = (16, 32, 64, 128, 256)
# Part of the warm-up that comes before reordering.
FIRST_SHARE = 2 / 3
SIZES = {
    "full": {
        "model": "opt-6.7b",
        "scale": 1.0,
        "layers": None,
        "prefixes": 6,
        "prefix_tokens": (2000, 10_000),
        "new_tokens": (64, 512),
        "shrink": 1.0,
        "warmup": 96,
        "settle": 2,
        "requests": 20,
        "recompute_requests": 6,
        "ssd_mbps": 0.0,
    },
    "quick": {
        "model": "opt-6.7b",
        "scale": 0.25,
        "layers": 3,
        "prefixes": 4,
        "prefix_tokens": (350, 700),
        "new_tokens": (32, 64),
        "shrink": 0.1,
        "warmup": 60,
        "settle": 1,
        "requests": 6,
        "recompute_requests": 2,
        "ssd_mbps": 20.0,
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A policy, and its caches as shares of the KVs of all prefixes."""

    name: str
    policy: str
    device_share: float
    host_share: float

    @property
    def stores(self) -> bool:
        """Whether it loads stored prefixes."""
        return self.policy != "recompute"

    @property
    def kind(self) -> str:
        """Which of the stores it reads, a key of `STORED_BY`."""
        return store_kind(self.policy)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """Systems that are compared on one workload; `prefix_tokens` are (shortest, longest)."""

    label: str
    model: str
    prefix_tokens: tuple[int, int]
    retention: float
    chunk_tokens: int
    systems: tuple[System, ...]


def main() -> int:
    """Run the benchmark; returns the exit status."""
    args = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        result = run(args)
    except KeyboardInterrupt:
        return 130
    except (EngineFailed, ImpressError, torch.OutOfMemoryError) as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells; prints each one's tables when it is done.

    Raises:
        EngineFailed: the disk is too small, or a prefix was not stored.
        ImpressError: a store cannot be opened, or its caches do not fit in memory.
    """
    began, cells = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir=args.ssd_dir or Path.cwd()) as at:
        for cell in make_cells(args):
            found = CellRun(args, cell, Path(at)).measure()
            cells.append(found)
            print(f"\n{_caption(args, found)}\n\n{report.format_tables(found['rows'])}", flush=True)
    return {
        "command": command_of(sys.argv[1:]),
        "machine": report.describe_device(torch.device(args.device)),
        "seconds": round(time.monotonic() - began),
        "figure": args.figure,
        "emulated_ssd_mbps": args.ssd_mbps or None,
        "readahead": args.readahead,
        "cells": cells,
    }


def make_cells(args: argparse.Namespace) -> list[Cell]:
    """What is measured: one cell, or those of a figure of the paper."""
    if args.figure is None:
        systems = tuple(_system(args, name) for name in args.policies or COMPARED)
        cell = Cell("", args.model, args.prefix_tokens, args.retention, args.chunk_tokens, systems)
        return [cell]
    models = args.models or FIGURE_MODELS[args.figure]
    if args.figure == 3:
        return [cell for model in models for cell in _length_cells(args, model)]
    systems = tuple(_system(args, name) for name in args.policies or FIGURE_POLICIES[args.figure])
    chunks = FIGURE_CHUNKS if args.figure == 23 else (args.chunk_tokens,)
    cells = []
    for model in models:
        for dataset in args.datasets or FIGURE_DATASETS[args.figure]:
            tokens = tokens_of(dataset, MODELS[model].longest_prefix, args.shrink)
            for chunk in chunks:
                label = f"{dataset}, chunks of {chunk}" if args.figure == 23 else dataset
                retention = DATASETS[dataset][1]
                cells.append(Cell(label, model, tokens, retention, chunk, systems))
    return cells


def tokens_of(dataset: str, longest: int, shrink: float) -> tuple[int, int]:
    """Shortest and longest prefix of a data set: around its mean, as far as a model takes them."""
    mean = DATASETS[dataset][0]
    bounds = (SHORTEST_PREFIX, min(2 * mean - SHORTEST_PREFIX, longest))
    shortest, longest = (max(LEAST_TOKENS, round(shrink * tokens)) for tokens in bounds)
    return shortest, longest


def _length_cells(args: argparse.Namespace, model: str) -> Iterator[Cell]:
    """Figure 3: prefixes of one length, computed, or loaded whole from one tier."""
    # Chunks are padded to pages, so a cache for all has some room to spare.
    everything = 1.5
    systems = (
        _system(args, "recompute"),
        System("as, device", "as", everything, 0.0),
        System("as, host", "as", 0.0, everything),
        System("as, SSD", "as", 0.0, 0.0),
    )
    for length in FIGURE_LENGTHS:
        tokens = max(LEAST_TOKENS, round(args.shrink * length))
        yield Cell(f"{tokens} tokens", model, (tokens, tokens), 1.0, args.chunk_tokens, systems)


def _system(args: argparse.Namespace, name: str) -> System:
    return System(name, name, args.device_share, args.host_share)


class CellRun:
    """One cell: the model, the stored prefixes, and each system on them."""

    def __init__(self, args: argparse.Namespace, cell: Cell, folder: Path) -> None:
        self._args = args
        self._cell = cell
        self._folder = folder
        self._dtype = getattr(torch, args.dtype)
        device = torch.device(args.device)
        shape = MODELS[cell.model].scaled(args.scale, args.layers)
        self._shape = shape
        self._workload = make_workload(self._options())
        distinct = args.distinct_layers
        model = Model(shape, device, self._dtype, distinct_layers=distinct, seed=args.seed)
        planter = Planter(shape, device, self._dtype, seed=args.seed)
        self._engine = Engine(model, planter, self._workload)
        self._kv_bytes = sum(self._workload.lengths) * shape.kv_bytes(self._dtype)

    def measure(self) -> dict[str, Any]:
        """The figures of all systems.

        Raises:
            EngineFailed: the disk is too small, or a prefix was not stored.
        """
        self._require_space()
        shape, planter = self._shape, self._engine.planter
        lengths, new = self._workload.lengths, self._args.new_tokens
        planted = measure_planting(
            planter, sorted(lengths)[len(lengths) // 2], sum(new) // 2, self._cell.retention
        )
        rows = {row["system"]: row for row in self._rows()}
        order = ["cold", *(system.name for system in self._cell.systems)]
        found = [rows[name] for name in order if name in rows]
        report.add_speedups(found)
        return {
            "label": self._cell.label,
            "model": dataclasses.asdict(shape),
            "dtype": self._args.dtype,
            "distinct_layers": self._engine.model.distinct_layers,
            "attention": self._engine.model.attention_name,
            "retention": self._cell.retention,
            "chunk_tokens": self._cell.chunk_tokens,
            "kv_bytes": self._kv_bytes,
            "workload": {**dataclasses.asdict(self._options()), "lengths": lengths},
            "planting": dataclasses.asdict(planter.planting),
            "planted": planted,
            "direct_io": self._direct_io,
            "rows": found,
        }

    def _options(self) -> WorkloadOptions:
        args = self._args
        return WorkloadOptions(
            prefixes=args.prefixes,
            prefix_tokens=self._cell.prefix_tokens,
            new_tokens=args.new_tokens,
            warmup=args.warmup,
            settle=args.settle,
            requests=args.requests,
            popularity=args.popularity,
            sigma=args.sigma,
            seed=args.seed,
        )

    def _rows(self) -> Iterator[report.Row]:
        for system in self._cell.systems:
            if not system.stores:
                yield self._computed(system)
        kinds = dict.fromkeys(system.kind for system in self._cell.systems if system.stores)
        for number, kind in enumerate(kinds):
            prepared = self._folder / f"prepared-{kind}"
            cold = self._store_prefixes(prepared, kind, compute=number == 0)
            if cold:
                yield report.make_row("cold", "cold", cold)
            for system in self._cell.systems:
                if system.stores and system.kind == kind:
                    yield self._stored(system, prepared)
            shutil.rmtree(prepared)

    def _computed(self, system: System) -> report.Row:
        """The policy that stores nothing; its first request is only to grow buffers."""
        with _step(system.name):
            self._engine.serve_computed(self._workload.measured[0])
            chosen = self._workload.measured[: self._args.recompute_requests]
            served = [self._engine.serve_computed(request) for request in chosen]
        return report.make_row(system.name, system.policy, served)

    def _store_prefixes(self, folder: Path, kind: str, *, compute: bool) -> list[report.Served]:
        """Store all prefixes, by serving one request for each if they are to be computed."""
        system = System(STORED_BY[kind], STORED_BY[kind], 0.0, 0.0)
        served = []
        with (
            _step(f"storing the prefixes for {kind}"),
            contextlib.closing(self._open_store(system, folder)) as store,
        ):
            for prefix in range(len(self._workload.lengths)):
                if compute:
                    request = dataclasses.replace(self._workload.measured[0], prefix=prefix)
                    served.append(compute_and_store(self._engine, store, request))
                else:
                    store_planted(self._engine, store, prefix)
            self._direct_io = bool(store.summary()["direct_io"])
        return served

    def _stored(self, system: System, prepared: Path) -> report.Row:
        """A policy that loads: warm-up, reordering, more warm-up, and the measured requests."""
        folder = self._folder / "store"
        link_segments(prepared, folder)
        config = self._config(system, folder)
        engine = StoredEngine(self._engine, config, self._kv_shape(make_policy(config)))
        with contextlib.closing(engine.store), _step(system.name):
            self._compile(engine.policy)
            first = round(len(self._workload.warmup) * FIRST_SHARE)
            _warm(engine, self._workload.warmup[:first])
            if engine.policy.reorders:
                engine.reorder()
            _warm(engine, self._workload.warmup[first:])
            # Caches fill alike at any speed; how reads are cut follows the speed that is seen.
            engine.emulate_ssd(self._args.ssd_mbps)
            for request in self._workload.settle:
                engine.serve(request)
            served = [engine.serve(request) for request in self._workload.measured]
        shutil.rmtree(folder)
        return report.make_row(system.name, system.policy, served)

    def _compile(self, policy: Policy) -> None:
        """Compile the kernels that requests use, so that no time to first token has that in it."""
        selects = not policy.exact(Wish(self._cell.retention))
        warm_up(
            self._kv_shape(policy),
            policy.identification if selects else None,
            self._cell.chunk_tokens,
            self._engine.model.device,
            in_slots=False,
        )

    def _open_store(self, system: System, folder: Path) -> PrefixStore:
        config = self._config(system, folder)
        shape = self._kv_shape(make_policy(config))
        return PrefixStore(config, IDENTITY, shape, self._engine.model.device)

    def _kv_shape(self, policy: Policy) -> KVShape:
        shape, count = self._shape, ImpressConfig().probe_heads
        heads = probe_kv_heads(shape.query_heads, shape.kv_heads, count)
        return shape.kv_shape(self._dtype, heads if policy.probes else ())

    def _config(self, system: System, folder: Path) -> ImpressConfig:
        args, gigabytes = self._args, self._kv_bytes / 1e9
        retention = 1.0 if system.policy == "impress" else self._cell.retention
        return ImpressConfig(
            # Nobody has queries here to measure with.
            base_error=0.0,
            ssd_dir=str(folder),
            ssd_gb=10 * gigabytes + 1.0,
            min_free_gb=0.0,
            policy=system.policy,
            retention=retention,
            min_retention=min(retention, ImpressConfig().min_retention),
            chunk_tokens=self._cell.chunk_tokens,
            device_gb=system.device_share * gigabytes,
            host_gb=system.host_share * gigabytes,
            readahead=args.readahead,
            reorder_interval=0.0,
        )

    def _require_space(self) -> None:
        stored = (system for system in self._cell.systems if system.stores)
        reorders = any(make_policy(self._config(own, self._folder)).reorders for own in stored)
        copies = 2 if reorders else 1
        # Codes and padding beside the KVs.
        needed = 1.75 * copies * self._kv_bytes
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise EngineFailed(
                f"{needed / 1e9:.0f} GB are needed on the SSD and {free / 1e9:.0f} GB are free; "
                "lower --prefixes or --prefix-tokens"
            )


def link_segments(source: Path, target: Path) -> None:
    """Make a store with the same prefixes: segments, which never change, are hard links.

    The index is found again from them; the marker, which has the key of the namespaces, says that
    it is a store.
    """
    for path in sorted((*source.glob("*/segments/*/*"), *source.glob(f"*/{MARKER}"))):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)


def _warm(engine: StoredEngine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.warm(request)


@contextlib.contextmanager
def _step(text: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{text}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _caption(args: argparse.Namespace, found: dict[str, Any]) -> str:
    planted, shape, lengths = found["planted"], found["model"], found["workload"]["lengths"]
    ssd = f"emulated, {args.ssd_mbps:g} MB/s" if args.ssd_mbps else "the real one"
    return (
        f"{' '.join(filter(None, (shape['name'], found['label'])))}: {shape['layers']} layers "
        f"({found['distinct_layers']} distinct), {shape['query_heads']} query and "
        f"{shape['kv_heads']} KV heads, {found['dtype']} on {args.device}, "
        f"{found['attention']} attention\n"
        f"{len(lengths)} prefixes of {min(lengths)} to {max(lengths)} tokens, "
        f"{found['kv_bytes'] / 1e9:.2f} GB of KVs, retention {found['retention']:g}, chunks of "
        f"{found['chunk_tokens']}; SSD: {ssd}, O_DIRECT {'on' if found['direct_io'] else 'off'}\n"
        f"planted: Jaccard index of two questions {planted['questions']:.2f}, of two heads "
        f"{planted['heads']:.2f}, of the probe heads {planted['probe']:.2f} (threshold "
        f"{planted['threshold']:.2f}, passed by {planted['layers_passed']:.0%}); sink "
        f"{planted['sink_mass']:.0%}, kept {planted['kept_mass']:.0%} of the mass"
    )


def parse_arguments(options: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, with those that depend on others filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m bench engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small model and few short requests")
    add("--figure", type=int, choices=sorted(FIGURE_MODELS), help="of the paper")
    group = parser.add_argument_group("what is compared")
    add = group.add_argument
    known = ", ".join((*reversed(POLICIES),))
    add(
        "--policies",
        type=_policies,
        metavar="A,B",
        help=f"of {known}",
    )
    add("--model", choices=MODELS, help="without --figure (default: opt-6.7b)")
    add("--models", type=_names(MODELS), metavar="A,B", help="with --figure (default: the paper's)")
    add("--datasets", type=_names(DATASETS), metavar="A,B", help="with --figure, likewise")
    add("--retention", type=float, default=0.25, help="without --figure (default: 0.25)")
    add("--chunk-tokens", type=int, default=64, help="(default: 64)")
    add("--device-share", type=float, default=DEVICE_SHARE, help="(default: %(default).3f)")
    add("--host-share", type=float, default=HOST_SHARE, help="(default: %(default).3f)")
    add("--readahead", type=float, default=ImpressConfig().readahead, help="0: nothing is")
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--scale", type=float, help="heads, FFN and vocabulary in shares of the model's")
    add("--layers", type=_positive, help="instead of the model's")
    add("--distinct-layers", type=_positive, default=4, help="with weights of their own (4)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float16", "bfloat16", "float32"))
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--prefixes", type=_positive, help="number of prefixes, at least 2")
    add("--prefix-tokens", type=_range, metavar="LOW-HIGH", help="without --figure")
    add("--new-tokens", type=_range, metavar="LOW-HIGH", help="of a question")
    add("--shrink", type=float, help="prefixes of --figure in shares of the paper's")
    add("--popularity", choices=POPULARITIES, default="normal", help="(default: %(default)s)")
    add("--sigma", type=float, help="of normal popularity, in prefixes (default: a quarter)")
    add("--warmup", type=_positive, help="loads that fill the caches, a third after reordering")
    add("--settle", type=_positive, help="requests before the measured ones")
    add("--requests", type=_positive, help="measured requests")
    add("--recompute-requests", type=_positive, help="how many of these recompute runs")
    add("--seed", type=int, default=1)
    group = parser.add_argument_group("storage and output")
    add = group.add_argument
    add("--ssd-dir", type=Path, metavar="DIR", help="for the store (default: here)")
    add("--ssd-mbps", type=float, help="emulate a slower drive; 0: the real one")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(options)
    for key, value in SIZES["quick" if args.quick else "full"].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.dtype is None:
        args.dtype = "float32" if args.device == "cpu" else "float16"
    if args.prefixes < 2:
        parser.error("--prefixes must be at least 2")
    return args


def command_of(options: Sequence[str]) -> str:
    """A command that gives the same run; paths of this machine are left out."""
    kept, rest = [], iter(options)
    for option in rest:
        if option in ("--json", "--ssd-dir"):
            next(rest, None)
        elif not option.startswith(("--json=", "--ssd-dir=")):
            kept.append(option)
    return " ".join(["python -m bench engine", *kept])


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy")
    return names


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = int(low), int(high or low)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of positive numbers")
    return bounds


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
