"""Recordings of what requests selected, so that policies can be compared without a model.

A recording is a directory with one `.npz` file per request:

    prefix      digest of the prefix's tokens, as a string
    num_tokens  m
    selected    uint8 [L, lanes, ceil(m / 8)]: bit i says whether a lane selected token i
    all_keys    bool [L]: whether the layer read all keys (it fell back)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedSelection:
    """One request: selected bool [L, lanes, m], all_keys bool [L]."""

    prefix: str
    selected: npt.NDArray[np.bool_]
    all_keys: npt.NDArray[np.bool_]

    def save(self, path: Path) -> None:
        """Write a file of the recording."""
        np.savez(
            path,
            prefix=np.array(self.prefix),
            num_tokens=np.array(self.selected.shape[2]),
            selected=np.packbits(self.selected, axis=2),
            all_keys=self.all_keys,
        )

    @classmethod
    def load(cls, path: Path) -> RecordedSelection:
        """Read a file of a recording."""
        with np.load(path) as file:
            num_tokens = int(file["num_tokens"])
            selected = np.unpackbits(file["selected"], axis=2, count=num_tokens).astype(np.bool_)
            return cls(str(file["prefix"]), selected, file["all_keys"])


class SelectionRecorder:
    """Collects the layers of one request and writes them when the last one is in."""

    def __init__(
        self, directory: Path, number: int, prefix: str, shape: tuple[int, int, int]
    ) -> None:
        """`shape` is (layers, lanes, tokens of the prefix)."""
        self._path = directory / f"{number:08d}.npz"
        self._prefix = prefix
        self._selected = np.zeros(shape, np.bool_)
        self._all_keys = np.zeros(shape[0], np.bool_)

    def note(
        self, layer: int, selected: Sequence[npt.NDArray[np.int64]], *, all_keys: bool
    ) -> None:
        """Take in a layer, what each lane selected; the last one writes the file."""
        for lane, tokens in enumerate(selected):
            self._selected[layer, lane, tokens] = True
        self._all_keys[layer] = all_keys
        if layer == len(self._all_keys) - 1:
            RecordedSelection(self._prefix, self._selected, self._all_keys).save(self._path)
