"""Reports of requests, totals of them, and what is remembered of the last."""

from __future__ import annotations

from typing import Any

import pytest

from impress_sglang.serving.report import (
    DECISIONS,
    MOST_WORDS,
    SOURCES,
    RecentRequests,
    RequestTotals,
    new_report,
    split_tokens,
)


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


def test_totals_are_sums_of_reports() -> None:
    totals = RequestTotals()
    assert totals["prompt_tokens"] == split(0, 0, 0, 0, 0, 0)
    assert totals["requests_decision"] == dict.fromkeys(DECISIONS, 0)
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
    assert totals["prompt_tokens"] == split(4, 0, 20, 0, 5, 18)
    assert totals["requests_decision"] == {"none": 1, "load": 1, "recompute": 1}
    names = ("requests", "requests_approximate", "requests_declined", "requests_ssd")
    assert [totals[own] for own in names] == [3, 1, 1, 1]
    assert [totals[f"{own}_tokens"] for own in ("prefix", "used", "truncated")] == [29, 24, 100]


PROMPT = [*range(100, 400)]


def note(
    recent: RecentRequests, prompt: list[int] = PROMPT, namespace: str = "n", **report: Any
) -> None:
    report = new_report("impress", 0, len(prompt)) | report
    recent.note("r" * 500, namespace, prompt, report, waited=0.25, loading=0.04, computing=0.06)


def test_prompts_are_told_apart_and_not_shown() -> None:
    recent = RecentRequests()
    note(recent)
    note(recent, [*PROMPT[:64], 7])
    note(recent, PROMPT[1:])
    note(recent, namespace="other")
    note(recent, PROMPT[:63])
    short, other, later, same, first = [row["begins"] for row in recent.after(0)]
    assert first == same and short == "" and len({first, later, other}) == 3
    assert all(row["words"] is None for row in recent.after(0))
    again = RecentRequests()
    note(again)
    assert again.after(0)[0]["begins"] != first, "nobody can look a prompt up"


def test_prompts_are_shown_to_who_wants_that() -> None:
    recent = RecentRequests(show_prompts=True)
    note(recent)
    assert recent.after(0)[0]["words"] == PROMPT[:MOST_WORDS]
