"""TTFT of the paper's systems with the shapes of real models on this machine, without SGLang.

A small engine runs layers with a model's shapes and random weights, and the product's own runtime
serves the prefixes: match, open, and in each layer probe, select, load, attend; reading ahead.
Files are real ones in --ssd-dir, read with O_DIRECT where there is that; --ssd-mbps slows the drive
down. All systems of a cell serve the same requests one at a time, on the same prefixes.

Weights are random, so attention would be flat; keys and queries are planted instead
(`bench/engine/workload.py`), while the projections that would give them are computed all the same.
Measured requests leave nothing behind. The warm-up loads but runs no model; it is long, because the
first questions want chunks that none before them wanted, which no policy can have cached. Loading
is never replaced by computing. Cache sizes are shares of the KVs of all prefixes, by default those
of the paper (section 6.1: 10 GB on the device and 32 GB on the host for 55 to 65 GB).

The paper's figures: 16, and 17 by its stages, are --models opt-6.7b,opt-13b,opt-30b with
--prefix-tokens 2000-7600 (piqa), 2000-8000 (rte), 2000-9200 and --retention 0.5 (copa), 2000-9400
(openbookqa), and 2000-4000 for opt-30b (sections 6.1, 6.2); 23 is --chunk-tokens 16,32,64,128,256;
25 is --models llama-2-7b,llama-2-13b; 3 is --policies recompute,as with one length, and a share of
1.5 for the device, the host or neither. The policy `impress` loads all tokens in few bits, whatever
the retention. On a GPU stages are measured by its events.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.core.options import SEED, Option, bounds, one_of
from bench.core.report import Column, Result, Row, Table, ratio
from bench.core.session import BenchFailed, step, work_folder
from bench.engine.clock import STAGES, Served
from bench.engine.model import Engine, Model
from bench.engine.stored import IDENTITY, StoredEngine, store_planted
from bench.engine.workload import MODELS, PROBE_HEADS, Planter, make_workload
from bench.policies import compared
from bench.policies.compared import POLICIES, STORED_BY, add_speedups, link_store, store_kind
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.selectors import probe_kv_heads
from impress_sglang.management.policies import Policy, make_policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.options import PART_POLICIES
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.warm_up import warm_up

OPTIONS = (
    Option("policies", POLICIES, "to compare", parse=one_of(POLICIES)),
    Option("models", ("opt-6.7b",), f"of {', '.join(MODELS)}", parse=one_of(MODELS)),
    Option("retention", 0.25, "of the policies that use parts of prefixes"),
    Option("chunk-tokens", (64,), "sizes of chunks"),
    Option("device-share", 0.166, "device cache, of all KVs"),
    Option("host-share", 0.531, "host cache, of all KVs"),
    Option("readahead", ImpressConfig().readahead, "0: nothing is read ahead"),
    Option("scale", 1.0, "heads, FFN and vocabulary in shares of the model's", quick=0.25),
    Option("layers", None, "instead of the model's", quick=3, parse=int),
    Option("distinct-layers", 4, "with weights of their own"),
    Option("device", "cuda" if torch.cuda.is_available() else "cpu", "of torch"),
    Option("dtype", "float16" if torch.cuda.is_available() else "float32", "of the model"),
    Option("prefixes", 6, "number of prefixes", quick=4),
    Option("prefix-tokens", None, "LOW-HIGH (2000-10000)", quick=(350, 700), parse=bounds),
    Option("new-tokens", None, "of a question (64-512)", quick=(32, 64), parse=bounds),
    Option("warmup", 96, "loads that fill the caches, a third after reordering", quick=60),
    Option("settle", 2, "requests before the measured ones", quick=1),
    Option("requests", 20, "measured requests", quick=6),
    Option("recompute-requests", 6, "how many of these recompute runs", quick=2),
    Option("ssd-dir", None, "on the drive that is meant", parse=Path),
    Option("ssd-mbps", 0.0, "emulate a slower drive; 0: the real one", quick=20.0),
    SEED,
)
# Part of the warm-up that comes before reordering.
FIRST_SHARE = 2 / 3


def run(args: argparse.Namespace) -> Result:
    """Measure all cells.

    Raises:
        BenchFailed: a prefix was not stored.
        ImpressError: a store cannot be opened, or its caches do not fit in memory.
    """
    if args.prefixes < 2:
        raise BenchFailed("--prefixes must be at least 2")
    cells, tables = [], []
    with work_folder(None, args.ssd_dir) as folder:
        for model, chunk_tokens in itertools.product(args.models, args.chunk_tokens):
            found = CellRun(args, model, chunk_tokens, folder).measure()
            cells.append(found)
            tables += [Table(TIMES, found["rows"]), Table(BYTES, found["rows"], _caption(found))]
    figures = {
        "emulated_ssd_mbps": args.ssd_mbps or None,
        "readahead": args.readahead,
        "cells": cells,
    }
    return Result(figures, tables)


class CellRun:
    """One cell: the model, the stored prefixes, and each system on them."""

    def __init__(
        self, args: argparse.Namespace, model: str, chunk_tokens: int, folder: Path
    ) -> None:
        self._args, self._chunk_tokens, self._folder = args, chunk_tokens, folder
        self._dtype = getattr(torch, args.dtype)
        device = torch.device(args.device)
        self._shape = shape = MODELS[model].scaled(args.scale, args.layers)
        parts = args.warmup, args.settle, args.requests
        self._workload = make_workload(
            args.prefixes,
            args.prefix_tokens or (2000, 10_000),
            args.new_tokens or (64, 512),
            parts,
            args.seed,
        )
        random = Model(
            shape, device, self._dtype, distinct_layers=args.distinct_layers, seed=args.seed
        )
        planter = Planter(shape, device, self._dtype, seed=args.seed)
        self._engine = Engine(random, planter, self._workload)
        self._kv_bytes = sum(self._workload.lengths) * shape.kv_bytes(self._dtype)

    def measure(self) -> dict[str, Any]:
        """The figures of all policies.

        Raises:
            BenchFailed: a prefix was not stored.
        """
        found = {row["policy"]: row for row in self._rows()}
        rows = [found[policy] for policy in self._args.policies]
        add_speedups(rows)
        return {
            "model": dataclasses.asdict(self._shape),
            "dtype": self._args.dtype,
            "device": self._args.device,
            "retention": self._args.retention,
            "chunk_tokens": self._chunk_tokens,
            "kv_bytes": self._kv_bytes,
            "lengths": self._workload.lengths,
            "planting": dataclasses.asdict(self._engine.planter.planting),
            "rows": rows,
        }

    def _rows(self) -> Iterator[Row]:
        stored = [name for name in self._args.policies if name != "recompute"]
        if len(stored) < len(self._args.policies):
            with step("recompute"):
                yield self._computed()
        for kind in dict.fromkeys(map(store_kind, stored)):
            prepared = self._folder / f"prepared-{kind}"
            with step(f"storing the prefixes for {kind}"):
                self._store_prefixes(prepared, STORED_BY[kind])
            for policy in stored:
                if store_kind(policy) == kind:
                    with step(policy):
                        yield self._stored(policy, prepared)
            shutil.rmtree(prepared)

    def _computed(self) -> Row:
        """The policy that stores nothing; its first request is only to grow buffers."""
        self._engine.serve_computed(self._workload.measured[0])
        chosen = self._workload.measured[: self._args.recompute_requests]
        return make_row("recompute", [self._engine.serve_computed(request) for request in chosen])

    def _store_prefixes(self, folder: Path, policy: str) -> None:
        config = self._config(policy, folder)
        shape, device = self._kv_shape(make_policy(config)), self._engine.model.device
        with contextlib.closing(PrefixStore(config, IDENTITY, shape, device)) as store:
            for prefix in range(len(self._workload.lengths)):
                store_planted(self._engine, store, prefix)

    def _stored(self, name: str, prepared: Path) -> Row:
        """A policy that loads: warm-up, reordering, more warm-up, and the measured requests."""
        folder = self._folder / "store"
        link_store(prepared, folder)
        config = self._config(name, folder)
        policy = make_policy(config)
        self._compile(policy)
        engine = StoredEngine(self._engine, config, self._kv_shape(policy))
        with contextlib.closing(engine):
            warmup = self._workload.warmup
            first = round(len(warmup) * FIRST_SHARE)
            for request in warmup[:first]:
                engine.warm(request)
            if engine.reorders:
                engine.reorder()
            for request in warmup[first:]:
                engine.warm(request)
            # Caches fill alike at any speed; how reads are cut follows the speed that is seen.
            engine.emulate_ssd(self._args.ssd_mbps)
            for request in self._workload.settle:
                engine.serve(request)
            served = [engine.serve(request) for request in self._workload.measured]
        shutil.rmtree(folder)
        return make_row(name, served)

    def _compile(self, policy: Policy) -> None:
        """Compile the kernels that requests use, so that no time to first token has that in it."""
        selects = policy.name in PART_POLICIES and self._args.retention < 1
        rule = policy.selector if selects else None
        device = self._engine.model.device
        warm_up(self._kv_shape(policy), rule, self._chunk_tokens, device)

    def _kv_shape(self, policy: Policy) -> KVShape:
        heads = probe_kv_heads(self._shape.query_heads, self._shape.kv_heads, PROBE_HEADS)
        return self._shape.kv_shape(self._dtype, heads if policy.probes else ())

    def _config(self, policy: str, folder: Path) -> ImpressConfig:
        gigabytes = self._kv_bytes / 1e9
        retention = self._args.retention if policy in PART_POLICIES else 1.0
        return ImpressConfig(
            # Nobody has queries here to measure with.
            base_error=0.0,
            ssd_dir=str(folder),
            ssd_gb=10 * gigabytes + 1.0,
            min_free_gb=0.0,
            min_prefix_tokens=1,
            policy=policy,
            load="always",
            retention=retention,
            min_retention=min(retention, ImpressConfig().min_retention),
            chunk_tokens=self._chunk_tokens,
            device_gb=self._args.device_share * gigabytes,
            host_gb=self._args.host_share * gigabytes,
            readahead=self._args.readahead,
            reorder_interval=0.0,
        )


def make_row(policy: str, served: Sequence[Served]) -> Row:
    """The figures of a system; times in ms per request, bytes and chunks of all, None: of nothing.

    `probe_ms` is scoring keys and choosing tokens, `load_ms` what else loading took, as the host
    sees them; stages are by the device's clock.
    """
    reads, loads = ReadStats(), LoadStats()
    for request in served:
        if request.reads is not None:
            reads.add(request.reads)
        if request.loads is not None:
            for name in LOAD_COUNTERS:
                setattr(loads, name, getattr(loads, name) + getattr(request.loads, name))
    ttft_ms = [request.ttft_ms for request in served]
    counters = {name: getattr(loads, name) for name in LOAD_COUNTERS}
    row = compared.make_row(policy, ttft_ms, {**reads.as_dict(), **counters})
    estimates = [request.estimated_ms for request in served if request.estimated_ms is not None]
    row["probe_share"] = ratio(loads.probe_ms, sum(ttft_ms))
    row["stage_ms"] = {
        name: round(statistics.fmean(request.stage_ms[name] for request in served), 2)
        for name in STAGES
    }
    row["estimated_ms"] = round(statistics.fmean(estimates), 2) if estimates else None
    return row


def _caption(found: dict[str, Any]) -> str:
    shape, lengths = found["model"], found["lengths"]
    return (
        f"{shape['name']}, chunks of {found['chunk_tokens']}: {shape['layers']} layers, "
        f"{shape['query_heads']} query and {shape['kv_heads']} KV heads, {found['dtype']} on "
        f"{found['device']}; {len(lengths)} prefixes of {min(lengths)} to {max(lengths)} tokens, "
        f"{found['kv_bytes'] / 1e9:.2f} GB of KVs, retention {found['retention']:g}; MB per request"
    )


def _stage(name: str) -> Any:
    return lambda row: row["stage_ms"][name]


LOAD_COUNTERS = ("layers_by_probe", "layers_by_fallback", "probe_ms", "load_ms")
TIMES = (
    *compared.TIMES,
    Column("probing", "probe_share", "{:.0%}"),
    *(Column(name, _stage(name), "{:,.1f}") for name in STAGES),
)
BYTES = (compared.TIMES[0], *compared.LOADED)
