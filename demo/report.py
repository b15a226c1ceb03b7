"""What the demo shows: its paths and questions, the check of each request, the table, the JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

SHOWN_CHARACTERS = 40

QUESTIONS = (
    "Where are wicks woven?",
    "When does the doctor come?",
    "What colour is the ribbon for a wedding?",
)
# As many users of one prefix at the same time.
CROWD = (
    *QUESTIONS,
    "What is silver polished with?",
    "Where are bicycles parked?",
    "What is the company dog called?",
    "Where does everybody meet in case of fire?",
    "How long does the winter model burn?",
)


class DemoFailed(RuntimeError):
    """The demo cannot show what it claims; the message says why, for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to get the prefix, and what SGLang must report of a request that went it.

    `served_by` is `meta_info["impress"]["path"]`; `approximate` says that the prefix is used in few
    bits, None that it may be.
    """

    name: str
    served_by: str
    approximate: bool | None = False


COMPUTED = Way("computed", "computed")
DEVICE = Way("device pool, exact", "device")
WHOLE = Way("SSD, exact", "ssd")
FEW_BITS = Way("SSD, few bits", "ssd", approximate=True)
AUTO_BITS = Way("SSD, auto", "ssd", approximate=None)
RESTARTED = Way("SSD, after restart", "ssd", approximate=True)
SHARED = Way("shared, few bits", "device", approximate=True)

WAYS = (COMPUTED, DEVICE, WHOLE, FEW_BITS, AUTO_BITS, RESTARTED, SHARED)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """One request: what was asked, how long the first token took, what was read, the answer."""

    way: str
    question: str
    ttft_ms: float
    prefix_tokens: int
    bits: float | None
    ssd_bytes: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """All requests of one way: medians, and how many gave the answer of the whole, exact prefix."""

    way: str
    requests: int
    ttft_ms: float
    ssd_bytes: float
    bits: float | None
    same_answers: int
    answer: str


@dataclasses.dataclass(frozen=True, slots=True)
class AtOnce:
    """Many questions at once: seconds until all are answered, and bytes that all of them read.

    `loaded` of a prefix on SSD, `resident` of the same questions again, when it is in slots.
    """

    requests: int
    loaded_s: float
    resident_s: float
    ssd_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.requests} questions at once, prefix on SSD: answered in {self.loaded_s:.2f} s, "
            f"{self.ssd_bytes / 1e6:,.1f} MB read by all of them; "
            f"prefix in slots: {self.resident_s:.2f} s"
        )


def make_reply(
    way: Way, question: str, ttft_ms: float, text: str, meta_info: Mapping[str, Any]
) -> Reply:
    """The reply of a finished request, from what SGLang reports of it.

    Raises:
        DemoFailed: the request was not served as its way says.
    """
    report = meta_info.get("impress")
    if report is None:
        raise DemoFailed(f"{way.name!r}: the server sent no IMPRESS report; is the plugin active?")
    _check(way, report, text)
    return Reply(
        way=way.name,
        question=question,
        ttft_ms=round(ttft_ms, 1),
        prefix_tokens=report["prefix_tokens"],
        bits=report["bits_mean"],
        ssd_bytes=report["ssd_bytes"],
        text=text,
    )


def _check(way: Way, report: Mapping[str, Any], text: str) -> None:
    found = report["path"]
    if found != way.served_by:
        raise DemoFailed(f"{way.name!r} was served by path {found!r}, not {way.served_by!r}")
    used, prefix = report["used_tokens"], report["prefix_tokens"]
    if used < prefix:
        raise DemoFailed(f"{way.name!r} used {used} of {prefix} tokens")
    if way.approximate is not None and report["approximate"] != way.approximate:
        expected = "in few bits" if way.approximate else "as it was computed"
        raise DemoFailed(f"{way.name!r} did not use the prefix {expected}")
    if (report["ssd_bytes"] > 0) != (way.served_by == "ssd"):
        raise DemoFailed(f"{way.name!r} read {report['ssd_bytes']} bytes of SSD")
    if not text.strip():
        raise DemoFailed(f"{way.name!r}: the answer is empty")


def make_rows(replies: Sequence[Reply]) -> list[Row]:
    """One row per way, in the order of the table; `DEVICE` has answered every question."""
    expected = {reply.question: reply.text for reply in replies if reply.way == DEVICE.name}
    rows = []
    for way in WAYS:
        asked = [reply for reply in replies if reply.way == way.name]
        bits = [reply.bits for reply in asked if reply.bits is not None]
        rows.append(
            Row(
                way=way.name,
                requests=len(asked),
                ttft_ms=statistics.median(reply.ttft_ms for reply in asked),
                ssd_bytes=statistics.median(reply.ssd_bytes for reply in asked),
                bits=statistics.median(bits) if bits else None,
                same_answers=sum(reply.text == expected[reply.question] for reply in asked),
                answer=next(reply.text for reply in asked if reply.question == QUESTIONS[0]),
            )
        )
    return rows


def make_table(rows: Sequence[Row]) -> Table:
    """The table for the terminal."""
    table = Table(
        title="Time to first token, by where the shared prefix comes from",
        caption=(
            f"Medians of {len(QUESTIONS)} questions (computed: one). Same answers: word for word "
            f"those of the whole, exact prefix. Shown: {QUESTIONS[0]}"
        ),
        box=box.SIMPLE,
    )
    table.add_column("prefix from", no_wrap=True)
    for heading in ("TTFT", "SSD read", "bits", "same answers"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for row in rows:
        table.add_row(
            row.way,
            f"{row.ttft_ms:,.0f} ms",
            f"{row.ssd_bytes / 1e6:,.1f} MB",
            "" if row.bits is None else f"{row.bits:.1f}",
            f"{row.same_answers} of {row.requests}",
            shorten(row.answer),
        )
    return table


def shorten(text: str) -> str:
    """The first words of an answer, on one line."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return line[: SHOWN_CHARACTERS - 1].rsplit(" ", 1)[0] + "…"


def write_json(rows: Sequence[Row], replies: Sequence[Reply], at_once: AtOnce, path: Path) -> None:
    """Write the rows, and each request behind them."""
    content = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "at_once": dataclasses.asdict(at_once),
        "requests": [dataclasses.asdict(reply) for reply in replies],
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
