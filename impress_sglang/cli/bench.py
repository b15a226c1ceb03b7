"""Measures whether the store pays on a machine: computes, stores and loads the same prefixes.

All prefixes are in namespaces made for the run, which are purged at the end, even if the command is
interrupted. If it is killed, the prefixes stay stored for up to an hour.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from impress_sglang.cli import CommandError, Unreachable
from impress_sglang.cli.server import Server

QUESTION_TOKENS = 16
TTL_S = 3600
WRITE_TIMEOUT_S = 60.0
POLL_S = 0.1
# Token ids that every vocabulary has.
_IDS = range(3, 256)
_BLOCK_TOKENS = 64
_COMPUTED, _STORED, _POOL, _LOADED = "computed", "computed, stored", "SGLang's pool", "loaded"
_DECLINED, _MISSED = "computed anyway", "not found"
# By the way requests were answered: (seconds until the first token, report) of each.
_Answers = dict[str, list[tuple[float, dict[str, Any]]]]


def measure(
    server: Server, prefixes: int, tokens: int, clients: int, *, text: str | None, flush: bool
) -> dict[str, Any]:
    """Measure a server with `prefixes` prefixes of `tokens` tokens, taken from `text` or random.

    Returns the rows of a table, and a conclusion.
    """
    if min(prefixes, clients) < 1 or tokens < 2 * _BLOCK_TOKENS:
        raise CommandError(f"there must be a prefix, of {2 * _BLOCK_TOKENS} tokens, and a client")
    num_tokens = prefixes * tokens
    ids = random.choices(_IDS, k=num_tokens) if text is None else server.tokenize(text)
    if len(ids) < num_tokens:
        raise CommandError(f"the text has {len(ids):,} tokens, and {num_tokens:,} are needed")
    parts = [ids[start : start + tokens] for start in range(0, num_tokens, tokens)]
    salt = f"impress-bench-{random.randbytes(8).hex()}"
    ways = (_COMPUTED, _STORED, _POOL, _LOADED, _DECLINED, _MISSED)
    answers: _Answers = {way: [] for way in ways}
    with _removing(server, salt):
        # The first request may be slow for other reasons and does not count.
        _ask(server, parts[0], f"{salt}-first", store=False)
        for way, namespace, store in (
            (_COMPUTED, f"{salt}-computed", False),
            (_STORED, salt, True),
            (_POOL, salt, False),
            *([(_LOADED, salt, False)] if flush else []),
        ):
            if way == _LOADED:
                server.flush()
            for seconds, report in _ask_all(server, parts, namespace, clients, store=store):
                answered = way if way in (_COMPUTED, _STORED) else _way_of(report)
                answers[answered].append((seconds, report))
            if way == _STORED:
                _wait_until_written(server, parts, salt)
        drive = (server.stats()["store"] or {}).get("read_mbps")
    computed = _median(answers[_COMPUTED])
    rate = clients * (tokens + QUESTION_TOKENS)
    rows = [_row(way, measured, computed, rate) for way, measured in answers.items() if measured]
    return {"ways": rows, "drive_mbps": drive, "conclusion": _conclusion(answers, drive)}


def _ask(server: Server, prefix: list[int], salt: str, *, store: bool) -> tuple[float, Any]:
    """Send a prompt; return the seconds until its first token, and its report."""
    custom: dict[str, Any] = {"impress_store": store}
    if store:
        custom["impress_ttl"] = TTL_S
    tokens = prefix + random.choices(_IDS, k=QUESTION_TOKENS)
    sampling = {"temperature": 0, "max_new_tokens": 1, "custom_params": custom}
    began = time.perf_counter()
    report = server.generate({"input_ids": tokens, "cache_salt": salt, "sampling_params": sampling})
    return time.perf_counter() - began, report


def _ask_all(
    server: Server, prefixes: Sequence[list[int]], salt: str, clients: int, *, store: bool
) -> list[tuple[float, Any]]:
    with ThreadPoolExecutor(clients) as pool:
        try:
            return list(pool.map(lambda prefix: _ask(server, prefix, salt, store=store), prefixes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _wait_until_written(server: Server, prefixes: Sequence[list[int]], salt: str) -> None:
    give_up = time.monotonic() + WRITE_TIMEOUT_S
    for prefix in prefixes:
        place = {"input_ids": prefix, "cache_salt": salt}
        while server.order("why", place)["why"]["reason"] == "being_written":
            if time.monotonic() > give_up:
                raise Unreachable(f"prefixes are not written within {WRITE_TIMEOUT_S:g} s")
            time.sleep(POLL_S)


def _median(answers: Sequence[tuple[float, Any]]) -> float:
    return statistics.median(seconds for seconds, _ in answers)


def _row(
    way: str, answers: Sequence[tuple[float, dict[str, Any]]], computed: float, rate: int
) -> dict[str, Any]:
    """Make a row of the table.

    `computed`: median seconds of computed prefixes. `rate`: tokens that all clients have in flight.
    """
    seconds, median = sorted(seconds for seconds, _ in answers), _median(answers)
    bits = [report["bits_mean"] for _, report in answers if report["bits_mean"]]
    p95 = seconds[min(len(seconds) * 95 // 100, len(seconds) - 1)]
    return {
        "way": way,
        "requests": len(answers),
        "ttft_ms": round(median * 1e3, 1),
        "p95_ms": round(p95 * 1e3, 1),
        "tokens_per_s": round(rate * len(answers) / sum(seconds)),
        "read_mb": round(statistics.mean(report["ssd_bytes"] for _, report in answers) / 1e6, 2),
        "bits": round(statistics.mean(bits), 2) if bits else None,
        "ratio": round(computed / median, 2),
    }


def _conclusion(answers: _Answers, drive: int | None) -> str:
    drive_speed = f"the drive reads {drive or 0:,} MB/s as far as the server knows"
    if answers[_LOADED]:
        loaded, computed = _median(answers[_LOADED]), _median(answers[_COMPUTED])
        verdict = "pays" if loaded < computed else "does not pay"
        return (
            f"The store {verdict} here: the first token takes {loaded * 1e3:.0f} ms with a "
            f"loaded prefix and {computed * 1e3:.0f} ms without ({computed / loaded:.2f}x); "
            f"{drive_speed}."
        )
    for _, report in (*answers[_DECLINED], *answers[_MISSED]):
        text = (report["why"] or {}).get("text", "it does not say why")
        return f"Nothing was loaded, for the server says: {text}; {drive_speed}."
    return "Loading was not measured: all is in SGLang's pool. --flush empties that, for all."


def _way_of(report: dict[str, Any]) -> str:
    """Return where a repeated request found its prefix."""
    missed = _DECLINED if report["decision"] == "recompute" else _MISSED
    return {"ssd": _LOADED, "device": _POOL}.get(report["path"], missed)


@contextlib.contextmanager
def _removing(server: Server, salt: str) -> Iterator[None]:
    """Purge the prefixes at the end, also after SIGTERM, and print that."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, handler)
        try:
            yield
        finally:
            try:
                salts = (salt, f"{salt}-computed", f"{salt}-first")
                counts = [server.order("purge", {"cache_salt": salt})["segments"] for salt in salts]
                message = f"removed what was stored: {sum(counts)} segments"
            except (CommandError, Unreachable) as error:
                purge = f"impress purge --cache-salt {salt}"
                message = f"what was stored stays for {TTL_S} s ({error}): {purge}"
            print(f"impress: {message}", file=sys.stderr)
