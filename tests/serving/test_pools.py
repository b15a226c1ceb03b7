"""Pools beside keys and values in the model's dtype: what comes back is what was resident.

An answer behind resident KVs is the reference, for what was computed may differ: a pass reads new
KVs before they are rounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from impress_sglang.store.peers import LOOK_SECONDS
from tests.serving.compare import Answer, assert_same, report
from tests.serving.conftest import Serve
from tests.serving.damage import segments, store_damaged
from tests.serving.harness import LATENT, SPECULATING, Server
from tests.serving.tiny_models import (
    make_adapter,
    make_draft,
    make_eagle,
    make_model,
    random_tokens,
)
from tests.serving.tiny_tokenizer import add_tokenizer

PROMPTS = [random_tokens(length, seed=length) for length in (500, 1100, 2300)]


def assert_comes_back(server: Server, *, ranks: int = 1) -> None:
    """Exactly, and computed if it is damaged."""

    def heard() -> None:
        if ranks > 1:
            # By the rank that reads what the first one wrote.
            time.sleep(2 * LOOK_SECONDS)
            server.stats()

    for prompt in PROMPTS:
        server.generate(prompt, 1)
        answers = []
        for path in ("device", "ssd"):
            answers.append(server.generate(prompt, 16, return_logprob=True))
            assert report(answers[-1])["path"] == path
            assert not report(answers[-1])["approximate"]
            server.flush()
            heard()
        # What was resident ends a token later than what was loaded, which rounds otherwise.
        assert_same(answers[:1], answers[1:], 1e-5)
    prompt = [*store_damaged(server, 900, seed=81), *random_tokens(3, seed=82)]
    heard()
    told = report(server.generate(prompt, 12))
    assert told["path"] == "computed" and told["why"]["reason"] == "damaged"


def test_eight_bits(serve: Serve) -> None:
    flags = ("--kv-cache-dtype=fp8_e4m3", "--impress-keep=auto", "--max-total-tokens=9000")
    with serve("fp8", *flags) as server:
        assert "KVs in torch.float8_e4m3fn are stored as they are" in server.log_text()
        assert_comes_back(server)


def test_latent_vectors(workdir: Path, serve: Serve) -> None:
    """Two ranks have the same ones, which the first one writes."""
    model = make_model("deepseek_v2", workdir / "deepseek")
    flags = ("--impress-keep=auto", "--max-total-tokens=9000")
    with serve("latents", *flags, model=model, preload=LATENT, ranks=2) as server:
        assert "latent vectors (MLA) are stored as they are" in server.log_text()
        assert_comes_back(server, ranks=2)
        written = (workdir / "store-latents").glob("*/segments/*/*.kv")
        assert set(written) == segments(server)
        server.assert_whole()


def test_text_of_a_multimodal_model(workdir: Path, serve: Serve) -> None:
    """Its three positions of a token are the same one."""
    model = make_model("qwen2_vl", workdir / "qwen2_vl")
    add_tokenizer(model, media=True)
    flags = ("--enable-multimodal", "--impress-bits=exact", "--max-total-tokens=9000")
    with serve("media", *flags, model=model) as server:
        assert_comes_back(server)
        server.assert_whole()


TRITON = ("--attention-backend=triton", "--triton-attention-num-kv-splits=2")


def acceptance(answers: list[Answer]) -> float:
    """Tokens of a verified draft, on average."""
    verified = sum(own["meta_info"]["spec_verify_ct"] for own in answers)
    return sum(own["meta_info"]["completion_tokens"] for own in answers) / verified


def speculating(algorithm: str, draft: Path) -> tuple[str, ...]:
    return (
        *(f"--speculative-algorithm={algorithm}", f"--speculative-draft-model-path={draft}"),
        *("--speculative-num-steps=3", "--speculative-eagle-topk=1"),
        *("--speculative-num-draft-tokens=4", "--disable-cuda-graph"),
        *("--max-total-tokens=4000", "--impress-keep=auto"),
    )


def same_logprobs(left: Sequence[Answer], right: Sequence[Answer]) -> None:
    """The same tokens, and about the same of each, also where SGLang's EAGLE has no number."""
    for own, other in zip(left, right, strict=True):
        assert own["output_ids"] == other["output_ids"]
        both = (
            [
                np.nan if found is None else found
                for found, *_ in told["meta_info"]["output_token_logprobs"]
            ]
            for told in (own, other)
        )
        np.testing.assert_allclose(*both, atol=1e-4)


