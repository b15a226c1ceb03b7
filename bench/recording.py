"""Recordings of selections as one file: `python -m bench.recording DIRECTORY FILE.npz`.

A server writes one file per request (`--impress-record-dir`); a packed recording is a single file
of bits, small enough to be kept. It holds no text: a prefix is named by a number.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from impress_sglang.importance.recording import RecordedSelection

# Questions of one prefix, in the order of the recording.
Recording = dict[str, list[RecordedSelection]]


def load_recording(path: Path) -> Recording:
    """Read a packed recording, or the directory that a server wrote."""
    by_prefix: Recording = defaultdict(list)
    selections = _from_directory(path) if path.is_dir() else _from_file(path)
    for selection in selections:
        by_prefix[selection.prefix].append(selection)
    if not by_prefix:
        raise SystemExit(f"{path} holds no recording")
    return dict(by_prefix)


def pack_recording(recording: Recording, path: Path) -> None:
    """Write a recording as one compressed file; prefixes get numbers for names."""
    arrays: dict[str, np.ndarray] = {}
    for number, selections in enumerate(recording.values()):
        stacked = np.stack([selection.selected for selection in selections])
        arrays[f"{number}.tokens"] = np.array(stacked.shape[2])
        arrays[f"{number}.selected"] = np.packbits(stacked, axis=2)
        arrays[f"{number}.all_keys"] = np.stack([s.all_keys for s in selections])
    np.savez_compressed(path, **arrays)


def _from_directory(path: Path) -> list[RecordedSelection]:
    return [RecordedSelection.load(file) for file in sorted(path.glob("*.npz"))]


def _from_file(path: Path) -> list[RecordedSelection]:
    found = []
    with np.load(path) as file:
        names = sorted({name.split(".")[0] for name in file.files}, key=int)
        for name in names:
            count = int(file[f"{name}.tokens"])
            selected = np.unpackbits(file[f"{name}.selected"], axis=2, count=count).astype(np.bool_)
            for own, all_keys in zip(selected, file[f"{name}.all_keys"], strict=True):
                found.append(RecordedSelection(name, own, all_keys))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    recording = load_recording(args.directory)
    pack_recording(recording, args.file)
    questions = sum(map(len, recording.values()))
    print(f"{args.file}: {len(recording)} prefixes, {questions} requests")


if __name__ == "__main__":
    main()
