"""Rows, starts and loading of prefixes in SGLang's triton and flashinfer backends, on a CPU.

`tests/serving/test_triton_backend.py` runs this file in a process of its own: Triton decides when
it is imported whether kernels are interpreted. The backends, pools, translator and batches are
SGLang's. Only a model runner's other parts, flashinfer's wrappers (there are none without CUDA;
what they are given is recorded) and the store are stand-ins.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.integration.attention import adopt_backend
from impress_sglang.integration.paged import keep_host_rows
from impress_sglang.options import EXACT_BITS
from impress_sglang.serving.request import StoredRequest
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.transfer.loader import LayerInputs
from impress_sglang.transfer.slots import LayerSlots

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SCALING = DIM**-0.5
CAPTURED = 4


class Store:
    """Stands in for `ServingRuntime`: each layer of a request has random KVs of its own."""

    def __init__(self) -> None:
        self.live: dict[str, StoredRequest] = {}
        self.shape = SimpleNamespace(num_layers=LAYERS)
        self.estimator = SimpleNamespace(note_forward=self._note)
        self.passes: list[tuple[int, float]] = []
        self.loaded: list[tuple[str, int]] = []
        self.inputs: dict[str, LayerInputs] = {}

    def load_layer(
        self, layer: int, request: StoredRequest, inputs: LayerInputs, slots: LayerSlots
    ) -> None:
        self.loaded.append((request.rid, layer))
        self.inputs[request.rid] = inputs
        for own in (slots.keys, slots.values):
            own.put(torch.randn(request.k, KV_HEADS, DIM))

    def finish_layer(self, request: StoredRequest) -> None:
        request.end_layer()

    def begin_saves(self, rids: Any, lengths: Any) -> dict[int, Any]:
        return {}

    def _note(self, new_tokens: int, pairs: float, seconds: float) -> None:
        assert seconds > 0
        self.passes.append((new_tokens, pairs))


class Row:
    """A request: its row in the table, and the slots that its attention should see."""

    numbers = itertools.count()

    def __init__(self, world: World, known: int, sink: tuple[int, int] | None = None) -> None:
        """`known` tokens are resident; after them, of a offset row, k of a prefix of m."""
        self.rid = f"request-{next(self.numbers)}"
        self._world = world
        (self.index,) = world.rows.alloc_rows(1)
        self.zeros = 0
        resident = world.take(known)
        slots = list(resident)
        if sink is not None:
            k, m = sink
            self.zeros = m - k
            own = world.take(k)
            slots += own
            world.store.live[self.rid] = StoredRequest(
                rid=self.rid,
                token_ids=torch.zeros(known + m, dtype=torch.int64),
                resident_slots=torch.tensor(resident, dtype=torch.int64),
                slots=torch.tensor(own),
                num_tokens=m,
                bits=EXACT_BITS,
                quality=Quality(1, k / m) if k < m else EXACT,
                loading=None,
                report={},
            )
        # Nobody may see what stands in the sink slot.
        self.slots = slots
        self._write(0, [0] * self.zeros + slots)

    @property
    def length(self) -> int:
        return self.zeros + len(self.slots)

    def grow(self, count: int) -> list[int]:
        """Slots for new tokens, which are appended to the row."""
        new = self._world.take(count)
        self._write(self.length, new)
        self.slots += new
        return new

    def _write(self, start: int, slots: Sequence[int]) -> None:
        table = self._world.runner.req_to_token_pool.req_to_token
        table[self.index, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)


class World:
    """A model runner's pools, translator and configuration, and a store."""

    def __init__(self, model_config: Any, server_args: Any, page_size: int = 1) -> None:
        rows, tokens = 12, 800
        pool = MHATokenToKVPool(
            tokens,
            page_size,
            torch.float32,
            KV_HEADS,
            DIM,
            LAYERS,
            "cpu",
            enable_memory_saver=False,
        )
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_()
            # Who reads the sink slot shall notice.
            buffer[0] = float("nan")
        table = ReqToTokenPool(rows, 256, "cpu", enable_memory_saver=False)
        allocator = TokenToKVPoolAllocator(tokens, torch.float32, "cpu", pool, need_sort=False)
        translator = KVIndexTranslator(
            req_to_token=table.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=page_size,
            device="cpu",
        )
        self.runner = SimpleNamespace(
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=translator,
            model_config=model_config,
            server_args=server_args,
            device="cpu",
            gpu_id=0,
            page_size=page_size,
            dtype=torch.float32,
            kv_cache_dtype=torch.float32,
            kv_cache_dtype_str="auto",
            sliding_window_size=None,
            is_draft_worker=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            decode_num_tokens_per_req=lambda: 1,
            prefill_attention_backend_str="flashinfer",
            decode_attention_backend_str="flashinfer",
        )
        self.store = Store()
        self.rows = table
        # Scattered, so that neighbours in a row are none in the pool.
        self._page_size = page_size
        self._pages = iter((torch.randperm(tokens // page_size) + 1).tolist())

    def take(self, count: int) -> list[int]:
        """Slots of pages that nobody has."""
        size = self._page_size
        pages = itertools.islice(self._pages, -(-count // size))
        return [page * size + token for page in pages for token in range(size)][:count]

    def row(self, known: int, sink: tuple[int, int] | None = None) -> Row:
        return Row(self, known, sink)

    def adopted(self, backend: Any) -> Any:
        adopt_backend(backend, self.runner)
        backend.connect(self.store, self.store)
        return backend

    def extend(self, rows: Sequence[tuple[Row, int]]) -> Any:
        """SGLang's batch that extends rows by some tokens each."""
        prefixes = [row.length for row, _ in rows]
        new = [count for _, count in rows]
        written = [slot for row, count in rows for slot in row.grow(count)]
        batch = self._batch(ForwardMode.EXTEND, [row for row, _ in rows], written)
        batch.extend_num_tokens = sum(new)
        batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
        batch.extend_seq_lens_cpu = new
        batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
        batch.extend_prefix_lens_cpu = prefixes
        batch.extend_start_loc = torch.tensor([0, *new[:-1]], dtype=torch.int32).cumsum(0)
        batch.req_pool_indices_cpu = batch.req_pool_indices.clone()
        return batch

    def decode(self, rows: Sequence[Row]) -> Any:
        """SGLang's batch that extends each row by one token."""
        return self._batch(ForwardMode.DECODE, rows, [row.grow(1)[0] for row in rows])

    def _batch(self, mode: ForwardMode, rows: Sequence[Row], written: Sequence[int]) -> Any:
        lengths = torch.tensor([row.length for row in rows])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(written), dtype=torch.int64),
            req_pool_indices=torch.tensor([row.index for row in rows]),
            seq_lens=lengths,
            out_cache_loc=torch.tensor(written),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths.clone(),
            positions=torch.zeros(len(written), dtype=torch.int64),
            rids=[row.rid for row in rows],
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch


def attend_all_layers(
    backend: Any, world: World, batch: Any, rows: Sequence[tuple[Row, int]]
) -> None:
    """Run each layer, and compare with attention over the slots that each row should have."""
    pool = world.runner.token_to_kv_pool
    total = sum(count for _, count in rows)
    for layer in layers():
        q = torch.randn(total, QUERY_HEADS * DIM)
        k, v = (torch.randn(total, KV_HEADS, DIM) for _ in range(2))
        output = backend.forward(q, k, v, layer, batch)[:total].view(total, QUERY_HEADS, DIM)
        first = 0
        for row, count in rows:
            new = slice(first, first + count)
            assert torch.equal(pool.k_buffer[layer.layer_id][row.slots[-count:]], k[new])
            expected = rectangular_attention(
                q.view(-1, QUERY_HEADS, DIM)[new],
                pool.k_buffer[layer.layer_id][row.slots],
                pool.v_buffer[layer.layer_id][row.slots],
                scaling=SCALING,
                causal=True,
            )
            torch.testing.assert_close(output[new], expected, rtol=1e-4, atol=1e-5)
            first += count


def layers() -> list[RadixAttention]:
    return [
        RadixAttention(QUERY_HEADS, DIM, SCALING, KV_HEADS, layer_id) for layer_id in range(LAYERS)
    ]


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": QUERY_HEADS * DIM,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
    }
    Path(folder / "config.json").write_text(json.dumps(config))
    args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        skip_tokenizer_init=True,
        triton_attention_num_kv_splits=2,
    )
    context = runtime_context.create_context(args, role="scheduler")
    with runtime_context.use_context(context):
        context.parallel.override_permanently(attn_dcp_rank=0)
        yield ModelConfig(str(folder)), args


@pytest.fixture
def world(configured: tuple[Any, Any]) -> World:
    return World(*configured)


@pytest.fixture
def torch_native_backend(world: World) -> Any:
    return world.adopted(TorchNativeAttnBackend(world.runner))


@pytest.fixture
def triton_backend(world: World) -> Any:
    return world.adopted(TritonAttnBackend(world.runner))


def test_extend_of_rows_with_and_without_a_prefix(world: World, triton_backend: Any) -> None:
    sink, resident, new = world.row(7, sink=(13, 50)), world.row(20), world.row(0)
    rows = [(sink, 9), (resident, 4), (new, 6)]
    batch = world.extend(rows)
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, rows)
    assert world.store.loaded == [(sink.rid, 0), (sink.rid, 1)]
    inputs = world.store.inputs[sink.rid]
    assert inputs.queries.shape == (9, QUERY_HEADS, DIM) and len(inputs.resident_keys) == 7
    pairs = 9 * (20 + 5) + 4 * (20 + 2.5) + 6 * 3.5
    assert world.store.passes == [(19, pairs)]
    # The scheduler's own lengths are left alone, and SGLang finds its translator in place.
    assert batch.seq_lens.tolist() == [66, 24, 6]
    assert batch.extend_prefix_lens_cpu == [57, 20, 0]
    assert triton_backend.kv_index_translator is world.runner.kv_index_translator


def test_chunks_of_a_prefill_and_its_decode(world: World, triton_backend: Any) -> None:
    """Two chunks of one request, then decode steps beside a row without a prefix."""
    sink, other = world.row(3, sink=(10, 40)), world.row(12)
    for count in (6, 5):
        batch = world.extend([(sink, count)])
        triton_backend.init_forward_metadata(batch)
        attend_all_layers(triton_backend, world, batch, [(sink, count)])
    assert len(world.store.loaded) == LAYERS, "the second chunk finds the prefix in its slots"
    batch = world.extend([(other, 2)])
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, [(other, 2)])
    for order in ([sink, other], [other, sink]):
        batch = world.decode(order)
        triton_backend.init_forward_metadata(batch)
        attend_all_layers(triton_backend, world, batch, [(row, 1) for row in order])


