"""Architectures and dtypes beside Llama in float32: a prefix from SSD changes no answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.damage import store_damaged
from tests.serving.harness import Server, Zygote, launch, wait_until_ready
from tests.serving.tiny_models import make_model, random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (500, 1100, 2300, 4000)]
_FLAGS = ("--skip-tokenizer-init", "--max-total-tokens=20000", "--max-running-requests=8")


@pytest.fixture(scope="module", params=["opt", "qwen2", "qwen3"])
def server(request: pytest.FixtureRequest, workdir: Path, serve: Serve) -> Iterator[Server]:
    family = request.param
    flags = ("--max-total-tokens=9000", "--chunked-prefill-size=128", "--impress-bits=exact")
    with serve(family, *flags, model=make_model(family, workdir / family)) as server:
        yield server


def _computed(server: Server, prompt: list[int]) -> Answer:
    """An answer in a namespace of which nothing is stored."""
    computed = server.generate(prompt, 12, return_logprob=True, extra_key="other")
    assert report(computed)["path"] == "computed"
    return computed


def test_family_in_float32(server: Server) -> None:
    """From SSD, and then resident."""
    for prompt in PROMPTS[:3]:
        computed = _computed(server, prompt)
        server.generate(prompt, 1)
        server.flush()
        for path in ("ssd", "device"):
            stored = server.generate(prompt, 12, return_logprob=True)
            assert report(stored)["path"] == path
            assert_same([computed], [stored], 1e-4)


def test_family_computes_an_unreadable_prefix_again(server: Server) -> None:
    """Each model is left in the middle of a pass within a pass, which then goes on."""
    prompt = [*store_damaged(server, 900, seed=81), *random_tokens(3, seed=82)]
    recomputed = server.generate(prompt, 12, return_logprob=True)
    assert report(recomputed)["recomputed"] is True
    assert_same([_computed(server, prompt)], [recomputed], 1e-4)


def test_bfloat16_is_as_close_as_stock_is_to_itself(workdir: Path, zygote: Zygote) -> None:
    """Stock SGLang answers differently cold and cached in bfloat16; we are no further away."""
    cold, cached, stored = _answers(workdir, zygote)
    ours = [_distance(a, b) for a, b in zip(cached, stored, strict=True)]
    theirs = [_distance(a, b) for a, b in zip(cached, cold, strict=True)]
    assert sum(ours) <= sum(theirs)


def _answers(workdir: Path, zygote: Zygote) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Answers of stock cold, stock cached, and ours from SSD."""
    model = make_model("llama", workdir / "llama-bfloat16")
    flags = (*_FLAGS, "--dtype=bfloat16")
    with contextlib.ExitStack() as stack:
        stock = launch(model, workdir / "stock-bfloat16.log", *flags, zygote=zygote, stock=True)
        stack.callback(stock.stop)
        ours = launch(
            model,
            workdir / "impress-bfloat16.log",
            *flags,
            "--enable-impress",
            "--impress-write-after=1",
            "--impress-load=always",
            f"--impress-ssd-dir={workdir / 'store-bfloat16'}",
            "--impress-bits=exact",
            zygote=zygote,
        )
        stack.callback(ours.stop)
        wait_until_ready(stock)
        wait_until_ready(ours)
        cold, cached = (_ask(stock) for _ in range(2))
        _ask(ours)
        ours.flush()
        stored = _ask(ours)
        assert paths(stored) == ["ssd"] * len(PROMPTS)
        stock.assert_quiet()
        ours.assert_quiet()
        return cold, cached, stored


def _ask(server: Server) -> list[Answer]:
    return [server.generate(prompt, 16, return_logprob=True) for prompt in PROMPTS]


def _distance(left: Answer, right: Answer) -> float:
    """Tokens that differ, and the log-probability difference of those before the first one."""
    pairs = list(zip(left["output_ids"], right["output_ids"], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    logprobs = zip(
        left["meta_info"]["output_token_logprobs"][:same],
        right["meta_info"]["output_token_logprobs"][:same],
        strict=True,
    )
    return len(pairs) - same + max((abs(a[0] - b[0]) for a, b in logprobs), default=0.0)
