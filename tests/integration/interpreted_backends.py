"""Rows, starts and loading of prefixes in SGLang's triton and flashinfer backends, on a CPU.

`tests/serving/test_backend.py` runs this file in a process of its own: Triton decides when
it is imported whether kernels are interpreted. Flashinfer's wrappers are stand-ins (there are none
without CUDA): what they are given is recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from tests.integration.backend_world import (
    DIM,
    LAYERS,
    QUERY_HEADS,
    World,
    configured,
    decode,
    extend,
)

__all__ = ["configured"]


@pytest.fixture
def world(configured: tuple[Any, Any]) -> World:
    return World(*configured)


@pytest.fixture(params=[TritonAttnBackend, TorchNativeAttnBackend])
def backend(world: World, request: pytest.FixtureRequest) -> Any:
    return world.adopted(request.param(world.runner))


def test_extend_of_rows_with_and_without_a_prefix(world: World, backend: Any) -> None:
    offset, resident, new = world.row(7, prefix=(13, 50)), world.row(20), world.row(0)
    batch = extend(backend, world, (offset, 9), (resident, 4), (new, 6))
    assert world.store.loaded == [(offset.rid, 0), (offset.rid, 1)]
    inputs = world.store.inputs[offset.rid]
    assert inputs.queries.shape == (9, QUERY_HEADS, DIM)
    assert inputs.resident_rows.tolist() == offset.slots[:7]
    # The scheduler's own lengths are left alone, and SGLang finds its translator in place.
    assert batch.seq_lens.tolist() == [66, 24, 6]
    assert batch.extend_prefix_lens_cpu == [57, 20, 0]
    if isinstance(backend, TritonAttnBackend):
        assert backend.kv_index_translator is world.runner.kv_index_translator


def test_chunks_of_a_prefill_and_its_decode(world: World, backend: Any) -> None:
    """Two chunks of one request, then decode steps beside a row without a prefix."""
    offset, other = world.row(3, prefix=(10, 40)), world.row(12)
    for count in (6, 5):
        extend(backend, world, (offset, count))
    assert len(world.store.loaded) == LAYERS, "the second chunk finds the prefix in its slots"
    extend(backend, world, (other, 2))
    for order in ([offset, other], [other, offset]):
        decode(backend, world, order)


def test_decoding_rows_in_a_batch_of_prefill(world: World, backend: Any) -> None:
    """MIXED: SGLang runs it as an extend in which decoding rows have one new token."""
    decoding = world.row(0, prefix=(8, 33))
    extend(backend, world, (decoding, 4))
    stored = world.row(2, prefix=(5, 21))
    extend(backend, world, (stored, 7), (world.row(6), 3), (decoding, 1))
