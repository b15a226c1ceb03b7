"""A writer that is killed at any moment leaves a store with complete, right segments only.

    python -m tests.unit.test_store_crash DIRECTORY ROUND...

A round is the name of a crash point, or a number of milliseconds after which the writer is killed.
Prints one JSON object per round. Every process is forked from this one, which never uses the store
itself, so that PyTorch is imported once.
"""

from __future__ import annotations

import json
import operator
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.files import FileSystem
from impress_sglang.store.journal import Journal
from impress_sglang.store.writing import Offer, StoreOutcome
from tests.unit import kv_factory as kv
from tests.unit.reading import read_rows
from tests.unit.store_checks import check_store
from tests.unit.store_factory import DEFAULTS, look_again, open_source, rows, until

SHAPE = kv.make_shape(dtype=torch.bfloat16, probe=())
FAMILIES = 3
STEP = 12  # tokens by which a prefix of a family grows
LONGEST = 40 * STEP


def sequence(family: int, length: int) -> tuple[int, ...]:
    return tuple(1000 * family + position % 97 for position in range(length))


def open_store(directory: Path) -> PartStore:
    options = DEFAULTS | {"device_gb": 2e-5, "host_gb": 4e-5}
    config = ImpressConfig(ssd_dir=str(directory), **options)
    return PartStore(config, kv.IDENTITY, SHAPE)


def write_forever(directory: Path, progress: Path) -> None:
    """Grow the prefixes of all families in turn, and note each one that is written."""
    store = open_store(directory)
    progress.write_text("0 0\n")
    for length in range(STEP, LONGEST, STEP):
        for family in range(FAMILIES):
            kvs = kv.SequenceKVs(SHAPE, "", sequence(family, length))
            tokens = kv.as_tokens(kvs.tokens)
            outcome = store.writes.offer(
                "", Offer(tokens, kvs.read_from, lambda: None, lambda: None, min_tokens=1)
            )
            if outcome is StoreOutcome.ACCEPTED:
                store.writes.drain()
            with progress.open("a") as file:
                file.write(f"{family} {length}\n")
    # It may be done before it is killed.
    time.sleep(1.0)


def lose_something(directory: Path, progress: Path) -> None:
    """Find the last segment of the first family damaged."""
    store = open_store(directory)
    match = store.match("", kv.as_tokens(sequence(0, LONGEST)))
    name = match.spans[-1].segment.segment_id
    (path,) = directory.rglob(f"{name}.kv")
    kv.flip_byte(path, path.stat().st_size - 4096)
    store.report(SegmentUnreadable(name, "a test"))
    look_again(store)
    store.close()


def reorder_something(directory: Path, progress: Path) -> None:
    """Rewrite the first segment of the first family."""
    store = open_store(directory)
    match = store.match("", kv.as_tokens(sequence(0, LONGEST)))
    length = len(match.spans[0])
    source = open_source(store, match, 0, length)
    head_groups = kv.head_groups_of(SHAPE)
    selected = torch.arange(1, length, 3).expand(head_groups, -1)
    for layer in range(SHAPE.num_layers):
        read_rows(source, layer, selected)
        source.note_selection(layer, selected.numpy(), torch.ones(head_groups, length))
    store.close_source(source)
    assert store.enqueue_rewrites(force=True) == 1
    until(store, lambda: not store.rewrites["pending"])
    store.close()


