"""The small engine: equal work for all policies, what it loads, and what it needs installed."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.core.options import parse
from bench.engine.engine import IDENTITY, OPTIONS, Engine, run, save, tokens_of
from bench.engine.model import MODELS, Model, ModelShape
from impress_sglang.config import ImpressConfig
from impress_sglang.store.store import PrefixStore
from impress_sglang.transfer.codecs import plain_codec

CPU, ROOT = torch.device("cpu"), Path(__file__).resolve().parents[2]
SHAPE = ModelShape("small", 2, 8, 4, 48, 64, head_dim=32)
TINY = [
    *("--quick", "--scale", "0.1", "--layers", "2"),
    *("--prefixes", "2", "--prefix-tokens", "300,400", "--new-tokens", "4", "--warmup", "2"),
    *("--requests", "2", "--ssd-mbps", "0", "--host-share", "3"),
]
LENGTH = 300


def model_of(shape: ModelShape = SHAPE) -> Model:
    return Model(shape, CPU, torch.float32, rows=LENGTH + 8, seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    config = ImpressConfig(
        ssd_dir=str(tmp_path), ssd_gb=1.0, min_free_gb=0.0, host_gb=0.0, device_gb=0.0
    )
    shape = SHAPE.kv_shape(torch.float32)
    opened = PrefixStore(config, IDENTITY, shape, CPU, codec=plain_codec(shape))
    with contextlib.closing(opened):
        yield opened


@pytest.mark.parametrize(("policy", "error"), [("as", 0.0), ("impress", 0.1)])
def test_a_stored_prefix_fills_the_pool(policy: str, error: float, store: PrefixStore) -> None:
    model = model_of()
    kvs = [[rows.clone() for rows in pool] for pool in model.pools]
    saved = model_of()
    save(store, saved, tokens_of(1, LENGTH))
    # The same numbers again, in the order in which they were saved.
    again = model_of()
    size = LENGTH, SHAPE.kv_heads, SHAPE.head_dim
    wanted = [(again.random(*size), again.random(*size)) for _ in range(SHAPE.layers)]
    engine = Engine(model, store, policy, new_tokens=4)
    ttft, load = engine.serve(tokens_of(1, LENGTH))
    assert 0 < engine.plan_seconds * 1e3 < load < ttft and engine.reads.ssd_bytes > 0
    for pool, right, before in zip(model.pools, wanted, kvs, strict=True):
        for found, exact, was in zip(pool, right, before, strict=True):
            assert float((found[:LENGTH] - exact).abs().mean()) <= error
            assert not torch.equal(found[:LENGTH], was[:LENGTH])


def test_each_policy_has_a_row_and_caches_of_its_own() -> None:
    (cell,) = run(parse("engine", "", OPTIONS, TINY)).figures["cells"]
    rows = {row["policy"]: row for row in cell["rows"]}
    assert list(rows) == ["recompute", "as", "impress"]
    assert rows["recompute"]["requests"] == 2 and rows["recompute"]["load_ms"] == 0
    for name in ("as", "impress"):
        assert rows[name]["host"] + rows[name]["device"] == 1.0 and rows[name]["ssd_mb"] == 0
    assert dataclasses.asdict(MODELS["llama-3-8b"].scaled(0.1, 2)) == cell["model"]


WITHOUT = """
import sys

for name in ("sglang", "requests", "rich", "transformers", "matplotlib", "numba"):
    sys.modules[name] = None
"""
ENGINE = """
sys.modules["triton"] = None
from bench.core.cli import main

assert main(["engine", *sys.argv[1:]]) == 0
assert not any(name.startswith("impress_sglang.plugin") for name in sys.modules)
"""


@pytest.mark.parametrize("code", [ENGINE, "import bench.micro.kernels"])
def test_it_runs_where_sglang_is_not(code: str, tmp_path: Path) -> None:
    """On a CPU codes take Numba, which a GPU machine without SGLang need not have."""
    options = [*TINY, "--policies", "recompute,as", "--ssd-dir", str(tmp_path)]
    command = [sys.executable, "-c", f"{WITHOUT}{code}", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == [], "stores are gone"
