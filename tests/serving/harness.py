"""Starts real servers for tests, talks to them, and ends just what it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from bench.core.session import ReservedPort
from bench.core.zygote import TELL_WHERE
from bench.core.zygote import Zygote as ZygoteProcess
from impress_sglang.serving.metrics import COUNTERS, GAUGES, PREFIX
from tests.fault_control import CONTROL_VARIABLE, FaultControl
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

ROOT = Path(__file__).parents[2]
STOCK = "bench.core.stock_server"
BENCH = "bench.core.server"
FAULTY = "tests.serving.faulty_server"
PLAIN_ATTENTION = "tests.serving.plain_attention_server"
SLOW_BLENDS = "tests.serving.slow_blend_server"
LATENT = "tests.serving.latent_server"
LATENT_HICACHE = "tests.serving.latent_hicache_server"
HYBRID = "tests.serving.hybrid_server"
WINDOWS = "tests.serving.window_server"
SPECULATING = "tests.serving.speculating_server"
PREFILLING = "tests.serving.prefill_server"
RETRACTING = "tests.serving.retracting_server"
SKEWED = "tests.serving.skewed_server"
RANKED, ALSO = "tests.serving.ranks_server", "TESTS_ALSO"
# Runs the Python file that the variable names, in place of a server, and says how it ended.
SCRIPT = "tests.serving.script"
SCRIPT_VARIABLE, ARGUMENTS_VARIABLE = "TESTS_SCRIPT", "TESTS_SCRIPT_ARGUMENTS"
ENDED = "ended with status "
LABELS = {label for own in (*COUNTERS, *GAUGES) for label in own.labels}
# What a server never says, and what it may say when something was raised on purpose.
BAD_WORDS = ("memory leak", "pool leak", "AssertionErr")
TRACEBACK = "Traceback (most recent call last)"
RANKS = {"cache_type", "tp_rank", "pp_rank", "dp_rank"}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
SCRIPT_TIMEOUT_S = 300
START_TIMEOUT_S = 240
REQUEST_TIMEOUT_S = 600

USUAL_FLAGS = (
    # Unless a test says otherwise: SGLang would take most of the machine's memory for its pool.
    "--max-total-tokens=60000",
    "--host=127.0.0.1",
    "--random-seed=1",
    "--log-level=info",
    # Without it an idle server keeps a core busy.
    "--sleep-on-idle",
)


# Several servers have room on one GPU, and do not capture graphs of many batch sizes.
CUDA_FLAGS = (
    "--mem-fraction-static=0.85",
    "--sampling-backend=pytorch",
    "--cuda-graph-max-bs-decode=8",
)


def on_cuda() -> bool:
    """Whether servers run on a GPU: `pytest --device cuda`."""
    return os.environ["TESTS_DEVICE"] == "cuda"


def place_flags() -> tuple[str, ...]:
    """Where servers run, and how they attend."""
    attention = os.environ["TESTS_ATTENTION"]
    flags = (f"--device={os.environ['TESTS_DEVICE']}", f"--attention-backend={attention}")
    return (*flags, *CUDA_FLAGS) if on_cuda() else flags


class Process(Protocol):
    """A server's main process, which leads its own process group."""

    pid: int

    def alive(self) -> bool: ...


