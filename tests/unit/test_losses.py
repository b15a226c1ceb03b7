"""What is remembered of what has left the store."""

from __future__ import annotations

import numpy as np

from impress_sglang.management.losses import Cause, Loss, Losses, prompt_of
from impress_sglang.management.prefix_hashes import BLOCK_TOKENS
from impress_sglang.management.store import PrefixStore
from tests.unit import store_factory
from tests.unit.kv_factory import as_tokens
from tests.unit.store_factory import Workbench, gb, look_up, lose, prompt
from tests.unit.waiting import Clock

bench = store_factory.bench_of_one_shape

LENGTH = 4 * BLOCK_TOKENS


def tokens(number: int, length: int = LENGTH) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return as_tokens(range(10_000 * number, 10_000 * number + length))


def test_a_loss_is_found_by_who_has_the_same_tokens() -> None:
    clock = Clock()
    losses = Losses(clock=clock)
    losses.note_tokens("a", tokens(1), Cause.EVICTED)
    clock.now += 5

    whole = Loss(Cause.EVICTED, LENGTH, 5.0)
    assert losses.find("a", tokens(1, LENGTH + 30), 0) == whole
    assert losses.find("a", tokens(1, 2 * BLOCK_TOKENS + 1), 0) == Loss(Cause.EVICTED, 128, 5.0)
    assert losses.find("a", tokens(1), 70) == Loss(Cause.EVICTED, LENGTH - 70, 5.0)
    fork = np.concatenate([tokens(1, 100), tokens(2)])
    assert losses.find("a", fork, 0) == Loss(Cause.EVICTED, BLOCK_TOKENS, 5.0)
    assert losses.find("a", fork, BLOCK_TOKENS) is None


def test_it_is_not_found_by_anybody_else() -> None:
    losses = Losses()
    losses.note_tokens("a", tokens(1), Cause.EVICTED)
    assert losses.find("b", tokens(1), 0) is None
    assert losses.find("a", tokens(2), 0) is None
    assert losses.find("a", tokens(1)[1:], 0) is None
    assert losses.find("a", tokens(1, BLOCK_TOKENS - 1), 0) is None
    assert losses.find("a", tokens(1, 0), 0) is None


def test_only_what_a_segment_had_is_lost_with_it() -> None:
    losses = Losses()
    losses.note_tokens("a", tokens(1), Cause.DAMAGED, start=100)
    found = losses.find("a", tokens(1), 0)
    assert found is not None and found.num_tokens == LENGTH
    assert losses.find("a", tokens(1, BLOCK_TOKENS), 0) is None


def test_memory_is_fixed_and_the_latest_are_kept() -> None:
    losses = Losses(places=64)
    for number in range(200):
        losses.note_tokens("a", tokens(number), Cause.EVICTED)
    found = [losses.find("a", tokens(number), 0) is not None for number in range(200)]
    assert found[-1] and not any(found[:50])


def test_what_the_store_removes_is_noted(bench: Workbench, store: PrefixStore) -> None:
    for number in (1, 2):
        bench.put(store, [*range(LENGTH), *tokens(number).tolist()], namespace="salt")
    for segment in store.tree.segments():
        whole = prompt_of(segment)
        assert len(whole) == segment.info.prefix_len + segment.info.num_tokens
        assert whole[:LENGTH].tolist() == list(range(LENGTH))
    second = [*range(LENGTH), *tokens(2).tolist()]
    lost = look_up(store, second, "salt").spans[-1].segment

    lose(bench, store, lost.segment_id)

    name = store.namespace("salt")
    found = store.losses.find(name, as_tokens(second), LENGTH)
    assert found is not None and (found.cause, found.num_tokens) == (Cause.DAMAGED, LENGTH)
    assert store.losses.find(store.namespace(""), as_tokens(second), LENGTH) is None


def test_what_makes_room_is_noted(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1, 200))
    room = store.summary()["used_bytes"]
    store = bench.reopen(store, ssd_gb=gb(room))

    bench.put(store, prompt(9, 200))

    found = store.losses.find(store.namespace(""), as_tokens(prompt(1, 200)), 0)
    assert found is not None and (found.cause, found.num_tokens) == (Cause.EVICTED, 192)
