"""A server that ends before any step on its disk, or in it, leaves whole, right segments.

It is killed, or the power goes, and with it all or some of what was not synced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.store import PartStore
from tests.faults import FaultyFileSystem, Killed, Rule
from tests.unit import store_factory as stores
from tests.unit.kv_factory import flip_byte
from tests.unit.store_checks import check_store
from tests.unit.store_factory import SHAPES, Workbench, check_rows, length, look_up, prompt
from tests.unit.test_store_reordering import select
from tests.unit.waiting import wait_until

CHANGES = "open-write|write|sync|sync_directory|rename|unlink"
DAY = 86_400.0
SHORT, LONG, LONGER = prompt(1, 13), prompt(1, 40), prompt(1, 60)


def segments(bench: Workbench) -> list[Path]:
    return sorted(bench.root.glob("*/segments/*/*.kv"))


class Killing:
    """A store with two segments, whose server ends at a step of what it does then."""

    def __init__(self, root: Path, end: str, after: int) -> None:
        self._end, self._after, self.taken = end, after, False
        self.bench = Workbench(root / "kv", SHAPES["head groups bfloat16"])
        store = self.bench.open()
        self.bench.put(store, SHORT, ttl=DAY)
        self.bench.put(store, LONG, ttl=2 * DAY)
        self.last = self.bench.file_of(stores.name_of(store, LONG, 1))
        self.first = segments(self.bench)
        self.bench.close(store)
        self.files = FaultyFileSystem(journal=root / "journal")
        self.store = self.bench.open(files=self.files)
        fault = "kill" if end.startswith("power") else end
        self.files.faults.add(Rule(fault, CHANGES, after=after))

    @property
    def killed(self) -> bool:
        return bool(self.files.faults.hits)

    def until(self, condition: Callable[[], object]) -> None:
        def is_met() -> bool:
            self.store.poll()
            return bool(condition())

        wait_until(lambda: self.killed or is_met())

    def act(self, act: Callable[[Killing], None]) -> None:
        with contextlib.suppress(Killed):
            act(self)
            self.store.worker.submit(int).result()
        self.bench.forget(self.store)
        for end in (self.files.kill, self.store.close):
            with contextlib.suppress(Killed):
                end()
        if self._end.startswith("power"):
            there = segments(self.bench)
            self.files.power_loss(everything=self._end == "power", seed=self._after)
            self.taken = there != segments(self.bench)


def write(life: Killing) -> None:
    life.bench.offer(life.store, LONGER)
    life.store.writes.drain()


def lose(life: Killing) -> None:
    flip_byte(life.last, life.last.stat().st_size - 4096)
    life.store.report(SegmentUnreadable(life.last.stem, "a test"))
    life.until(lambda: not life.store.summary()["segments_suspect"])


def rewrite(life: Killing) -> None:
    select(life.store, LONG, 3, 20)
    life.store.enqueue_rewrites(force=True)
    life.until(lambda: not life.store.rewrites["pending"])


def expire(life: Killing) -> None:
    life.store.expire(time.time() + 3 * DAY)


def check_written(life: Killing, before: list[Path], store: PartStore) -> bool:
    """A file that has its final name counts, whatever the index says."""
    assert set(segments(life.bench)) == set(before)
    tokens = LONGER if len(before) == 3 else LONG
    assert length(store, LONGER) == len(tokens)
    check_rows(store, tokens)
    return len(before) == 3


def check_lost(life: Killing, before: list[Path], store: PartStore) -> bool:
    check_rows(store, SHORT)
    if life.last in before:
        with pytest.raises(SegmentUnreadable):
            check_rows(store, LONG)
    else:
        assert length(store, LONG) == len(SHORT)
    return life.last not in before


def check_rewritten(life: Killing, before: list[Path], store: PartStore) -> bool:
    """A rewrite takes over with its rename, and changes no row."""
    check_rows(store, LONG)
    generations = sum(span.segment.info.generation for span in look_up(store, LONG).spans)
    assert generations == len({*before} - {*life.first})
    return generations == 2


def check_expired(life: Killing, before: list[Path], store: PartStore) -> bool:
    """What others build on goes last; a loss of power may bring back either."""
    left = (0, len(SHORT), len(LONG))
    assert life.taken or length(store, LONG) == left[len(before)]
    return life.taken or not before


# What it does, what must be there then, and how many steps that takes at least: a line of the
# journal that is late is written with the next.
ACTS = {
    "write": (write, check_written, 8),
    "loss": (lose, check_lost, 4),
    "rewrite": (rewrite, check_rewritten, 24),
    "expiry": (expire, check_expired, 4),
}


@pytest.mark.parametrize("end", ["kill", "torn-kill", "power", "power, but some is kept"])
@pytest.mark.parametrize("name", ACTS)
def test_the_next_process_finds_what_was_written_whole_and_right(
    tmp_path: Path, name: str, end: str
) -> None:
    """It ends before the first, the second ... step that changes something, and behind the last."""
    (act, check, min_steps), taken = ACTS[name], False
    for after in itertools.count():
        life = Killing(tmp_path / str(after), end, after)
        life.act(act)
        taken |= life.taken
        before = segments(life.bench)
        store = life.bench.open()
        check_store(store)
        assert check(life, before, store) or life.killed, "what was done in the end is there"
        assert not list(life.bench.root.rglob("*.tmp")), "nothing is left of what was not finished"
        store.worker.submit(int).result()
        names = {segment.segment_id for segment in store.tree.segments()}
        assert {path.stem for path in segments(life.bench)} == names
        life.bench.close_all()
        if not life.killed:
            break
    assert after >= (1 if end == "torn-kill" else min_steps)
    assert taken or end != "power", "a loss of power takes what was not synced"
