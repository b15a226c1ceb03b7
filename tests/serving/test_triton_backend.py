"""SGLang's triton backend, whose kernels run in Triton's interpreter on a CPU: parts of prefixes.

The interpreter is slow, so prompts are short. It says that rows, starts and loading are right, and
nothing of a GPU: neither of CUDA graphs nor of what runs at the same time there. Servers that load
beside their passes attend as SGLang does; `test_pools.py` has some, with drafts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, logprobs, paths, report
from tests.serving.conftest import TINY_FLAGS, Serve
from tests.serving.harness import STOCK, Server
from tests.serving.tiny_models import make_model, random_tokens

CHUNK = 64
FLAGS = (
    "--attention-backend=triton",
    "--triton-attention-num-kv-splits=2",
    "--max-total-tokens=4000",
    f"--chunked-prefill-size={CHUNK}",
    "--enable-mixed-chunk",
)
PARTS = ("--impress-policy=paper", "--impress-retention=0.25")
EXACT: dict[str, Any] = {"impress_retention": 1.0}
STAYS_WHOLE = "triton"


@pytest.fixture(scope="module")
def model(workdir: Path) -> Path:
    return make_model("llama", workdir / "llama-two-layers", num_hidden_layers=2)


@pytest.fixture(scope="module")
def stock_triton(start: Serve, model: Path) -> Iterator[Server]:
    with start("stock-triton", *TINY_FLAGS, *FLAGS, model=model, preload=STOCK) as server:
        yield server


@pytest.fixture(scope="module")
def triton(model: Path, serve: Serve) -> Iterator[Server]:
    with serve("triton", *PARTS, *FLAGS, model=model) as server:
        yield server


@pytest.fixture(scope="module")
def torch_native(model: Path, serve: Serve) -> Iterator[Server]:
    flags = (*PARTS, "--attention-backend=torch_native", *FLAGS[1:])
    with serve("torch-native", *flags, model=model) as server:
        yield server


def test_whole_prefixes_give_the_answers_of_stock(stock_triton: Server, triton: Server) -> None:
    stored = triton.store(100, seed=1)
    batch = [
        [*stored, *random_tokens(20, seed=2)],
        [*stored, *random_tokens(CHUNK + 10, seed=3)],
        random_tokens(60, seed=4),
    ]
    expected = stock_triton.generate_together(batch, 4, return_logprob=True)
    actual = triton.generate_together(batch, 4, return_logprob=True, **EXACT)
    assert_same(expected, actual)
    assert paths(actual)[2] == "computed" and "ssd" in paths(actual)[:2]
    resident = triton.generate(batch[0], 4, return_logprob=True, **EXACT)
    assert_same(expected[:1], [resident])
    assert paths([resident]) == ["device"]


def test_parts_of_prefixes_give_the_answers_of_torch_native(
    triton: Server, torch_native: Server
) -> None:
    servers = [torch_native, triton]
    stored = [random_tokens(length, seed=length) for length in (100, 66)]
    for server in servers:
        server.store_prompts(*stored)
    batch = [
        [*stored[0], *random_tokens(16, seed=12)],
        [*stored[1], *random_tokens(9, seed=13)],
        random_tokens(40, seed=14),
    ]
    expected, actual = (s.generate_together(batch, 4, return_logprob=True) for s in servers)
    # The same tokens are chosen from scores that differ in their last bits.
    assert_same(expected, actual, 5e-3)
    assert paths(actual) == ["ssd", "ssd", "computed"]
    assert [report(answer)["used_tokens"] for answer in actual] == [25, 17, 0]
    # In two chunks.
    long = [*stored[1], *random_tokens(CHUNK + 9, seed=15)]
    chunked = [server.generate(long, 4, return_logprob=True) for server in servers]
    assert_same(chunked[:1], chunked[1:], 5e-3)
    # The control: a part gives other answers than the whole.
    whole = triton.generate(batch[0], 4, return_logprob=True, **EXACT)
    assert abs(logprobs(whole) - logprobs(actual[0])).max() > 1e-2


def test_decoding_beside_prefill(triton: Server, torch_native: Server) -> None:
    """MIXED batches: one request decodes on a part of a prefix while another is computed."""
    prefix = random_tokens(80, seed=21)
    for server in (torch_native, triton):
        server.store_prompts(prefix)
    prompt = [*prefix, *random_tokens(8, seed=22)]
    other = random_tokens(2 * CHUNK, seed=23)
    expected = [torch_native.generate(ids, 6) for ids in (prompt, other)]
    with ThreadPoolExecutor() as pool:
        decoding = pool.submit(triton.generate, prompt, 6)
        while "#cached-token: 80" not in triton.log_text():
            assert not decoding.done()
            time.sleep(0.05)
        computed = triton.generate(other, 6)
    actual = [decoding.result(), computed]
    assert [one["output_ids"] for one in actual] == [one["output_ids"] for one in expected]
    assert paths(actual) == ["ssd", "computed"]
    # Chunks that were computed while a request was running.
    assert re.search(r"Prefill batch.*#new-token: 6\d.*#running-req: 1", triton.log_text())
