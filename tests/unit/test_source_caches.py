"""Sources and the caches: what is cached, what is found there and what moves, and the counters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.placement import Tier
from tests.unit import source_factory as sources
from tests.unit.kv_factory import flip_byte
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
            layout = case.spans[number][0].layout
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
        cache.placement.check_integrity()
    if damaged is not None:
        flip_byte(*damaged)
    sources.check_everything(case)
    case.close()