class LaunchedProcess:
    """A child of this process."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid = child.pid

    def alive(self) -> bool:
        return self._child.poll() is None


class Zygote(ZygoteProcess):
    """Forks servers under test."""

    def __init__(self) -> None:
        # Compiling the penalties of a sampler takes longer than most tests, and changes no answer.
        # Triton decides when it is imported whether it interprets; torch_native does not use it.
        on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Tensor cores round float32 to ten bits, unless Triton is told not to.
        own = {"TRITON_F32_DEFAULT": "ieee"} if on_cuda() else on_cpu
        super().__init__(server_environment({"TORCHDYNAMO_DISABLE": "1", **own}))

    def run(self, script: Path, log: Path, *arguments: str) -> str:
        """Run a Python file in a fork, where SGLang is imported; it has to end well.

        Returns:
            What it printed.
        """
        own = {SCRIPT_VARIABLE: str(script), ARGUMENTS_VARIABLE: json.dumps(arguments)}
        process = self.fork([], log, preload=SCRIPT, environment=own)
        wait_until(lambda: not process.alive(), SCRIPT_TIMEOUT_S)
        told, _, status = log.read_text(errors="replace").rpartition(ENDED)
        assert status.strip() == "0", tail(told + status)
        return told


class Server:
    """A running server and its HTTP interface."""

    def __init__(self, process: Process, port: ReservedPort, log: Path) -> None:
        self.process = process
        self.port = port.number
        self._reserved = port
        self.log = log
        # Whether requests run without being taken out and put back.
        self.is_calm = True
        self._forgiven = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=REQUEST_TIMEOUT_S)

    def ask(
        self, input_ids: Sequence[int], max_new_tokens: int = 8, **fields: Any
    ) -> requests.Response:
        """Greedy generation of exactly so many tokens; `impress_...` are custom parameters."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        sampling |= fields.pop("sampling_params", {})
        if custom := {own: fields.pop(own) for own in [*fields] if own.startswith("impress_")}:
            sampling["custom_params"] = custom
        return self.post("/generate", input_ids=[*input_ids], sampling_params=sampling, **fields)

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int = 8, **fields: Any
    ) -> dict[str, Any]:
        """The answer to what must not be refused."""
        response = self.ask(input_ids, max_new_tokens, **fields)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def generate_together(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 8, **fields: Any
    ) -> list[dict[str, Any]]:
        """Several requests at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, max_new_tokens, **fields), prompts))

    def flush(self) -> None:
        """Empty the device pool; what is being written to SSD is waited for."""
        deadline = time.monotonic() + 60
        while not self.post("/flush_cache").ok:
            # SGLang refuses while a request is under way.
            assert time.monotonic() < deadline, "flush_cache kept failing"
            time.sleep(0.2)

    def stats(self) -> dict[str, Any]:
        """With the result of a check now."""
        self.post("/impress/check").raise_for_status()
        stats: dict[str, Any] = requests.get(self.url + "/impress/stats", timeout=60).json()
        return stats

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def assert_quiet(self) -> None:
        """No memory leak report, no exception, and still alive."""
        text = self.log_text()[self._forgiven :]
        for word in (*BAD_WORDS, TRACEBACK):
            assert word not in text, tail(text)
        assert self.process.alive(), tail(text)

    def forgive(self, error: str) -> None:
        """Each exception that the log has so far is this one, which was raised on purpose."""
        text = self.log_text()
        own = text[self._forgiven :]
        assert own.count(TRACEBACK) == own.count(error), tail(own)
        self._forgiven = len(text)

    def assert_whole(self) -> None:
        """Idle, it holds nothing, its parts agree, and nothing went wrong."""
        self.flush()
        stats = self.stats()
        assert stats["integrity"] == "ok" and stats["requests_live"] == 0
        assert not stats["store"]["segments_failed"] and not stats["store"]["writes_pending"]
        pool = stats["device_pool"]
        assert not any(pool[kind] for kind in pool if kind != "tokens"), pool
        self.assert_quiet()

    def store(self, length: int, seed: int, **fields: Any) -> list[int]:
        """A prefix that is on SSD only."""
        prefix = random_tokens(length, seed)
        self.store_prompts(prefix, **fields)
        return prefix

    def store_prompts(self, *prompts: Sequence[int], **fields: Any) -> None:
        """These are on SSD only."""
        for prompt in prompts:
            self.generate(prompt, 1, **fields)
        self.flush()

    def abort_in_every_phase(self, prompts: Sequence[Sequence[int]]) -> None:
        """Give requests up while they wait, load, prefill and decode."""
        names = [f"abort-{number}" for number in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = []
            for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                asked.append(pool.submit(self.ask, prompt, 400, rid=name))
                if number % 2:
                    time.sleep(0.05 * number)
                    self.post("/abort_request", rid=name)
            for name in names[::2]:
                time.sleep(0.1)
                self.post("/abort_request", rid=name)
            for own in asked:
                own.result(120)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server and all that it started, and wait for it.

        A polite signal goes to the main process, which ends its children itself.
        """
        group = self.process.pid
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if how == signal.SIGKILL else os.kill)(group, how)
        self._wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        assert self._wait(30), "a killed server does not end"
        self._reserved.close()

    def tell_where(self) -> None:
        """Have all threads of all its processes written to the log, if it was forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, TELL_WHERE)
        time.sleep(1)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.process.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.process.alive()


def schedulers_of(server: Server) -> list[psutil.Process]:
    """The processes of a server that have a model and a store, in the order of their ranks."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = {own: " ".join(own.cmdline()) for own in children}
    return sorted(
        (own for own, title in found.items() if title.startswith("sglang::scheduler")),
        key=lambda own: found[own],
    )


