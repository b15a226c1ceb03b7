"""Rows, starts and loading of prefixes in SGLang's triton and flashinfer backends, on a CPU.

`tests/serving/test_triton_backend.py` runs this file in a process of its own: Triton decides when
it is imported whether kernels are interpreted. Flashinfer's wrappers are stand-ins (there are none
without CUDA): what they are given is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from impress_sglang.paper.plugin.paged import keep_host_rows
from tests.integration.backend_world import (
    CAPTURED,
    DIM,
    LAYERS,
    QUERY_HEADS,
    Row,
    World,
    attend,
    beams_on_rows_of,
    captured,
    configured,
    decode,
    extend,
    prepare,
    replayed,
)

__all__ = ["configured"]


@pytest.fixture
def world(configured: tuple[Any, Any]) -> World:
    return World(*configured)


@pytest.fixture
def triton_backend(world: World) -> Any:
    return world.adopted(TritonAttnBackend(world.runner))


def test_extend_of_rows_with_and_without_a_prefix(world: World, triton_backend: Any) -> None:
    offset, resident, new = world.row(7, prefix=(13, 50)), world.row(20), world.row(0)
    batch = extend(triton_backend, world, (offset, 9), (resident, 4), (new, 6))
    assert world.store.loaded == [(offset.rid, 0), (offset.rid, 1)]
    inputs = world.store.inputs[offset.rid]
    assert inputs.queries.shape == (9, QUERY_HEADS, DIM)
    assert inputs.resident_rows.tolist() == offset.slots[:7]
    # The scheduler's own lengths are left alone, and SGLang finds its translator in place.
    assert batch.seq_lens.tolist() == [66, 24, 6]
    assert batch.extend_prefix_lens_cpu == [57, 20, 0]
    assert triton_backend.kv_index_translator is world.runner.kv_index_translator


def test_chunks_of_a_prefill_and_its_decode(world: World, triton_backend: Any) -> None:
    """Two chunks of one request, then decode steps beside a row without a prefix."""
    offset, other = world.row(3, prefix=(10, 40)), world.row(12)
    for count in (6, 5):
        extend(triton_backend, world, (offset, count))
    assert len(world.store.loaded) == LAYERS, "the second chunk finds the prefix in its slots"
    extend(triton_backend, world, (other, 2))
    for order in ([offset, other], [other, offset]):
        decode(triton_backend, world, order)


def test_decoding_rows_in_a_batch_of_prefill(world: World, triton_backend: Any) -> None:
    """MIXED: SGLang runs it as an extend in which decoding rows have one new token."""
    decoding = world.row(0, prefix=(8, 33))
    extend(triton_backend, world, (decoding, 4))
    stored = world.row(2, prefix=(5, 21))
    extend(triton_backend, world, (stored, 7), (world.row(6), 3), (decoding, 1))


@pytest.mark.parametrize("kind", [TritonAttnBackend, TorchNativeAttnBackend])
def test_beams_on_rows_that_started_late(world: World, kind: type[Any]) -> None:
    backend = world.adopted(kind(world.runner))
    rows = beams_on_rows_of(world, backend, [(4, 30), (6, 50)])
    decode(backend, world, rows)


Begin = Callable[..., Any]


def rows_of_all_kinds(world: World, backend: Any, begin: Begin) -> list[Row]:
    """With a part of a prefix, without one, and with a whole one."""
    rows = [world.row(2, prefix=(11, 60)), world.row(17), world.row(0, prefix=(6, 6))]
    begin(backend, world, *((row, 3) for row in rows))
    return rows


def beams_beside_a_row_that_starts_late(world: World, backend: Any, begin: Begin) -> list[Row]:
    rows = [*beams_on_rows_of(world, backend, [(4, 30)]), world.row(0, prefix=(5, 40))]
    begin(backend, world, (rows[-1], 2))
    return rows


made_by = pytest.mark.parametrize(
    "make", [rows_of_all_kinds, beams_beside_a_row_that_starts_late], ids=["all kinds", "beams"]
)


def assert_sees(kv_indptr: Tensor, kv_indices: Tensor, rows: Sequence[Row]) -> None:
    """Of a captured size each row its slots, and what fills it up one each."""
    lengths = [len(row.slots) for row in rows]
    assert kv_indptr.diff().tolist() == [*lengths, *[1] * (CAPTURED - len(rows))]
    assert kv_indices[: sum(lengths)].tolist() == [slot for row in rows for slot in row.slots]


@made_by
def test_captured_decode(world: World, triton_backend: Any, make: Callable[..., Any]) -> None:
    """Steps of rows in a captured size that is larger than the batch."""
    triton_backend.init_cuda_graph_state(CAPTURED, CAPTURED)
    graph = captured(triton_backend, world, CAPTURED)
    rows = make(world, triton_backend, extend)
    for order in (rows, rows[1:], rows[::-1]):
        batch = world.decode(order)
        triton_backend.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
        # A replay reads what was captured, whatever was prepared eagerly in between.
        triton_backend.forward_metadata = graph
        assert_sees(graph.kv_indptr, graph.kv_indices, order)
        attend(triton_backend, world, batch, [(row, 1) for row in order], CAPTURED)


class Wrapper:
    """Stands in for flashinfer's wrappers: keeps what it was told to plan."""

    def __init__(self, *_: Any, use_cuda_graph: bool = False, **buffers: Any) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        self._paged_kv_indices_buf = buffers.get("paged_kv_indices_buffer")
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin_forward(self, *arguments: Any, **keywords: Any) -> None:
        copied = (a.clone() if isinstance(a, Tensor) else a for a in arguments)
        self.plans.append((tuple(copied), keywords))


