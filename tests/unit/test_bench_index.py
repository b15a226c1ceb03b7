"""The index benchmark reads what it says."""

from __future__ import annotations

from bench.micro.index import measure_chunks


def test_each_chunk_of_each_segment_is_read() -> None:
    row = measure_chunks(2)

    # Pages of the base, and two planes of the units of 64 tokens of 8 heads, in 32 layers.
    assert row["chunks"] == 2 * 32 * (64 + 2 * 8 * 128)
    assert min(row["attach ms"], row["access ms"]) > 0