def test_decoding_rows_in_a_batch_of_prefill(world: World, triton_backend: Any) -> None:
    """MIXED: SGLang runs it as an extend in which decoding rows have one new token."""
    decoding = world.row(0, sink=(8, 33))
    batch = world.extend([(decoding, 4)])
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, [(decoding, 4)])
    rows = [(world.row(2, sink=(5, 21)), 7), (world.row(6), 3), (decoding, 1)]
    batch = world.extend(rows)
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, rows)


def test_row_that_is_used_again(world: World, triton_backend: Any) -> None:
    """A row's start goes with the request that has it."""
    first = world.row(0, sink=(4, 30))
    batch = world.extend([(first, 2)])
    triton_backend.init_forward_metadata(batch)
    del world.store.live[first.rid]
    world.rows.free_rows([first.index])
    second = world.row(9)
    assert second.index == first.index
    batch = world.extend([(second, 3)])
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, [(second, 3)])


class Beam(Row):
    """A row that SGLang makes of another one: it is allocated and filled, and never extended."""

    def __init__(self, world: World, leader: Row) -> None:
        super().__init__(world, 0)
        self.slots = list(leader.slots)
        self._write(0, self.slots)


def beams_on_rows_of(world: World, backend: Any, starts: Sequence[tuple[int, int]]) -> list[Row]:
    """A leader without a prefix and its beams, on rows that earlier requests started late."""
    gone = [world.row(0, sink=sink) for sink in starts]
    backend.init_forward_metadata(world.extend([(row, 2) for row in gone]))
    leader = world.row(70)
    backend.init_forward_metadata(world.extend([(leader, 3)]))
    world.store.live.clear()
    world.rows.free_rows([row.index for row in gone])
    beams = [Beam(world, leader) for _ in gone]
    assert {row.index for row in beams} == {row.index for row in gone}
    return [leader, *beams]


