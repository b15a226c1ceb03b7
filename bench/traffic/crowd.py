"""Clients that stream answers, and clients that ask for stored prefixes, for a fixed time."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.core.report import Row
from bench.core.servers import Server
from bench.traffic.prompts import draw
from bench.traffic.reading import drive_bytes
from bench.traffic.streams import Pieces, gaps_of, tokens_between

# Nothing is counted until all have begun.
BEGIN_SECONDS = 3.0
SHORT_TOKENS = (20, 60)
QUESTION_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Crowd:
    """How many of each kind there are, and what they ask for."""

    streaming: int
    asking: int
    answer_tokens: int
    prefixes: Sequence[Sequence[int]]
    custom: dict[str, Any] | None
    seed: int

    def ask(self, server: Server, seconds: float) -> Row:
        """Let all ask over and over, and count what comes in so many seconds.

        Raises:
            BenchFailed: a request failed.
        """
        began = time.perf_counter() + BEGIN_SECONDS
        window = began, began + seconds
        with ThreadPoolExecutor(self.streaming + self.asking) as pool:
            streams = [
                pool.submit(self._stream, server, number, window)
                for number in range(self.streaming)
            ]
            asked = [
                pool.submit(self._ask, server, number, window) for number in range(self.asking)
            ]
            # The kernel is asked, not the server, which has other things to do.
            read = _bytes_in(server.pid, window)
            answers = [answer for own in streams for answer in own.result()]
            loads = [load for own in asked for load in own.result()]
        return describe(answers, loads, window) | {"drive_mb_per_s": round(read / seconds / 1e6, 2)}

    def _stream(
        self, server: Server, number: int, window: tuple[float, float]
    ) -> list[tuple[float, Pieces]]:
        """When each answer was asked for, and its pieces."""
        chance, found = random.Random(f"{self.seed} stream {number}"), []
        while (began := time.perf_counter()) < window[1]:
            prompt = draw(chance, chance.randint(*SHORT_TOKENS))
            pieces = list(server.stream(prompt, self.answer_tokens, custom=self.custom))
            found.append((began, pieces))
        return found

    def _ask(
        self, server: Server, number: int, window: tuple[float, float]
    ) -> list[tuple[float, float, float]]:
        """When each request was made and answered, and the share of it that was not computed."""
        chance, found = random.Random(f"{self.seed} ask {number}"), []
        while (began := time.perf_counter()) < window[1]:
            prompt = [*chance.choice(self.prefixes), *draw(chance, QUESTION_TOKENS)]
            answer = server.generate(prompt, custom=self.custom)
            share = answer["meta_info"]["cached_tokens"] / len(prompt)
            found.append((began, time.perf_counter(), share))
        return found


def _bytes_in(pid: int, window: tuple[float, float]) -> int:
    """Wait for the end of the window; bytes that were read from drives in it."""
    found = []
    for edge in window:
        time.sleep(max(0.0, edge - time.perf_counter()))
        found.append(drive_bytes(pid))
    return found[1] - found[0]


def describe(
    answers: Sequence[tuple[float, Pieces]],
    loads: Sequence[tuple[float, float, float]],
    window: tuple[float, float],
) -> Row:
    """The figures of what came in the window."""
    seconds = window[1] - window[0]
    gaps = [gap for _, pieces in answers for gap in gaps_of(pieces, *window)]
    tokens = sum(tokens_between(pieces, *window) for _, pieces in answers)
    first = [
        pieces[0][0] - began for began, pieces in answers if window[0] < pieces[0][0] <= window[1]
    ]
    ended = [load for load in loads if window[0] < load[1] <= window[1]]
    times = [after - before for before, after, _ in ended]
    return {
        "tokens_per_s": round(tokens / seconds, 2),
        **_quantiles("gap", gaps, (50, 99, 100)),
        **_quantiles("first", first, (50, 100)),
        "answered_per_s": round(len(ended) / seconds, 3),
        **_quantiles("ttft", times, (50, 100)),
        "cached_share": round(float(np.mean([own[2] for own in ended])), 3) if ended else None,
    }


def _quantiles(name: str, values: Sequence[float], percents: Sequence[int]) -> Row:
    """In milliseconds; None of nothing."""
    return {
        f"{name}_{'max' if percent == 100 else f'p{percent}'}_ms": (
            round(float(np.percentile(values, percent)) * 1e3, 1) if values else None
        )
        for percent in percents
    }
