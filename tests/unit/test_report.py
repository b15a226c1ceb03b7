"""Reports of requests, and totals of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impress_sglang.serving.report import (
    DECISIONS,
    SOURCES,
    RequestTotals,
    new_report,
    publish,
    split_tokens,
)
from impress_sglang.serving.request import StoredRequest
from impress_sglang.storage.quality import EXACT


def split(*numbers: int) -> dict[str, int]:
    return dict(zip(SOURCES, numbers, strict=True))


@pytest.mark.parametrize(
    ("num_tokens", "found", "expected"),
    [
        (10, {}, split(0, 0, 0, 0, 0, 10)),
        (10, {"resident": 3, "loaded": 4}, split(3, 0, 4, 0, 0, 3)),
        (10, {"shared": 2, "blended": 3, "unused": 1}, split(0, 2, 0, 3, 1, 4)),
        # What was put back has computed some of its answer.
        (10, {"resident": 12}, split(10, 0, 0, 0, 0, 0)),
        (10, {"resident": 8, "loaded": 7, "unused": 1}, split(8, 0, 2, 0, 0, 0)),
    ],
)
def test_tokens_are_split_by_their_sources(
    num_tokens: int, found: dict[str, int], expected: dict[str, int]
) -> None:
    assert split_tokens(num_tokens, **found) == expected


def test_what_could_not_be_read_was_computed() -> None:
    report: dict[str, Any] = new_report("impress", 3, 20)
    tokens = split_tokens(20, resident=3, shared=4, loaded=5, unused=1)
    report.update(tokens=tokens, path="ssd", blended_tokens=2)
    request = StoredRequest(
        rid="r",
        token_ids=torch.arange(13),
        resident_slots=torch.arange(3),
        slots=torch.arange(3, 12),
        num_tokens=10,
        bits=16.0,
        quality=EXACT,
        loading=None,
        report=report,
    )
    publish(request)
    assert report["tokens"] == tokens
    request.compute_again()
    publish(request)
    publish(request)
    assert report["tokens"] == split(3, 0, 0, 0, 0, 17) and report["blended_tokens"] == 0


def test_totals_are_sums_of_reports() -> None:
    totals = RequestTotals()
    assert totals.prompt_tokens == split(0, 0, 0, 0, 0, 0)
    assert totals.requests_decision == dict.fromkeys(DECISIONS, 0)
    first: dict[str, Any] = new_report("impress", 4, 10)
    second = new_report("impress", 0, 30) | {
        "tokens": split_tokens(30, loaded=20, unused=5),
        "path": "ssd",
        "decision": "load",
        "approximate": True,
        "prefix_tokens": 25,
        "used_tokens": 20,
        "truncated_tokens": 100,
    }
    third = new_report("impress", 0, 7) | {"decision": "recompute"}
    for report in (first, second, third):
        totals.add(report)
    assert totals.prompt_tokens == split(4, 0, 20, 0, 5, 18)
    assert totals.requests_decision == {"none": 1, "load": 1, "recompute": 1}
    assert (totals.requests, totals.requests_approximate, totals.requests_declined) == (3, 1, 1)
    assert (totals.prefix_tokens, totals.used_tokens, totals.truncated_tokens) == (29, 24, 100)
