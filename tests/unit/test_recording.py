"""Recordings of selections: what is written is read back, one file per request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from impress_sglang.importance.recording import RecordedSelection, SelectionRecorder


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


def test_recorder_writes_one_file_when_the_last_layer_is_in(tmp_path: Path) -> None:
    recorder = SelectionRecorder(tmp_path, 42, "d1", (3, 2, 11))
    nothing, everything = np.array([], np.int64), np.arange(11)

    recorder.note(0, [np.array([0, 10]), np.array([3])], all_keys=False)
    recorder.note(1, [nothing, everything], all_keys=True)
    assert list(tmp_path.iterdir()) == []
    recorder.note(2, [everything, nothing], all_keys=True)

    assert [path.name for path in tmp_path.iterdir()] == ["00000042.npz"]
    found = RecordedSelection.load(tmp_path / "00000042.npz")
    assert found.prefix == "d1"
    assert found.all_keys.tolist() == [False, True, True]
    assert [[np.flatnonzero(lane).tolist() for lane in layer] for layer in found.selected] == [
        [[0, 10], [3]],
        [[], list(range(11))],
        [list(range(11)), []],
    ]


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
