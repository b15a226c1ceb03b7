"""The one way in which benchmarks start servers, ask them, and end them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter

from bench.core.session import BenchFailed, ReservedPort, step, work_folder
from bench.core.zygote import Zygote

# What is imported before a server starts: our file system and routes, rectangular attention, or
# that and what HiCache needs on a CPU.
OURS = "bench.core.server"
STOCK = "bench.core.stock_server"
HICACHE = "bench.core.hicache_server"
# MB/s of the drive under HiCache's files, in the environment; 0: as it is.
HICACHE_MBPS = "BENCH_HICACHE_SSD_MBPS"

START_SECONDS = 300
STOP_SECONDS = 120
REQUEST_SECONDS = 600
REORDER_SECONDS = 1200
LOG_LINES_SHOWN = 20
# Rows that SGLang keeps free beside a prompt's own.
SPARE_TOKENS = 64
# What a server may say only when something was raised on purpose, and what it never says.
TRACEBACK = "Traceback (most recent call last)"
BAD_WORDS = ("memory leak", "pool leak", "AssertionErr")
TROUBLE = (TRACEBACK, *BAD_WORDS)
# SGLang asks itself to freeze its garbage collector, perhaps before it listens; nothing is lost.
_HARMLESS = re.compile(r"post-warmup freeze_gc failed\nTraceback.*?(?=\n\[\d{4}-)", re.DOTALL)
Step = Callable[[str], contextlib.AbstractContextManager[None]]
_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--host=127.0.0.1",
    "--random-seed=1",
    "--log-level=info",
    # Benchmarks have a warm-up of their own.
    "--skip-server-warmup",
    # Without it an idle server keeps a core busy.
    "--sleep-on-idle",
)


class Servers:
    """Servers of one run: forked from one process, with their stores and logs in one folder."""

    def __init__(self, folder: Path, zygote: Zygote, show: Step = step) -> None:
        """`show` says how long starting one took."""
        self.folder = folder
        self._zygote = zygote
        self._show = show

    @contextlib.contextmanager
    def running(
        self,
        name: str,
        model: Path,
        dtype: str,
        *flags: str,
        preload: str | None = OURS,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """A server for the time of a `with` block, killed at its end unless it was stopped.

        Its environment has more variables for what is not read while SGLang is imported.

        Raises:
            BenchFailed: it ended, or did not answer in time; with the end of its log.
        """
        log = self.folder / f"{name}.log"
        with contextlib.closing(ReservedPort()) as port:
            listen = f"--port={port.number}"
            argv = [f"--model-path={model}", f"--dtype={dtype}", listen, *_FLAGS, *flags]
            with contextlib.ExitStack() as stack:
                with self._show(f"{name}: starting a server"):
                    process = self._zygote.fork(argv, log, preload=preload, environment=environment)
                    server = Server(process, port.number, log)
                    stack.callback(server.kill)
                    server.wait_ready()
                yield server


def store_flags(store: Path) -> list[str]:
    """Of a server that stores at once, always loads, and keeps nothing in memory."""
    return [
        "--enable-impress",
        f"--impress-ssd-dir={store}",
        "--impress-write-after=1",
        "--impress-load=always",
        # Some requests ask for exact KVs.
        "--impress-keep=both",
        "--impress-host-gb=0",
        "--impress-device-gb=0",
    ]


@contextlib.contextmanager
def servers(args: argparse.Namespace, show: Step = step) -> Iterator[Servers]:
    """What starts servers, in the folder of `--keep` or a temporary one."""
    threads = str(len(os.sched_getaffinity(0)))
    whole = {"OMP_NUM_THREADS": threads, **os.environ, "HF_HUB_OFFLINE": "1"}
    zygote = Zygote(whole)
    with work_folder(args.keep) as folder:
        yield Servers(folder, zygote, show)


class Piece(NamedTuple):
    """Of a streamed answer: when it came (perf_counter), tokens by then, and SGLang's meta_info."""

    at: float
    tokens: int
    meta: Mapping[str, Any]


