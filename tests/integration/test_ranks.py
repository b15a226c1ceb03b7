"""Tree caches of several ranks in lock step, whose disks and threads differ."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest
from torch import distributed

from impress_sglang.errors import SegmentUnreadable, UnsupportedError
from impress_sglang.plugin.prefix_loads import SAVES_EVERY
from impress_sglang.plugin.rank_groups import identity_of_rank, identity_reader, ranks_of
from impress_sglang.plugin.tree_nodes import is_locked
from impress_sglang.serving.ranks import Ranks
from impress_sglang.store import disk_worker
from impress_sglang.store.identity import rank_identity
from tests.damage import flip_bit
from tests.integration.tiny_model import draw
from tests.integration.tree_world import TreeWorld
from tests.unit.ranks_model import Diverged, Reduction
from tests.unit.waiting import wait_until

SIZE = 2
ROUNDS = 40
_T = TypeVar("_T")


class RankWorlds:
    """Two tree caches, each with its own store, that are told the same.

    Of `copies` the first writes for all.
    """

    def __init__(self, root: Path, copies: int = 1, **options: Any) -> None:
        self.reduction = Reduction(SIZE)
        ranks = [Ranks(rank, SIZE, self.reduction.begin) for rank in range(SIZE)]
        for rank in ranks:
            rank.head_replicas = copies
        self.worlds = [
            TreeWorld(root / f"rank{rank.rank // copies}", ranks=rank, **options) for rank in ranks
        ]

    def all(self, act: Callable[[TreeWorld], _T]) -> _T:
        """Let all ranks do the same at the same time; returns what came of it on each."""
        first, other = self.reduction.all(self.worlds, act)
        if first != other:
            raise Diverged(f"{first} and {other}")
        return first

    def check(self) -> None:
        self.all(digest)

    def close(self) -> None:
        for world in self.worlds:
            world.cache.release_host_resources()
        self.reduction.close()


def digest(world: TreeWorld) -> Any:
    """What SGLang's next pass depends on."""
    nodes, waiting = [], [world.cache.root_node]
    for node in waiting:
        children = list(node.children.values())
        waiting += children
        for child in children:
            nodes.append((len(child.key), is_locked(child)))
    queue = [req.rid for req in world.scheduler.waiting_queue]
    room = world.allocator.available_size(), world.cache.evictable_size()
    return nodes, queue, room, len(world.jobs.jobs), sorted(world.jobs.waiters)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank writes late."""
    write = disk_worker.write_segment

    def late(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if "rank1" in str(path):
            time.sleep(0.03)
        return write(path, *arguments, **keywords)

    monkeypatch.setattr(disk_worker, "write_segment", late)


@pytest.fixture
def ranks(tmp_path: Path, slow: None) -> Iterator[RankWorlds]:
    ranks = RankWorlds(tmp_path, size=3000)
    yield ranks
    ranks.close()


def run_ready(world: TreeWorld) -> list[str]:
    """Requests that need not wait run, one after the other; returns which."""
    done = []
    for req in list(world.scheduler.waiting_queue):
        if not world.waits(req):
            world.admit(req)
            world.compute(req)
            world.end(req)
            done.append(req.rid)
    return done


def hurt(world: TreeWorld, rng: random.Random) -> None:
    """A file of one rank goes, or is damaged."""
    if files := files_of(world):
        path, unlinks = rng.choice(files), rng.random() < 0.5
        # Its rank may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            path.unlink() if unlinks else flip_bit(path, path.stat().st_size // 2, bit=3)


@pytest.mark.parametrize("seed", range(3))
def test_they_do_the_same_whatever_their_disks_do(ranks: RankWorlds, seed: int) -> None:
    rng = random.Random(seed)
    families = [draw(100 * seed + number, 300) for number in range(4)]
    for number in range(ROUNDS):
        for part in range(rng.randrange(3)):
            rid = f"r{number}.{part}"
            prompt = [*rng.choice(families)[: rng.randrange(40, 300)], *draw(rng.randrange(50), 9)]
            wanted = rng.choice([{}, {"bits": "exact"}])
            ranks.all(lambda world, rid=rid, p=prompt, w=wanted: bool(world.request(rid, p, **w)))
        for _ in range(rng.randrange(1, 5)):
            ranks.all(TreeWorld.poll)
            ranks.all(run_ready)
            ranks.check()
        if rng.random() < 0.15:
            hurt(rng.choice(ranks.worlds), rng)
        if rng.random() < 0.2:
            drain(ranks)
            ranks.all(TreeWorld.flush)
            ranks.check()
    drain(ranks)
    assert all(world.service.totals["prompt_tokens"]["loaded"] for world in ranks.worlds)


def drain(ranks: RankWorlds) -> None:
    """Until nobody waits."""

    def is_over() -> bool:
        ranks.all(TreeWorld.poll)
        ranks.all(run_ready)
        ranks.check()
        return not (ranks.worlds[0].scheduler.waiting_queue or ranks.worlds[0].jobs.jobs)

    wait_until(is_over)


def test_saves_alone_are_seldom_agreed_on_while_a_batch_runs(ranks: RankWorlds) -> None:
    ranks.all(lambda world: bool(world.request("r", draw(1, 200))))
    ranks.all(TreeWorld.poll)
    ranks.all(run_ready)
    ranks.all(lambda world: world.scheduler.running_batch.reqs.append(object()))
    before, passes = ranks.reduction.count, 0

    def is_released() -> bool:
        nonlocal passes
        passes += 1
        ranks.all(TreeWorld.poll)
        ((_, is_locked),), *_ = ranks.all(digest)
        return not is_locked

    wait_until(is_released)
    assert ranks.reduction.count == before + passes / SAVES_EVERY


def test_what_one_writes_for_both_is_lost_for_both(tmp_path: Path) -> None:
    """Also if only the other one cannot read it."""
    ranks, prompt, asked = RankWorlds(tmp_path, SIZE), draw(1, 200), itertools.count()
    writer, reader = (world.service.store for world in ranks.worlds)

    def loaded() -> int:
        rid = f"r{next(asked)}"
        ranks.all(lambda world: bool(world.request(rid, prompt)))
        drain(ranks)
        ranks.all(TreeWorld.flush)
        return int(ranks.worlds[0].service.totals["prompt_tokens"]["loaded"])

    wait_until(loaded)
    assert len(files_of(ranks.worlds[0])) == 1
    before = loaded()
    damage = SegmentUnreadable(next(writer.tree.segments()).segment_id, "damaged")
    with mock.patch.object(reader.readers, "open", side_effect=damage):
        assert loaded() == before
    wait_until(lambda: loaded() > before)
    ranks.close()


def files_of(world: TreeWorld) -> list[Path]:
    return sorted(Path(world.config.ssd_dir).glob("*/segments/*/*.kv"))


def test_without_weights_that_all_can_read_nobody_has_an_identity() -> None:
    def fails() -> str:
        raise OSError("gone")

    ranks = Ranks(1, 2, all_gather=lambda text: ["a", text])
    assert identity_of_rank(ranks, lambda: "b") == rank_identity(["a", "b"], 1)
    with pytest.raises(OSError, match="gone"):
        identity_of_rank(ranks, fails)
    ranks = Ranks(1, 2, all_gather=lambda text: ["", text])
    with pytest.raises(UnsupportedError):
        identity_of_rank(ranks, lambda: "b")


def test_ranks_of_dp_attention_know_the_whole_model_by_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts_by_rank = ["a", "b"]

    def gather(texts: list[str], text: str, group: Any) -> None:
        assert group == "all" and text in texts_by_rank
        texts[:] = texts_by_rank

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: {"this one": 1}[group])
    context = SimpleNamespace(
        tp_size=2,
        params=SimpleNamespace(tp_cache_group="this one", pp_size=1),
        tp_group=SimpleNamespace(cpu_group="all"),
    )
    # Each of two runs batches of its own, and has half of the experts.
    assert ranks_of(context).alone
    readers = [
        identity_reader(context, ranks_of(context), lambda rank=rank: texts_by_rank[rank])
        for rank in (0, 1)
    ]
    names = {read() for read in readers}
    assert names == {rank_identity(["a", "b"], 0)}, "they share a store"
    texts_by_rank[1] = "c"
    assert readers[0]() in names
    with pytest.raises(UnsupportedError, match="restart"):
        readers[1]()
    assert identity_reader(context, ranks_of(context), lambda: "a")() not in names
    # Of four with the same heads two run batches together: the first of them writes for both.
    texts_by_rank[:], context.tp_size = ["a"] * 4, 4
    for rank in range(2):
        ranks = Ranks(rank, 2, all_gather=lambda text: [text, text])
        ranks.head_replicas = 2
        assert ranks.writes == (rank == 0)
        assert identity_reader(context, ranks, lambda: "a")() == rank_identity(["a"] * 4, 0)
