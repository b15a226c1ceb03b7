"""A SGLang server as a child process, and requests to it. SGLang itself is not imported."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests

from demo.report import DemoFailed

START_SECONDS = 300
STOP_SECONDS = 20
CLEAN_UP_SECONDS = 5
REQUEST_SECONDS = 180
LOG_LINES_SHOWN = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: milliseconds until its first text, the text, SGLang's `meta_info`."""

    ttft_ms: float
    text: str
    meta_info: dict[str, Any]


class Server:
    """A CPU server that is starting or running; `kill` must be called in the end."""

    def __init__(self, model: Path, options: Sequence[str], port: int, log: Path) -> None:
        """Start it; `log` is appended to."""
        self._url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                _command(model, options, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                # Its own process group: Ctrl-C does not reach it, and a kill ends all of it.
                start_new_session=True,
            )
        self._session = requests.Session()
        # A proxy of the environment does not know this machine's loopback.
        self._session.trust_env = False

    def wait_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            DemoFailed: it ended, or did not answer in time; with the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            status = self._process.poll()
            if status is not None:
                raise DemoFailed(f"the server ended with status {status}{self._log_end()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"no answer from the server in {START_SECONDS} s{self._log_end()}")
            time.sleep(0.5)

    def generate(self, text: str, max_new_tokens: int, bits: str | None = None) -> Answer:
        """Complete a text greedily, streaming.

        `bits` asks for a precision of stored prefixes in place of the server's.

        Raises:
            DemoFailed: the server refused, broke off, or sent no text.
        """
        body: dict[str, Any] = {
            "text": text,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
            "stream": True,
        }
        if bits is not None:
            body["sampling_params"]["custom_params"] = {"impress_bits": bits}
        began = time.perf_counter()
        try:
            with self._session.post(
                f"{self._url}/generate", json=body, stream=True, timeout=REQUEST_SECONDS
            ) as response:
                response.raise_for_status()
                return _read_answer(response, began)
        except requests.RequestException as error:
            raise DemoFailed(f"a request failed: {error}{self._log_end()}") from error

    def flush_cache(self) -> None:
        """Empty the device pool, once all writes to SSD are done.

        Raises:
            DemoFailed: the server refused.
        """
        try:
            self._session.post(
                f"{self._url}/flush_cache", params={"timeout": 30}, timeout=REQUEST_SECONDS
            ).raise_for_status()
        except requests.RequestException as error:
            raise DemoFailed(f"the flush failed: {error}{self._log_end()}") from error

    def stop(self) -> None:
        """Let the server finish what it does, and end."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """End the server at once, and everything that it started."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + CLEAN_UP_SECONDS
        try:
            # Workers end; Python's resource tracker stays to remove their shared memory.
            self._signal_group(signal.SIGTERM)
            while self._signal_group(0) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> bool:
        """Send a signal; False if nothing is left of the server's process group."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _is_ready(self) -> bool:
        try:
            return bool(self._session.get(f"{self._url}/health", timeout=30).ok)
        except requests.RequestException:
            return False

    def _log_end(self) -> str:
        with self._log.open(encoding="utf-8", errors="replace") as lines:
            end = "".join(deque(lines, LOG_LINES_SHOWN))
        return f"; the end of {self._log}:\n{end}"


def free_port(port: int = 0) -> int:
    """The given TCP port of 127.0.0.1, or any, if nothing uses it right now.

    Raises:
        DemoFailed: the port is in use.
    """
    with socket.socket() as probe:
        # As servers do: connections of the last server that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoFailed(f"port {port} cannot be used: {error.strerror}") from error
        found: int = probe.getsockname()[1]
        return found


def _command(model: Path, options: Sequence[str], port: int) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    # bfloat16 is very slow on CPUs without AMX.
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-total-tokens", "8192", "--max-running-requests", "8"]
    # The demo warms up with requests of its own.
    command += ["--skip-server-warmup"]
    return [*command, "--enable-impress", "--impress-write-after", "1", *options]


def _environment() -> dict[str, str]:
    threads = str(len(os.sched_getaffinity(0)))
    return {"OMP_NUM_THREADS": threads, **os.environ, "HF_HUB_OFFLINE": "1"}


def _read_answer(response: requests.Response, began: float) -> Answer:
    ttft_ms = None
    last: dict[str, Any] = {"text": "", "meta_info": {}}
    for line in response.iter_lines():
        if not line.startswith(b"data: {"):
            continue
        last = json.loads(line.removeprefix(b"data: "))
        if "error" in last:
            raise DemoFailed(f"the server answered with an error: {last['error']}")
        if ttft_ms is None and last["text"]:
            ttft_ms = (time.perf_counter() - began) * 1e3
    if ttft_ms is None:
        raise DemoFailed("the server sent no text")
    return Answer(ttft_ms, last["text"], last["meta_info"])
