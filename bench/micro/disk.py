"""How fast the reader of the SSD store is against `fio`, on the same file, in the same run.

    python -m bench disk [--sizes 4k,16k,64k,256k --depth 32 --json FILE]

Writes a segment of --mb MB into the current directory, then reads runs of blocks of each size at
random places with O_DIRECT: `fio` (libaio, the same block size and depth), the engine alone, and
the whole reader, which also cuts runs into pieces and verifies the checksum of each block. They
take turns; figures are medians over --repeat turns. `fio` is Debian's package; without it the last
column is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.machine import describe_machine
from impress_sglang.storage.direct_io import AlignedBuffer, AlignedMemory
from impress_sglang.storage.engines import make_engine
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.reader import BlockRuns, ChunkReader, OpenSegment
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.storage.writer import write_segment

LAYERS, KV_HEADS, DIM = 16, 8, 128
CHUNK_TOKENS = 64
# Runs that are asked for together, as for a layer; two such reads are under way.
RUNS_PER_READ = 256
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20}


def main() -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse_arguments()
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=Path.cwd()) as folder:
        if not FileSystem().supports_direct_io(Path(folder)):
            print("the file system of this folder has no O_DIRECT", file=sys.stderr)
            return 1
        path = _write_segment(Path(folder), args.mb)
        segment = OpenSegment(path, FileSystem(), direct=True)
        rows = [_measure(args, segment, path, size) for size in args.sizes]
        segment.close()
    result = {
        "command": " ".join(["python -m bench disk", *sys.argv[1:]]),
        "machine": describe_machine(),
        "depth": args.depth,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench disk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=_sizes, default=_sizes("4k,16k,64k,256k"))
    parser.add_argument("--depth", type=int, default=32, help="reads in flight (default: 32)")
    parser.add_argument("--engine", default="auto", choices=("auto", "aio", "threads"))
    parser.add_argument("--mb", type=int, default=1024, help="size of the file (default: 1024)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number, unit = word[:-1], word[-1].lower()
        sizes.append(int(number) * _SUFFIXES[unit] if unit in _SUFFIXES else int(word))
    if any(size % BLOCK_BYTES for size in sizes):
        raise argparse.ArgumentTypeError(f"sizes must be multiples of {BLOCK_BYTES}")
    return sizes


def _write_segment(folder: Path, megabytes: int) -> Path:
    shape = KVShape(LAYERS, KV_HEADS, KV_HEADS, DIM, DIM, torch.float16, (0,))
    num_tokens = megabytes * 1_000_000 // (LAYERS * 2 * KV_HEADS * DIM * 2)
    info = SegmentInfo(
        "bench", "", "", "", 0, np.arange(num_tokens, dtype=np.int32), shape, CHUNK_TOKENS
    )
    rows = torch.randint(0, 1 << 15, (num_tokens, KV_HEADS, DIM), dtype=torch.int16)
    kvs = rows.view(torch.float16)
    path = folder / "bench.kv"
    write_segment(path, info, lambda layer: (kvs, kvs), AlignedBuffer(), FileSystem(), direct=True)
    return path


def _measure(
    args: argparse.Namespace, segment: OpenSegment, path: Path, size: int
) -> dict[str, Any]:
    turns: dict[str, list[float]] = {"reader": [], "engine": [], "fio": []}
    cpu = []
    for turn in range(args.repeat):
        mbps, used = _reader_mbps(args, segment, size, turn)
        turns["reader"].append(mbps)
        cpu.append(used)
        turns["engine"].append(_engine_mbps(args, path, size, turn))
        if shutil.which("fio"):
            turns["fio"].append(_fio_mbps(args, path, size))
    medians = {name: round(statistics.median(own), 1) for name, own in turns.items() if own}
    fio = medians.get("fio")
    return {
        "bytes": size,
        "reader_mbps": medians["reader"],
        "engine_mbps": medians["engine"],
        "fio_mbps": fio,
        "reader_over_fio": round(medians["reader"] / fio, 3) if fio else None,
        "engine_over_fio": round(medians["engine"] / fio, 3) if fio else None,
        "reader_cores": round(statistics.median(cpu), 2),
        "turns": {name: [round(mbps, 1) for mbps in own] for name, own in turns.items()},
    }


def _reader_mbps(
    args: argparse.Namespace, segment: OpenSegment, size: int, seed: int
) -> tuple[float, float]:
    """MB/s of the whole reader, and the cores it keeps busy."""
    pick, layout = random.Random(seed), segment.layout
    reader = ChunkReader(args.depth, FileSystem(), engine=args.engine)
    places = layout.layer_bytes // size
    memories = [AlignedMemory(layout.layer_bytes) for _ in range(2)]
    for memory in memories:
        # Fresh memory would be counted as reading.
        np.frombuffer(memory.view, np.uint8)[::BLOCK_BYTES] = 1

    def runs(number: int) -> BlockRuns:
        chosen = sorted(pick.sample(range(places), min(RUNS_PER_READ, places)))
        starts = np.array(chosen, np.int64) * size
        offset = layout.layer_offset(pick.randrange(LAYERS))
        return BlockRuns(segment, memories[number % 2], offset, starts, starts + size)

    began, used, total = time.perf_counter(), time.process_time(), 0
    pending = reader.submit([runs(0)])
    number = 0
    while time.perf_counter() - began < args.seconds:
        number += 1
        following = reader.submit([runs(number)])
        pending.wait()
        total += pending.num_bytes
        pending = following
    pending.wait()
    total += pending.num_bytes
    seconds = time.perf_counter() - began
    cores = (time.process_time() - used) / seconds
    reader.close()
    return total / seconds / 1e6, cores


def _engine_mbps(args: argparse.Namespace, path: Path, size: int, seed: int) -> float:
    """MB/s of the engine alone: no pieces, no checksums."""
    engine, rng = make_engine(args.engine, args.depth), np.random.default_rng(seed)
    memory = AlignedMemory(engine.depth * size)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    places = path.stat().st_size // size
    slots = np.arange(engine.depth)
    by_number: dict[int, int] = {}
    began, total, in_flight = time.perf_counter(), 0, 0
    while (going := time.perf_counter() - began < args.seconds) or in_flight:
        if going and len(slots):
            count = len(slots)
            offsets = rng.integers(0, places, count) * size
            numbers = engine.start(
                np.full(count, descriptor),
                offsets,
                memory.address + slots * size,
                np.full(count, size),
            )
            by_number.update(zip(numbers.tolist(), slots.tolist(), strict=True))
            in_flight += count
        numbers, results = engine.finish()
        assert (results == size).all()
        total += int(results.sum())
        in_flight -= len(numbers)
        slots = np.array([by_number.pop(number) for number in numbers.tolist()])
    seconds = time.perf_counter() - began
    os.close(descriptor)
    engine.close()
    return total / seconds / 1e6


def _fio_mbps(args: argparse.Namespace, path: Path, size: int) -> float:
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        "--readonly",
        "--rw=randread",
        f"--bs={size}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={args.depth}",
        f"--runtime={args.seconds}",
        "--time_based",
        "--output-format=json",
    ]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e6


if __name__ == "__main__":
    sys.exit(main())
