"""Measures whether the store pays on a machine: the same prefixes computed, stored and loaded.

All prefixes are in namespaces of their own, which are purged in the end, also if the command is
interrupted. If it is killed, what is left stays stored for an hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from impress_sglang.cli.outcome import Refused, Unreachable
from impress_sglang.cli.server import Server

QUESTION_TOKENS = 16
LEFT_FOR_S = 3600
WRITTEN_IN_S = 60.0
LOOK_S = 0.1
# Token ids that every vocabulary has.
_IDS = range(3, 256)
_BLOCK_TOKENS = 64
_COMPUTED, _STORED, _POOL, _LOADED = "computed", "computed, stored", "SGLang's pool", "loaded"
_DECLINED, _MISSED = "computed anyway", "not found"
_WAYS = (_COMPUTED, _STORED, _POOL, _LOADED, _DECLINED, _MISSED)


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    """`seconds` until the first token of a prompt of `num_tokens`, as measured here."""

    way: str
    seconds: float
    num_tokens: int
    report: dict[str, Any]


class Measurement:
    """Some prefixes, and a server that is sent them; `close` removes what it has stored of them."""

    def __init__(self, server: Server, prefixes: Sequence[list[int]], clients: int) -> None:
        """`prefixes`: lists of token ids that begin differently; `clients` send at once."""
        self._server = server
        self._prefixes = prefixes
        self._clients = clients
        self.salt = f"impress-bench-{random.randbytes(8).hex()}"
        """`cache_salt` of what is stored."""
        self._other_salt, self._first_salt = f"{self.salt}-computed", f"{self.salt}-first"
        self._answers: list[_Answer] = []
        self._random = random.Random(0)

    def run(self, *, flush: bool) -> dict[str, Any]:
        """Send all prefixes in each way; returns the rows of a table, and a conclusion.

        Raises:
            Refused: the server refuses something.
            Unreachable: it does not answer, or not as expected.
        """
        # A server's first request may be slow for other reasons, so it is not counted.
        self._ask(self._prefixes[0], self._first_salt, _COMPUTED)
        self._answers += self._ask_all(self._other_salt, _COMPUTED)
        self._answers += self._ask_all(self.salt, _STORED)
        self._wait_until_written()
        self._answers += self._ask_all(self.salt, _POOL)
        if flush:
            self._server.flush()
            self._answers += self._ask_all(self.salt, _LOADED)
        drive = (self._server.stats()["store"] or {}).get("read_mbps")
        rows = [self._row(way) for way in _WAYS if self._of(way)]
        return {"ways": rows, "drive_mbps": drive, "conclusion": self._conclusion(drive)}

    def close(self) -> int:
        """Purge all that was sent; returns how many segments that was."""
        # SGLang's pool is asked for prefixes only.
        places: list[dict[str, Any]] = [
            {"input_ids": prefix, "cache_salt": salt}
            for salt in (self.salt, self._other_salt, self._first_salt)
            for prefix in self._prefixes
        ]
        places.append({"cache_salt": self.salt})
        return sum(self._server.order("purge", place)["segments"] for place in places)

    def _ask_all(self, salt: str, way: str) -> list[_Answer]:
        with ThreadPoolExecutor(self._clients) as pool:
            try:
                return list(pool.map(lambda own: self._ask(own, salt, way), self._prefixes))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _ask(self, prefix: list[int], salt: str, way: str) -> _Answer:
        custom: dict[str, Any] = {"impress_store": way == _STORED}
        if way == _STORED:
            custom["impress_ttl"] = LEFT_FOR_S
        tokens = prefix + self._random.choices(_IDS, k=QUESTION_TOKENS)
        sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": custom}
        body = {"input_ids": tokens, "cache_salt": salt, "sampling_params": sampling}
        began = time.perf_counter()
        report = self._server.generate(body)
        seconds = time.perf_counter() - began
        if way in (_POOL, _LOADED):
            way = _way_of(report)
        return _Answer(way, seconds, len(tokens), report)

    def _wait_until_written(self) -> None:
        give_up = time.monotonic() + WRITTEN_IN_S
        for prefix in self._prefixes:
            place = {"input_ids": prefix, "cache_salt": self.salt}
            while self._server.order("why", place)["why"]["reason"] == "being_written":
                if time.monotonic() > give_up:
                    raise Unreachable(f"prefixes are not written within {WRITTEN_IN_S:g} s")
                time.sleep(LOOK_S)

    def _of(self, way: str) -> list[_Answer]:
        return [own for own in self._answers if own.way == way]

    def _row(self, way: str) -> dict[str, Any]:
        answers = self._of(way)
        seconds = [own.seconds for own in answers]
        bits = [own.report["bits_mean"] for own in answers if own.report["bits_mean"]]
        read = statistics.mean(own.report["ssd_bytes"] for own in answers)
        computed, median = self._median(_COMPUTED), statistics.median(seconds)
        return {
            "way": way,
            "requests": len(answers),
            "ttft_ms": round(median * 1e3, 1),
            "p95_ms": round(_late(seconds) * 1e3, 1),
            "tokens_per_s": round(
                self._clients * sum(own.num_tokens for own in answers) / sum(seconds)
            ),
            "read_mb": round(read / 1e6, 2),
            "bits": round(statistics.mean(bits), 2) if bits else None,
            "ratio": round(computed / median, 2),
        }

    def _median(self, way: str) -> float:
        return statistics.median(own.seconds for own in self._of(way))

    def _conclusion(self, drive: int | None) -> str:
        drive_says = f"the drive reads {drive:,} MB/s as far as the server knows"
        if self._of(_LOADED):
            loaded, computed = self._median(_LOADED), self._median(_COMPUTED)
            verdict = "pays" if loaded < computed else "does not pay"
            return (
                f"The store {verdict} here: the first token takes {loaded * 1e3:.0f} ms with a "
                f"loaded prefix and {computed * 1e3:.0f} ms without ({computed / loaded:.2f}x); "
                f"{drive_says}."
            )
        for way in (_DECLINED, _MISSED):
            for answer in self._of(way):
                text = (answer.report["why"] or {}).get("text", "it does not say why")
                return f"Nothing was loaded, for the server says: {text}; {drive_says}."
        return "Loading was not measured: all is in SGLang's pool. --flush empties that, for all."


def measure(
    server: Server, *, prefixes: int, tokens: int, clients: int, text: str | None, flush: bool
) -> dict[str, Any]:
    """Measure a server with `prefixes` prefixes of `tokens` tokens, random ones or from a text.

    Raises:
        Refused: a number is out of range, the text is too short, or the server refuses.
        Unreachable: the server does not answer as expected.
        KeyboardInterrupt: it was interrupted.
    """
    if min(prefixes, clients) < 1 or tokens < 2 * _BLOCK_TOKENS:
        raise Refused(f"there must be a prefix, of {2 * _BLOCK_TOKENS} tokens, and a client")
    wanted = prefixes * tokens
    ids = random.choices(_IDS, k=wanted) if text is None else server.tokenize(text)
    if len(ids) < wanted:
        raise Refused(f"the text has {len(ids):,} tokens, and {wanted:,} are needed")
    parts = [ids[start : start + tokens] for start in range(0, wanted, tokens)]
    measurement = Measurement(server, parts, clients)
    with _removing(measurement):
        return measurement.run(flush=flush)


@contextlib.contextmanager
def _removing(measurement: Measurement) -> Iterator[None]:
    """In the end, remove what was stored, and say so; SIGTERM is such an end as well."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        try:
            yield
        finally:
            try:
                told = f"removed what was stored: {measurement.close()} segments"
            except (Refused, Unreachable) as error:
                purge = f"impress purge --cache-salt {measurement.salt}"
                told = f"what was stored stays for {LEFT_FOR_S} s ({error}): {purge}"
            print(f"impress: {told}", file=sys.stderr)


def _way_of(report: dict[str, Any]) -> str:
    """Where a request that was sent again found its prefix."""
    if report["path"] == "ssd":
        return _LOADED
    if report["path"] == "device":
        return _POOL
    return _DECLINED if report["decision"] == "recompute" else _MISSED


def _late(seconds: Sequence[float]) -> float:
    """The 95th percentile."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]