@pytest.mark.parametrize("kind", ["triton_backend", "torch_native_backend"])
def test_beams_on_rows_that_started_late(
    request: pytest.FixtureRequest, world: World, kind: str
) -> None:
    backend = request.getfixturevalue(kind)
    rows = beams_on_rows_of(world, backend, [(4, 30), (6, 50)])
    batch = world.decode(rows)
    backend.init_forward_metadata(batch)
    attend_all_layers(backend, world, batch, [(row, 1) for row in rows])


def captured(backend: Any, world: World, size: int) -> Any:
    """Prepare a batch size for capture, as SGLang's runner does; returns what a graph would use."""
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=torch.zeros(size, dtype=torch.int64),
        req_pool_indices=torch.zeros(size, dtype=torch.int64),
        seq_lens=torch.ones(size, dtype=torch.int64),
        out_cache_loc=torch.zeros(size, dtype=torch.int64),
        seq_lens_sum=size,
        seq_lens_cpu=torch.ones(size, dtype=torch.int64),
        positions=torch.zeros(size, dtype=torch.int64),
    )
    world.runner.kv_index_translator.bind_runner_slots(batch)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return backend.forward_metadata


def replayed(world: World, batch: Any, size: int) -> Any:
    """SGLang's view of a batch that is filled up to a captured size."""

    def filled(values: Tensor, fill: int) -> Tensor:
        return torch.cat([values, torch.full((size - len(values),), fill, dtype=values.dtype)])

    buffers = SimpleNamespace(
        input_ids=filled(batch.input_ids, 0),
        positions=filled(batch.positions, 0),
        req_pool_indices=filled(batch.req_pool_indices, 0),
        seq_lens=filled(batch.seq_lens, 1),
        seq_lens_cpu=filled(batch.seq_lens_cpu, 1),
        mamba_track_indices=None,
    )
    return build_replay_fb_view(
        batch, buffers, size, batch.batch_size, size, None, 1, ForwardMode.DECODE, False
    )


