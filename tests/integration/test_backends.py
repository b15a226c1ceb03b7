"""How SGLang's attention backends become ours, and what they compute of rows with an offset.

Pools and batches are SGLang's; the store is a stand-in. `tests/serving/test_triton_backend.py`
compares triton with torch_native, which is tested here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable, UnsupportedError
from impress_sglang.paper.plugin.attention import ADOPTED, PrefixAttention, adopt_backend
from impress_sglang.paper.request import StoredRequest
from impress_sglang.plugin.rectangular import rectangular_attention
from impress_sglang.serving.pool_reader import reading_stream
from impress_sglang.serving.report import new_report
from impress_sglang.transfer.sources import ReadStats
from tests.unit.kv_factory import make_shape

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SCALING, TOKENS = DIM**-0.5, 800
SHAPE = make_shape(layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, key_dim=DIM)


@dataclasses.dataclass
class Row:
    """A request: its row in the table, which begins with zeros, and the slots behind these, which
    its attention should see."""

    index: int
    rid: str
    zeros: int
    slots: list[int]

    @property
    def length(self) -> int:
        return self.zeros + len(self.slots)


class Loading(StoredRequest):
    """A request whose layers get random KVs, or fail, when not all is in its place."""

    def __init__(self, world: World, rid: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world, self.rid = world, rid

    def load(
        self, layer: int, queries: Tensor, new_keys: Tensor, scaling: float, *pools: Tensor
    ) -> Tensor:
        assert scaling == SCALING and new_keys.shape == (len(queries), KV_HEADS, DIM)
        self.world.loaded.append((self.rid, layer, len(queries)))
        for pool in pools:
            pool[self.slots] = torch.randn(self.k, KV_HEADS, DIM)
        number, error = self.world.fails.get(self.rid, (-1, Exception()))
        if layer == number:
            pools[0][self.slots] = torch.nan
            raise error
        return self.slots


class World:
    """A backend with its pools, and requests, some of which fail in a layer."""

    def __init__(self) -> None:
        self.pool = MHATokenToKVPool(
            TOKENS, 1, torch.float32, KV_HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
            # Who reads slot 0 shall notice.
            buffer[0] = float("nan")
        self.table = ReqToTokenPool(12, 256, "cpu", enable_memory_saver=False)
        pools = {"req_to_token_pool": self.table, "token_to_kv_pool": self.pool}
        runner: Any = SimpleNamespace(device="cpu", **pools)
        # Scattered, so that neighbours in a row are none in the pool.
        self.free = iter((torch.randperm(TOKENS) + 1).tolist())
        self.backend: Any = TorchNativeAttnBackend(runner)
        self.live: dict[str, Loading] = {}
        self.fails: dict[str, tuple[int, Exception]] = {}
        self.failed: list[str] = []
        self.loaded: list[tuple[str, int, int]] = []
        self.store: Any = SimpleNamespace(
            report=lambda error: None,
            close_source=lambda source: None,
            ahead=SimpleNamespace(top_up=lambda: None),
        )
        adopt_backend(self.backend, self.live, self.pool, self.failed.append)

    def row(self, known: int, prefix: tuple[int, int] = (0, 0)) -> Row:
        """After m - k zeros `known` resident tokens, and then k tokens of a stored prefix of m."""
        (index,), (k, m) = self.table.alloc_rows(1), prefix
        resident, loaded = ([*itertools.islice(self.free, count)] for count in (known, k))
        row = Row(index, f"request-{index}", m - k, [*resident, *loaded])
        if m:
            source: Any = SimpleNamespace(
                rid=row.rid, num_layers=99, stats=ReadStats(), end_layer=lambda layer: None
            )
            slots, report = map(torch.tensor, (resident, loaded)), new_report("impress", known, m)
            rest = self.store, source, report
            self.live[row.rid] = Loading(self, row.rid, SHAPE, 0.6, *slots, m, *rest)
        return row

    def run(self, mode: ForwardMode, *rows: tuple[Row, int]) -> Any:
        """A whole pass that extends rows by some tokens each, compared with attention over the
        slots that each row should have."""
        before, written = [row.length for row, _ in rows], list[int]()
        for row, count in rows:
            new = [*itertools.islice(self.free, count)]
            row.slots += new
            written += new
            indices = torch.tensor([0] * row.zeros + row.slots, dtype=torch.int32)
            self.table.req_to_token[row.index, : row.length] = indices
        lengths = torch.tensor([row.length for row, _ in rows])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(written), dtype=torch.int64),
            req_pool_indices=torch.tensor([row.index for row, _ in rows]),
            seq_lens=lengths,
            out_cache_loc=torch.tensor(written),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths.clone(),
            positions=torch.zeros(len(written), dtype=torch.int64),
            rids=[row.rid for row, _ in rows if row.rid],
        )
        if mode.is_extend():
            counts = [count for _, count in rows]
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
            batch.extend_seq_lens_cpu = counts
            batch.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
            batch.extend_prefix_lens_cpu = before
        self.backend.init_forward_metadata(batch)
        for number in range(LAYERS):
            self._attend(RadixAttention(QUERY_HEADS, DIM, SCALING, KV_HEADS, number), batch, rows)
        assert self.failed == [*self.fails]
        return batch

    def _attend(self, layer: Any, batch: Any, rows: Sequence[tuple[Row, int]]) -> None:
        total = sum(count for _, count in rows)
        keys, values = self.pool.k_buffer[layer.layer_id], self.pool.v_buffer[layer.layer_id]
        q = torch.randn(total, QUERY_HEADS * DIM)
        k, v = (torch.randn(total, KV_HEADS, DIM) for _ in range(2))
        output = self.backend.forward(q, k, v, layer, batch).view(total, QUERY_HEADS, DIM)
        first = 0
        for row, count in rows:
            new = slice(first, first + count)
            assert torch.equal(keys[row.slots[-count:]], k[new])
            queries, seen = q.view(-1, QUERY_HEADS, DIM)[new], (keys[row.slots], values[row.slots])
            expected = rectangular_attention(queries, *seen, scaling=SCALING, causal=True)
            torch.testing.assert_close(output[new], expected, rtol=1e-4, atol=1e-5)
            first += count

    def extend(self, *rows: tuple[Row, int]) -> Any:
        return self.run(ForwardMode.EXTEND, *rows)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("stock", ADOPTED)
def test_objects_can_change_their_class(stock: type[Any]) -> None:
    """Python refuses a class with another layout, and a method that moved would not be found."""
    backend, anything = object.__new__(stock), Any
    adopt_backend(backend, anything, anything, anything)
    assert isinstance(backend, stock) and isinstance(backend, PrefixAttention)
    # What loads comes first, and goes on where SGLang would.
    assert type(backend).forward is PrefixAttention.forward
    assert "forward" not in vars(stock)
    for method in ("init_forward_metadata", "forward_extend", "forward_decode"):
        assert method in vars(stock), method
    assert "pack_read_stream" in vars(KVIndexTranslator)


def test_other_kinds_are_refused() -> None:
    """Also a subclass of a judged one, which may read rows in its own way."""
    kind, anything = type("Own", (TorchNativeAttnBackend,), {}), Any
    with pytest.raises(UnsupportedError, match=r"how Own attends; use .* torch_native, triton"):
        adopt_backend(object.__new__(kind), anything, anything, anything)


def test_extend_of_rows_with_and_without_a_prefix(world: World) -> None:
    offset, resident, new = world.row(7, prefix=(13, 50)), world.row(20), world.row(0)
    # Rows of beams come last, and have no request.
    new.rid = ""
    batch = world.extend((offset, 9), (resident, 4), (new, 6))
    assert world.loaded == [(offset.rid, 0, 9), (offset.rid, 1, 9)]
    # The scheduler's own lengths are left alone.
    assert batch.seq_lens.tolist() == [66, 24, 6]
    assert batch.extend_prefix_lens_cpu == [57, 20, 0]


def test_chunks_of_a_prefill_and_its_decode(world: World) -> None:
    """Two chunks of one request, then decode steps beside a row without a prefix, and in a MIXED
    batch: SGLang runs it as an extend in which decoding rows have one new token."""
    offset, other = world.row(3, prefix=(10, 40)), world.row(12)
    for count in (6, 5):
        world.extend((offset, count))
    assert len(world.loaded) == LAYERS, "the second chunk finds the prefix in its slots"
    world.extend((other, 2))
    for order in ([offset, other], [other, offset]):
        world.run(ForwardMode.DECODE, *((row, 1) for row in order))
    world.extend((world.row(2, prefix=(5, 21)), 7), (world.row(6), 3), (offset, 1))


@pytest.mark.parametrize(
    "error", [SegmentUnreadable("ab12", "test"), MemoryError(), torch.OutOfMemoryError()]
)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_only_the_request_fails_and_brings_no_nan_into_the_pass(
    world: World, layer: int, error: Exception
) -> None:
    """Whose prefix cannot be loaded; it goes through the pass, and others are served."""
    broken, intact = (world.row(0, prefix=(40, 50)) for _ in range(2))
    world.fails[broken.rid] = layer, error
    request, other = (world.live[row.rid] for row in (broken, intact))
    world.extend((broken, 1), (intact, 1))
    assert request.failed and not request.is_loading and request.layers_loaded == LAYERS
    assert not other.failed and other.layers_loaded == LAYERS
    slots = broken.slots[:40]
    for number in range(LAYERS):
        found = torch.cat([world.pool.k_buffer[number][slots], world.pool.v_buffer[number][slots]])
        assert bool(found.any()) == (number < layer)


def test_another_error_is_not_hidden(world: World) -> None:
    row = world.row(0, prefix=(4, 5))
    world.fails[row.rid] = 1, ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        world.extend((row, 1))


def test_pools_are_read_on_a_stream_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a process come round: a new one may be the model's."""
    numbers = itertools.chain([7, 3, 7, 5], itertools.repeat(9))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Handle(next(numbers)))
    reading_stream.cache_clear()
    model, scheduler = Handle(7), Handle(3)
    found = reading_stream(torch.device("cuda", 0), model, scheduler)
    assert found.cuda_stream == 5
    assert reading_stream(torch.device("cuda", 0), model, scheduler) is found, "one for all writes"
    reading_stream.cache_clear()


@dataclasses.dataclass(frozen=True)
class Handle:
    """A stream, as far as it is looked at."""

    cuda_stream: int
