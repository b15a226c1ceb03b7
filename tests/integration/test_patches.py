"""The diffs in `patches/`: they apply to the installed SGLang, keep its results, and pay off."""

from __future__ import annotations

import inspect
import runpy
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

PATCH = next(
    Path(__file__).parents[2].glob("patches/sglang-0.5.23/*-torch-native-rectangular-*.patch")
)
BACKEND = Path("sglang/srt/layers/attention/torch_native_backend.py")
Extend = Callable[..., Tensor]

# (prefix length, new tokens) of each request of a batch.
BATCHES = {
    "all new": [(0, 1), (0, 17), (0, 40)],
    "all cached": [(40, 1), (1, 40), (64, 8)],
    "ragged": [(0, 5), (33, 1), (7, 19), (0, 1), (100, 64)],
}


@pytest.fixture(scope="module")
def extends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Extend, ...]:
    """The extend attention as the command of patches/README.md patches it, and as SGLang has it;
    it uses no state of the backend."""
    if shutil.which("patch") is None:
        pytest.skip("needs the program patch")
    site = tmp_path_factory.mktemp("site-packages")
    (site / BACKEND).parent.mkdir(parents=True)
    shutil.copy(inspect.getfile(TorchNativeAttnBackend), site / BACKEND)
    with PATCH.open("rb") as diff:
        subprocess.run(["patch", "-p2", "--fuzz=0", "-d", site], stdin=diff, check=True)
    patched: Any = runpy.run_path(str(site / BACKEND))["TorchNativeAttnBackend"]
    both: tuple[Any, ...] = patched, TorchNativeAttnBackend
    return tuple(backend.__new__(backend)._run_sdpa_forward_extend for backend in both)


def make_batch(
    lengths: list[tuple[int, int]], query_heads: int, kv_heads: int, head_dim: int
) -> SimpleNamespace:
    """A batch whose KVs lie scattered in the pool, as the backend gets it."""
    prefixes, new = torch.tensor(lengths).unbind(1)
    seq_lens = prefixes + new
    rows = torch.randperm(len(lengths) * int(seq_lens.max())).view(len(lengths), -1)
    return SimpleNamespace(
        query=torch.randn(int(new.sum()), query_heads, head_dim),
        k_cache=torch.randn(rows.numel(), kv_heads, head_dim),
        v_cache=torch.randn(rows.numel(), kv_heads, head_dim),
        req_to_token=rows,
        req_pool_indices=torch.arange(len(lengths)).flip(0),
        seq_lens=seq_lens,
        extend_prefix_lens=prefixes,
        extend_seq_lens=new,
        encoder_lens=None,
        scaling=0.3,
        enable_gqa=query_heads != kv_heads,
    )


def run(extend: Extend, batch: SimpleNamespace, **options: Any) -> Tensor:
    output = torch.full_like(batch.query, float("nan"))
    return extend(**vars(batch), output=output, **options)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, -1, 0, 5, 500])
def test_causal_results_are_the_same(
    extends: tuple[Extend, ...], lengths: list[tuple[int, int]], kv_heads: int, window: int | None
) -> None:
    batch = make_batch(lengths, 4, kv_heads, 16)
    options = {"causal": True, "sliding_window_size": window}
    patched, original = (run(extend, batch, **options) for extend in extends)
    assert not patched.isnan().any()
    torch.testing.assert_close(patched, original, rtol=1e-5, atol=1e-5)


def test_few_new_tokens_after_many_cached_are_cheap(extends: tuple[Extend, ...]) -> None:
    """Needs the patch: without it, 64 new tokens cost as much as 4,064 (measured: 40 times
    what they cost with it)."""
    batch = make_batch([(4000, 64)], 8, 2, 64)
    patched, original = extends
    assert 5 * best_seconds(patched, batch, 20) < best_seconds(original, batch, 3)


def best_seconds(extend: Extend, batch: SimpleNamespace, calls: int) -> float:
    """Best of some calls, as other work on the machine only adds time."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        run(extend, batch, causal=True)
        times.append(time.perf_counter() - began)
    return min(times)
