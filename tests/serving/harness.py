"""Starts real servers for tests, talks to them, and ends just what it started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from bench.core import servers
from bench.core.servers import REQUEST_SECONDS, TRACEBACK, RunningServer, body_of
from bench.core.session import BenchFailed, ReservedPort
from bench.core.zygote import TELL_WHERE
from bench.core.zygote import Zygote as ZygoteProcess
from impress_sglang.serving.metrics import COUNTERS, GAUGES, PREFIX
from tests.fault_control import CONTROL_VARIABLE, FaultControl
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

ROOT = Path(__file__).parents[2]
BENCH, STOCK = servers.OURS, servers.STOCK
FAULTY = "tests.serving.faulty_server"
LATENT = "tests.serving.latent_server"
HYBRID = "tests.serving.hybrid_server"
WINDOWS = "tests.serving.window_server"
SPECULATING = "tests.serving.speculating_server"
PREFILLING = "tests.serving.prefill_server"
RETRACTING = "tests.serving.retracting_server"
SKEWED = "tests.serving.skewed_server"
RANKED = "tests.serving.ranks_server"
# Runs the Python file that the variable names, in place of a server, and says how it ended.
SCRIPT = "tests.serving.script"
SCRIPT_VARIABLE, ARGUMENTS_VARIABLE = "TESTS_SCRIPT", "TESTS_SCRIPT_ARGUMENTS"
ENDED = "ended with status "
LABELS = {label for metric in (*COUNTERS, *GAUGES) for label in metric.labels}
RANKS = {"cache_type", "tp_rank", "pp_rank", "dp_rank"}
SCRIPT_TIMEOUT_S = 300

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


class LaunchedProcess(subprocess.Popen[bytes]):
    """The command that users type, in a process group of its own."""

    def is_alive(self) -> bool:
        return self.poll() is None


class Zygote(ZygoteProcess):
    def __init__(self) -> None:
        # Compiling the penalties of a sampler takes longer than most tests, and changes no answer.
        # Triton decides when it is imported whether it interprets; torch_native does not use it.
        on_cpu = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Tensor cores round float32 to ten bits, unless Triton is told not to.
        settings = {"TRITON_F32_DEFAULT": "ieee"} if on_cuda() else on_cpu
        super().__init__(server_environment({"TORCHDYNAMO_DISABLE": "1", **settings}))

    def run(self, script: Path, log: Path, *arguments: str) -> str:
        """Run a Python file in a fork, where SGLang is imported; it has to end well.

        Returns:
            What it printed.
        """
        variables = {SCRIPT_VARIABLE: str(script), ARGUMENTS_VARIABLE: json.dumps(arguments)}
        process = self.fork([], log, preload=SCRIPT, environment=variables)
        wait_until(lambda: not process.is_alive(), SCRIPT_TIMEOUT_S)
        told, _, status = log.read_text(errors="replace").rpartition(ENDED)
        assert status.strip() == "0", tail(told + status)
        return told


class Server(RunningServer):
    ready_route = "/ready"

    def __init__(self, process: ForkServerProcess | LaunchedProcess, port: int, log: Path) -> None:
        super().__init__(process, port, log)
        self.port = port
        # Whether requests run without being taken out and put back.
        self.is_calm = True
        self._forgiven = 0

    def wait_ready(self) -> None:
        try:
            super().wait_ready()
        except BenchFailed:
            self.tell_where()
            raise
        if "the store takes long to open" in self.log_text():
            # Of a bucket, or on a busy machine: nothing is stored until then.
            stats = f"{self.url}/impress/stats"
            wait_until(lambda: '"opening"' not in requests.get(stats, timeout=60).text, 60)

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=REQUEST_SECONDS)

    def ask(
        self, input_ids: Sequence[int], max_new_tokens: int = 8, **fields: Any
    ) -> requests.Response:
        """Greedy generation of exactly so many tokens; `impress_...` are custom parameters."""
        custom = {key: fields.pop(key) for key in [*fields] if key.startswith("impress_")}
        body = body_of(input_ids, max_new_tokens, custom)
        body["sampling_params"] |= fields.pop("sampling_params", {})
        return self.post("/generate", **body, **fields)

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
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, max_new_tokens, **fields), prompts))

    def stats(self, *, check: bool = True) -> dict[str, Any]:
        """With the result of a check now, unless that would take too long."""
        if check:
            self.post("/impress/check").raise_for_status()
        stats: dict[str, Any] = requests.get(self.url + "/impress/stats", timeout=60).json()
        return stats

    def live(self) -> int:
        return int(self.stats(check=False)["requests_live"])

    def stored(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt are stored."""
        answer = self.post("/impress/why", input_ids=[*prompt])
        answer.raise_for_status()
        return int(answer.json()["stored_tokens"])

    def assert_quiet(self) -> None:
        """No memory leak report, no exception, and still alive."""
        self.check_log(self._forgiven)
        assert self.process.is_alive(), tail(self.log_text())

    def forgive(self, error: str) -> None:
        """Each exception that the log has so far is this one, which was raised on purpose."""
        text = self.log_text()
        recent = text[self._forgiven :]
        assert recent.count(TRACEBACK) == recent.count(error), tail(recent)
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
            for answer in asked:
                answer.result(120)

    def tell_where(self) -> None:
        """Have all threads of all its processes written to the log, if it was forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, TELL_WHERE)
        time.sleep(1)


def schedulers_of(server: Server) -> list[psutil.Process]:
    """The processes of a server that have a model and a store, in the order of their ranks."""
    children = psutil.Process(server.pid).children(recursive=True)
    found = {child: " ".join(child.cmdline()) for child in children}
    return sorted(
        (child for child, title in found.items() if title.startswith("sglang::scheduler")),
        key=lambda child: found[child],
    )


def metrics_of(server: Server) -> dict[str, float]:
    """Our own, by name and label: of the first of several ranks, and of all replicas together."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    found = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith(PREFIX) and sample.labels.get("tp_rank", "0") == "0":
            mine = {key: value for key, value in sample.labels.items() if key in LABELS}
            assert sample.labels.keys() - mine.keys() <= {"le", "pid", *RANKS}, sample.labels
            found[" ".join([sample.name.removeprefix(PREFIX), *mine.values()])] += sample.value
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


