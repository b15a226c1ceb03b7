"""A writer that is killed at any moment leaves a store with complete, right segments only."""

from __future__ import annotations

import json
import operator
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests
from tests.unit.crash_writer import CRASH_POINTS, STEP

POINTS = tuple(CRASH_POINTS)
RANDOM_KILLS = 5
# A temporary file is left.
UNFINISHED = (*POINTS[:5], "reorder: between layers", "reorder: before the rename")


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A directory, and what each new process found in it after the one before was killed."""
    pick = random.Random(4)
    kills = [str(pick.randint(10, 150)) for _ in range(RANDOM_KILLS)]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "tests.unit.crash_writer"),
            *(str(tmp_path_factory.mktemp("crash")), *POINTS, *kills),
        ],
        cwd=Path(tests.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_process_finds_what_was_written_whole_and_right(rounds: list[dict[str, Any]]) -> None:
    assert len(rounds) == len(POINTS) + RANDOM_KILLS
    before = [0, 0, 0]
    for r in rounds:
        assert r["end"] == {"signal": signal.SIGKILL}
        assert "error" not in r, r["error"]
        lengths = r["result"]["lengths"]
        assert all(length % STEP == 0 for length in lengths), "a segment is there or not"
        assert all(map(operator.ge, lengths, r["written"])), r
        if r["round"].startswith("loss"):
            assert lengths == [before[0] - STEP, *before[1:]], r
        else:
            assert all(map(operator.ge, lengths, before)), r
        before = lengths
        assert r["result"]["leftovers_after"] == 0, r
        if r["round"] in UNFINISHED:
            assert r["result"]["leftovers_before"] == 1, "the crash point was not where it says"
    assert sum(before) > 3 * STEP, "something was written at all"


def test_a_file_that_was_renamed_counts_as_written(rounds: list[dict[str, Any]]) -> None:
    """The index has no row of it; the file itself tells what it is."""
    found = {r["round"]: sum(r["result"]["lengths"]) for r in rounds}

    assert found["before the rename"] + STEP == found["after the rename"] - STEP
    assert found["after the rename"] + 2 * STEP == found["before the index"]


def test_a_rewrite_takes_over_with_its_rename_and_changes_no_row(
    rounds: list[dict[str, Any]],
) -> None:
    generations = {
        r["round"]: r["result"]["generations"]
        for r in rounds
        if r["round"] in POINTS and r["round"].startswith("reorder")
    }

    assert list(generations.values()) == [0, 0, 1, 2, 3]
    for name in generations:
        (lengths,) = (r["result"]["lengths"] for r in rounds if r["round"] == name)
        assert lengths == rounds[POINTS.index("loss: after the index")]["result"]["lengths"]
