"""Chunks that a kernel moves hold the bytes that indexing would give them."""

from __future__ import annotations

import numpy as np
import pytest

from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.placement import Tier
from tests.unit.test_chunk_cache import HEAD_GROUPS, SHAPE, Bench, make_cache
from tests.unit.test_placement import each_move


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("shape", "device_pages", "host_pages"),
    [(SHAPE, 24, 20), (HEAD_GROUPS, 24, 20), (SHAPE, 0, 12), (HEAD_GROUPS, 12, 0)],
)
def test_random_accesses(shape: KVShape, device_pages: int, host_pages: int) -> None:
    """From SSD, between the caches, and through pages that others have just left."""
    bench, rng = Bench(make_cache(device_pages, host_pages, shape), shape), np.random.default_rng(0)
    for num_tokens, chunk_tokens in ((19, 8), (11, 4), (20, 16)):
        bench.attach(num_tokens, chunk_tokens)
    # Those of a probe stream without heads have no bytes, and are never asked for.
    chunks = sorted(chunk for chunk, own in bench.bytes.items() if len(own))
    moves = set()
    for _ in range(60):
        chosen = rng.choice(chunks, 7, replace=False).tolist()
        access = bench.access(dict(zip(chosen, rng.random(7).tolist(), strict=True)))
        moves |= {(move.source, move.target) for move in each_move(access)}
    assert bench.check_all() > 0
    if device_pages:
        assert (Tier.SSD, Tier.DEVICE) in moves
    if device_pages and host_pages:
        assert {(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST), (Tier.SSD, Tier.HOST)} <= moves
