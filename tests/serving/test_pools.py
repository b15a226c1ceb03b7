"""Pools beside keys and values in the model's dtype: what comes back is what was resident.

An answer behind resident KVs is the reference, for what was computed may differ: a pass reads new
KVs before they are rounded.
"""

from __future__ import annotations

from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve
from tests.serving.damage import store_damaged
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

PROMPTS = [random_tokens(length, seed=length) for length in (500, 1100, 2300)]


def assert_comes_back(server: Server) -> None:
    """Exactly, and computed if it is damaged."""
    for prompt in PROMPTS:
        server.generate(prompt, 1)
        answers = []
        for path in ("device", "ssd"):
            answers.append(server.generate(prompt, 16, return_logprob=True))
            assert report(answers[-1])["path"] == path
            assert not report(answers[-1])["approximate"]
            server.flush()
        assert_same(answers[:1], answers[1:], 0.0)
    prompt = [*store_damaged(server, 900, seed=81), *random_tokens(3, seed=82)]
    told = report(server.generate(prompt, 12))
    assert told["path"] == "computed" and told["why"]["reason"] == "damaged"


def test_eight_bits(serve: Serve) -> None:
    flags = ("--kv-cache-dtype=fp8_e4m3", "--impress-keep=auto", "--max-total-tokens=9000")
    with serve("fp8", *flags) as server:
        assert "KVs in torch.float8_e4m3fn are stored as they are" in server.log_text()
        assert_comes_back(server)
    with serve("fp8", *flags) as server:
        told = report(server.generate(PROMPTS[0], 1))
        assert told["path"] == "ssd", "what an earlier server stored"
