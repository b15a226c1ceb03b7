"""Who waits for stored tokens, and when it is their turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.store.lookahead import _GAP, LookAhead, turns_of
from impress_sglang.store.orders import Purge
from impress_sglang.store.stored import StoredSpan
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import LAST_TURN, NOT_AWAITED
from tests.unit.kv_factory import make_shape, stored_segment
from tests.unit.reading import read_rows
from tests.unit.store_checks import check_lookahead, check_store
from tests.unit.store_factory import Workbench, gb, look_up

SEGMENTS = [stored_segment(name, range(40), shape=make_shape()) for name in "ab"]
RANGES = st.tuples(st.integers(0, 9), st.integers(1, 5)).map(lambda pair: (pair[0], sum(pair)))


def spans(*wanted: tuple[int, tuple[int, int]]) -> list[StoredSpan]:
    return [StoredSpan(SEGMENTS[number], *span) for number, span in wanted]


def turns_in_order(lookahead: LookAhead, rids: Sequence[str]) -> list[int]:
    turns = [lookahead.turn(rid) for rid in rids]
    assert turns == sorted(set(turns))
    return turns


def test_a_queue_that_moves_on_keeps_its_turns() -> None:
    """So that nothing has to be told to the caches but what comes and goes."""
    lookahead = LookAhead()
    lookahead.set_expected("b", spans((0, (0, 4))))
    lookahead.set_queue(["a", "b", "c"])
    assert lookahead.take_changed()
    turns = turns_in_order(lookahead, "abc")
    assert lookahead.turn("nobody") == LAST_TURN

    lookahead.set_queue(["b", "c", "d"])

    assert [lookahead.turn(rid) for rid in "bc"] == turns[1:] and lookahead.turn("d") > turns[2]
    assert not lookahead.take_changed()
    lookahead.set_queue(queue := ["d", "new", "b", "c"])
    turns_in_order(lookahead, queue)
    assert not lookahead.take_changed()
    lookahead.set_queue(queue := ["d", "c", "b", "new"])
    turns_in_order(lookahead, queue)
    assert lookahead.take_changed() == {"a"}


def test_who_waits_behind_others_for_the_same_changes_nothing() -> None:
    """Until it has a turn, and only where nobody with the same tokens has an earlier one."""
    lookahead = LookAhead()
    lookahead.set_expected("a", spans((0, (0, 4)), (1, (0, 4))))
    lookahead.set_queue(["a"])
    assert lookahead.take_changed() == {"a", "b"}
    known = lookahead.ranges("a")
    lookahead.set_expected("b", spans((0, (0, 4)), (1, (0, 5))))
    assert lookahead.take_changed() == {"b"} and lookahead.ranges("a") == known
    lookahead.set_queue(["b", "a"])
    lookahead.take_changed()
    lookahead.set_expected("a", spans((0, (0, 5))))
    lookahead.take_changed()
    lookahead.set_expected("b", spans((0, (0, 5))))
    assert lookahead.take_changed() == {"a", "b"}
    assert lookahead.ranges("a") == [(0, 5, lookahead.turn("b"))]


def test_a_gap_between_turns_may_be_full() -> None:
    lookahead = LookAhead()
    lookahead.set_queue(["a", "z"])
    for number in range(3 * _GAP):
        queue = ["a", str(number), str(number - 1), "z"]
        lookahead.set_queue(queue)
        turns_in_order(lookahead, queue)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("pqrs"), st.lists(st.tuples(st.integers(0, 1), RANGES))),
            st.lists(st.sampled_from("pqrstuvw"), unique=True),
        ),
        max_size=16,
    )
)
def test_the_next_turn_is_that_of_the_first_who_waits(steps: list[Any]) -> None:
    """Against a list of who waits for what; what the caches were told is the same."""
    lookahead, wanted = LookAhead(), dict[str, dict[int, tuple[int, int]]]()
    told = dict[str, list[tuple[int, int, int]]]()
    for step in steps:
        if isinstance(step, tuple):
            rid, ranges = step
            # Of a segment a request waits for one range.
            wanted[rid] = dict(ranges)
            lookahead.set_expected(rid, spans(*wanted[rid].items()))
        else:
            lookahead.set_queue(step)
            assert all(0 <= turn < LAST_TURN for turn in turns_in_order(lookahead, step))
            # Others have left the queue.
            wanted = {rid: ranges for rid, ranges in wanted.items() if rid in step}
        check_lookahead(lookahead)
        told.update((name, lookahead.ranges(name)) for name in lookahead.take_changed())

    for number, name in enumerate("ab"):
        ranges = [(rid, of[number]) for rid, of in wanted.items() if number in of]
        turns = turns_of(15, 1, told.get(name, []))
        for token in range(15):
            waiting = [rid for rid, (start, stop) in ranges if start <= token < stop]
            assert turns[token] == min(map(lookahead.turn, waiting), default=NOT_AWAITED)
        assert (name in lookahead) == bool(ranges)


@pytest.mark.parametrize("coded", [False, True])
def test_what_a_request_waits_for_stays_in_the_cache(tmp_path: Path, coded: bool) -> None:
    """Of a cache with room for less than one of two prefixes."""
    heads = {"layers": 2, "query_heads": 6, "kv_heads": 3, "key_dim": 64, "value_dim": 64}
    shape = make_shape(**heads, probe=(), coded=coded, raw=int(coded))
    bench, lookahead = Workbench(tmp_path, shape), LookAhead()
    options = {"policy": "impress" if coded else "as", "chunk_tokens": 64, "lookahead": lookahead}
    store = bench.open(host_gb=gb(50 * 4096), **options)

    def read(prefix: range) -> int:
        """Bytes from SSD, for all that is certain to be read of a prefix in a pass."""
        store.poll()
        match = look_up(store, prefix)
        assert match.num_tokens == len(prefix)
        if coded:
            source = store.readers.open(match.spans, exact=False)
            for layer in range(bench.shape.num_layers):
                source.read(layer)
        else:
            source = store.open_part(match, 0, len(prefix), whole=True)
            for layer in range(bench.shape.num_layers):
                read_rows(source, layer, None)
        store.close_source(source)
        check_store(store)
        return source.stats.ssd_bytes

    wanted, popular = range(256), range(1000, 1256)
    for prefix in (wanted, popular):
        bench.put(store, prefix)
    whole = read(wanted)
    lookahead.set_expected("waits", look_up(store, wanted).spans)
    left = read(wanted)
    for _ in range(5):
        assert read(popular) == whole
    assert read(wanted) == left < whole

    lookahead.stop_waiting("waits")
    for _ in range(9):
        left = read(popular)
    assert left < whole == read(wanted)
    lookahead.set_expected("waits", look_up(store, wanted).spans)
    store.poll()
    # What nobody has read since the start is in no table of the caches yet.
    store = bench.reopen(store, host_gb=gb(50 * 4096), **options)
    store.poll()
    read(wanted)
    for _ in range(9):
        read(popular)
    assert read(wanted) < whole

    placement = store.cache.placement
    assert placement.cached_chunks(Tier.HOST)
    Purge().step(store)
    assert not placement.cached_chunks(Tier.HOST), "room for those that are there"
    bench.close_all()
