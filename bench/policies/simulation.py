"""One serving engine and its KV hierarchy, as a simulation of discrete events.

The engine does one thing at a time, as SGLang does: it prefills a request while there is a free
place in the batch, else it decodes. Prefilling takes as long as the longer one of computing and of
loading the history, which goes layer by layer beside it (AttentionStore 3.2.1). A history comes
from where it is when the request is admitted. The SSD reads one item after another; when it has
nothing to do it fetches for waiting requests, in the order of the queue, as many as may fill half
of the host's memory (3.3.1). They stay there until they are used. KVs are stored when a request
ends. Writes are asynchronous (3.2.2): they are counted, and take no time.

A gateway lets at most `depth` requests wait in the engine, in the order of their arrivals.
Policies, fetching and scheduling know nothing of those that it keeps back.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.core.report import ratio
from bench.policies.eviction import Hierarchy
from bench.policies.sessions import Request, Workload
from impress_sglang.serving.scheduling import WINDOW, Place, Rank, first_of

# Of the host's memory, for items of waiting requests.
FETCH_SHARE = 0.5
ORDERS = ("fcfs", "classes", "estimate", "shortest")
_ARRIVAL, _END, _FETCHED = range(3)


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What an engine does in a second; a GB is 1e9 bytes."""

    prefill_tokens_per_s: float
    decode_ms: float
    batch: int
    h2d_gbps: float
    ssd_gbps: float
    bytes_per_token: int
    overhead_ms: float = 0.0


class Simulation:
    """Serves a workload."""

    def __init__(
        self,
        rates: Rates,
        hierarchy: Hierarchy,
        workload: Workload,
        *,
        order: str = "fcfs",
        depth: float = math.inf,
        fetch: bool = True,
    ) -> None:
        """`order` is one of ORDERS; see the module for `depth`."""
        self.hierarchy = hierarchy
        self.ssd_bytes = 0
        self._rates = rates
        self._workload = workload
        self._order = order
        self._depth = depth
        names = [tier.name for tier in hierarchy.tiers]
        self._host = hierarchy.tiers[names.index("host")] if fetch and "host" in names else None
        self._events: list[tuple[float, int, int, Any]] = []
        self._numbers = itertools.count()
        self._positions = itertools.count()
        self._gateway: deque[Request] = deque()
        self._queue: deque[Request] = deque()
        # With the step in which each request ends.
        self._batch: list[tuple[int, int, Request]] = []
        self._steps = 0
        self._ssd_free = 0.0
        # What the engine does: what follows, the number of its end, and since when it decodes.
        self._then: Callable[[float], None] | None = None
        self._end = -1
        self._decodes_since: float | None = None
        self._served: list[Request] = []

    def run(self) -> list[Request]:
        """Serve all; returns the requests in the order of their first tokens."""
        for request in self._workload.first():
            self._at(request.arrival, _ARRIVAL, request)
        while self._events:
            now, number, kind, request = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                self._gateway.append(request)
                self._open_gateway()
                self._stop_decoding(now)
            elif kind == _END and number == self._end:
                assert self._then is not None
                then, self._then = self._then, None
                then(now)
            if self._then is None:
                self._begin(now)
            self._fetch(now)
        return self._served

    def _at(self, when: float, kind: int, request: Request | None = None) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (when, number, kind, request))
        return number

    def _do_until(self, when: float, then: Callable[[float], None]) -> None:
        self._then = then
        self._end = self._at(when, _END)

    def _open_gateway(self) -> None:
        while self._gateway and len(self._queue) < self._depth:
            self._enqueue(self._gateway.popleft())

    def _enqueue(self, request: Request) -> None:
        request.position = next(self._positions)
        request.queued = True
        request.item.waiting.append(request)
        self._queue.append(request)
        self.hierarchy.policy.wait(request, self._bytes(request.history))

    def _bytes(self, tokens: int) -> int:
        return tokens * self._rates.bytes_per_token

    def _begin(self, now: float) -> None:
        """Prefill if there is a place for somebody, else decode."""
        if len(self._batch) < self._rates.batch:
            if self._gateway and not self._queue:
                self._enqueue(self._gateway.popleft())
            if self._queue:
                self._prefill(self._take(now), now)
                return
        if self._batch:
            self._decodes_since = now
            steps = self._batch[0][0] - self._steps
            self._do_until(now + steps * self._rates.decode_ms / 1e3, self._decoded)

    def _take(self, now: float) -> Request:
        """Let the next request out of the queue."""
        place = self._choose(now)
        request, item = self._queue[place], self._queue[place].item
        seconds = max(self._prefill_seconds(request, now))
        for other in itertools.islice(self._queue, place):
            other.overtaken += 1
            other.waited += seconds
        del self._queue[place]
        item.waiting.remove(request)
        request.queued = False
        request.behind = len(self._queue) + len(self._gateway)
        self.hierarchy.policy.leave(request, self._bytes(request.history))
        self.hierarchy.policy.use(item, now)
        item.next_use = request.next_use
        self._open_gateway()
        return request

    def _choose(self, now: float) -> int:
        """The place of the next request in the queue, as the server chooses it."""
        if self._order == "fcfs":
            return 0
        window = itertools.islice(self._queue, WINDOW)
        return first_of([self._place(request, now) for request in window])

    def _place(self, request: Request, now: float) -> Place:
        """A request's place; ranks are those of the server.

        `classes` (CaR III-B1): what is resident, what has nothing stored, what has to be loaded.
        `estimate`: seconds of loading that computing does not hide; `shortest`: of prefilling, of
        those first that have none of these.
        """
        computing, loading = self._prefill_seconds(request, now)
        seconds = max(computing, loading)
        if self._order == "classes":
            loads = request.item.level != 0 or request.item.ready > now
            rank: Rank = (1.0 if self._source(request) is None else 2.0 * loads,)
        elif self._order == "estimate":
            rank = (seconds - computing,)
        else:
            rank = seconds > computing, seconds
        return Place(rank, seconds, WINDOW - request.overtaken, seconds - request.waited)

    def _source(self, request: Request) -> str | None:
        """The tier of the history; None if it has to be computed."""
        tier = self.hierarchy.tier_of(request.item)
        return tier.name if tier and request.history else None

    def _prefill_seconds(self, request: Request, now: float) -> tuple[float, float]:
        """Seconds of computing, and of loading, for a request that would be admitted now."""
        source, rates = self._source(request), self._rates
        tokens = request.question + (0 if source else request.history)
        computing = rates.overhead_ms / 1e3 + tokens / rates.prefill_tokens_per_s
        if source in (None, "device"):
            return computing, 0.0
        size = self._bytes(request.history) / 1e9
        loading = max(request.item.ready - now, size / rates.h2d_gbps)
        if source == "ssd":
            loading = max(loading, max(0.0, self._ssd_free - now) + size / rates.ssd_gbps)
        return computing, loading

    def _prefill(self, request: Request, now: float) -> None:
        request.admitted = now
        seconds = max(self._prefill_seconds(request, now))
        request.source = self._source(request)
        if request.source == "ssd":
            self._read(self._bytes(request.history), now)
        elif request.source and request.item.ready > now:
            request.source = "ssd"
        self.hierarchy.weigh(request.item, held=False)
        self._do_until(now + seconds, lambda then: self._prefilled(request, then))

    def _read(self, size: int, now: float) -> float:
        """Let the SSD read, after all that it was asked for; returns when that is done."""
        self.ssd_bytes += size
        self._ssd_free = max(now, self._ssd_free) + size / self._rates.ssd_gbps / 1e9
        self._at(self._ssd_free, _FETCHED)
        return self._ssd_free

    def _prefilled(self, request: Request, now: float) -> None:
        request.first_token = now
        self._served.append(request)
        if request.answer > 1:
            ends = self._steps + request.answer - 1
            heapq.heappush(self._batch, (ends, request.position, request))
        else:
            self._finish(request, now)

    def _stop_decoding(self, now: float) -> None:
        """Let decoding end with its present step if somebody can be admitted."""
        if self._decodes_since is not None and len(self._batch) < self._rates.batch:
            step = self._rates.decode_ms / 1e3
            steps = math.ceil((now - self._decodes_since) / step - 1e-9)
            self._do_until(max(now, self._decodes_since + steps * step), self._decoded)

    def _decoded(self, now: float) -> None:
        assert self._decodes_since is not None
        self._steps += round((now - self._decodes_since) * 1e3 / self._rates.decode_ms)
        self._decodes_since = None
        while self._batch and self._batch[0][0] <= self._steps:
            self._finish(heapq.heappop(self._batch)[2], now)

    def _finish(self, request: Request, now: float) -> None:
        item = request.item
        following = self._workload.after(request, now)
        if following:
            item.next_use = following.arrival
            self._at(following.arrival, _ARRIVAL, following)
        item.ready = now
        item.held = False
        self.hierarchy.put(item, self._bytes(request.kept), 0, now)

    def _fetch(self, now: float) -> None:
        """Hold what the head of the queue finds in memory, and read the first that is on SSD."""
        if self._host is None:
            return
        room = FETCH_SHARE * self._host.capacity
        for request in self._queue:
            item = request.item
            room -= max(item.bytes, self._bytes(request.kept))
            if room < 0:
                return
            source = self._source(request)
            if source == "host" and not item.held:
                self.hierarchy.weigh(item, held=True)
            elif source == "ssd" and self._ssd_free <= now:
                item.held = True
                self.hierarchy.put(item, item.bytes, self._host.level, now)
                item.ready = self._read(item.bytes, now)


