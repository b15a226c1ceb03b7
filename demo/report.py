"""What the demo shows: the requests it makes, the checks of what it claims, the table, the JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

SHOWN_CHARACTERS = 40


class DemoFailed(RuntimeError):
    """The demo cannot show what it claims; the message says why, for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A request of the demo, and what SGLang must report for it.

    `served_by` is `meta_info["impress"]["path"]`; `approximate` says that the prefix is loaded in
    few bits.
    """

    path: str
    question: str
    served_by: str
    approximate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request: the path it took, time to the first token, and what was used of the prefix."""

    path: str
    ttft_ms: float
    prefix_tokens: int
    used_tokens: int
    bits: float | None
    ssd_bytes: int
    text: str


COMPUTED = Case("computed", "Where are wicks woven?", "computed")
DEVICE = Case("device hit", "What colour is the ribbon for a wedding?", "device")
WHOLE = Case("SSD whole prefix", "How long does the winter model burn?", "ssd")
FEW_BITS = Case("SSD in few bits", "When does the doctor come?", "ssd", approximate=True)
SHARED = Case("shared in few bits", "How often is the brass bell rung?", "device", approximate=True)
RESTARTED = Case("SSD after restart", "What is silver polished with?", "ssd", approximate=True)

ORDER = (COMPUTED, DEVICE, WHOLE, FEW_BITS, SHARED, RESTARTED)


def make_row(case: Case, ttft_ms: float, text: str, meta_info: Mapping[str, Any]) -> Row:
    """The row of a finished request, from what SGLang reports of it.

    Raises:
        DemoFailed: the request was not served as the case says.
    """
    report = meta_info.get("impress")
    if report is None:
        raise DemoFailed(f"{case.path!r}: the server sent no IMPRESS report; is the plugin active?")
    _check(case, report, text)
    return Row(
        path=case.path,
        ttft_ms=round(ttft_ms, 1),
        prefix_tokens=report["prefix_tokens"],
        used_tokens=report["used_tokens"],
        bits=report["bits_mean"],
        ssd_bytes=report["ssd_bytes"],
        text=text,
    )


def _check(case: Case, report: Mapping[str, Any], text: str) -> None:
    found = report["path"]
    if found != case.served_by:
        raise DemoFailed(f"{case.path!r} was served by path {found!r}, not {case.served_by!r}")
    if report["recomputed"]:
        raise DemoFailed(f"{case.path!r}: the stored prefix was unreadable and was computed again")
    used, prefix = report["used_tokens"], report["prefix_tokens"]
    if used < prefix:
        raise DemoFailed(f"{case.path!r} used {used} of {prefix} tokens")
    if report["approximate"] != case.approximate:
        expected = "in few bits" if case.approximate else "as it was computed"
        raise DemoFailed(f"{case.path!r} did not use the prefix {expected}")
    # What a question lacks of a shared prefix is read, too.
    if case is not SHARED and (report["ssd_bytes"] > 0) != (case.served_by == "ssd"):
        raise DemoFailed(f"{case.path!r} read {report['ssd_bytes']} bytes of SSD")
    if not text.strip():
        raise DemoFailed(f"{case.path!r}: the answer is empty")


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of the table, which is not the order of the requests."""
    places = {case.path: place for place, case in enumerate(ORDER)}
    return sorted(rows, key=lambda row: places[row.path])


def make_table(rows: Sequence[Row]) -> Table:
    """The table for the terminal."""
    table = Table(
        title="Time to first token, by where the shared prefix comes from",
        caption="Compare times: a 135M model often errs, also with the whole prefix.",
        box=box.SIMPLE,
    )
    table.add_column("path", no_wrap=True)
    for heading in ("TTFT", "prefix", "used", "bits", "SSD read"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for row in rows:
        table.add_row(
            row.path,
            f"{row.ttft_ms:,.0f} ms",
            f"{row.prefix_tokens:,}",
            f"{row.used_tokens:,}",
            "" if row.bits is None else f"{row.bits:.1f}",
            f"{row.ssd_bytes / 1e6:,.1f} MB",
            shorten(row.text),
        )
    return table


def shorten(text: str) -> str:
    """The first words of an answer, on one line."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return line[: SHOWN_CHARACTERS - 1].rsplit(" ", 1)[0] + "…"


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a list of objects."""
    objects = [dataclasses.asdict(row) for row in rows]
    path.write_text(json.dumps(objects, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
