"""The trace of `bench serving`, its policies and its rows."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bench.core.data import Question
from bench.core.report import Table
from bench.policies import serving
from bench.policies.serving import counted, warnings
from bench.policies.trace import MAX_QUESTION_TOKENS, Trace, make_trace
from impress_sglang.config import ImpressConfig
from impress_sglang.options import POLICIES as ALL_POLICIES
from impress_sglang.serving.report import RequestTotals

TOTALS = dict(RequestTotals())

OPTIONS = {
    "prefixes": 6,
    "prefix_tokens": 300,
    "warmup": 5,
    "settle": 2,
    "requests": 20,
    "sigma": 1.5,
    "seed": 3,
}


class Words:
    """A tokenizer of words and signs."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        words = re.findall(r"\w+|\W", text)
        return [self._ids.setdefault(word, len(self._ids)) for word in words]


def examples(count: int, name: str = "a") -> list[Question]:
    return [Question(f"What is {name} {i}?", (f"it is {i}",), 0) for i in range(count)]


def trace_of(**options: Any) -> Trace:
    return make_trace({"made": examples(400)}, Words(), argparse.Namespace(**(OPTIONS | options)))


def test_equal_options_give_equal_traces() -> None:
    assert trace_of() == trace_of()
    assert trace_of().prefixes != trace_of(seed=4).prefixes


def test_a_request_is_a_prefix_and_a_question_that_no_prefix_shows() -> None:
    trace = trace_of()
    asked = set()
    for request in (*trace.warmup, *trace.settle, *trace.measured):
        (prefix,) = (own for own in trace.prefixes if request[: len(own)] == own)
        question = request[len(prefix) :]
        assert 0 < len(question) <= MAX_QUESTION_TOKENS and question not in asked
        asked.add(question)
        for other in trace.prefixes:
            places = range(len(other) - len(question))
            assert all(other[i : i + len(question)] != question for i in places)


@pytest.mark.parametrize("name", [*serving.POLICIES, "impress+lru", "impress+lfu"])
def test_flags_of_a_policy_are_options_of_the_server(name: str) -> None:
    flags = serving.policy_flags(name, Path("kv"), 0.25, (70, 104))
    given = dict(flag.removeprefix("--impress-").split("=") for flag in flags[1:])
    fields = {own.name: own.default for own in dataclasses.fields(ImpressConfig)}
    assert {key.replace("-", "_") for key in given} <= set(fields)
    assert given["policy"] in ALL_POLICIES
    if name != "recompute":
        assert given["retention"] == ("1.0" if name == "as" or name[0] == "i" else "0.25")
        assert float(given["device-gb"]) == 0.07 and given["load"] == "always"
    kinds = {"pap": "paper", "imp": "codes"}
    assert serving.store_kind(name) == kinds.get(name[:3], "exact")


def stats(**totals: float) -> dict[str, Any]:
    return {"totals": {**TOTALS, **totals}}


def test_a_row_has_what_was_counted_in_between() -> None:
    before = stats(requests=3, ssd_bytes=100)
    after = stats(
        requests=5, requests_ssd=1, ssd_bytes=400, ssd_needed_bytes=200, wait_ms=30, device_chunks=3
    )
    after["totals"]["chunks_accessed"] = 4
    row = serving.make_row("as", [100.0, 200.0], counted(before, after, 2))
    assert (row["ttft_ms_mean"], row["io_share"], row["ssd_bytes"]) == (150.0, 0.1, 300)
    assert (row["read_amplification"], row["device_hit_ratio"]) == (1.5, 0.75)
    assert row["important_device_hit_ratio"] is None
    assert "only 1 of 2 requests" in warnings([row])[0]
    fast = {**row, "policy": "impress", "ttft_ms_mean": 50.0}
    serving.add_speedups([row, fast])
    assert (row["speedup_over_best_baseline"], fast["speedup_over_best_baseline"]) == (1.0, 3.0)
    assert "3.00x" in str(Table(serving.COLUMNS, [row, fast])).splitlines()[-1]
