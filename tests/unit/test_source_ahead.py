"""Reading ahead: the same rows, each byte counted once, and nothing left over at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impress_sglang.cost import ReadCost
from impress_sglang.paper.source import PartSource
from impress_sglang.storage import reader as reader_module
from tests.unit.reading import wait_for_reads
from tests.unit.source_factory import (
    BLOCK,
    KVS,
    SHAPES,
    Case,
    Part,
    draw_case,
    open_case,
    random_tokens,
)
from tests.unit.step_engine import counting, reading, stepping


def draw_reads(data: st.DataObject, case: Case) -> Iterator[tuple[list[str], torch.Tensor | None]]:
    """What a layer asks for: whole, some tokens, all keys first, or nothing of the probe column."""
    count = data.draw(st.integers(1, min(12, case.num_tokens)))
    tokens = random_tokens(case, count, data.draw(st.integers(0, 1 << 20)))
    mode = data.draw(st.sampled_from(["some", "some", "whole", "all keys", "unseen"]))
    if mode != "unseen":
        yield ["probe"], None
    if mode == "all keys":
        yield ["keys"], None
        yield ["values"], tokens
    else:
        yield list(KVS), None if mode == "whole" else tokens


def run_requests(data: st.DataObject, case: Case) -> list[PartSource]:
    """Requests that take turns, read ahead at any time, and skip layers; rows are checked."""
    done, live = [], []
    for _ in range(data.draw(st.integers(2, 14))):
        steps = ["open", "ahead", "ahead", "read", "read", "close"]
        step = data.draw(st.sampled_from(steps))
        if step == "open" or not live:
            assert case.cache is not None
            case.cache.placement.advance()
            live.append(case.make_source(whole=data.draw(st.booleans())))
            continue
        source = data.draw(st.sampled_from(live))
        if step == "ahead":
            if source.next_ahead < source.num_layers:
                source.read_ahead()
        elif step == "close" or source.layer + 1 == source.num_layers:
            source.close()
            live.remove(source)
            done.append(source)
        else:
            layer = data.draw(st.integers(source.layer + 1, source.num_layers - 1))
            case.source = source
            for kinds, tokens in draw_reads(data, case):
                case.check_more(layer, kinds, tokens)
    for source in live:
        source.close()
    case.source = case.make_source()
    return done + live


@settings(max_examples=60)
@given(data=st.data(), engine=st.sampled_from(["auto", "threads", "counting"]))
def test_rows_are_the_stored_bits_whatever_was_read_ahead(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, engine: str
) -> None:
    """Chunks move between the caches after they were read ahead, and before they are asked for."""
    if engine == "counting":
        check_every_byte_is_counted_once(tmp_path_factory.mktemp("any"), data)
        return
    with reading(data.draw(st.integers(1, 6)), engine) as r:
        case = draw_case(data, tmp_path_factory.mktemp("any"), r)
        run_requests(data, case)
        case.close()


def check_every_byte_is_counted_once(folder: Path, data: st.DataObject) -> None:
    """What the device gave is what the sources counted, and no source reads a block twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "PIECE_BYTES", BLOCK)
        patch.setattr(ReadCost, "gap_bytes", 0)
        with counting() as (reader, engine):
            case = draw_case(data, folder, reader)
            sources = run_requests(data, case)

            assert sum(own.stats.ssd_bytes for own in sources) == engine.started_bytes
            for own in sources:
                stats = own.stats
                assert 0 <= stats.ahead_used_bytes <= stats.ahead_bytes <= stats.ssd_bytes
                wait_for_reads(own)
            if len(sources) == 1:
                assert len(set(engine.started)) == len(engine.started)
            case.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("name", ["cut-rows-float32", "no-probe-cut-rows", "no-probe-float32"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_is_certain_to_be_wanted_is_read_ahead(
    name: str, whole: bool, reordered: bool, tmp_path: Path
) -> None:
    """The probe column, or all keys without; nothing of it is left, and nothing else was read."""
    certain = ["probe"] if SHAPES[name].probe_kv_heads else ["keys"]
    certain = ["probe", "keys", "values"] if whole else certain
    with counting() as (reader, engine):
        parts = [Part(61, 8, 0, 61), Part(30, 8, 0, 30)]
        case = open_case(tmp_path, SHAPES[name], parts, reader, reordered=reordered)
        source = case.make_source(whole=whole)

        source.read_ahead()
        wait_for_reads(source)

        case.source, begun = source, engine.started_bytes
        assert begun == case.block_bytes(0, certain)
        for kind in certain:
            case.check_more(0, [kind])
        assert engine.started_bytes == begun
        case.check_more(0, sorted({"probe", "keys", "values"} - set(certain)))
        assert engine.started_bytes == case.block_bytes(0)
        source.close()
        assert source.stats.ssd_bytes == engine.started_bytes
        assert source.stats.ahead_bytes == source.stats.ahead_used_bytes == begun
        case.close()


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("asked", [False, True])
def test_nothing_reads_from_the_files_of_a_closed_source(tmp_path: Path, asked: bool) -> None:
    """No others begin; when those that were begun have ended, the files can be closed."""
    with stepping(4) as (reader, engine):
        parts = [Part(77, 8, 0, 77), Part(33, 8, 0, 33)]
        case = open_case(tmp_path, SHAPES["cut-rows-float32"], parts, reader)
        source = case.make_source(whole=True)
        for _ in range(2):
            source.read_ahead()
        engine.wait_started(2)
        if asked:
            engine.allow()
            source.read_probe(0)
            engine.stop()
        assert source.is_reading or asked

        in_flight = engine.in_flight
        source.close()
        time.sleep(0.1)
        assert source.is_reading == bool(in_flight)
        engine.allow()
        wait_for_reads(source)

        assert engine.in_flight == 0
        begun = len(engine.started)
        for segment, _, _ in case.spans:
            segment.close()
        # Another file takes the descriptors; nobody reads from it.
        reused = [os.open(tmp_path / "other", os.O_RDONLY | os.O_CREAT) for _ in case.spans]
        assert {segment.descriptor for segment, _, _ in case.spans} == set(reused)
        assert source.stats.ssd_bytes == engine.started_bytes
        for descriptor in reused:
            os.close(descriptor)
    assert len(engine.started) == begun
