"""Where a prefix's KVs come from: what reading costs, what is noted, and flipped bytes."""

from __future__ import annotations

from dataclasses import replace
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
from tests.unit import source_factory as sources
from tests.unit.kv_factory import BLOCK, flip_byte, head_groups_of
from tests.unit.source_factory import KINDS, SEVERAL, SHAPES, Part, PartCase


@given(data=st.data())
def test_costs_exactly_the_blocks_that_hold_wanted_rows(
    tmp_path_factory: pytest.TempPathFactory, reader: BlockReader, data: st.DataObject
) -> None:
    """Of few and many tokens, where nothing is cached."""
    with mock.patch.object(ReadCost, "gap_bytes", 0):
        case = sources.draw_case(data, tmp_path_factory.mktemp("any"), reader, pages=[0])
        for seed, count in enumerate((1, 2, 5, case.num_tokens // 2, case.num_tokens)):
            tokens = sources.random_tokens(case, min(max(1, count), case.num_tokens), seed)
            for kind in KINDS:
                case.check(0, [kind], tokens)
                assert case.source.stats.ssd_bytes == BLOCK * case.blocks(0, [kind], tokens)
        case.close()


@pytest.mark.parametrize("shape", ["gqa-float32", "no-probe-gqa-float32", "no-probe-mha-bfloat16"])
def test_each_segment_notes_its_own_tokens(shape: str, reader: BlockReader, tmp_path: Path) -> None:
    """In logical order, whatever the order on disk, and each head group apart; their scores too."""
    case = PartCase(tmp_path, SEVERAL, reader, SHAPES[shape], reordered=True)
    selected = sources.random_tokens(case, 20, 3)
    scores = torch.rand(case.shape.num_query_heads, case.num_tokens)

    case.source.record_selection(1, selected.numpy(), scores)

    of_groups = scores.unflatten(0, (head_groups_of(case.shape), -1)).sum(1)
    noted = []
    for sums, history, (_, span, _) in zip(
        of_groups.split(case.source.lengths, 1), case.histories, case.spans, strict=True
    ):
        expected = np.zeros_like(history.order_key)
        expected[1][:, span] = sums / sums.mean(1, keepdim=True)
        np.testing.assert_allclose(history.order_key, expected, rtol=2e-3)
        noted.append(history.average[1][:, span])
        assert np.count_nonzero(history.average) == np.count_nonzero(noted[-1])
    found = [np.flatnonzero(row).tolist() for row in np.concatenate(noted, 1)]
    assert found == selected.tolist()
    case.close()


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize(
    ("shape", "reordered"), [("cut-rows", False), ("cut-rows", True), ("no-probe-cut-rows", True)]
)
def test_a_flipped_byte_hurts_the_rows_of_its_block_alone(
    reader: BlockReader, tmp_path: Path, shape: str, reordered: bool
) -> None:
    """The first or the last byte of each, one after the other; its ends cut through rows."""
    parts, one_layer = (Part(2), Part(11, start=6)), replace(SHAPES[shape], num_layers=1)
    case = PartCase(tmp_path, parts, reader, one_layer, reordered=reordered)
    each = torch.arange(case.num_tokens).expand(head_groups_of(case.shape), -1).split(1, 1)
    reads = [
        (0, [kind], tokens) for kind in KINDS for tokens in (each[:1] if kind == "probe" else each)
    ]
    failures = 0
    for number, (segment, _, _) in enumerate(case.spans):
        layout = segment.layout
        for offset in range(layout.header_bytes, layout.file_bytes, BLOCK):
            bad = offset + (BLOCK - 1) * (offset // BLOCK % 2)
            flip_byte(case.paths[number], bad)
            for read in reads:
                try:
                    case.check(*read)
                except SegmentUnreadable as error:
                    assert error.segment_id == f"segment{number}" and f"at {offset} " in str(error)
                    failures += 1
            flip_byte(case.paths[number], bad)
    assert failures == sum(case.blocks(*read) for read in reads) > 15
    case.check_everything()
    case.close()
