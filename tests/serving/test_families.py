"""Architectures and dtypes beside Llama in float32: a prefix from SSD changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.compare import Answer, assert_same, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import make_model, random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (500, 1100, 2300)]
FLAGS = ("--max-total-tokens=9000", "--chunked-prefill-size=128", "--impress-bits=exact")
# All tokens are computed again, but not by way of SGLang's own pass.
BLENDED = {"impress_blend": 0.99999, "impress_bits": 6, "impress_store": False}


@pytest.fixture(scope="module", params=["opt", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(family: str, workdir: Path, serve: Serve) -> Iterator[Server]:
    """What learns positions cannot blend."""
    flags = (*FLAGS, *(("--impress-blend=auto",) if family != "opt" else ()))
    with serve(family, *flags, model=make_model(family, workdir / family)) as server:
        yield server


def _computed(server: Server, prompt: list[int]) -> Answer:
    """An answer in a namespace of which nothing is stored."""
    computed = server.generate(prompt, 12, return_logprob=True, extra_key="other")
    assert report(computed)["path"] == "computed"
    return computed


def test_family_in_float32(server: Server) -> None:
    """From SSD, and then resident."""
    for prompt in PROMPTS:
        computed = _computed(server, prompt)
        server.generate(prompt, 1)
        server.flush()
        for path in ("ssd", "device"):
            stored = server.generate(prompt, 12, return_logprob=True)
            assert report(stored)["path"] == path
            assert_same([computed], [stored], 1e-4)


def test_family_blends(server: Server, family: str) -> None:
    """With biases, or norms of heads: what was blended is what the server computes itself."""
    stored = server.store(1000, seed=91)
    prompt = [*random_tokens(9, seed=92), *stored[700:], *stored[:700], *random_tokens(9, seed=93)]
    response = server.ask(prompt, 12, return_logprob=True, **BLENDED)
    if family == "opt":
        assert response.status_code == 400 and "does not blend" in response.text
        return
    blended = response.json()
    assert report(blended)["path"] == "ssd" and report(blended)["approximate"]
    assert_same([_computed(server, prompt)], [blended], 1e-4)


def test_bfloat16_is_stored_as_it_was_computed(workdir: Path, serve: Serve) -> None:
    """Cold and cached answers differ in bfloat16, by as much as with stock SGLang."""
    model = make_model("llama", workdir / "llama-bfloat16")
    with serve("bfloat16", *FLAGS, "--dtype=bfloat16", model=model) as server:
        for prompt in PROMPTS:
            server.generate(prompt, 1)
            answers = []
            for path in ("device", "ssd"):
                answers.append(server.generate(prompt, 16, return_logprob=True))
                assert report(answers[-1])["path"] == path
                server.flush()
            assert_same(answers[:1], answers[1:], 0.0)
