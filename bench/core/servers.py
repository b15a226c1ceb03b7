"""The servers that `bench serving` compares: their flags, their stores, start, requests and end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from bench.core.zygote import ForkedProcess, Zygote
from bench.policies.recording import RECORD_VARIABLE
from impress_sglang.config import ImpressConfig
from impress_sglang.options import EXACTLY, is_bits

POLICIES = (
    "recompute",
    "as",
    "as+h2o+lru",
    "as+h2o+lfu",
    "paper+itf",
    "paper+itf+reorder",
    "paper",
    "impress",
)
BASELINES = POLICIES[:4]
REORDERING = ("paper+itf+reorder", "paper")
# `impress@BITS` loads prefixes in so many bits, `even@BITS` too, but spreads them evenly.
WITH_BITS = ("impress", "even")

START_SECONDS = 300
STOP_SECONDS = 30
REQUEST_SECONDS = 300
REORDER_SECONDS = 1200
LOG_LINES_SHOWN = 20
MIN_PREFIX_TOKENS = 128
# Rows that SGLang keeps free beside a prompt's own.
SPARE_TOKENS = 64


class BenchFailed(RuntimeError):
    """The benchmark cannot go on; the message says why, for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What all servers of a run have in common; `pool_tokens` is the size of the device pool."""

    model: Path
    dtype: str
    retention: float
    pool_tokens: int
    concurrency: int

    def flags(self) -> list[str]:
        """Arguments of `sglang.launch_server` without those of the extension."""
        return [
            f"--model-path={self.model}",
            f"--dtype={self.dtype}",
            f"--max-total-tokens={self.pool_tokens}",
            f"--max-running-requests={max(2, self.concurrency)}",
            "--device=cpu",
            "--attention-backend=torch_native",
            "--host=127.0.0.1",
            "--random-seed=1",
            "--log-level=info",
            # The benchmark has a warm-up of its own.
            "--skip-server-warmup",
            # Without it an idle server keeps a core busy.
            "--sleep-on-idle",
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """What stands in front of the SSD, and how fast it is.

    Caches in MB, the bandwidth it is slowed down to (0 = it is not), and the share of bytes that
    may be read ahead in vain (0 = nothing is read ahead). `load`: what is compared is loading, so
    it is never computing instead, unless asked for.
    """

    device_mb: float
    host_mb: float
    ssd_mbps: float
    readahead: float = ImpressConfig().readahead
    load: str = "always"


NO_TIERS = Tiers(0, 0, 0)


def is_policy(name: str) -> bool:
    """Whether this names something to compare: a policy, or one of `WITH_BITS` with bits."""
    base, at, bits = name.partition("@")
    if not at:
        return name in POLICIES
    return base in WITH_BITS and (bits == EXACTLY or (is_number(bits) and is_bits(float(bits))))


def is_number(text: str) -> bool:
    """Whether `float` takes it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def policy_flags(policy: str, store: Path, retention: float, tiers: Tiers) -> list[str]:
    """Arguments of the extension for one policy; `impress` loads all tokens in few bits."""
    name, _, bits = policy.partition("@")
    ours = name in WITH_BITS
    base = "impress" if ours else name
    flags = ["--enable-impress", f"--impress-ssd-dir={store}", f"--impress-policy={base}"]
    if name == "recompute":
        return flags
    flags += [
        # Shorter than any prefix of a trace.
        f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
        f"--impress-retention={1.0 if ours else retention}",
        # A measured request leaves nothing behind.
        "--impress-approximation-depth=0",
        f"--impress-device-gb={tiers.device_mb / 1e3:.6f}",
        f"--impress-host-gb={tiers.host_mb / 1e3:.6f}",
        f"--impress-readahead={tiers.readahead}",
        f"--impress-load={tiers.load}",
    ]
    if bits:
        flags.append(f"--impress-bits={bits}")
    if name == "even":
        flags.append("--impress-allocate=even")
    if name in REORDERING:
        flags.append("--impress-reorder-interval=0")
    return flags


