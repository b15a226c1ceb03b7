"""The compiled loops and vectorised ones give the same results, bit for bit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from impress_sglang import loops
from tests.unit import vectorised_loops

SEEDS = st.integers(0, 2**32 - 1)


def both(name: str, *arguments: Any) -> Any:
    """What a loop returns; both modules return it and leave the same in their arguments."""
    outcomes = []
    for loop in (getattr(loops, name), getattr(vectorised_loops, name)):
        own = copy.deepcopy(arguments)
        outcomes.append((loop(*own), own))
    (found, changed), (expected, expected_changed) = outcomes
    check_same(found, expected)
    check_same(changed, expected_changed)
    return found


def check_same(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert isinstance(found, tuple)
        for own, other in zip(found, expected, strict=True):
            check_same(own, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def test_the_compiled_loops_are_used_where_numba_is_installed() -> None:
    assert all(hasattr(getattr(loops, name), "nopython_signatures") for name in loops.__all__)


def ascending(rng: np.random.Generator, head_groups: int, k: int, stop: int) -> np.ndarray:
    return np.sort([rng.permutation(stop)[:k] for _ in range(head_groups)], axis=1).reshape(
        head_groups, k
    )


def blocks_of(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last row of blocks, some of which hold parts of rows, and some none."""
    first = np.sort(rng.integers(0, rows, rng.integers(0, 9)))
    last = np.minimum(first + rng.integers(-1, 4, len(first)), rows - 1)
    return first.astype(np.int32), last.astype(np.int32)


