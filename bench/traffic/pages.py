"""HiCache with its `file` backend and with ours: what a hit takes, and what a flipped bit does.

Each prompt is computed, stored, and asked for again behind an empty pool and empty host memory, so
that all of it comes from files; --mbps slows their reads down to a drive's, otherwise those of
`file` come from the kernel's page cache. Then the first byte of a number in the middle of a file
has a wrong bit. Columns: median TTFT in ms, computed and as a hit; what all prompts together wrote,
in how many files, and what the hits read; the answer behind the wrong bit, and the share of the
prompt that came from the storage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np

from bench.core.data import kv_bytes_per_token, model_folder
from bench.core.options import DTYPE, KEEP, MODEL, SEED, Option
from bench.core.report import Result, Row, Table, plain
from bench.core.servers import HICACHE, HICACHE_MBPS, Server, servers
from bench.core.session import step
from bench.traffic.clients import file_bytes
from bench.traffic.systems import HICACHE_FLAGS, HICACHE_FOLDER
from impress_sglang.cli.main import HICACHE as OURS

SYSTEMS = ("file", "impress")
OPTIONS = (
    Option("prompts", 8, "random ones", quick=2),
    Option("prompt-tokens", 2048, "of each", quick=512),
    Option("mbps", (0.0,), "of the drive; 0: as it is"),
    *(MODEL, DTYPE, SEED, KEEP),
)


def run(args: argparse.Namespace) -> Result:
    """Measure both backends at all rates."""
    model, rows = model_folder(args.model), []
    own_bytes = args.prompts * args.prompt_tokens * kv_bytes_per_token(model, args.dtype)
    draw = np.random.default_rng(args.seed)
    prompts = draw.integers(100, 40_000, (args.prompts, args.prompt_tokens + 1)).tolist()
    room = args.prompt_tokens * (args.prompts + 1)
    with servers(args) as pool:
        for mbps, system in itertools.product(args.mbps, SYSTEMS):
            name = f"{system}-{mbps:g}"
            store = pool.folder / f"kv-{name}"
            extra = json.dumps(OURS | {"ssd_dir": str(store), "ssd_gb": 100, "min_free_gb": 0})
            flags = [*HICACHE_FLAGS, "--hicache-ratio=1.05", f"--max-total-tokens={room}"]
            if system == "impress":
                flags += ["--hicache-storage-backend=dynamic"]
                flags += [f"--hicache-storage-backend-extra-config={extra}"]
            told = {HICACHE_FOLDER: str(store), HICACHE_MBPS: str(mbps)}
            how = {"preload": HICACHE, "environment": told}
            with pool.running(name, model, args.dtype, *flags, **how) as server, step(name):
                server.generate(list(range(100, 140)), 4)
                row = measure(server, store, prompts, own_bytes)
                server.check_log()
            rows.append({"system": system, "mbps": mbps, **row})
    return Result({"model": model.name, "rows": rows}, [Table(plain(*rows[0]), rows)])


def measure(server: Server, store: Path, prompts: list[list[int]], own_bytes: float) -> Row:
    """The figures of one backend, whose files will have `own_bytes` at least."""
    begun = file_bytes(server.pid)
    computed = [ttft(server, prompt) for prompt in prompts]
    files = files_in(store)
    while sum(path.stat().st_size for path in files) < own_bytes:
        time.sleep(0.2)
        files = files_in(store)
    stored = file_bytes(server.pid)
    server.flush()
    hits = [ttft(server, prompt) for prompt in prompts]
    after = file_bytes(server.pid)
    right = server.generate(prompts[0], 8)["output_ids"]
    server.flush()
    # The sign and exponent of a float32 come last.
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2 // 4 * 4 + 3] ^= 1 << 6
        path.write_bytes(content)
    answer = server.generate(prompts[0], 8)
    found = (answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)
    return {
        "computed_ms": round(statistics.median(computed) * 1e3, 1),
        "hit_ms": round(statistics.median(hits) * 1e3, 1),
        "written_mb": round((stored[1] - begun[1]) / 1e6, 1),
        "files": len(files),
        "read_mb": round((after[0] - stored[0]) / 1e6, 1),
        "flipped_bit": "right" if answer["output_ids"] == right else "wrong",
        "of_it_cached": round(found / len(prompts[0]), 3),
    }


def files_in(store: Path) -> list[Path]:
    """Of both backends, without those that are being written."""
    return [path for path in store.rglob("*") if path.suffix in (".bin", ".pages")]


def ttft(server: Server, prompt: list[int]) -> float:
    """Seconds until the first token."""
    began = time.perf_counter()
    came = list(server.stream(prompt, 1))
    return came[0].at - began