WRITERS = {"loss": lose_something, "reorder": reorder_something}


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner: Any, name: str, call_number: int, *, after: bool = False) -> None:
    """Kill this process at the n-th call of a function, before or after it."""
    original, calls = getattr(owner, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call_number and not after:
            kill_self()
        result = original(*args, **kwargs)
        if calls == call_number:
            kill_self()
        return result

    setattr(owner, name, wrapper)


# Two layers and a header are three writes of a segment; file and directory are two syncs.
CRASH_POINTS: dict[str, Callable[[], None]] = {
    "first write of a file": lambda: kill_at(os, "pwritev", 4),
    "between layers": lambda: kill_at(os, "pwritev", 5),
    "before the header": lambda: kill_at(os, "pwritev", 6),
    "before the sync": lambda: kill_at(FileSystem, "sync", 2),
    "before the rename": lambda: kill_at(os, "rename", 2),
    "after the rename": lambda: kill_at(os, "rename", 2, after=True),
    "before the index": lambda: kill_at(Journal, "record", 2),
    "after the index": lambda: kill_at(Journal, "record", 2, after=True),
    "loss: before the index": lambda: kill_at(Journal, "record", 1),
    "loss: after the index": lambda: kill_at(Journal, "record", 1, after=True),
    "reorder: between layers": lambda: kill_at(os, "pwritev", 2),
    "reorder: before the rename": lambda: kill_at(os, "rename", 1),
    "reorder: after the rename": lambda: kill_at(os, "rename", 1, after=True),
    "reorder: before the index": lambda: kill_at(Journal, "record", 1),
    "reorder: in the index": lambda: kill_at(Journal, "record", 2),
    "reorder: after the index": lambda: kill_at(Journal, "record", 2, after=True),
}


def verify(directory: Path) -> dict[str, Any]:
    """Open the store, and compare every row in it with what was offered."""
    leftovers = len(list(directory.rglob("*.tmp")))
    store = open_store(directory)
    check_store(store)
    lengths, covered = [], 0
    for family in range(FAMILIES):
        tokens = sequence(family, LONGEST)
        match = store.match("", kv.as_tokens(tokens))
        lengths.append(match.num_tokens)
        covered += len(match.spans)
        if match.num_tokens:
            kvs = kv.SequenceKVs(SHAPE, "", tokens[: match.num_tokens])
            source = open_source(store, match)
            for layer in range(SHAPE.num_layers):
                keys, values = rows(SHAPE, source, layer)
                assert torch.equal(keys, kvs.keys(layer))
                assert torch.equal(values, kvs.values(layer))
            store.close_source(source)
    assert covered == len(store.tree), "a segment that no sequence reaches"
    files = sorted(path.stem for path in directory.glob("*/segments/*/*.kv"))
    assert files == sorted(segment.segment_id for segment in store.tree.segments())
    generations = sum(segment.info.generation for segment in store.tree.segments())
    store.close()
    return {
        "lengths": lengths,
        "generations": generations,
        "leftovers_before": leftovers,
        "leftovers_after": len(list(directory.rglob("*.tmp"))),
    }


def in_child(function: Callable[[], Any], kill_when: Callable[[], None] | None = None) -> Any:
    """Run a function in a forked process; its result, or the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = {"result": function()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    if kill_when is not None:
        kill_when()
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return json.loads(answer)


def run_round(directory: Path, name: str) -> dict[str, Any]:
    progress = directory.with_name("progress")
    progress.unlink(missing_ok=True)

    def writer() -> None:
        if name in CRASH_POINTS:
            CRASH_POINTS[name]()
        WRITERS.get(name.partition(":")[0], write_forever)(directory, progress)
        raise AssertionError("the writer was not killed")

    def wait() -> None:
        while not progress.exists():
            time.sleep(0.001)
        time.sleep(int(name) / 1000)

    end = in_child(writer, None if name in CRASH_POINTS else wait)
    lines = progress.read_text().splitlines() if progress.exists() else []
    complete = [line.split() for line in lines if len(line.split()) == 2]
    written = [
        max((int(n) for f, n in complete if int(f) == i), default=0) for i in range(FAMILIES)
    ]
    return {"round": name, "end": end, "written": written, **in_child(lambda: verify(directory))}


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
            *(sys.executable, "-m", "tests.unit.test_store_crash"),
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

    assert list(generations.values()) == [0, 0, 1, 2, 3, 4]
    for name in generations:
        (lengths,) = (r["result"]["lengths"] for r in rounds if r["round"] == name)
        assert lengths == rounds[POINTS.index("loss: after the index")]["result"]["lengths"]


def main() -> None:
    torch.set_num_threads(1)
    # A killed process loses nothing that it has written.
    os.fsync = lambda descriptor: None
    directory = Path(sys.argv[1]) / "store"
    # A new store has writes and renames of its own.
    in_child(lambda: open_store(directory).close())
    for name in sys.argv[2:]:
        print(json.dumps(run_round(directory, name)), flush=True)


if __name__ == "__main__":
    main()