def metrics_of(server: Server) -> dict[str, float]:
    """Our own, by name and label: of the first of several ranks, and of all replicas together."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    samples = (own for family in text_string_to_metric_families(text) for own in family.samples)
    found = Counter[str]()
    for own in samples:
        if own.name.startswith(PREFIX) and own.labels.get("tp_rank", "0") == "0":
            mine = {key: value for key, value in own.labels.items() if key in LABELS}
            assert own.labels.keys() - mine.keys() <= {"le", "pid", *RANKS}, own.labels
            found[" ".join([own.name.removeprefix(PREFIX), *mine.values()])] += own.value
    return found


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(line[:400] for line in text.splitlines()[-lines:])


def server_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What servers under test see: no network, and SGLang's strict memory checks."""
    return {
        **os.environ,
        # `make servers` has two tests at a time.
        "OMP_NUM_THREADS": "1" if "PYTEST_XDIST_WORKER" in os.environ else "2",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        **(extra or {}),
    }


def launch(
    model: Path,
    log: Path,
    *flags: str,
    zygote: Zygote | None,
    stock: bool = False,
    bench: bool = False,
    faults: FaultControl | None = None,
    retracts: bool = False,
    preload: str | None = None,
    ranks: int = 1,
    stages: int = 1,
    replicas: int = 1,
    environment: dict[str, str] | None = None,
) -> Server:
    """Start a server without waiting for it: forked, or by the real command if there is no zygote.

    `stock` is the one to compare with, `bench` one that can be slowed down and commanded, one that
    `retracts` takes requests out and puts them back all the time, `preload` a module that makes
    another one, `ranks` share its heads, `stages` its layers, `replicas` its requests; all of these
    are forked.
    """
    assert not (stock and faults), "stock has no store"
    port = ReservedPort()
    argv = [f"--model-path={model}", f"--port={port.number}", *USUAL_FLAGS, *place_flags(), *flags]
    preload = STOCK if stock else BENCH if bench else RETRACTING if retracts else preload
    own = {**(environment or {}), **(RETRACT if retracts else {})}
    if faults is not None:
        # Which retracts as well, as those do that have faults and something else.
        preload = FAULTY if preload in (None, RETRACTING) else preload
        own[CONTROL_VARIABLE] = str(faults.path)
    if ranks * stages * replicas > 1:
        # Which has faults and retracts as well, and what else a server is.
        own[ALSO] = preload or ""
        preload = RANKED
        argv += [f"--tp-size={ranks}", f"--pp-size={stages}", f"--dp-size={replicas}"]
        cores = (str(number % 2) for number in range(ranks * stages * replicas))
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    if zygote is not None:
        process = zygote.fork(argv, log, preload=preload, environment=own)
        return Server(process, port, log)
    assert preload is None
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(),
            cwd=ROOT,
            start_new_session=True,
        )
    return Server(LaunchedProcess(child), port, log)


def wait_until_ready(server: Server) -> Server:
    """Wait until the server has warmed up; its last words if it dies."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.alive(), tail(server.log_text())
        with contextlib.suppress(requests.RequestException):
            if requests.get(server.url + "/ready", timeout=5).ok:
                return server
        time.sleep(0.1)
    server.tell_where()
    server.stop(signal.SIGKILL)
    raise AssertionError(f"server did not start:\n{tail(server.log_text(), 300)}")


@contextlib.contextmanager
def running(
    model: Path, log: Path, *flags: str, zygote: Zygote | None, **how: Any
) -> Iterator[Server]:
    """A server for the time of a `with` block; see `launch`."""
    server = launch(model, log, *flags, zygote=zygote, **how)
    try:
        yield wait_until_ready(server)
    finally:
        server.stop()
