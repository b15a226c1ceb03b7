"""The planning benchmark plans what a request plans."""

from __future__ import annotations

from bench.core.options import parse
from bench.micro.planning import OPTIONS, run


def test_every_state_has_a_row() -> None:
    given = ["--prefixes", "1000", "--shapes", "Llama-3-8B", "--repeat", "1"]
    rows = run(parse("planning", "", OPTIONS, given)).figures["rows"]
    states = ["no cache", "first read", "in the cache", "a cache of 30%"]
    assert [row["state"] for row in rows] == states
    for row in rows:
        # Pages of the base, and two planes of the units of 64 tokens of 8 heads, in 32 layers.
        assert row["chunks"] == 32 * (8 + 2 * 8 * 16)
        stages = (row["found again ms"], row["opened ms"], row["layers ms"])
        assert min(stages) > 0
        assert abs(sum(stages) - row["whole ms"]) < 0.05
