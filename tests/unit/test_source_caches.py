"""Sources and the caches: what is cached, what is found there and what moves, and the counters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.stored_source import ReadStats
from tests.unit import source_factory as sources
from tests.unit.kv_factory import flip_byte, make_cache, make_shape
from tests.unit.step_engine import counting

ROOMY = [
    f"several-segments, {name}, reordered: {shape}"
    for name in sources.CACHES
    if name.startswith("room")
    for shape in ("cut-rows-float32", "no-probe-cut-rows")
]


@pytest.mark.parametrize("name", ROOMY)
def test_a_second_read_comes_from_the_caches_alone(name: str, tmp_path: Path) -> None:
    with counting() as (reader, engine):
        roomy = sources.opened(name, tmp_path, reader)
        sources.check_everything(roomy)
        first = roomy.stats
        chunks = sum(len(roomy.chunks(layer, s)) for layer in (0, 1) for s in roomy.columns)
        assert (first.ssd_chunks, first.host_chunks, first.device_chunks) == (chunks, 0, 0)
        assert engine.started_bytes == first.ssd_bytes > 0
        engine.started.clear()

        sources.check_everything(roomy)

        stats = roomy.stats
        assert engine.started == []
        assert stats.ssd_bytes == first.ssd_bytes
        assert stats.ssd_needed_bytes == first.ssd_needed_bytes
        assert stats.ssd_chunks == first.ssd_chunks
        assert stats.host_chunks + stats.device_chunks == chunks
        assert roomy.cache is not None
        if not roomy.cache.placement.capacity[Tier.HOST]:
            assert stats.device_chunks == chunks
        if not roomy.cache.placement.capacity[Tier.DEVICE]:
            assert stats.host_chunks == chunks
        roomy.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("name", ROOMY)
def test_a_chunk_that_will_be_cached_is_read_whole(
    name: str, reader: BlockReader, tmp_path: Path
) -> None:
    roomy = sources.opened(name, tmp_path, reader)
    tokens = sources.random_tokens(roomy, 4, 1)

    roomy.check(0, ["values"], tokens)

    whole = roomy.chunk_bytes(0, ["values"], tokens)
    if roomy.shape.probe_kv_heads:
        assert whole > roomy.block_bytes(0, ["values"], tokens), "else nothing is shown"
    assert roomy.stats.ssd_bytes == whole
    roomy.check(0, ["values"], tokens)
    assert roomy.stats.ssd_bytes == whole
    roomy.close()


@pytest.mark.usefixtures("no_gaps")
def test_a_chunk_that_will_not_be_cached_is_read_in_part(
    reader: BlockReader, tmp_path: Path
) -> None:
    """The device has one chunk, which is used as often as any other."""
    shape = sources.SHAPES["cut-rows-float32"]
    cache = sources.CacheKind(device=1, rule="LFU", page_tokens=8).make(shape)
    case = sources.open_case(tmp_path, shape, sources.LAYOUTS["one-segment"], reader, cache=cache)
    case.check(0, ["values"], torch.tensor([[0]]))
    before = case.stats.ssd_bytes

    case.check(0, ["values"], torch.tensor([[8]]))

    assert case.stats.ssd_bytes - before == sources.BLOCK
    assert (case.stats.ssd_chunks, case.stats.device_chunks) == (2, 0)
    case.close()


def draw_tokens(data: st.DataObject, case: sources.Case) -> Tensor | None:
    """None, or a random number of tokens, others in each head group."""
    if data.draw(st.integers(0, 3)) == 0:
        return None
    count = data.draw(st.integers(1, min(case.num_tokens, 12)))
    return sources.random_tokens(case, count, data.draw(st.integers(0, 1 << 20)))


@settings(max_examples=60)
@given(data=st.data())
def test_rows_are_the_stored_bits_whatever_moves_between_tiers(
    tmp_path_factory: pytest.TempPathFactory, reader: BlockReader, data: st.DataObject
) -> None:
    """Interleaved reads, requests, damage that comes and goes, and ids given to other chunks."""
    case = sources.draw_case(data, tmp_path_factory.mktemp("any"), reader)
    shape, parts, cache = case.shape, case.parts, case.cache
    assert cache is not None
    sources.poison(case)
    damaged: tuple[Path, int] | None = None
    for _ in range(data.draw(st.integers(1, 20))):
        step = data.draw(st.sampled_from(["read"] * 5 + ["damage", "reopen"]))
        if step == "reopen":
            case.reopen()
        elif step == "damage" and damaged is None:
            number = data.draw(st.integers(0, len(parts) - 1))
            layout = case.spans[number].segment.layout
            place = data.draw(st.integers(layout.header_bytes, layout.file_bytes - 1))
            damaged = (case.paths[number], place)
            flip_byte(*damaged)
        elif step == "damage" and damaged is not None:
            flip_byte(*damaged)
            damaged = None
        else:
            case.request()
            first = data.draw(st.integers(0, shape.num_layers - 1))
            for layer in range(first, shape.num_layers):
                kinds = data.draw(st.sets(st.sampled_from(sources.KINDS), min_size=1))
                tokens = draw_tokens(data, case)
                try:
                    case.check_more(layer, kinds, tokens)
                except SegmentUnreadable as error:
                    assert damaged is not None
                    assert error.segment_id == damaged[0].stem
                    break
        cache.check_integrity()
    if damaged is not None:
        flip_byte(*damaged)
    sources.check_everything(case)
    case.close()


Small = Callable[..., sources.Case]
SMALL = make_shape()


@pytest.fixture
def small(reader: BlockReader, tmp_path: Path) -> Iterator[Small]:
    """20 tokens in chunks of 8; rows of 32, 32 and 64 bytes, every chunk one block."""
    with contextlib.ExitStack() as stack:

        def make(shape: KVShape = SMALL, **room: int) -> sources.Case:
            cache, parts = make_cache(shape, **room), [sources.Part(20, 8, 0, 20)]
            case = sources.open_case(tmp_path, shape, parts, reader, cache=cache)
            stack.callback(case.close)
            return case

        yield make


def probe_and_load(case: sources.Case) -> None:
    """What the loader does where the probe heads agree on tokens 1, 2 and 17."""
    tokens = torch.tensor([[1, 2, 17]])
    case.check(0, ["probe"])
    case.check_more(0, sources.KVS, tokens)


# 20 rows of 32 bytes, and 3 of 32 + 64 bytes, in 3 and 2 + 2 chunks.
FIRST_TIME = ReadStats(
    ssd_bytes=7 * sources.BLOCK,
    ssd_needed_bytes=20 * 32 + 3 * 96,
    h2d_bytes=20 * 32 + 3 * 96,
    ssd_chunks=7,
    selected_chunks=4,
    important_bytes=3 * 96,
)


@pytest.mark.usefixtures("no_gaps")
class TestCounters:
    def test_without_caches(self, small: Small) -> None:
        case = small()

        probe_and_load(case)

        assert case.stats == FIRST_TIME
        assert (case.stats.chunks_accessed, case.stats.chunks_loaded) == (7, 7)
        assert case.histories[0].ssd_bytes == 4 * sources.BLOCK, "what was selected, not probed"

    def test_with_room_on_the_device(self, small: Small) -> None:
        """Every chunk that enters it is copied there whole."""
        case = small(device_chunks=20)

        probe_and_load(case)
        moved = FIRST_TIME.h2d_bytes + 7 * sources.BLOCK
        first = dataclasses.replace(FIRST_TIME, h2d_bytes=moved)
        assert case.stats == first
        probe_and_load(case)

        assert case.stats == dataclasses.replace(
            first,
            device_chunks=7,
            selected_chunks=8,
            important_bytes=2 * 3 * 96,
            important_device_bytes=3 * 96,
        )
        assert (case.stats.chunks_accessed, case.stats.chunks_loaded) == (14, 7)
        assert case.histories[0].ssd_bytes == 4 * sources.BLOCK

    def test_of_a_layer_that_falls_back(self, small: Small) -> None:
        """All keys were read, to choose: not as those of selected tokens."""
        case, tokens = small(), torch.tensor([[1, 2, 17]])
        case.check(0, ["probe"])
        case.check_more(0, ["keys"])
        case.check_more(0, ["values"], tokens)

        assert case.stats == ReadStats(
            ssd_bytes=8 * sources.BLOCK,
            ssd_needed_bytes=20 * 64 + 3 * 64,
            h2d_bytes=20 * 64 + 3 * 64,
            ssd_chunks=8,
            selected_chunks=5,
            important_bytes=3 * 64,
        )

    def test_a_hit_is_a_selected_row_that_was_on_the_device(self, small: Small) -> None:
        """Tokens 1 and 2 are in the one chunk that has room there, token 17 is not."""
        case = small(device_chunks=1)
        case.check(0, ["values"], torch.tensor([[1]]))
        assert (case.stats.important_bytes, case.stats.important_device_bytes) == (64, 0)

        case.check(0, ["values"], torch.tensor([[1, 2, 17]]))

        assert (case.stats.important_bytes, case.stats.important_device_bytes) == (4 * 64, 2 * 64)


def test_stats_add_up_field_by_field() -> None:
    names = [field.name for field in dataclasses.fields(ReadStats)]
    left, right = ReadStats(*range(len(names))), ReadStats(*range(100, 100 + len(names)))

    left.add(right)

    assert [getattr(left, name) for name in names] == [100 + 2 * i for i in range(len(names))]
    found = left.as_dict()
    chunks = {tier: found[f"{tier}_chunks"] for tier in ("device", "host", "ssd")}
    assert found.pop("chunks_accessed") == sum(chunks.values())
    assert found.pop("chunks_loaded") == chunks["host"] + chunks["ssd"]
    assert found == dataclasses.asdict(left)