def summarize(simulation: Simulation, served: list[Request], warmup: int) -> dict[str, Any]:
    """Figures of all but the first `warmup` requests; hit ratios are of those with a history."""
    measured = served[warmup:]
    again = [request for request in measured if request.history]
    ttft = np.array([request.first_token - request.arrival for request in measured])
    prefill = np.array([request.first_token - request.admitted for request in measured])
    hits = {
        tier.name: sum(request.source == tier.name for request in again)
        for tier in simulation.hierarchy.tiers
    }
    lost = sum(request.history for request in again if request.source is None)
    return {
        "requests": len(measured),
        "hit_ratio": ratio(sum(hits.values()), len(again)),
        "hit_ratio_of_all": ratio(sum(hits.values()), len(measured)),
        **{f"{name}_hit_ratio": ratio(value, len(again)) for name, value in hits.items()},
        "queue_mean": round(float(np.mean([request.behind for request in measured])), 1),
        "ttft_s_mean": round(float(ttft.mean()), 4),
        "ttft_s_p50": round(float(np.percentile(ttft, 50)), 4),
        "ttft_s_p99": round(float(np.percentile(ttft, 99)), 4),
        "prefill_ms_mean": round(float(prefill.mean()) * 1e3, 2),
        "computed_again": ratio(lost, sum(request.history for request in again)),
        "ssd_read_gb": round(simulation.ssd_bytes / 1e9, 1),
        "ssd_written_gb": round(simulation.hierarchy.demoted.get("ssd", 0) / 1e9, 1),
        "seconds": round(served[-1].first_token, 1),
        "overtaken_most": max(request.overtaken for request in served),
    }