def test_captured_decode(world: World, triton_backend: Any) -> None:
    """Steps of rows with and without a prefix, in a captured size that is larger than the batch."""
    triton_backend.init_cuda_graph_state(CAPTURED, CAPTURED)
    graph = captured(triton_backend, world, CAPTURED)
    rows = [world.row(2, sink=(11, 60)), world.row(17), world.row(0, sink=(6, 6))]
    batch = world.extend([(row, 3) for row in rows])
    triton_backend.init_forward_metadata(batch)
    attend_all_layers(triton_backend, world, batch, [(row, 3) for row in rows])
    for order in (rows, rows[1:], rows[::-1]):
        batch = world.decode(order)
        triton_backend.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
        # A replay reads what was captured, whatever was prepared eagerly in between.
        triton_backend.forward_metadata = graph
        size = len(order)
        lengths = [len(row.slots) for row in order]
        assert graph.kv_indptr.diff().tolist() == [*lengths, *[1] * (CAPTURED - size)]
        seen = [slot for row in order for slot in row.slots]
        assert graph.kv_indices[: len(seen)].tolist() == seen
        attend_captured(triton_backend, world, batch, order)


def test_captured_decode_of_beams(world: World, triton_backend: Any) -> None:
    """Beside a row that does start late."""
    triton_backend.init_cuda_graph_state(CAPTURED, CAPTURED)
    graph = captured(triton_backend, world, CAPTURED)
    rows = beams_on_rows_of(world, triton_backend, [(4, 30), (6, 50)])
    rows.append(world.row(0, sink=(5, 40)))
    triton_backend.init_forward_metadata(world.extend([(rows[-1], 2)]))
    batch = world.decode(rows)
    triton_backend.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
    triton_backend.forward_metadata = graph
    assert graph.kv_indptr.diff().tolist() == [len(row.slots) for row in rows]
    seen = [slot for row in rows for slot in row.slots]
    assert graph.kv_indices[: len(seen)].tolist() == seen


def attend_captured(backend: Any, world: World, batch: Any, rows: Sequence[Row]) -> None:
    """As the kernels of a replay, for a batch that is filled up; only its own rows are compared."""
    missing = CAPTURED - len(rows)
    # Row 0 is read by what fills up the batch, and slot 0 is written by it.
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(missing, dtype=torch.int64)])
    pool = world.runner.token_to_kv_pool
    for layer in layers():
        q = torch.randn(CAPTURED, QUERY_HEADS * DIM)
        k, v = (torch.randn(CAPTURED, KV_HEADS, DIM) for _ in range(2))
        output = backend.forward(q, k, v, layer, batch).view(-1, QUERY_HEADS, DIM)
        for index, row in enumerate(rows):
            expected = rectangular_attention(
                q.view(-1, QUERY_HEADS, DIM)[index : index + 1],
                pool.k_buffer[layer.layer_id][row.slots],
                pool.v_buffer[layer.layer_id][row.slots],
                scaling=SCALING,
                causal=True,
            )
            torch.testing.assert_close(output[index : index + 1], expected, rtol=1e-4, atol=1e-5)


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
    for name in ("BatchDecode", "BatchPrefill"):
        monkeypatch.setattr(
            flashinfer_backend, f"{name}WithPagedKVCacheWrapper", Wrapper, raising=False
        )
    monkeypatch.setattr(
        flashinfer_backend, "BatchPrefillWithRaggedKVCacheWrapper", Wrapper, raising=False
    )
    monkeypatch.setattr(flashinfer_backend, "fast_decode_plan", fast_decode_plan, raising=False)
    monkeypatch.setattr(flashinfer_backend, "torch", TorchOnCpu())
    return world.adopted(flashinfer_backend.FlashInferAttnBackend(world.runner))