class Server:
    """A running server and what a benchmark asks of it."""

    def __init__(self, process: ForkedProcess, port: int, log: Path) -> None:
        self._process = process
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self._session = requests.Session()
        # A proxy of the environment does not know this machine's loopback.
        self._session.trust_env = False

    def wait_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            BenchFailed: it ended, or did not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if not self._process.alive():
                raise BenchFailed(f"a server ended while it started{self._log_end()}")
            if time.monotonic() > deadline:
                raise BenchFailed(f"no answer from a server in {START_SECONDS} s{self._log_end()}")
            time.sleep(0.2)

    def stats(self) -> dict[str, Any]:
        """`GET /impress/stats`."""
        stats: dict[str, Any] = self._request("GET", "/impress/stats").json()
        return stats

    def flush(self) -> None:
        """Empty the device pool, once all writes to SSD are done."""
        self._request("POST", "/flush_cache", params={"timeout": 60})

    def reorder(self) -> None:
        """Reorder the stored prefixes now, and wait until that is done.

        Raises:
            BenchFailed: it took too long, or the server does not tell how far it is.
        """
        self._request("POST", "/bench/reorder")
        deadline = time.monotonic() + REORDER_SECONDS
        while self._reorder_pending():
            if time.monotonic() > deadline:
                raise BenchFailed(f"reordering took more than {REORDER_SECONDS} s")
            time.sleep(0.2)

    def emulate_ssd(self, mbps: float) -> None:
        """Slow reads from SSD down from now on; 0 for as fast as they are."""
        self._request("POST", "/bench/ssd_mbps", json={"mbps": mbps})

    def set_readahead(self, share: float) -> None:
        """Let so much be read ahead in vain from now on; 0 for nothing read ahead."""
        self._request("POST", "/bench/readahead", json={"share": share})

    def stop(self) -> None:
        """Let the server finish its writes and close its store."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        self._wait_for_end(STOP_SECONDS)

    def kill(self) -> None:
        """End the server and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._wait_for_end(STOP_SECONDS)

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._process.alive() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _reorder_pending(self) -> int:
        try:
            return int(self.stats()["reorder"]["pending"])
        except KeyError as error:
            raise BenchFailed(f"GET /impress/stats has no {error} of reorder.pending") from error

    def _request(self, method: str, path: str, **how: Any) -> requests.Response:
        try:
            response = self._session.request(
                method, self.url + path, timeout=REQUEST_SECONDS, **how
            )
            response.raise_for_status()
        except requests.RequestException as error:
            raise BenchFailed(f"{method} {path} failed: {error}{self._log_end()}") from error
        return response

    def _is_ready(self) -> bool:
        try:
            return bool(self._session.get(f"{self.url}/health", timeout=30).ok)
        except requests.RequestException:
            return False

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "; the end of its log:\n" + "\n".join(line[:300] for line in lines)


@contextlib.contextmanager
def running(
    zygote: Zygote,
    setup: Setup,
    log: Path,
    flags: list[str],
    *,
    record: Path | None = None,
    preload: str | None = "bench.core.server",
) -> Iterator[Server]:
    """A server for the time of a `with` block, killed at the end unless it was stopped.

    A `bench.core.server` writes what requests select to the directory `record`.
    """
    port = _free_port()
    argv = [*setup.flags(), f"--port={port}", *flags]
    recording = {} if record is None else {RECORD_VARIABLE: str(record.resolve())}
    process = zygote.fork(argv, log, preload=preload, environment=recording)
    server = Server(process, port, log)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def server_environment() -> dict[str, str]:
    """What servers see: no network, and one thread per core."""
    threads = str(len(os.sched_getaffinity(0)))
    return {"OMP_NUM_THREADS": threads, **os.environ, "HF_HUB_OFFLINE": "1"}


def link_store(source: Path, target: Path) -> None:
    """Make a store with the same prefixes: segments, which never change, are hard links.

    The catalog is copied, since servers write to it; a lock belongs to one directory.
    """
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif "segments" in path.relative_to(source).parts:
            os.link(path, copy)
        elif path.name != "lock":
            shutil.copy2(path, copy)


def segment_sizes(store: Path) -> list[int]:
    """Bytes of each stored segment."""
    return [path.stat().st_size for path in store.glob("*/segments/*/*") if path.is_file()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
