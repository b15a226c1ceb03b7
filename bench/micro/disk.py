"""How fast the reader of the SSD store is against `fio`, on the same file, in the same run.

Writes a segment of --mb MB into the current directory, then reads runs of blocks of each size at
random places with O_DIRECT: `fio` (libaio, the same block size and depth), and the reader, which
also cuts runs into pieces and verifies the checksum of each block. They take turns; figures are
medians over --repeat turns. `fio` is Debian's package; without it its columns are empty.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from bench.core.options import KEEP, Option, one_of
from bench.core.report import Result, Row, Table, plain
from bench.core.session import BenchFailed, work_folder
from impress_sglang.storage.direct_io import AlignedBuffer, AlignedMemory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.pending_read import BlockRuns
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.storage.writer import write_segment

LAYERS, KV_HEADS, DIM = 16, 8, 128
CHUNK_TOKENS = 64
# Runs that are asked for together, as for a layer; two such reads are under way.
RUNS_PER_READ = 256
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20}


def _size(text: str) -> int:
    """Bytes, also as 4k or 1m."""
    unit = _SUFFIXES.get(text[-1].lower())
    size = int(text[:-1]) * unit if unit else int(text)
    if size % BLOCK_BYTES:
        raise argparse.ArgumentTypeError(f"sizes must be multiples of {BLOCK_BYTES}")
    return size


OPTIONS = (
    Option("sizes", (4096, 16384, 65536, 262144), "of a read, also as 4k", parse=_size),
    Option("depth", 32, "reads in flight"),
    Option("engine", "auto", "of reads", parse=one_of(("auto", "aio", "threads"))),
    Option("mb", 1024, "size of the file", quick=128),
    Option("seconds", 2.0, "of each measurement", quick=0.2),
    Option("repeat", 3, "turns", quick=1),
    KEEP,
)


def run(args: argparse.Namespace) -> Result:
    """Measure reads of all sizes.

    Raises:
        BenchFailed: the file system has no O_DIRECT.
    """
    with work_folder(args.keep) as folder:
        if not FileSystem().supports_direct_io(folder):
            raise BenchFailed("the file system of this folder has no O_DIRECT")
        path = _write_segment(folder, args.mb)
        segment = OpenSegment(path, FileSystem(), direct=True)
        rows = [_measure(args, segment, path, size) for size in args.sizes]
        segment.close()
    columns = plain(*(name for name in rows[0] if name != "turns"))
    return Result({"depth": args.depth, "rows": rows}, [Table(columns, rows)])


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


def _measure(args: argparse.Namespace, segment: OpenSegment, path: Path, size: int) -> Row:
    turns: dict[str, list[float]] = {"reader": [], "fio": []}
    cpu = []
    for turn in range(args.repeat):
        mbps, used = _reader_mbps(args, segment, size, turn)
        turns["reader"].append(mbps)
        cpu.append(used)
        if shutil.which("fio"):
            turns["fio"].append(_fio_mbps(args, path, size))
    medians = {name: round(statistics.median(own), 1) for name, own in turns.items() if own}
    fio = medians.get("fio")
    return {
        "bytes": size,
        "reader_mbps": medians["reader"],
        "fio_mbps": fio,
        "reader_over_fio": round(medians["reader"] / fio, 3) if fio else None,
        "reader_cores": round(statistics.median(cpu), 2),
        "turns": {name: [round(mbps, 1) for mbps in own] for name, own in turns.items()},
    }


def _reader_mbps(
    args: argparse.Namespace, segment: OpenSegment, size: int, seed: int
) -> tuple[float, float]:
    """MB/s of the whole reader, and the cores it keeps busy."""
    pick, layout = random.Random(seed), segment.layout
    reader = BlockReader(args.depth, FileSystem(), engine=args.engine)
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