@pytest.mark.parametrize("paged", [False, True])
def test_flashinfer_extend(world: World, flashinfer: Any, paged: bool) -> None:
    """New tokens from memory and the rest from the pool, or all from the pool."""
    flashinfer.use_paged = paged
    rows = [(world.row(4, sink=(12, 70)), 5), (world.row(9), 2), (world.row(0, sink=(3, 8)), 1)]
    flashinfer.init_forward_metadata(world.extend(rows))
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
    rows = [world.row(4, sink=(12, 70)), world.row(9)]
    flashinfer.init_forward_metadata(world.extend([(row, 2) for row in rows]))
    batch = world.decode(rows)
    if known_on_host:
        keep_host_rows(batch, SimpleNamespace(req_pool_indices_cpu=batch.req_pool_indices.clone()))
    flashinfer.init_forward_metadata(batch)
    (kv_indptr, kv_indices, *_), _ = flashinfer.decode_wrappers[0].plans[-1]
    assert kv_indptr.diff().tolist() == [len(row.slots) for row in rows]
    assert kv_indices.tolist() == [slot for row in rows for slot in row.slots]


@pytest.mark.parametrize("known_on_host", [True, False])
def test_flashinfer_captured_decode(world: World, flashinfer: Any, known_on_host: bool) -> None:
    """The plan on the host has the lengths that the graph will find on the device."""
    flashinfer.init_cuda_graph_state(CAPTURED, CAPTURED)
    captured(flashinfer, world, CAPTURED)
    wrapper = flashinfer.decode_cuda_graph_metadata[CAPTURED][0]
    assert isinstance(wrapper.begin_forward, partial), "SGLang plans replays on the host"
    rows = [world.row(4, sink=(12, 70)), world.row(9), world.row(1, sink=(5, 30))]
    flashinfer.init_forward_metadata(world.extend([(row, 2) for row in rows]))
    for order in (rows, rows[::-1]):
        batch = world.decode(order)
        if known_on_host:
            host_rows = batch.req_pool_indices.clone()
            keep_host_rows(batch, SimpleNamespace(req_pool_indices_cpu=host_rows))
        flashinfer.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
        (kv_indptr, kv_indices, *_), keywords = wrapper.plans[-1]
        lengths = [*(len(row.slots) for row in order), 1]
        assert kv_indptr.diff().tolist() == lengths
        assert keywords["global_override_indptr_cpu"].diff().tolist() == lengths
        seen = [slot for row in order for slot in row.slots]
        assert kv_indices[: len(seen)].tolist() == seen


@pytest.mark.parametrize("known_on_host", [True, False])
def test_flashinfer_captured_decode_of_beams(
    world: World, flashinfer: Any, known_on_host: bool
) -> None:
    """Host and device agree on rows whose starts are void, whoever knows which rows they are."""
    flashinfer.init_cuda_graph_state(CAPTURED, CAPTURED)
    captured(flashinfer, world, CAPTURED)
    wrapper = flashinfer.decode_cuda_graph_metadata[CAPTURED][0]
    rows = beams_on_rows_of(world, flashinfer, [(4, 30)])
    rows.append(world.row(0, sink=(5, 40)))
    flashinfer.init_forward_metadata(world.extend([(rows[-1], 2)]))
    batch = world.decode(rows)
    if known_on_host:
        host_rows = batch.req_pool_indices.clone()
        keep_host_rows(batch, SimpleNamespace(req_pool_indices_cpu=host_rows))
    flashinfer.init_forward_metadata_out_graph(replayed(world, batch, CAPTURED))
    (kv_indptr, kv_indices, *_), keywords = wrapper.plans[-1]
    lengths = [*(len(row.slots) for row in rows), 1]
    assert kv_indptr.diff().tolist() == lengths
    assert keywords["global_override_indptr_cpu"].diff().tolist() == lengths
    seen = [slot for row in rows for slot in row.slots]
    assert kv_indices[: len(seen)].tolist() == seen
