"""The benchmarks of the index and of planning read and plan what they say."""

from __future__ import annotations

import pytest

from bench.core.options import parse
from bench.micro import planning
from bench.micro.index import measure_chunks


def test_each_chunk_of_each_segment_is_read() -> None:
    row = measure_chunks(2)

    # Pages of the base, and three planes of the units of 128 tokens of 8 heads, in 32 layers.
    assert row["chunks"] == 2 * 32 * (32 + 3 * 8 * 64)
    assert min(row["attach ms"], row["access ms"]) > 0


@pytest.mark.parametrize("more", [[], ["--kernels"]])
def test_every_state_has_a_row(more: list[str]) -> None:
    given = ["--prefixes", "1000", "--shapes", "Llama-3-8B", "--repeat", "1", *more]
    rows = planning.run(parse("planning", "", planning.OPTIONS, given)).figures["rows"]
    states = ["no cache", "first read", "read again", "in the cache", "a cache of 30%"]
    assert [row["state"] for row in rows] == states
    for row in rows:
        assert row["chunks"] == 32 * (4 + 3 * 8 * 8)
        stages = (row["found again ms"], row["opened ms"], row["layers ms"])
        assert min(stages) > 0
        assert abs(sum(stages) - row["whole ms"]) < 0.05
