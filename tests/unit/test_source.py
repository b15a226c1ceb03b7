"""Where a prefix's KVs come from: what reading costs, what is noted, and flipped bytes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.cost import ReadCost
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.reader import BlockReader
from tests.unit import kv_factory as kv
from tests.unit import source_factory as sources
from tests.unit.kv_factory import head_groups_of


@given(data=st.data())
def test_costs_exactly_the_blocks_that_hold_wanted_rows(
    tmp_path_factory: pytest.TempPathFactory, reader: BlockReader, data: st.DataObject
) -> None:
    """Of few and many tokens, where nothing is cached."""
    with mock.patch.object(ReadCost, "gap_bytes", 0):
        case = sources.draw_case(data, tmp_path_factory.mktemp("any"), reader, most_chunks=0)
        for seed, count in enumerate((1, 2, 5, case.num_tokens // 2, case.num_tokens)):
            tokens = sources.random_tokens(case, min(max(1, count), case.num_tokens), seed)
            for kind in sources.KINDS:
                before = case.stats.ssd_bytes
                case.check(0, [kind], tokens)
                assert case.stats.ssd_bytes - before == case.block_bytes(0, [kind], tokens)
        case.close()


@pytest.mark.parametrize("shape", ["gqa-float32", "no-probe-float32", "no-probe-bfloat16"])
def test_each_segment_notes_its_own_tokens(shape: str, reader: BlockReader, tmp_path: Path) -> None:
    """In logical order, whatever the order on disk, and each head group apart; their scores too."""
    own_shape, reordered = sources.SHAPES[shape], shape != "no-probe-float32"
    several = sources.open_case(tmp_path, own_shape, sources.SEVERAL, reader, reordered=reordered)
    head_groups = head_groups_of(own_shape)
    selected = sources.random_tokens(several, 20, 3)
    several.histories = [sources.history_of(span, by_importance=True) for span in several.spans]

    several.check(1, ["values"], selected)
    assert several.source.segment_ids == [f"segment{n}" for n in range(5)]
    scores = torch.rand(several.shape.num_query_heads, several.num_tokens)
    several.source.note_selection(1, selected.numpy(), scores)

    noted, first = [], 0
    for part, history in zip(several.parts, several.histories, strict=True):
        span, average, key = slice(part.start, part.stop), history.average, history.order_key
        assert average.shape == key.shape == (2, head_groups, part.num_tokens)
        for found in (average, key):
            assert not found[0].any(), "another layer"
            assert not found[1, :, : part.start].any() and not found[1, :, part.stop :].any()
        noted.append(average[1, :, span])
        count = part.stop - part.start
        sums = scores[:, first : first + count].view(head_groups, -1, count).sum(1)
        np.testing.assert_allclose(key[1, :, span], sums / sums.mean(1, keepdim=True), rtol=2e-3)
        first += count
    found = [np.flatnonzero(row).tolist() for row in np.concatenate(noted, 1)]
    assert found == selected.tolist()
    several.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize(
    ("shape", "reordered"),
    [("cut-rows-float32", False), ("cut-rows-float32", True), ("no-probe-cut-rows", True)],
)
def test_a_flipped_byte_hurts_the_rows_of_its_block_alone(
    reader: BlockReader, tmp_path: Path, shape: str, reordered: bool
) -> None:
    """The first or the last byte of each, one after the other; its ends cut through rows."""
    parts = [sources.Part(16, 8, 0, 16), sources.Part(30, 8, 3, 30)]
    case = sources.open_case(tmp_path, sources.SHAPES[shape], parts, reader, reordered=reordered)
    head_groups = kv.head_groups_of(case.shape)
    path, found = case.paths[1], 0
    for layer, column, chunk, start in list(sources.all_chunks(case.shape, case.parts[1], path)):
        (kind,) = (kind for kind in sources.KINDS if column in case.kind_columns(kind))
        # The other head groups of a read want good rows, and of the probe column all is read.
        head_group = 0 if column == kv.PROBE else kv.head_group_of(case.shape, column)
        touched_by = [
            case.blocks(layer, column, sources.same_tokens(case, [token]))
            for token in range(case.num_tokens)
        ]
        size = kv.chunk_disk_bytes(case.shape, column, 8, case.parts[1].num_tokens, chunk)
        for block in range(size // sources.BLOCK):
            touching = [t for t, blocks in enumerate(touched_by) if (1, chunk, block) in blocks]
            others = [t for t in range(case.num_tokens) if t not in touching]
            offset = start + block * sources.BLOCK
            bad = offset + (sources.BLOCK - 1) * ((chunk + block) % 2)
            kv.flip_byte(path, bad)

            if others:
                tokens = sources.same_tokens(case, range(len(others))).clone()
                tokens[head_group] = torch.tensor(others)
                case.check(layer, [kind], tokens)
            for token in touching[:1] if column == kv.PROBE else touching:
                found += 1
                case.request()
                one = torch.tensor([[token if n == head_group else 0] for n in range(head_groups)])
                with pytest.raises(SegmentUnreadable, match=f"block at {offset} ") as caught:
                    case.read(layer, [kind], one)
                assert caught.value.segment_id == "segment1"
            for other in {"probe", "keys", "values"} - {kind}:
                case.check(layer, [other])

            kv.flip_byte(path, bad)
    assert found > 100
    sources.check_everything(case)
    case.close()
