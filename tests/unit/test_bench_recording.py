"""Recordings of selections: what is written is read back, one file per request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bench.policies.recording import RecordedSelection, SelectionRecorder
from impress_sglang.management.tree import prefix_digest
from impress_sglang.options import EXACT_BITS
from impress_sglang.serving.request import StoredRequest
from impress_sglang.storage.quality import Quality
from tests.unit.kv_factory import make_shape


@given(
    selected=arrays.arrays(
        np.bool_, st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))
    ),
    prefix=st.text("0123456789abcdef", max_size=32),
    data=st.data(),
)
def test_a_selection_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    selected: np.ndarray,
    prefix: str,
    data: st.DataObject,
) -> None:
    all_keys = data.draw(arrays.arrays(np.bool_, len(selected)))
    path = tmp_path_factory.getbasetemp() / "selection.npz"

    RecordedSelection(prefix, selected, all_keys).save(path)
    found = RecordedSelection.load(path)

    assert found.prefix == prefix
    assert found.selected.dtype == found.all_keys.dtype == np.bool_
    assert np.array_equal(found.selected, selected)
    assert np.array_equal(found.all_keys, all_keys)


def request_of(rid: str, length: int, k: int, resident: int = 0) -> StoredRequest:
    """A request that uses k of a stored prefix of so many tokens."""
    return StoredRequest(
        rid=rid,
        token_ids=torch.arange(resident + length),
        resident_slots=torch.arange(resident),
        slots=torch.arange(k),
        num_tokens=length,
        bits=EXACT_BITS,
        quality=Quality(1, k / length),
        loading=None,
        report={},
    )


def test_recorder_writes_one_file_when_the_last_layer_is_in(tmp_path: Path) -> None:
    shape = make_shape(layers=3, kv_heads=2, probe=())
    recorder = SelectionRecorder(tmp_path / "records")
    request, other = request_of("a", 11, 2, resident=4), request_of("b", 11, 2)
    sets = [[[0, 10], [3, 4]], [[0, 1], [9, 10]], [[2, 3], [5, 7]]]

    for layer, tokens in enumerate(sets):
        assert list((tmp_path / "records").iterdir()) == []
        request.stats.layers_by_fallback += layer == 1
        # Another request of the same batch, which never comes to its end.
        if layer < 2:
            recorder.selected(shape, layer, other, torch.tensor([[0, 1], [0, 1]]))
        recorder.selected(shape, layer, request, torch.tensor(tokens))

    (path,) = (tmp_path / "records").iterdir()
    found = RecordedSelection.load(path)
    assert path.name == "00000001.npz", "in the order in which they began"
    assert found.prefix == prefix_digest("", np.arange(4, 15, dtype=np.int32))
    assert found.all_keys.tolist() == [False, True, False]
    assert [[np.flatnonzero(lane).tolist() for lane in layer] for layer in found.selected] == sets


def test_recorder_takes_a_request_anew_that_begins_again(tmp_path: Path) -> None:
    shape = make_shape(layers=2, kv_heads=1, probe=())
    recorder, request = SelectionRecorder(tmp_path), request_of("a", 8, 1)

    for layer, token in ((0, 5), (0, 6), (1, 7)):
        recorder.selected(shape, layer, request, torch.tensor([[token]]))

    (path,) = tmp_path.iterdir()
    assert np.argwhere(RecordedSelection.load(path).selected[:, 0]).tolist() == [[0, 6], [1, 7]]


def test_recorder_leaves_whole_prefixes_out(tmp_path: Path) -> None:
    shape = make_shape(layers=1, kv_heads=1, probe=())

    SelectionRecorder(tmp_path).selected(shape, 0, request_of("a", 3, 3), torch.arange(3)[None])

    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_fields_of_its_description(tmp_path: Path) -> None:
    """Other tools read it without this package: token i is bit 7 - i % 8 of byte i // 8."""
    selected = np.zeros((2, 2, 11), np.bool_)
    selected[0, 1, [0, 9]] = True
    path = tmp_path / "selection.npz"

    RecordedSelection("d1", selected, np.array([False, True])).save(path)

    with np.load(path) as file:
        assert {name: file[name].tolist() for name in file} == {
            "prefix": "d1",
            "num_tokens": 11,
            "selected": [[[0, 0], [0b1000_0000, 0b0100_0000]], [[0, 0], [0, 0]]],
            "all_keys": [False, True],
        }
        assert file["selected"].dtype == np.uint8