@contextlib.contextmanager
def running(
    model: Path,
    log: Path,
    *flags: str,
    zygote: Zygote | None,
    waits: bool = True,
    stops: bool = False,
    faults: FaultControl | None = None,
    retracts: bool = False,
    preload: str | None = None,
    ranks: int = 1,
    stages: int = 1,
    replicas: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server for the time of a `with` block: forked, or by the real command without a zygote.

    `waits`: until it has warmed up. In the end it is killed, unless it `stops`, which closes its
    store. `preload` are modules that make another server of it, with
    `faults` its disk fails, one that `retracts` takes requests out and puts them back all the time,
    `ranks` share its heads, `stages` its layers, `replicas` its requests.
    """
    variables, modules, more = {**(environment or {})}, [preload or ""], list[str]()
    if retracts:
        modules.append(RETRACTING)
    if faults is not None:
        variables[CONTROL_VARIABLE] = str(faults.path)
        modules.append(FAULTY)
    if ranks * stages * replicas > 1:
        modules.append(RANKED)
        more = [f"--tp-size={ranks}", f"--pp-size={stages}", f"--dp-size={replicas}"]
        cores = (str(number % 2) for number in range(ranks * stages * replicas))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    with contextlib.closing(ReservedPort()) as port:
        argv = [f"--model-path={model}", f"--port={port.number}", *USUAL_FLAGS, *place_flags()]
        argv += [*flags, *more]
        process: ForkServerProcess | LaunchedProcess
        if zygote is not None:
            process = zygote.fork(argv, log, preload=",".join(modules), environment=variables)
        else:
            process = LaunchedProcess(
                [sys.executable, "-m", "sglang.launch_server", *argv],
                stdout=log.open("wb"),
                stderr=subprocess.STDOUT,
                env=server_environment(),
                cwd=ROOT,
                start_new_session=True,
            )
        server = Server(process, port.number, log)
        try:
            if waits:
                server.wait_ready()
            yield server
        finally:
            if stops:
                server.stop()
            server.kill()
            assert not process.is_alive(), "a killed server does not end"