def fast_decode_plan(wrapper: Wrapper, *arguments: Any, **keywords: Any) -> None:
    Wrapper.begin_forward(wrapper, *arguments, **keywords)


class TorchOnCpu:
    """torch, where "cuda" is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: str = "cpu", **keywords: Any) -> Tensor:
        return torch.empty(*shape, **keywords)

    def zeros(self, *shape: Any, device: str = "cpu", **keywords: Any) -> Tensor:
        return torch.zeros(*shape, **keywords)


@pytest.fixture
def flashinfer(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    for kind in ("DecodeWithPaged", "PrefillWithPaged", "PrefillWithRagged"):
        name = f"Batch{kind}KVCacheWrapper"
        monkeypatch.setattr(flashinfer_backend, name, Wrapper, raising=False)
    monkeypatch.setattr(flashinfer_backend, "fast_decode_plan", fast_decode_plan, raising=False)
    monkeypatch.setattr(flashinfer_backend, "torch", TorchOnCpu())
    return world.adopted(flashinfer_backend.FlashInferAttnBackend(world.runner))


@pytest.mark.parametrize("paged", [False, True])
def test_flashinfer_extend(world: World, flashinfer: Any, paged: bool) -> None:
    """New tokens from memory and the rest from the pool, or all from the pool."""
    flashinfer.use_paged = paged
    rows = [(world.row(4, prefix=(12, 70)), 5), (world.row(9), 2), (world.row(0, prefix=(3, 8)), 1)]
    prepare(flashinfer, world, *rows)
    (qo_indptr, kv_indptr, kv_indices, *_), _ = flashinfer.prefill_wrappers_paged[0].plans[-1]
    seen = [row.slots if paged else row.slots[:-count] for row, count in rows]
    assert qo_indptr.diff().tolist() == [5, 2, 1]
    assert kv_indptr.diff().tolist() == [len(slots) for slots in seen]
    assert kv_indices[: kv_indptr[-1]].tolist() == [slot for slots in seen for slot in slots]
    assert flashinfer.forward_metadata.use_ragged is not paged
    if not paged:
        (ragged_qo, ragged_kv, *_), _ = flashinfer.prefill_wrapper_ragged.plans[-1]
        assert ragged_qo.tolist() == ragged_kv.tolist() == [0, 5, 7, 8]
        assert flashinfer.forward_metadata.extend_no_prefix is False


@pytest.mark.parametrize("known_on_host", [True, False])
def test_flashinfer_decode(world: World, flashinfer: Any, known_on_host: bool) -> None:
    rows = [world.row(4, prefix=(12, 70)), world.row(9)]
    prepare(flashinfer, world, *((row, 2) for row in rows))
    batch = world.decode(rows)
    if known_on_host:
        keep_host_rows(batch, SimpleNamespace(req_pool_indices_cpu=batch.req_pool_indices.clone()))
    flashinfer.init_forward_metadata(batch)
    (kv_indptr, kv_indices, *_), _ = flashinfer.decode_wrappers[0].plans[-1]
    assert kv_indptr.diff().tolist() == [len(row.slots) for row in rows]
    assert kv_indices.tolist() == [slot for row in rows for slot in row.slots]


@made_by
@pytest.mark.parametrize("known_on_host", [True, False])
def test_flashinfer_captured_decode(
    world: World, flashinfer: Any, known_on_host: bool, make: Callable[..., Any]
) -> None:
    """The plan on the host has the lengths that the graph will find on the device.

    Also of rows whose starts are void, and whoever knows which rows they are.
    """
    flashinfer.init_cuda_graph_state(CAPTURED, CAPTURED)
    captured(flashinfer, world, CAPTURED)
    wrapper = flashinfer.decode_cuda_graph_metadata[CAPTURED][0]
    assert isinstance(wrapper.begin_forward, partial), "SGLang plans replays on the host"
    rows = make(world, flashinfer, prepare)
    for order in (rows, rows[::-1]):
        batch = world.decode(order)
        if known_on_host:
            host_rows = batch.req_pool_indices.clone()
            keep_host_rows(batch, SimpleNamespace(req_pool_indices_cpu=host_rows))
        flashinfer.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
        (kv_indptr, kv_indices, *_), keywords = wrapper.plans[-1]
        assert_sees(kv_indptr, kv_indices, order)
        assert torch.equal(keywords["global_override_indptr_cpu"].diff(), kv_indptr.diff())
