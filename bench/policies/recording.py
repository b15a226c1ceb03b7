"""Recordings of what requests selected, so that policies can be compared without a model.

`bench.core.server` writes a folder with one `.npz` file per request if BENCH_RECORD_DIR names it:

    prefix      digest of the prefix's tokens, as a string
    num_tokens  m
    selected    uint8 [L, lanes, ceil(m / 8)]: bit i says whether a lane selected token i
    all_keys    bool [L]: whether the layer read all keys (it fell back)

`python -m bench recording DIRECTORY FILE.npz` packs it into a single file of bits, small enough to
be kept. It holds no text: a prefix is named by a number.

For each prefix p it has `p.tokens` m, `p.selected` uint8 [requests, L, lanes, ceil(m / 8)] and
`p.all_keys` bool [requests, L]; `order` says in which order the requests came. Files from before
there were lanes have no such dimension in `p.selected`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.management.tree import prefix_digest
from impress_sglang.serving.request import StoredRequest
from impress_sglang.storage.layout import KVShape

RECORD_VARIABLE = "BENCH_RECORD_DIR"


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
    """A `SelectionObserver` that writes a file for each request that uses a part of its prefix."""

    def __init__(self, directory: Path) -> None:
        """Make the directory if there is none."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._begun = 0
        self._open: dict[str, tuple[Path, RecordedSelection]] = {}

    def selected(self, shape: KVShape, layer: int, request: StoredRequest, tokens: Tensor) -> None:
        """See `SelectionObserver.selected`; the last layer writes the file."""
        if request.k == request.num_tokens:
            return
        if layer == 0:
            self._open[request.rid] = self._next_path(), _nothing_selected(shape, request)
        path, selection = self._open[request.rid]
        for lane, own in enumerate(tokens.numpy()):
            selection.selected[layer, lane, own] = True
        fallbacks = int(selection.all_keys.sum())
        selection.all_keys[layer] = request.stats.layers_by_fallback > fallbacks
        if layer == shape.num_layers - 1:
            del self._open[request.rid]
            selection.save(path)

    def _next_path(self) -> Path:
        self._begun += 1
        return self._directory / f"{self._begun - 1:08d}.npz"


def _nothing_selected(shape: KVShape, request: StoredRequest) -> RecordedSelection:
    tokens = request.token_ids.numpy().astype(np.int32)[request.resident_len :]
    size = shape.num_layers, shape.num_lanes, request.num_tokens
    return RecordedSelection(
        prefix_digest("", tokens), np.zeros(size, np.bool_), np.zeros(size[0], np.bool_)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """What requests selected, by prefix, and the order in which they came.

    `questions[p]` are the requests of prefix p; `order` has (p, position in `questions[p]`).
    """

    questions: list[list[RecordedSelection]]
    order: list[tuple[int, int]]


def load_recording(path: Path) -> Recording:
    """Read a packed recording, or the directory that a server wrote."""
    recording = _from_directory(path) if path.is_dir() else _from_file(path)
    if not recording.order:
        raise SystemExit(f"{path} holds no recording")
    return recording


def pack_recording(recording: Recording, path: Path) -> None:
    """Write a recording as one compressed file."""
    arrays = {"order": np.array(recording.order)}
    for number, selections in enumerate(recording.questions):
        stacked = np.stack([selection.selected for selection in selections])
        arrays[f"{number}.tokens"] = np.array(stacked.shape[3])
        arrays[f"{number}.selected"] = np.packbits(stacked, axis=3)
        arrays[f"{number}.all_keys"] = np.stack([s.all_keys for s in selections])
    np.savez_compressed(path, **arrays)


def _from_directory(path: Path) -> Recording:
    questions: dict[str, list[RecordedSelection]] = defaultdict(list)
    order: list[tuple[int, int]] = []
    for file in sorted(path.glob("*.npz")):
        selection = RecordedSelection.load(file)
        own = questions[selection.prefix]
        order.append((list(questions).index(selection.prefix), len(own)))
        own.append(selection)
    return Recording(list(questions.values()), order)


def _from_file(path: Path) -> Recording:
    questions = []
    with np.load(path) as file:
        order = [(int(prefix), int(question)) for prefix, question in file["order"]]
        for number in range(len({prefix for prefix, _ in order})):
            count = int(file[f"{number}.tokens"])
            packed = file[f"{number}.selected"]
            if packed.ndim == 3:
                packed = packed[:, :, None]
            selected = np.unpackbits(packed, axis=3, count=count).astype(np.bool_)
            flags = file[f"{number}.all_keys"]
            name = str(number)
            questions.append(
                [RecordedSelection(name, *pair) for pair in zip(selected, flags, strict=True)]
            )
    return Recording(questions, order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    recording = load_recording(args.directory)
    pack_recording(recording, args.file)
    print(f"{args.file}: {len(recording.questions)} prefixes, {len(recording.order)} requests")


if __name__ == "__main__":
    main()
