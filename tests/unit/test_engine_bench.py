"""The small engine: what it loads, equal work for all policies, and what it needs installed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.core.session import ROOT
from bench.engine.engine import IDENTITY, Engine, save, tokens_of
from bench.engine.model import MODELS, Model, ModelShape
from impress_sglang.config import ImpressConfig
from impress_sglang.store.store import PrefixStore
from impress_sglang.transfer.codecs import plain_codec

CPU, LENGTH = torch.device("cpu"), 300
SHAPE = ModelShape("small", 2, 8, 4, 48, 64, head_dim=32)


def model() -> Model:
    return Model(SHAPE, CPU, torch.float32, rows=LENGTH + 8, seed=1)


@pytest.mark.parametrize(("policy", "error"), [("as", 0.0), ("impress", 0.1)])
def test_a_stored_prefix_fills_the_pool(policy: str, error: float, tmp_path: Path) -> None:
    sizes = {"ssd_gb": 1.0, "min_free_gb": 0.0, "host_gb": 0.0, "device_gb": 0.0}
    config = ImpressConfig(ssd_dir=str(tmp_path), **sizes)
    shape, size = SHAPE.kv_shape(torch.float32), (LENGTH, SHAPE.kv_heads, SHAPE.head_dim)
    store = PrefixStore(config, IDENTITY, shape, CPU, codec=plain_codec(shape))
    with contextlib.closing(store):
        save(store, model(), tokens_of(1, LENGTH))
        # The same numbers again, in the order in which they were saved.
        again, serving = model(), model()
        saved = [(again.random(*size), again.random(*size)) for _ in range(SHAPE.layers)]
        before = [[rows.clone() for rows in pool] for pool in serving.pools]
        engine = Engine(serving, store, policy, new_tokens=4)
        ttft, load = engine.serve(tokens_of(1, LENGTH))
    assert 0 < engine.plan_seconds * 1e3 < load < ttft and engine.reads.ssd_bytes > 0
    for pools in zip(serving.pools, saved, before, strict=True):
        for loaded, exact, old in zip(*pools, strict=True):
            difference = float((loaded[:LENGTH] - exact).abs().mean())
            assert difference <= error and (difference > 0) == (policy == "impress")
            assert not torch.equal(loaded[:LENGTH], old[:LENGTH])


# A GPU machine without SGLang need not have Numba, which only codes on a CPU need.
WITHOUT_SGLANG = """
import sys

ABSENT = "sglang", "requests", "rich", "transformers", "matplotlib", "numba", "triton"
sys.modules |= dict.fromkeys(ABSENT)
from bench.core.cli import main

assert main(sys.argv[1:]) == 0
assert not any(name.startswith("impress_sglang.plugin") for name in sys.modules)
del sys.modules["triton"]
import bench.micro.kernels
"""
TINY = [
    *("--quick", "--scale=0.1", "--layers=2", "--prefixes=2", "--prefix-tokens=300,400"),
    *("--new-tokens=4", "--warmup=2", "--requests=2", "--ssd-mbps=0", "--host-share=3"),
]


def test_each_policy_has_a_row_where_sglang_is_not(tmp_path: Path) -> None:
    drive, path = tmp_path / "drive", tmp_path / "result"
    options = [*TINY, "--policies=recompute,as", f"--ssd-dir={drive}", f"--json={path}"]
    command = [sys.executable, "-c", WITHOUT_SGLANG, "engine", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert list(drive.iterdir()) == [], "stores are gone"
    (cell,) = json.loads(path.read_text())["cells"]
    computed, loaded = cell["rows"]
    assert (computed["policy"], loaded["policy"]) == ("recompute", "as")
    assert computed["requests"] == 2 and computed["load_ms"] == 0
    assert loaded["host"] + loaded["device"] == 1.0 and loaded["ssd_mb"] == 0
    assert dataclasses.asdict(MODELS["llama-3-8b"].scaled(0.1, 2)) == cell["model"]