class RunningServer:
    """A process that serves, and how it is talked to, from any thread."""

    ready_route = "/health"
    """Says whether it takes requests."""

    def __init__(self, process: Any, port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._session = requests.Session()
        # A proxy of the environment does not know this machine's loopback.
        self._session.trust_env = False
        self._session.mount("http://", HTTPAdapter(pool_maxsize=100))

    @property
    def pid(self) -> int:
        """Of the main process."""
        return self.process.pid

    def log_text(self) -> str:
        """All of its log."""
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            BenchFailed: it ended, or did not answer in time; with the end of its log.
        """
        if not wait(START_SECONDS, lambda: self._is_ready() or not self.process.is_alive()):
            raise BenchFailed(f"no answer from a server in {START_SECONDS} s{self._log_end()}")
        if not self.process.is_alive():
            raise BenchFailed(f"a server ended while it started{self._log_end()}")

    def stream(
        self, tokens: Sequence[int], new_tokens: int, custom: Mapping[str, Any] | None = None
    ) -> Iterator[Piece]:
        """Greedy generation; yields what has come.

        Raises:
            BenchFailed: the request failed.
        """
        body = body_of(tokens, new_tokens, custom) | {"stream": True}
        count = 0
        with self.request("POST", "/generate", json=body, stream=True) as response:
            try:
                for line in response.iter_lines():
                    now = time.perf_counter()
                    if line.startswith(b"data: {"):
                        meta = json.loads(line.removeprefix(b"data: ")).get("meta_info", {})
                        count = meta.get("completion_tokens", 0)
                        yield Piece(now, count, meta)
            except requests.RequestException as error:
                raise BenchFailed(f"a stream broke off: {error}{self._log_end()}") from error
        if count != new_tokens:
            raise BenchFailed(f"a stream ended after {count} of {new_tokens} tokens")

    def flush(self) -> None:
        """Empty the device pool, once all writes to SSD are done."""
        self.request("POST", "/flush_cache", params={"timeout": 60})

    def emulate_ssd(self, mbps: float) -> None:
        """Slow reads from SSD down from now on; 0 for as fast as they are."""
        self.request("POST", "/bench/ssd_mbps", json={"mbps": mbps})

    def check_log(self, since: int = 0, words: Sequence[str] = TROUBLE) -> None:
        """Raise if the log has such words from a character on, of an exception or a leak.

        Raises:
            BenchFailed: it does.
        """
        lines = _HARMLESS.sub("", self.log_text()[since:]).splitlines()
        told = [i for i, line in enumerate(lines) if any(word in line for word in words)]
        if told:
            first = "\n".join(line[:300] for line in lines[told[0] : told[0] + LOG_LINES_SHOWN])
            raise BenchFailed(f"a server was in trouble:\n{first}{self._log_end()}")

    def stop(self) -> None:
        """Let the server finish its writes and close its store."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        wait(STOP_SECONDS, lambda: not self.process.is_alive())

    def kill(self) -> None:
        """End the server and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        wait(STOP_SECONDS, lambda: not self.process.is_alive())

    def request(
        self, method: str, path: str, *, timeout: float = REQUEST_SECONDS, **how: Any
    ) -> requests.Response:
        """A request to any of its routes, as `requests` takes it.

        Raises:
            BenchFailed: it was refused, or there was no answer.
        """
        try:
            response = self._session.request(method, self.url + path, timeout=timeout, **how)
            response.raise_for_status()
        except requests.RequestException as error:
            raise BenchFailed(f"{method} {path} failed: {error}{self._log_end()}") from error
        return response

    def _is_ready(self) -> bool:
        try:
            return bool(self._session.get(f"{self.url}{self.ready_route}", timeout=30).ok)
        except requests.RequestException:
            return False

    def _log_end(self) -> str:
        lines = self.log_text().splitlines()[-LOG_LINES_SHOWN:]
        return "; the end of its log:\n" + "\n".join(line[:300] for line in lines)


class Server(RunningServer):
    """What a benchmark asks of a server."""

    def generate(
        self,
        tokens: Sequence[int],
        new_tokens: int = 1,
        *,
        custom: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Greedy generation of so many tokens; `custom` are the request's `custom_params`.

        Raises:
            BenchFailed: the request failed.
        """
        body = body_of(tokens, new_tokens, custom) | fields
        answer: dict[str, Any] = self.request("POST", "/generate", json=body).json()
        reason = answer["meta_info"]["finish_reason"] or {}
        if reason.get("type") != "length":
            raise BenchFailed(f"a request did not finish: {reason}")
        return answer

    def generate_together(
        self, prompts: Sequence[Sequence[int]], at_once: int, new_tokens: int = 1
    ) -> list[float]:
        """Greedy generation for each prompt, so many at a time; seconds until each answer."""

        def ask(tokens: Sequence[int]) -> float:
            began = time.perf_counter()
            self.generate(tokens, new_tokens)
            return time.perf_counter() - began

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, prompts))

    def store(self, tokens: Sequence[int], *, custom: Mapping[str, Any] | None = None) -> None:
        """Compute a prompt, and empty the pool once it is written."""
        self.generate(tokens, custom=custom)
        self.flush()

    def stats(self) -> dict[str, Any]:
        """`GET /impress/stats`."""
        stats: dict[str, Any] = self.request("GET", "/impress/stats").json()
        return stats

    def reorder(self) -> None:
        """Reorder the stored prefixes now, and wait until that is done.

        Raises:
            BenchFailed: it took too long.
        """
        self.request("POST", "/bench/reorder")
        if not wait(REORDER_SECONDS, lambda: not self.stats()["reorder"]["pending"]):
            raise BenchFailed(f"reordering took more than {REORDER_SECONDS} s")


class Stream:
    """An answer that is streamed by a thread; see `Server.stream`."""

    def __init__(self, server: RunningServer, *asked: Any) -> None:
        self.came: list[Piece] = []
        self._changed = threading.Condition()
        self._error: BenchFailed | None = None
        self._ended = False
        self._pieces = server.stream(*asked)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def wait(self, tokens: int) -> None:
        """Until so many have come, or it has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or bool(self.came and self.came[-1].tokens >= tokens)
            )

    def join(self) -> Sequence[Piece]:
        """Wait until it has ended.

        Raises:
            BenchFailed: it did not end well.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.came

    def _follow(self) -> None:
        try:
            for piece in self._pieces:
                with self._changed:
                    self.came.append(piece)
                    self._changed.notify_all()
        except BenchFailed as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def gaps_of(came: Sequence[Piece]) -> list[float]:
    """Seconds between pieces."""
    return [after.at - before.at for before, after in itertools.pairwise(came)]


def body_of(
    tokens: Sequence[int], new_tokens: int, custom: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The body of a request for greedy generation."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if custom:
        sampling["custom_params"] = dict(custom)
    return {"input_ids": list(tokens), "sampling_params": sampling}


def wait(seconds: float, until: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not (true := until()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return true
