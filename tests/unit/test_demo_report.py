"""The pure parts of `make demo`: its prompt, its checks, its rows, its table and its JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from demo import handbook, report
from demo.report import Case, DemoFailed, Row


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


def row_of(case: Case, **changes: Any) -> Row:
    own = {"approximate": True, "bits_mean": 5.0} if case.approximate else {}
    told = meta_info(case.served_by, **{**own, **changes})
    return report.make_row(case, 12.345, "An answer.", told)


def all_rows() -> list[Row]:
    return [row_of(case) for case in report.ORDER]


def test_handbook_is_the_same_every_time() -> None:
    assert handbook.handbook() == handbook.handbook()


def test_policies_are_numbered_and_differ() -> None:
    lines = [line for line in handbook.handbook().splitlines() if line.startswith("Policy ")]
    numbers = [int(line.split(".")[0].removeprefix("Policy ")) for line in lines]
    assert numbers == list(range(1, len(lines) + 1))
    assert len({line.split(". ", 1)[1] for line in lines}) == len(lines)


def test_prompts_share_all_but_the_question() -> None:
    one, other = (handbook.prompt(question) for question in ("Who?", "When?"))
    shared = one[: one.index("Who?")]
    assert other.startswith(shared)
    assert handbook.handbook() in shared
    assert one.replace("Who?", "When?") == other


def test_prompt_has_about_3000_tokens() -> None:
    # 3.5 characters a token in this text; the exact number needs the model's tokenizer.
    assert 2700 < len(handbook.prompt("Who?")) / 3.5 < 3300


def test_questions_differ() -> None:
    questions = [case.question for case in report.ORDER]
    assert len(set(questions)) == len(questions)


def test_paths_and_their_order() -> None:
    assert [case.path for case in report.ORDER] == [
        "computed",
        "device hit",
        "SSD whole prefix",
        "SSD in few bits",
        "shared in few bits",
        "SSD after restart",
    ]


def test_row_has_what_the_server_reported() -> None:
    row = row_of(report.FEW_BITS)
    assert row == Row("SSD in few bits", 12.3, 2860, 2860, 5.0, 1000, "An answer.")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (report.COMPUTED, {"path": "device"}, "'computed' was served by path 'device'"),
        (report.DEVICE, {"path": "ssd"}, "not 'device'"),
        (report.FEW_BITS, {"path": "computed"}, "not 'ssd'"),
        (report.FEW_BITS, {"recomputed": True}, "unreadable"),
        (report.FEW_BITS, {"approximate": False}, "in few bits"),
        (report.SHARED, {"path": "ssd"}, "not 'device'"),
        (report.DEVICE, {"used_tokens": 100}, "used 100 of 2860 tokens"),
        (report.DEVICE, {"ssd_bytes": 5}, "read 5 bytes"),
        (report.RESTARTED, {"ssd_bytes": 0}, "read 0 bytes"),
    ],
)
def test_row_that_is_not_what_it_claims(case: Case, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        row_of(case, **changes)


def test_whole_prefix_must_be_whole() -> None:
    with pytest.raises(DemoFailed, match="as it was computed"):
        report.make_row(report.WHOLE, 1.0, "text", meta_info("ssd", approximate=True))


def test_server_without_the_plugin() -> None:
    with pytest.raises(DemoFailed, match="is the plugin active"):
        report.make_row(report.COMPUTED, 1.0, "text", {"cached_tokens": 0})


def test_empty_answer() -> None:
    with pytest.raises(DemoFailed, match="empty"):
        report.make_row(report.COMPUTED, 1.0, " \n", meta_info("computed"))


def test_rows_are_put_in_order() -> None:
    assert report.in_order(all_rows()[::-1]) == all_rows()


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    report.write_json(all_rows(), path)
    objects = json.loads(path.read_text(encoding="utf-8"))
    keys = ["path", "ttft_ms", "prefix_tokens", "used_tokens", "bits", "ssd_bytes", "text"]
    assert [list(item) for item in objects] == [keys] * 6
    assert [Row(**item) for item in objects] == all_rows()


@pytest.mark.parametrize("width", [80, 120])
def test_table_shows_every_row(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.make_table(all_rows()))
    text = console.export_text()
    places = [text.index(f"{row.path} ") for row in all_rows()]
    assert places == sorted(places)
    assert "2,860" in text
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
