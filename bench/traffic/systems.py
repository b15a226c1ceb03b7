"""Systems that are compared under traffic: stock SGLang, HiCache and IMPRESS, with equal memory."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.core.data import kv_bytes_per_token
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option, one_of
from bench.core.report import Row, interval
from bench.core.servers import HICACHE, HICACHE_MBPS, OURS, STOCK, Server, servers
from bench.core.session import step
from impress_sglang.cli.main import HICACHE as BACKEND

# Stock SGLang; HiCache with its `file` backend, and with ours; few bits, as a server has them that
# is told nothing; and exact KVs.
SYSTEMS = ("stock", "hicache", "backend", "impress", "exact")
OPTIONS = (
    Option("systems", SYSTEMS, f"of {', '.join(SYSTEMS)}", parse=one_of(SYSTEMS)),
    Option("mbps", (0.0,), "of the drive; 0: as it is"),
    *(SERVER_FLAG, MODEL, DTYPE, SEED, KEEP),
)
CHUNK_TOKENS = 512
# One file per page. Of its policies for reading ahead this one finds all that is in files; the
# others let go of what has not come in time.
PAGE_TOKENS = 64
HICACHE_FLAGS = (
    "--enable-hierarchical-cache",
    f"--page-size={PAGE_TOKENS}",
    "--hicache-io-backend=direct",
    "--hicache-mem-layout=layer_first",
    "--hicache-write-policy=write_through",
    "--hicache-storage-backend=file",
    "--hicache-storage-prefetch-policy=wait_complete",
)
HICACHE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# HiCache refuses a pool on the host that is not larger than the device's.
HOST_RATIO = 1.05


def measure(
    args: argparse.Namespace, model: Path, room: int, ask: Callable[[Server], Row]
) -> dict[str, Any]:
    """The figures of all systems at all rates, one after the other, with a pool of so many tokens.

    `ask` gives those of a warm server, among them `ttfts` in ms, of the same requests each time.
    """
    host_bytes = int(HOST_RATIO * room * kv_bytes_per_token(model, args.dtype))
    flags = [f"--max-total-tokens={room}", f"--chunked-prefill-size={CHUNK_TOKENS}"]
    rows = []
    with servers(args) as pool:
        for mbps, system in itertools.product(args.mbps, args.systems):
            name = f"{system}-{mbps:g}"
            how, options = flags_of(system, pool.folder / f"kv-{name}", host_bytes, mbps)
            options += args.server_flag if how["preload"] == OURS else []
            with pool.running(name, model, args.dtype, *flags, *options, **how) as server:
                if how["preload"] == OURS:
                    server.emulate_ssd(mbps)
                # First requests take longer.
                server.generate(list(range(100, 140)), 4)
                server.flush()
                with step(f"{system}, {mbps:g} MB/s"):
                    before = file_bytes(server.pid)
                    row = {"system": system, "mbps": mbps, **ask(server)}
                    read, written = np.subtract(file_bytes(server.pid), before) / 1e6
                row |= {"read_mb": round(float(read), 1), "written_mb": round(float(written), 1)}
                server.check_log()
            rows.append(row)
    compare(rows)
    return {"model": model.name, "pool_tokens": room, "host_bytes": host_bytes, "rows": rows}


def flags_of(
    system: str, store: Path, host_bytes: int, mbps: float
) -> tuple[dict[str, Any], list[str]]:
    """What a server of a system is, and its flags."""
    if system == "stock":
        return {"preload": STOCK}, []
    if system in ("impress", "exact"):
        flags = ["--enable-impress", f"--impress-ssd-dir={store}", "--impress-min-free-gb=0"]
        flags += ["--impress-device-gb=0", f"--impress-host-gb={host_bytes / 1e9:.4f}"]
        return {"preload": OURS}, flags + ["--impress-bits=exact"] * (system == "exact")
    flags = [*HICACHE_FLAGS, f"--hicache-ratio={HOST_RATIO}"]
    if system == "backend":
        extra = BACKEND | {"ssd_dir": str(store), "ssd_gb": 100, "min_free_gb": 0}
        flags += ["--hicache-storage-backend=dynamic"]
        flags += [f"--hicache-storage-backend-extra-config={json.dumps(extra)}"]
    told = {HICACHE_FOLDER: str(store), HICACHE_MBPS: str(mbps)}
    return {"preload": HICACHE, "environment": told}, flags


def file_bytes(pid: int) -> tuple[int, int]:
    """What the processes of a server have read from files and written to them, be it to and from
    the page cache."""
    main, read, written = psutil.Process(pid), 0, 0
    for process in (main, *main.children(recursive=True)):
        # It has ended, or the kernel does not say.
        with contextlib.suppress(psutil.Error, NotImplementedError):
            counters = process.io_counters()
            read += max(counters.read_bytes, counters.read_chars)
            written += max(counters.write_bytes, counters.write_chars)
    return read, written


def compare(rows: Sequence[Row]) -> None:
    """Add medians and means of TTFTs as multiples of the first system's at the same rate.

    With 95% intervals by a paired bootstrap over requests, which are the same for all. Medians jump
    where about half of the requests find all in the pool.
    """
    for row in rows:
        first = next(other for other in rows if other["mbps"] == row["mbps"])
        pairs = np.stack([row["ttfts"], first["ttfts"]], axis=-1)
        for name, of in (("p50_ratio", np.median), ("mean_ratio", np.mean)):

            def ratio(drawn: Any, axis: int = 0, of: Callable[..., Any] = of) -> Any:
                values, base = of(drawn, axis=axis).T
                return values / base

            low, high = interval([pairs], of=ratio)
            row[name] = f"{ratio(pairs):.2f} [{low:.2f}, {high:.2f}]"
