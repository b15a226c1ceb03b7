"""The examples run as their texts say, on a tiny model; with `--full-matrix` on SmolLM2."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.model import model_path
from tests.serving.conftest import BLENDS, Serve
from tests.serving.harness import ROOT, Server, Zygote, tail

EXAMPLES = ROOT / "examples"
EXAMPLE_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def model(at_length: bool, tiny_llama: Path) -> Path:
    return model_path() if at_length else tiny_llama


@pytest.fixture(scope="module")
def server(model: Path, serve: Serve) -> Iterator[Server]:
    with serve("examples", "--enable-cache-report", *BLENDS, model=model, words=True) as server:
        yield server
        server.assert_whole()


def test_offline_engine(model: Path, workdir: Path, zygote: Zygote) -> None:
    """`sglang.Engine` has no command line; the example starts its own, where SGLang is imported."""
    options = [f"--model-path={model}", "--device=cpu", "--dtype=float32"]
    log = workdir / "offline-engine.log"
    told = zygote.run(EXAMPLES / "offline_engine.py", log, *options)
    first, _, second = told.partition("after emptying the device pool\n")
    assert "path computed" in first and "path ssd" in second, tail(told)


def test_frontend_language(server: Server, workdir: Path, zygote: Zygote) -> None:
    script, log = EXAMPLES / "frontend_language.py", workdir / "frontend-language.log"
    told = zygote.run(script, log, f"--url={server.url}")
    assert told.count("tokens were cached") == told.count("topic: ") == 3


def test_openai_client(server: Server) -> None:
    assert run("openai_client.py", server).count("of them cached") == 3


def test_passages(server: Server) -> None:
    """They are found in another order than that in which they were stored."""
    told = run("passages.py", server)
    cached = [int(count) for count in re.findall(r"(\d+) of them cached", told)]
    assert len(cached) == 3 and sum(count > 200 for count in cached) >= 2, told


def test_bench_serving(server: Server, model: Path, workdir: Path, zygote: Zygote) -> None:
    """SGLang's own benchmark, with turns, against a server whose pool forgot what it computed."""
    options = [
        f"--base-url={server.url}",
        f"--model={model}",
        f"--output-file={workdir / 'bench-serving.jsonl'}",
        "--backend=sglang-oai-chat",
        "--dataset-name=generated-shared-prefix",
        "--gsp-num-groups=2",
        "--gsp-prompts-per-group=2",
        "--gsp-num-turns=2",
        "--gsp-system-prompt-len=300",
        "--gsp-question-len=16",
        "--gsp-output-len=4",
        "--warmup-requests=0",
        "--cache-report",
        "--disable-tqdm",
    ]
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    script = Path(package, "bench_serving.py")
    for log in ("computed", "loaded"):
        told = zygote.run(script, workdir / f"bench-serving-{log}.log", *options)
        server.flush()
    assert re.search(r"Successful requests: +8 ", told), tail(told)
    assert re.search(r"Storage \(impress\): +[1-9]\d{2,}", told), tail(told)


def run(name: str, server: Server) -> str:
    """What an example prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"--url={server.url}"],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout
