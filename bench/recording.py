"""Recordings of selections as one file: `python -m bench.recording DIRECTORY FILE.npz`.

A server writes one file per request (`--impress-record-dir`); a packed recording is a single file
of bits, small enough to be kept. It holds no text: a prefix is named by a number.

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

from impress_sglang.importance.recording import RecordedSelection


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
