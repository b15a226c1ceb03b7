"""Systems that are compared under traffic: stock SGLang, HiCache and IMPRESS, with equal memory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.data import kv_bytes_per_token
from bench.core.options import DTYPE, KEEP, MODEL, SEED, SERVER_FLAG, Option, one_of
from bench.core.report import Row, interval
from bench.core.servers import HICACHE, HICACHE_MBPS, OURS, STOCK, Server, Servers
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


@dataclasses.dataclass(frozen=True)
class Systems:
    """Servers of all systems at all rates, one after the other."""

    args: argparse.Namespace
    model: Path
    room: int

    @property
    def host_bytes(self) -> int:
        """Of host memory for KVs."""
        return int(HOST_RATIO * self.room * kv_bytes_per_token(self.model, self.args.dtype))

    def each(self, pool: Servers) -> Iterator[tuple[str, float, Server]]:
        """A warm server of each; its log is looked at when the next is asked for."""
        for mbps, system in itertools.product(self.args.mbps, self.args.systems):
            with self._running(pool, system, mbps) as server:
                # First requests take longer.
                server.generate(list(range(100, 140)), 4)
                server.flush()
                yield system, mbps, server
                server.check_log()

    @contextlib.contextmanager
    def _running(self, pool: Servers, system: str, mbps: float) -> Iterator[Server]:
        name = f"{system}-{mbps:g}"
        store, flags, told = pool.folder / f"kv-{name}", [], {}
        preload = {"stock": STOCK, "hicache": HICACHE, "backend": HICACHE}.get(system, OURS)
        if preload == HICACHE:
            flags += [*HICACHE_FLAGS, f"--hicache-ratio={HOST_RATIO}"]
            told = {HICACHE_FOLDER: str(store), HICACHE_MBPS: str(mbps)}
            if system == "backend":
                extra = BACKEND | {"ssd_dir": str(store), "ssd_gb": 100, "min_free_gb": 0}
                flags += ["--hicache-storage-backend=dynamic"]
                flags += [f"--hicache-storage-backend-extra-config={json.dumps(extra)}"]
        elif preload == OURS:
            flags += ["--enable-impress", f"--impress-ssd-dir={store}", "--impress-min-free-gb=0"]
            flags += ["--impress-device-gb=0", f"--impress-host-gb={self.host_bytes / 1e9:.4f}"]
            flags += ["--impress-bits=exact"] if system == "exact" else []
            flags += self.args.server_flag
        flags += [f"--max-total-tokens={self.room}", f"--chunked-prefill-size={CHUNK_TOKENS}"]
        how = {"preload": preload, "environment": told}
        with pool.running(name, self.model, self.args.dtype, *flags, **how) as server:
            if preload == OURS:
                server.emulate_ssd(mbps)
            yield server


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
                own, base = of(drawn, axis=axis).T
                return own / base

            low, high = interval([pairs], of=ratio)
            row[name] = f"{ratio(pairs):.2f} [{low:.2f}, {high:.2f}]"
