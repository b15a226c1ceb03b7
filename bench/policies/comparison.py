"""The comparison itself: prefixes are stored once, then each policy answers the trace."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.core.client import Client
from bench.core.servers import (
    NO_TIERS,
    REORDERING,
    BenchFailed,
    Server,
    Setup,
    Tiers,
    link_store,
    policy_flags,
    running,
    segment_sizes,
)
from bench.core.zygote import Zygote
from bench.policies import report
from bench.policies.stores import STORED_BY, store_kind
from bench.policies.trace import Request, Trace

Tick = Callable[[], None]
# Part of the warm-up that comes before reordering.
FIRST_SHARE = 2 / 3


class Comparison:
    """One run: the prepared store, and a server for each policy."""

    def __init__(
        self,
        setup: Setup,
        trace: Trace,
        zygote: Zygote,
        client: Client,
        folder: Path,
        console: Console,
        *,
        recompute_requests: int,
        keep_stores: bool,
        record: Path | None = None,
    ) -> None:
        self._setup = setup
        self._console = console
        self._trace = trace
        self._zygote = zygote
        self._client = client
        self._folder = folder
        self._recompute_requests = recompute_requests
        self._keep_stores = keep_stores
        self._record = record

    def prepare(self, policies: Sequence[str]) -> int:
        """Compute and store every prefix as each of the policies needs it.

        Returns:
            Bytes on SSD, as the first one has them.

        Raises:
            BenchFailed: not all were stored.
        """
        sizes = [self._prepare(kind) for kind in dict.fromkeys(map(store_kind, policies))]
        return sizes[0]

    def _prepare(self, kind: str) -> int:
        prefixes = [prefix.tokens for prefix in self._trace.prefixes]
        store = self._prepared(kind)
        with (
            self._server(store.name, STORED_BY[kind], store, NO_TIERS) as server,
            self._step(f"computing the prefixes for {kind}", len(prefixes)) as tick,
        ):
            for tokens in prefixes:
                self._client.ask(server.url, [tokens], tick)
                # While a prefix is written, the pool has no room to write another.
                server.flush()
            server.stop()
        sizes = segment_sizes(store)
        if len(sizes) != len(prefixes):
            raise BenchFailed(
                f"{len(sizes)} segments were stored for {len(prefixes)} prefixes; is there room "
                "on the SSD?"
            )
        return sum(sizes)

    def measure(self, policy: str, tiers: Tiers) -> report.Row:
        """Run the trace with one policy."""
        with self.serving(policy, tiers) as server:
            return self._measure(policy, server, tiers.ssd_mbps)

    @contextlib.contextmanager
    def serving(self, policy: str, tiers: Tiers) -> Iterator[Server]:
        """A server with a policy and all prefixes, for the time of a `with` block."""
        store = self._folder / f"store-{policy}"
        link_store(self._prepared(store_kind(policy)), store)
        with self._server(policy, policy, store, tiers) as server:
            yield server
        if not self._keep_stores:
            shutil.rmtree(store)

    def _prepared(self, kind: str) -> Path:
        return self._folder / f"prepared-{kind}"

    def _measure(self, policy: str, server: Server, ssd_mbps: float) -> report.Row:
        measured = self._trace.measured
        if policy == "recompute":
            measured = measured[: self._recompute_requests]
            # There are no caches to fill, and one request is enough to grow buffers. The last one,
            # because the prefix that it leaves in the pool is not that of the first measured one.
            self._ask(server, f"{policy}: first request", self._trace.settle[-1:])
        else:
            warmup = self._trace.warmup
            # An order is found from the first part; the second one fills the caches again.
            first = round(len(warmup) * FIRST_SHARE)
            self._ask(server, f"{policy}: warm-up", warmup[:first])
            if policy in REORDERING:
                with self._step(f"{policy}: reordering"):
                    server.reorder()
            self._ask(server, f"{policy}: second warm-up", warmup[first:])
            # Caches fill alike at any speed; how reads are cut follows the speed that is seen.
            server.emulate_ssd(ssd_mbps)
            self._ask(server, f"{policy}: warm-up at this speed", self._trace.settle)
        before = server.stats()
        ttft_ms = self._ask(server, f"{policy}: measuring", measured)
        return report.make_row(policy, ttft_ms, report.difference(before, server.stats()))

    def _ask(self, server: Server, text: str, requests: Sequence[Request]) -> list[float]:
        with self._step(text, len(requests)) as tick:
            return self._client.ask(server.url, [request.tokens for request in requests], tick)

    @contextlib.contextmanager
    def _server(self, name: str, policy: str, store: Path, tiers: Tiers) -> Iterator[Server]:
        flags = policy_flags(policy, store, self._setup.retention, tiers)
        record = self._record / policy if self._record and name == policy else None
        log = self._folder / f"{name}.log"
        with contextlib.ExitStack() as stack:
            with self._step(f"{name}: starting a server"):
                server = stack.enter_context(
                    running(self._zygote, self._setup, log, flags, record=record)
                )
            yield server

    def _step(self, text: str, total: int | None = None) -> contextlib.AbstractContextManager[Tick]:
        return step(self._console, text, total)


@contextlib.contextmanager
def step(console: Console, text: str, total: int | None = None) -> Iterator[Tick]:
    """Show a step while it runs, and leave a line when it is done; without a terminal, the line."""
    began = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
    count = "" if total is None else f" ({total})"
    console.print(f"{text}{count} {time.monotonic() - began:.1f} s", markup=False)
