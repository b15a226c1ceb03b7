"""The controller benchmark: what is planned, read and waited for, where all is small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core.options import parse
from bench.engine import controller
from bench.engine.controller import OPTIONS, PAPER_TOKENS, Cell, Timed
from impress_sglang.options import AUTO
from impress_sglang.serving.paper.blending import SHARES
from impress_sglang.storage import files

LAYERS, DOCUMENTS, TOKENS = 4, 3, 200
SMALL = Timed(LAYERS, 1, load_ms=20.0, compute_ms=60.0)
GIVEN = ("--documents", str(DOCUMENTS), "--tokens", str(TOKENS), "--requests", "2")


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    monkeypatch.setattr(controller, "MODELS", {"small": SMALL})
    args = parse("controller", "", OPTIONS, [*GIVEN, "--shares", "0,0.5"])
    try:
        with contextlib.closing(Cell(args, "small", tmp_path / "kv")) as cell:
            yield cell
    finally:
        files.install(files.FileSystem())


def test_more_is_computed_again_where_the_drive_is_slow(cell: Cell) -> None:
    fast, slow = (list(cell.rows(drive)) for drive in (100.0, 0.05))
    for rows in (fast, slow):
        assert [row["share"] for row in rows] == [0.0, 0.5, AUTO]
        for row in rows:
            assert 0 <= row["loading"] <= row["TTFT"]
            assert row["computing"] == pytest.approx(row["TTFT"] - row["loading"], abs=0.11)
    # What is computed is a wait, so it takes no less; the checked layers compute all.
    again = 2 + 0.5 * (LAYERS - 2)
    reused = DOCUMENTS * TOKENS - 1 - 16
    assert fast[1]["computing"] >= again * reused / PAPER_TOKENS * SMALL.compute_ms - 1
    assert slow[0]["loading"] > fast[0]["loading"]
    # How fast the machine computes is learnt on the way, so they may be the same on a busy one.
    assert SHARES[-1] <= fast[-1]["auto"] <= slow[-1]["auto"] <= SHARES[0]
