"""The benchmark of planning plans what it says."""

from __future__ import annotations

from bench.core.options import parse
from bench.micro import planning


def test_every_state_has_a_row() -> None:
    given = ["--prefixes", "1000", "--shapes", "Llama-3-8B", "--repeat", "1"]
    rows = planning.run(parse("planning", "", planning.OPTIONS, given)).figures["rows"]
    states = ["no cache", "first read", "read again", "in the cache", "a cache of 30%"]
    assert [row["state"] for row in rows] == states
    for row in rows:
        assert row["chunks"] == 32 * (4 + 3 * 8 * 8)
        stages = (row["found again ms"], row["opened ms"], row["layers ms"])
        assert min(stages) > 0
        assert abs(sum(stages) - row["whole ms"]) < 0.05
