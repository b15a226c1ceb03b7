"""Batches of SGLang for its attention backends, on a CPU, and what they should give.

Pools, translator and batches are SGLang's. Only a model runner's other parts and the store are
stand-ins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from impress_sglang.paper.loader import LayerInputs
from impress_sglang.paper.plugin.attention import adopt_backend
from impress_sglang.paper.runtime import ServingRuntime, StoredRequest
from impress_sglang.plugin.rectangular import rectangular_attention
from impress_sglang.serving.report import new_report
from impress_sglang.transfer.sources import ReadStats
from tests.integration.tiny_model import LLAMA, write_config

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SCALING = DIM**-0.5


def stored_request(
    tokens: Tensor, resident: Tensor, slots: Tensor, rid: str = "r", **fields: Any
) -> StoredRequest:
    """Its prefix of these tokens is resident in some slots, and of the rest a part is loaded."""
    m = len(tokens) - len(resident)
    report = new_report("impress", len(resident), len(tokens))
    source = SimpleNamespace(
        rid=rid, num_layers=99, stats=ReadStats(), end_layer=lambda layer: None
    )
    store = SimpleNamespace(
        close_source=lambda source: None, ahead=SimpleNamespace(top_up=lambda: None)
    )
    own: dict[str, Any] = {"store": store, "source": source, "report": report}
    return StoredRequest(resident, slots, m, **(own | fields))


class Store:
    """Stands in for `ServingRuntime`: each layer of a request has random KVs of its own.

    Loading a layer of some requests fails, when not all is in its place.
    """

    fail = ServingRuntime.fail

    def __init__(self) -> None:
        self.live: dict[str, StoredRequest] = {}
        self.fails: dict[str, tuple[int, Exception]] = {}
        self.failed: list[str] = []
        self.store = SimpleNamespace(report=lambda error: None)
        self.shape = SimpleNamespace(num_layers=LAYERS)
        self.loaded: list[tuple[str, int]] = []
        self.inputs: dict[str, LayerInputs] = {}
        self.loader = self

    def load(
        self,
        layer: int,
        source: SimpleNamespace,
        inputs: LayerInputs,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        stats: Any,
    ) -> None:
        self.loaded.append((source.rid, layer))
        self.inputs[source.rid] = inputs
        for pool in (keys, values):
            pool[rows] = torch.randn(len(rows), KV_HEADS, DIM)
        number, error = self.fails.get(source.rid, (-1, Exception()))
        if layer == number:
            keys[rows] = torch.nan
            raise error


class Row:
    """A request: its row in the table, and the slots that its attention should see."""

    numbers = itertools.count()

    def __init__(self, world: World, known: int, prefix: tuple[int, int] | None = None) -> None:
        """After m - k zeros `known` resident tokens, and then k tokens of a stored prefix of m."""
        self.rid = f"request-{next(self.numbers)}"
        self._world = world
        (self.index,) = world.rows.alloc_rows(1)
        self.zeros = 0
        resident = world.take(known)
        slots = list(resident)
        if prefix is not None:
            k, m = prefix
            self.zeros = m - k
            own = world.take(k)
            slots += own
            tokens = torch.zeros(known + m, dtype=torch.int64)
            before = torch.tensor(resident, dtype=torch.int64)
            request = stored_request(tokens, before, torch.tensor(own), self.rid)
            world.store.live[self.rid] = request
        # Nobody may see what stands in slot 0.
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
            # Who reads slot 0 shall notice.
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

    def row(self, known: int, prefix: tuple[int, int] | None = None) -> Row:
        return Row(self, known, prefix)

    def adopted(self, backend: Any) -> Any:
        store: Any = self.store
        adopt_backend(backend, store, self.runner.token_to_kv_pool, store.failed.append)
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
        places = [(row.index, row.length) for row in rows]
        batch = forward_batch(mode, places, written, rids=[row.rid for row in rows])
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch


def forward_batch(
    mode: ForwardMode, places: Sequence[tuple[int, int]], written: Sequence[int], **fields: Any
) -> ForwardBatch:
    """SGLang's batch of rows with these indices and lengths, which writes to these slots."""
    indices, lengths = map(torch.tensor, zip(*places, strict=True))
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(places),
        input_ids=torch.zeros(len(written), dtype=torch.int64),
        req_pool_indices=indices,
        seq_lens=lengths,
        out_cache_loc=torch.tensor(written),
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths.clone(),
        positions=torch.zeros(len(written), dtype=torch.int64),
        **fields,
    )


def layers() -> list[RadixAttention]:
    return [RadixAttention(QUERY_HEADS, DIM, SCALING, KV_HEADS, layer) for layer in range(LAYERS)]


def prepare(backend: Any, world: World, *rows: tuple[Row, int]) -> Any:
    """Rows are extended by some tokens each, as far as a backend sees before it attends."""
    batch = world.extend(rows)
    backend.init_forward_metadata(batch)
    return batch


def extend(backend: Any, world: World, *rows: tuple[Row, int]) -> Any:
    """A whole pass that extends rows."""
    batch = prepare(backend, world, *rows)
    attend(backend, world, batch, rows)
    return batch


def decode(backend: Any, world: World, rows: Sequence[Row]) -> None:
    """A whole pass that extends each row by one token."""
    batch = world.decode(rows)
    backend.init_forward_metadata(batch)
    attend(backend, world, batch, [(row, 1) for row in rows])


def attend(backend: Any, world: World, batch: Any, rows: Sequence[tuple[Row, int]]) -> None:
    """Run each layer, and compare with attention over the slots that each row should have."""
    pool, total = world.runner.token_to_kv_pool, sum(count for _, count in rows)
    for layer in layers():
        q = torch.randn(total, QUERY_HEADS * DIM)
        k, v = (torch.randn(total, KV_HEADS, DIM) for _ in range(2))
        output = backend.forward(q, k, v, layer, batch).view(total, QUERY_HEADS, DIM)
        first = 0
        for row, count in rows:
            new = slice(first, first + count)
            assert torch.equal(pool.k_buffer[layer.layer_id][row.slots[-count:]], k[new])
            check(world, layer, row, q.view(-1, QUERY_HEADS, DIM)[new], output[new])
            first += count
    assert world.store.failed == [*world.store.fails]


def check(world: World, layer: Any, row: Row, queries: Tensor, output: Tensor) -> None:
    """What a layer has computed of a row is attention over the row's slots."""
    pool = world.runner.token_to_kv_pool
    expected = rectangular_attention(
        queries,
        pool.k_buffer[layer.layer_id][row.slots],
        pool.v_buffer[layer.layer_id][row.slots],
        scaling=SCALING,
        causal=True,
    )
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    config = LLAMA | {"hidden_size": QUERY_HEADS * DIM, "num_hidden_layers": LAYERS}
    folder = write_config(tmp_path_factory.mktemp("model"), config)
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