@pytest.mark.parametrize(("algorithm", "ranks"), [("STANDALONE", 1), ("EAGLE", 1), ("EAGLE", 2)])
def test_drafts(workdir: Path, serve: Serve, algorithm: str, ranks: int) -> None:
    """Behind what was loaded, as many are accepted as behind what was resident."""
    if algorithm == "EAGLE":
        model, draft = make_eagle(workdir / "eagle")
    else:
        model = make_model("llama", workdir / "llama-one-layer", num_hidden_layers=1)
        draft = make_draft(model, workdir / "draft")
    flags = (*TRITON, *speculating(algorithm, draft))
    with serve(
        f"{algorithm}-{ranks}", *flags, model=model, preload=SPECULATING, ranks=ranks
    ) as server:
        assert "a draft model's KVs are stored with the others" in server.log_text()
        found: dict[str, list[Answer]] = {"device": [], "ssd": []}
        for seed in range(2):
            prompt = random_tokens(100 + 10 * seed, seed)
            server.generate(prompt, 1)
            for path, answers in found.items():
                answers.append(server.generate(prompt, 16, return_logprob=True))
                assert report(answers[-1])["path"] == path
                server.flush()
        same_logprobs(found["device"], found["ssd"])
        accepted = {path: acceptance(answers) for path, answers in found.items()}
        assert accepted["ssd"] > 0.98 * accepted["device"] > 2.0, accepted
        server.assert_whole()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters(workdir: Path, tiny_llama: Path, serve: Serve, ranks: int) -> None:
    """Nobody reads what other weights have made, also of an adapter with the same name and path."""
    folder = make_adapter(workdir / f"adapter-{ranks}", seed=1)
    flags = (
        *("--enable-lora", f"--lora-paths=own={folder}", "--lora-backend=torch_native"),
        *("--max-total-tokens=9000", "--impress-bits=exact", "--impress-keep=exact"),
    )
    prompt, answers = random_tokens(600, seed=7), {}

    def ask(server: Server, name: str, path: str, adapter: str | None) -> None:
        """Behind nothing, what was loaded, and what is resident, in this order."""
        answer = server.generate(prompt, 12, return_logprob=True, lora_path=adapter)
        assert report(answer)["path"] == path
        assert_same([answers.setdefault(name, answer)], [answer], 1e-4)
        server.flush()

    with serve(f"adapters-{ranks}", *flags, preload=SPECULATING, ranks=ranks) as server:
        for name, adapter in (("base", None), ("first", "own")):
            for path in ("computed", "ssd"):
                ask(server, name, path, adapter)
        for name, seed, path in (("second", 2, "computed"), ("first", 1, "ssd")):
            server.post("/unload_lora_adapter", lora_name="own").raise_for_status()
            make_adapter(folder, seed)
            server.post(
                "/load_lora_adapter", lora_name="own", lora_path=str(folder)
            ).raise_for_status()
            ask(server, name, path, "own")
        server.assert_whole()
    make_adapter(folder, 2)
    with serve(f"adapters-{ranks}", *flags, preload=SPECULATING, ranks=ranks) as server:
        for name, adapter in (("base", None), ("second", "own")):
            ask(server, name, "ssd", adapter)
    assert len({tuple(own["output_ids"]) for own in answers.values()}) == 3
