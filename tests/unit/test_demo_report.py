"""The pure parts of `make demo`: its prompt, its checks, its rows, its table and its JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from demo import handbook, report
from demo.report import DEVICE, QUESTIONS, WAYS, AtOnce, DemoFailed, Reply, Row, Way


def meta_info(served_by: str, **changes: Any) -> dict[str, Any]:
    """What SGLang reports of a request that was served as the demo expects it."""
    found = {
        "path": served_by,
        "prefix_tokens": 0 if served_by == "computed" else 2860,
        "used_tokens": 0 if served_by == "computed" else 2860,
        "approximate": False,
        "bits_mean": None if served_by == "computed" else 16.0,
        "ssd_bytes": 1000 if served_by == "ssd" else 0,
        "recomputed": False,
    }
    return {"impress": {**found, **changes}}


def reply_of(
    way: Way, question: str = QUESTIONS[0], ttft_ms: float = 12.345, **changes: Any
) -> Reply:
    own = {"approximate": True, "bits_mean": 5.0} if way.approximate else {}
    told = meta_info(way.served_by, **{**own, **changes})
    return report.make_reply(way, question, ttft_ms, f"Answer to {question}", told)


def all_replies() -> list[Reply]:
    return [reply_of(way, question) for way in WAYS for question in QUESTIONS]


def test_prompts_share_all_but_the_question() -> None:
    one, other = (handbook.prompt(question) for question in ("Who?", "When?"))
    shared = one[: one.index("Who?")]
    assert other.startswith(shared)
    assert handbook.handbook() in shared
    assert one.replace("Who?", "When?") == other


def test_prompt_has_about_3000_tokens() -> None:
    # 3.5 characters a token in this text; the exact number needs the model's tokenizer.
    assert 2700 < len(handbook.prompt("Who?")) / 3.5 < 3300


def test_reply_has_what_the_server_reported() -> None:
    text = f"Answer to {QUESTIONS[0]}"
    expected = Reply("SSD, few bits", QUESTIONS[0], 12.3, 2860, 5.0, 1000, text)
    assert reply_of(report.FEW_BITS) == expected


@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        (report.COMPUTED, {"path": "device"}, "'computed' was served by path 'device'"),
        (report.DEVICE, {"path": "ssd"}, "not 'device'"),
        (report.FEW_BITS, {"path": "computed"}, "not 'ssd'"),
        (report.FEW_BITS, {"recomputed": True}, "unreadable"),
        (report.FEW_BITS, {"approximate": False}, "in few bits"),
        (report.WHOLE, {"approximate": True}, "as it was computed"),
        (report.SHARED, {"path": "ssd"}, "not 'device'"),
        (report.DEVICE, {"used_tokens": 100}, "used 100 of 2860 tokens"),
        (report.DEVICE, {"ssd_bytes": 5}, "read 5 bytes"),
        (report.RESTARTED, {"ssd_bytes": 0}, "read 0 bytes"),
    ],
)
def test_reply_that_is_not_what_it_claims(way: Way, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        reply_of(way, **changes)


def test_server_without_the_plugin() -> None:
    with pytest.raises(DemoFailed, match="is the plugin active"):
        report.make_reply(report.COMPUTED, "Who?", 1.0, "text", {"cached_tokens": 0})


def test_empty_answer() -> None:
    with pytest.raises(DemoFailed, match="empty"):
        report.make_reply(report.COMPUTED, "Who?", 1.0, " \n", meta_info("computed"))


def test_rows_are_medians_and_count_the_answers_of_the_exact_prefix() -> None:
    times = dict(zip(QUESTIONS, (30.0, 10.0, 20.0), strict=True))
    replies = [reply_of(report.COMPUTED)]
    replies += [reply_of(DEVICE, question, times[question]) for question in QUESTIONS]
    for number, question in enumerate(QUESTIONS):
        replies.append(reply_of(report.SHARED, question, ssd_bytes=number, bits_mean=5 + number))
    replies[-1] = dataclasses.replace(replies[-1], text="Another answer.")
    replies += [reply_of(way) for way in (report.WHOLE, report.FEW_BITS, report.RESTARTED)]

    rows = {row.way: row for row in report.make_rows(replies[::-1])}

    assert list(rows) == [way.name for way in WAYS]
    answer = f"Answer to {QUESTIONS[0]}"
    assert rows[DEVICE.name] == Row(DEVICE.name, 3, 20.0, 0, 16.0, 3, answer)
    assert rows[report.SHARED.name] == Row(report.SHARED.name, 3, 12.3, 1, 6, 2, answer)
    assert rows[report.COMPUTED.name] == Row(report.COMPUTED.name, 1, 12.3, 0, None, 1, answer)


def test_json(tmp_path: Path) -> None:
    path, replies = tmp_path / "demo.json", all_replies()
    rows = report.make_rows(replies)
    at_once = AtOnce(8, 2.1, 2.0, 26_500_000)
    report.write_json(rows, replies, at_once, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert [Row(**row) for row in content["rows"]] == rows
    assert [Reply(**reply) for reply in content["requests"]] == replies
    assert AtOnce(**content["at_once"]) == at_once
    assert "answered in 2.10 s, 26.5 MB read" in str(at_once)


@pytest.mark.parametrize("width", [100, 120])
def test_table_shows_every_row(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    rows = report.make_rows(all_replies())
    console.print(report.make_table(rows))
    text = console.export_text()
    places = [text.index(f"{row.way} ") for row in rows]
    assert places == sorted(places)
    assert text.count("3 of 3") == len(WAYS)
    assert "…" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        (" A\n short  answer. ", "A short answer."),
        ("word " * 8, "word word word word word word word word"),
        ("word " * 20, "word word word word word word word…"),
        ("x" * 100, "x" * 39 + "…"),
    ],
)
def test_shorten(text: str, shown: str) -> None:
    assert report.shorten(text) == shown
    assert len(shown) <= report.SHOWN_CHARACTERS