class Span:
    """A span of a segment in a prefix, and tokens of the prefix."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.head_groups = int(rng.integers(1, 4))
        self.rows = int(rng.integers(1, 40))
        self.chunk_rows = int(rng.integers(1, 20))
        self.start = int(rng.integers(0, self.rows))
        count = int(rng.integers(1, self.rows - self.start + 1))
        self.first = int(rng.integers(0, 5))
        self.stop = self.first + count
        prefix = self.stop + int(rng.integers(0, 5))
        self.tokens = ascending(rng, self.head_groups, int(rng.integers(1, prefix + 1)), prefix)
        self.mapping = np.empty(0, np.uint16)
        if rng.integers(2):
            order = [rng.permutation(self.rows) for _ in range(self.head_groups)]
            self.mapping = np.concatenate(order).astype(rng.choice([np.uint16, np.uint32]))

    @property
    def place(self) -> tuple[Any, ...]:
        return self.tokens, self.first, self.stop, self.start, self.mapping, self.rows


@given(SEEDS)
def test_locate_rows(seed: int) -> None:
    span = Span(seed)
    blocks = (*blocks_of(span.rng, span.rows), *blocks_of(span.rng, span.rows))
    both("locate_rows", *span.place, span.chunk_rows, *blocks, True)
    inside = min(span.tokens.shape[1], span.stop - span.first)
    span.tokens = ascending(span.rng, span.head_groups, inside, span.stop - span.first) + span.first
    _, _, rows, counts, *_ = both("locate_rows", *span.place, span.chunk_rows, *blocks, False)
    assert len(rows) == counts.sum() == span.tokens.size


@given(SEEDS)
def test_chunk_hits(seed: int) -> None:
    span = Span(seed)
    hit = span.rng.integers(0, 2, span.head_groups * -(-span.rows // span.chunk_rows)).astype(bool)
    wanted, hits = both("chunk_hits", *span.place, span.chunk_rows, hit)
    assert 0 <= hits <= wanted <= span.tokens.size


@given(SEEDS)
def test_move_averages(seed: int) -> None:
    span = Span(seed)
    rng = span.rng
    averages = rng.integers(0, 256, (span.head_groups, span.rows)).astype(np.uint8)
    kept, raised = rng.integers(0, 256, (2, 256)).astype(np.uint8)
    both("move_averages", averages, span.tokens, span.first, span.stop, span.start, kept, raised)


@given(SEEDS)
def test_touched_chunks_and_tally(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 65, rng.integers(1, 30))
    counts = rng.integers(0, rows + 1) * rng.integers(0, 2, len(rows))
    chunks, wanted, shares = both("touched_chunks", counts, rows.astype(np.float64))
    assert (counts[chunks] == wanted).all() and wanted.sum() == counts.sum()
    assert (shares > 0).all() and (shares <= 1).all()
    tiers = rng.integers(0, 3, len(chunks)).astype(np.uint8)
    assert sum(both("tally", tiers, wanted)) == wanted.sum() + len(chunks)


@given(SEEDS)
def test_add_cached_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, rng.integers(1, 10))
    chunk_of_block = np.repeat(np.arange(len(sizes)), sizes)
    chunks = np.flatnonzero(rng.integers(0, 2, len(sizes)))
    tiers = rng.integers(0, 3, len(chunks)).astype(np.uint8)
    kept, wanted, blocks = (
        rng.integers(0, 2, size).astype(bool)
        for size in (len(chunks), len(chunk_of_block), len(chunk_of_block))
    )
    both("add_cached_blocks", blocks, wanted, chunk_of_block, chunks, tiers, kept, 0)


@given(SEEDS)
@settings(max_examples=300)
def test_record_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    accesses = rng.choice([0, 1, 2, 8, 9, 10, 19, 20, 21, 999, 1000], size).astype(np.uint16)
    averages, frequencies, priorities = rng.random((3, size)) * [[1.0], [9.0], [9.0]]
    ids = rng.permutation(size)[: rng.integers(0, size + 1)]
    shares = rng.random(len(ids))
    columns = (accesses, averages, frequencies, priorities)
    assert both("record_scores", ids, shares, *columns, 2.0, 0.1, 1000) is None


@given(SEEDS)
@settings(max_examples=300)
def test_find_candidates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    ids = rng.permutation(size)[: rng.integers(0, size + 1)]
    tiers = rng.integers(0, 3, len(ids)).astype(np.uint8)
    num_pages = rng.integers(1, 5, size).astype(np.uint16)
    # Few different values, so that some are equal.
    priorities = rng.integers(0, 4, size).astype(np.float64)
    lowest = rng.choice([0.0, 1.0, 2.0, np.inf], 2).tolist()
    both("find_candidates", ids, tiers, num_pages, priorities, 3, 2, *lowest, *FREE[seed % 3])


FREE = ((0, 0), (2, 0), (0, 1))


@given(SEEDS)
def test_loops_over_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, num_chunks = rng.integers(1, 5, 2).tolist()
    chunk_of_block = np.sort(rng.integers(0, num_chunks, rng.integers(1, 20)))
    possible = rng.integers(0, 2, len(chunk_of_block)).astype(bool)
    tiers = rng.integers(0, 3, (layers, num_chunks)).astype(np.uint8)
    missing = both("missing_blocks", tiers, chunk_of_block, possible, 0).reshape(-1)
    codes = rng.integers(0, 256, missing.size).astype(np.uint8)
    assert both("weigh_codes", codes, missing).sum() == missing.sum()
    assert (both("likely_flags", codes, missing, 26) <= missing).all()
    kept, raised = rng.integers(0, 256, (2, 256)).astype(np.uint8)
    both("move_codes", codes, missing, kept, raised)


@given(SEEDS)
def test_vector_addresses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    head_groups, head_group_chunks, chunk_rows, row_vectors, page_vectors = rng.integers(
        1, 6, 5
    ).tolist()
    count = int(rng.integers(1, 12))
    head_group, row = (
        rng.integers(0, head_groups, count),
        rng.integers(0, head_group_chunks * chunk_rows, count),
    )
    touched = np.unique(head_group * head_group_chunks + row // chunk_rows)
    place_of_chunk = np.zeros(head_groups * head_group_chunks, np.int64)
    place_of_chunk[touched] = np.arange(len(touched))
    tiers = rng.integers(0, 3, len(touched)).astype(np.uint8) * (seed % 3 > 0)
    width = -(-chunk_rows * row_vectors // page_vectors)
    pages = rng.integers(0, 99, (len(touched) if tiers.any() else 0, width)).astype(np.int32)
    sizes = (head_group_chunks, chunk_rows, row_vectors, page_vectors, 32, 4096, 8192, 512)
    bases = np.array([7, 3, 5], np.int64) << 40
    both("vector_addresses", head_group, row, tiers, place_of_chunk, pages, *sizes, bases)


def test_loops_are_compiled_where_nothing_can_be_kept() -> None:
    """A read-only container: no folder for what is compiled."""
    script = """
import logging
logging.basicConfig(level=logging.WARNING)
from impress_sglang.loops.jit import compiled

@compiled("(int64,)")
def successor(number: int) -> int:
    return number + 1

print(successor(41), type(successor).__name__)
"""
    environment = {
        **os.environ,
        "NUMBA_CACHE_LOCATOR_CLASSES": "numba.core.caching.IPythonCacheLocator",
    }
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["42", "CPUDispatcher"]
    assert "NUMBA_CACHE_DIR" in found.stderr
