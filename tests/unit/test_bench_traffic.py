"""Loads in the midst of other requests: traffic, streams and figures, without SGLang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bench.core.servers import Piece
from bench.core.session import BenchFailed
from bench.traffic import beside, systems
from bench.traffic.clients import Stream, gaps_of, tokens_between

CAME = [Piece(*own, {}) for own in ((1.0, 1), (1.5, 2), (3.0, 3), (3.25, 5))]


def test_gaps_and_tokens_of_a_stream() -> None:
    assert gaps_of(CAME) == [0.5, 1.5, 0.25]
    assert tokens_between(CAME, 1.0, 3.0) == 2 and tokens_between(CAME, 0.0, 9.0) == 5
    assert beside.describe_gaps([0.5, 1.5, 0.25]) == {
        "longest_ms": 1500.0,
        "second_ms": 500.0,
        "median_ms": 500.0,
    }


class Streaming:
    """Streams pieces, the last ones when told, or fails in their place."""

    def __init__(self, error: BenchFailed | None = None) -> None:
        self.go_on = threading.Event()
        self.error = error

    def stream(self, *_: Any) -> Iterator[Piece]:
        yield from CAME[:2]
        assert self.go_on.wait(10)
        if self.error:
            raise self.error
        yield from CAME[2:]


def test_a_stream_that_fails_says_so_to_who_waits() -> None:
    server: Any = Streaming(BenchFailed("broken"))
    stream = Stream(server, [1], 5)
    server.go_on.set()
    stream.wait(5)
    with pytest.raises(BenchFailed, match="broken"):
        stream.join()


def test_systems_are_compared_request_by_request() -> None:
    """Requests differ by far more than systems do, and both are drawn together."""
    first = [float(own) for own in range(100, 1000, 9)]
    rows: list[dict[str, Any]] = [
        {"mbps": mbps, "ttfts": ttfts}
        for mbps in (0, 130)
        for ttfts in (first, [1.5 * own for own in first], [1.5 * own for own in first[::-1]])
    ]
    systems.compare(rows)
    for base, slower, mixed in (rows[:3], rows[3:]):
        for name in ("p50_ratio", "mean_ratio"):
            assert (base[name], slower[name]) == ("1.00 [1.00, 1.00]", "1.50 [1.50, 1.50]")
            low, high = mixed[name].split(" [")[1].rstrip("]").split(", ")
            assert float(low) < 1.35 and float(high) > 1.65
