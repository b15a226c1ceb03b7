"""Writing prefixes to the store: what is accepted, and when it is found."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.store.losses import Cause
from impress_sglang.store.orders import Purge
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSpan
from impress_sglang.store.writing import Offer, StoreOutcome, _missing
from tests.unit import kv_factory as kv
from tests.unit.store_factory import Workbench, check_rows, length, prompt
from tests.unit.waiting import wait_until


def test_kvs_that_the_reader_lacks_must_be_stored(bench: Workbench, store: PrefixStore) -> None:
    """The request has KVs from token 8 on only."""
    tokens = prompt(1, 20)

    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    assert bench.files() == set() and bench.done == []
    bench.put(store, prompt(1, 7))
    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.UNREACHABLE
    bench.put(store, prompt(1, 8))
    bench.put(store, tokens, available_from=8)
    check_rows(store, tokens)


def test_writes_are_abandoned_latest_first(bench: Workbench, store: PrefixStore) -> None:
    """Their slots are wanted back: from now on nobody reads them; see the model as well."""
    for number in (1, 2, 3):
        bench.begin(store, prompt(number))

    for _ in range(2):
        store.writes.abandon()
        assert bench.abandoned == bench.done == [prompt(3), prompt(2), prompt(1)]

    store.writes.drain()
    assert len(bench.done) == 3, "each one once"
    assert store.health.state == "ok"


def test_a_write_that_has_read_everything_is_published_although_it_is_abandoned(
    bench: Workbench, store: PrefixStore
) -> None:
    bench.offer(store, prompt(1))
    wait_until(store.writes._writes[0].future.done)

    store.writes.abandon()

    store.writes.drain()
    assert bench.done == [prompt(1)]
    check_rows(store, prompt(1))
    assert store.stats.segments_abandoned == 0


def test_what_is_purged_after_it_was_read_gets_no_name(bench: Workbench) -> None:
    """Else a server that is killed before it looks again would find it at its next start."""
    store, tokens = bench.open(write_gb_per_day=1.0), prompt(1, BLOCK_TOKENS)
    read, last = kv.SequenceKVs(bench.shape, "", tokens).read_from(0), bench.shape.num_layers - 1
    entered, purged = threading.Event(), threading.Event()

    def read_layers(start: int) -> LayerReader:
        def read_layer(layer: int) -> tuple[Tensor, Tensor]:
            if layer == last:
                entered.set()
                assert purged.wait(30)
            return read(layer)

        return read_layer

    budget = store.summary()["write_budget_left_bytes"]
    bench.offer(store, tokens, read_layers=read_layers)
    assert entered.wait(30)
    (segment,) = store.tree.segments()
    assert Purge().step(store).writes == 1
    purged.set()
    assert isinstance(store.writes._writes[0].future.exception(), WriteAbandoned)
    assert bench.files() == set()
    store.writes.drain()
    assert length(store, tokens) == 0
    loss = store.losses.find(store.namespace(""), kv.as_tokens(tokens), 0)
    assert loss is not None and loss.cause is Cause.PURGED
    spent = budget - store.summary()["write_budget_left_bytes"]
    assert spent > 0.9 * segment.file_bytes, "the drive took it; a little time has passed"


@pytest.mark.parametrize(("new", "expected"), [(4, StoreOutcome.KNOWN), (5, StoreOutcome.ACCEPTED)])
def test_a_short_rest_is_not_worth_a_file(
    bench: Workbench, store: PrefixStore, new: int, expected: StoreOutcome
) -> None:
    bench.put(store, prompt(1, 20))

    assert bench.offer(store, prompt(1, 20 + new), min_tokens=5) is expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("", (0, 20)),
        (".", (3, 20)),
        ("o", (0, 20)),
        ("..o", (6, 20)),
        (".oo", (3, 20)),
        (".oo.o", (3, 9)),
        ("x", (0, 0)),
        (".ox", (3, 6)),
    ],
)
def test_holes_next_to_each_other_are_filled_at_once(known: str, expected: tuple[int, int]) -> None:
    """Three tokens each: `.` is stored, `o` a hole, `x` one of another quality."""
    spans = []
    for number, kind in enumerate(known):
        state = SegmentState.READY if kind == "." else SegmentState.LOST
        quality = Quality(1, 8.0, 0.5) if kind == "x" else EXACT
        own = kv.stored_segment(str(number), range(3), state=state, quality=quality)
        spans.append(StoredSpan(own, 0, 3))
    nothing: Any = None
    offer = Offer(kv.as_tokens(range(20)), nothing, nothing, nothing, min_tokens=1)
    assert _missing(StoredMatch(tuple(spans)), offer) == expected
