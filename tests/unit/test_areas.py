"""Which blocks are read, and by which read, against the same block by block."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.loops import areas

SSD, HOST, DEVICE = 0, 1, 2
COUNTS = np.array([3, 3, 2, 1, 1, 1, 1, 1])
FIRST = np.cumsum(COUNTS) - COUNTS
BLOCKS, WIDTH = int(COUNTS.sum()), 3
CHUNK = st.tuples(st.sampled_from([SSD, HOST, DEVICE]), st.booleans())
FLAGS = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS)
OWNERS = st.lists(st.integers(-1, 2), min_size=BLOCKS, max_size=BLOCKS)


@given(
    found=st.dictionaries(st.integers(0, len(COUNTS) - 1), CHUNK), spared=FLAGS, pages=st.booleans()
)
def test_blocks_of_chunks(
    found: dict[int, tuple[int, bool]], spared: list[bool], pages: bool
) -> None:
    chunks = np.array(list(found), np.int64)
    tiers = np.array([tier for tier, _ in found.values()], np.uint8)
    kept = np.array([keep for _, keep in found.values()], np.bool_)
    width = WIDTH if pages or tiers.any() else 0
    held = np.arange(100, 100 + len(found) * width, dtype=np.int32).reshape(len(found), width)

    sources, frames, wanted, sums = areas.find_blocks(
        chunks, FIRST, COUNTS, tiers, kept, held, np.array(spared)
    )

    expected, from_ssd, by_tier = [], list[int](), [0, 0, 0]
    for place, (chunk, (tier, keep)) in enumerate(found.items()):
        for inside in range(COUNTS[chunk]):
            block = int(FIRST[chunk]) + inside
            expected.append((tier, block if tier == SSD else int(held[place, inside])))
            by_tier[tier] += 1
            if tier == SSD and (keep or not spared[block]):
                from_ssd.append(block)
    assert list(zip(sources.tolist(), frames.tolist(), strict=True)) == expected
    assert wanted.tolist() == from_ssd
    assert sums.tolist() == by_tier


@given(
    chunks=st.sets(st.integers(0, len(COUNTS) - 1)),
    tiers=st.lists(st.integers(0, 2), min_size=len(COUNTS), max_size=len(COUNTS)),
    spared=FLAGS,
)
def test_blocks_that_are_in_no_cache(
    chunks: set[int], tiers: list[int], spared: list[bool]
) -> None:
    found = areas.uncached_blocks(
        np.array(sorted(chunks), np.int64),
        FIRST,
        COUNTS,
        np.array(tiers, np.uint8),
        np.array(spared),
    )

    expected = [
        block
        for chunk in sorted(chunks)
        for block in range(FIRST[chunk], FIRST[chunk] + COUNTS[chunk])
        if tiers[chunk] == SSD and not spared[block]
    ]
    assert found.tolist() == expected


def naive_runs(blocks: list[int], gap: int) -> list[tuple[int, int]]:
    """Block by block: go on with the last run where that costs no more than the gap."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block - runs[-1][1] <= gap:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs


@given(wanted=FLAGS, owners=OWNERS, gap=st.integers(0, 20))
def test_what_no_read_brings_is_read_in_runs(
    wanted: list[bool], owners: list[int], gap: int
) -> None:
    own = np.array(owners, np.int16)

    starts, stops = areas.claim_blocks(np.flatnonzero(wanted), own, 3, gap)

    missing = [block for block in range(BLOCKS) if wanted[block] and owners[block] < 0]
    runs = list(zip(starts.tolist(), stops.tolist(), strict=True))
    assert runs == naive_runs(missing, gap)
    assert own.tolist() == [3 if block in missing else owner for block, owner in enumerate(owners)]


@given(wanted=FLAGS, owners=OWNERS, seen=FLAGS)
def test_who_brings_what_is_wanted(wanted: list[bool], owners: list[int], seen: list[bool]) -> None:
    blocks, own, before = np.flatnonzero(wanted), np.array(owners, np.int16), np.array(seen)

    found = areas.bringing(blocks, own, 3)
    new = areas.count_new(blocks, own, before, 3)

    asked = blocks.tolist()
    reads = range(-1, 3)
    assert found.tolist() == [any(owners[block] == read for block in asked) for read in reads]
    assert new.tolist() == [
        sum(owners[block] == read and not seen[block] for block in asked) for read in reads
    ]
    assert before.tolist() == [one or other for one, other in zip(wanted, seen, strict=True)]


@given(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_units_below_the_floors(floors: list[int], first: int, count: int) -> None:
    found = areas.units_below(np.array(floors, np.uint8), first, first + count)

    assert found.tolist() == [
        [plane, head, unit]
        for plane in range(2)
        for head, floor in enumerate(floors)
        for unit in range(first, first + count)
        if plane < floor
    ]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 3)), max_size=9))
def test_chunks_of_units(units: list[tuple[int, int, int]]) -> None:
    found = areas.unit_places(np.array(units, np.int64).reshape(-1, 3), 3, 4, 10)

    order = list(itertools.product(range(2), range(3), range(4)))
    assert found.tolist() == [10 + order.index(unit) for unit in units]


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 9))
def test_units_that_lack_planes(data: st.DataObject, heads: int, units: int, first: int) -> None:
    """Also of some columns of a table."""
    planes = st.lists(st.integers(0, 2), min_size=heads * units, max_size=heads * units)
    levels, wanted = (
        np.pad(np.array(data.draw(planes), np.uint8).reshape(heads, units), 1)[1:-1, 1:-1]
        for _ in range(2)
    )

    found = areas.missing_units(levels, wanted, first)

    plane = np.arange(2)[:, None, None]
    missing = np.argwhere((plane >= levels) & (plane < wanted))
    missing[:, 2] += first
    assert found.tolist() == missing.tolist()
