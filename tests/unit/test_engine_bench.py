"""The small engine: planted importance, equal work for all policies, and its answers."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.core.options import parse
from bench.core.session import BenchFailed
from bench.engine import model as engine_model
from bench.engine.clock import ATTENTION, LOAD, MODEL, REST, STAGES, Served, StageClock
from bench.engine.engine import OPTIONS, make_row, run
from bench.engine.model import Engine, Model
from bench.engine.stored import IDENTITY, StoredEngine, store_planted
from bench.engine.workload import (
    MODELS,
    PROBE_HEADS,
    ModelShape,
    Planter,
    Request,
    Workload,
    make_workload,
)
from bench.policies.compared import POLICIES, STORED_BY, link_store, store_kind
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.scores import column_sums
from impress_sglang.importance.selection import mean_jaccard, per_head_tokens, top_tokens
from impress_sglang.importance.selectors import probe_kv_heads
from impress_sglang.management.store import PrefixStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.read_planner import ReadStats

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
MULTI_HEAD = ModelShape("mha", 6, 8, 8, 64, 100, gated=False, head_dim=32)
GROUPED = ModelShape("gqa", 4, 16, 4, 64, 100, gated=True, head_dim=32)
SMALL = ModelShape("small", 2, 4, 4, 48, 64, gated=False, head_dim=32)
SMALL_GROUPED = dataclasses.replace(SMALL, query_heads=8, gated=True)
TINY = [
    *("--quick", "--device", "cpu", "--scale", "0.0625", "--layers", "2", "--prefixes", "2"),
    *("--prefix-tokens", "150-300", "--new-tokens", "4-8", "--warmup", "3", "--requests", "2"),
    *("--recompute-requests", "1", "--ssd-mbps", "0"),
]


def read(*given: str) -> argparse.Namespace:
    return parse("engine", "", OPTIONS, given)


def workload_of(**changed: Any) -> Workload:
    options: dict[str, Any] = {
        "prefixes": 3,
        "prefix_tokens": (260, 300),
        "new_tokens": (5, 9),
        "parts": (6, 1, 4),
        "seed": 3,
        **changed,
    }
    return make_workload(**options)


@pytest.mark.parametrize(
    ("shape", "probe"), [(MULTI_HEAD, (0.33, 0.45)), (GROUPED, (0.42, 0.6))], ids=["mha", "gqa"]
)
def test_planted_sets_are_as_alike_as_those_of_real_models(
    shape: ModelShape, probe: tuple[float, float]
) -> None:
    """Jaccard indices of the top quarter, of SmolLM2 and OPT (IMPRESS 4.2); mass on token 0."""
    planter, group, k = Planter(shape, CPU, torch.float32, seed=1), shape.query_heads, 375
    group //= shape.kv_heads
    probed = group * len(probe_kv_heads(shape.query_heads, shape.kv_heads, PROBE_HEADS))
    asked = [planter.question(number, 32) for number in range(3)]
    found: dict[str, list[float]] = {"questions": [], "heads": [], "probe": [], "sink": []}
    for layer, (keys, _) in enumerate(planter.prefix(0, 1500)):
        sets = []
        for own in asked:
            new = own.new_keys[layer]
            scores = column_sums(own.queries[layer], keys, keys[:0], new, shape.head_dim**-0.5)
            sets.append(per_head_tokens(scores, group, k))
            found["heads"].append(mean_jaccard(sets[-1], 1500))
            found["probe"].append(mean_jaccard(top_tokens(scores[:probed], k), 1500))
            found["sink"].append(float((scores[:, 0] / scores.sum(1)).mean()))
        for head in range(shape.kv_heads):
            of_head = torch.stack([own[head] for own in sets])
            found["questions"].append(mean_jaccard(of_head, 1500))
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    assert 0.66 <= mean["questions"] <= 0.79 and 0.3 <= mean["heads"] <= 0.45
    assert probe[0] <= mean["probe"] <= probe[1] and 0.36 <= mean["sink"] <= 0.51


def test_equal_seeds_plant_equal_kvs() -> None:
    one, same, other = (Planter(SMALL, CPU, torch.float32, seed=seed) for seed in (1, 1, 2))
    keys, values = next(one.prefix(4, 50))
    for own, equal in zip(next(same.prefix(4, 50)), (keys, values), strict=True):
        assert torch.equal(own, equal)
    assert not torch.equal(keys, next(one.prefix(5, 50))[0])
    assert not torch.equal(keys, next(other.prefix(4, 50))[0])
    assert torch.equal(one.question(7, 3).queries[1], same.question(7, 3).queries[1])
    assert not torch.equal(one.question(7, 3).queries[1], one.question(8, 3).queries[1])


def test_a_workload_has_what_was_asked_for() -> None:
    found = workload_of(prefixes=5, parts=(6, 1, 400))
    requests = [*found.warmup, *found.settle, *found.measured]
    assert found == workload_of(prefixes=5, parts=(6, 1, 400)) != workload_of(seed=4)
    assert sorted(found.lengths) == [260, 270, 280, 290, 300]
    assert [len(found.warmup), len(found.settle), len(found.measured)] == [6, 1, 400]
    assert {own.new_tokens for own in requests} == {5, 6, 7, 8, 9} and found.longest_new == 9
    # No question is asked twice, and no prefix twice in a row; the middle one is popular.
    assert len({own.question for own in requests}) == len(requests)
    assert all(one.prefix != other.prefix for one, other in itertools.pairwise(requests))
    counts = Counter(own.prefix for own in requests)
    assert set(counts) == set(range(5)) and counts[2] > 1.5 * counts[0]
    prompt = found.prompt(Request(1, 0, 4))
    assert prompt[: found.lengths[1]].tolist() == found.tokens(1).tolist()
    assert found.tokens(0)[0] != found.tokens(1)[0]


def test_scaled_models_keep_their_groups() -> None:
    scaled = MODELS["llama-3-8b"].scaled(0.25, 5)
    assert (scaled.layers, scaled.query_heads, scaled.kv_heads) == (5, 8, 2)
    assert (scaled.hidden, scaled.ffn) == (1024, 3584)
    # 40 layers, keys and values, 5120 elements of 2 bytes.
    assert MODELS["opt-13b"].kv_bytes(torch.float16) == 40 * 2 * 5120 * 2


class FakeDevice:
    """An accelerator that is `lag` seconds behind whoever records."""

    now = lag = 0.0

    @dataclasses.dataclass
    class Event:
        at: float

        def elapsed_time(self, end: FakeDevice.Event) -> float:
            return (end.at - self.at) * 1e3

    def record(self) -> Event:
        return self.Event(self.now + self.lag)


def test_stages_on_an_accelerator_last_until_it_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, device = iter([100.0, 101.0]), FakeDevice()
    monkeypatch.setattr("bench.engine.clock.time.perf_counter", lambda: next(clock))
    stages = StageClock(device.record, FakeDevice.Event.elapsed_time)
    with stages.span(ATTENTION):
        # Queued at once; the device is busy with it until 0.5 s.
        device.lag = 0.5
    with stages.span(LOAD):
        # The host reads for 0.3 s meanwhile, all of which is hidden, and copies until 0.6 s.
        device.now, device.lag = 0.6, 0.0

    found = stages.finish()

    assert stages.duration_ms == pytest.approx(1000)
    assert found == pytest.approx({MODEL: 0, ATTENTION: 500, LOAD: 100, REST: 400})


def test_a_row_sums_counters_and_takes_means_of_times() -> None:
    counters = {"ssd_bytes": 30, "ssd_needed_bytes": 10, "ssd_chunks": 1, "device_chunks": 3}
    none = dict.fromkeys(STAGES, 0.0)

    def served(ttft: float) -> Served:
        reads = ReadStats(**counters, wait_ms=0.6 * ttft)
        loads = LoadStats(layers_by_probe=3, layers_by_fallback=1, probe_ms=ttft / 10)
        return Served(ttft, none | {LOAD: ttft / 2}, torch.zeros(1), reads, loads, 7.0)

    row = make_row("paper", [served(100.0), served(300.0)])

    assert row["requests"] == 2 and row["ttft_ms"] == [100.0, 300.0]
    assert row["ttft_ms_mean"] == row["ttft_ms_p50"] == 200.0
    assert row["ttft_ms_p99"] == pytest.approx(298.0)
    assert (row["wait_ms"], row["io_share"]) == (240.0, 0.6)
    assert (row["probe_ms"], row["probe_share"]) == (40.0, 0.1)
    assert row["stage_ms"] == none | {LOAD: 100.0}
    assert (row["ssd_bytes"], row["read_amplification"]) == (60, 3.0)
    assert (row["device_hit_ratio"], row["ssd_ratio"]) == (0.75, 0.25)
    assert (row["fallback_share"], row["estimated_ms"]) == (0.25, 7.0)
    computed = make_row("recompute", [Served(10.0, none, torch.zeros(1))])
    assert computed["device_hit_ratio"] is None and computed["estimated_ms"] is None


WITHOUT = """
import sys

for name in ("sglang", "requests", "rich", "transformers", "matplotlib", "numba", "triton"):
    sys.modules[name] = None
from bench.core.cli import main

assert main(["engine", *sys.argv[1:]]) == 0
assert not any(name.startswith("impress_sglang.integration") for name in sys.modules)
"""


def test_it_runs_where_sglang_is_not(tmp_path: Path) -> None:
    # On a CPU codes take Numba, which a GPU machine without SGLang need not have.
    options = [*TINY, "--policies", "recompute,as+h2o+lru,paper", "--ssd-dir", str(tmp_path)]
    command = [sys.executable, "-c", WITHOUT, *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == [], "stores are gone"


def test_kernels_import_where_sglang_is_not() -> None:
    blocked = WITHOUT.split("from bench")[0].replace(', "triton"', "")
    command = [sys.executable, "-c", f"{blocked}import bench.micro.kernels"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr


@dataclasses.dataclass
class Prepared:
    """An engine, and its prefixes stored."""

    engine: Engine
    root: Path

    def config(self, folder: Path, **options: object) -> ImpressConfig:
        return ImpressConfig.from_options(
            {
                "ssd_dir": str(folder),
                "min_free_gb": 0.0,
                "min_prefix_tokens": 1,
                "load": "always",
                "reorder_interval": 0.0,
                "base_error": 0.0,
                "device_gb": 0.0002,
                "host_gb": 0.0006,
                **options,
            }
        )

    def shape(self, kind: str) -> KVShape:
        own = self.engine.model.shape
        probes = probe_kv_heads(own.query_heads, own.kv_heads, 3) if kind == "paper" else ()
        return own.kv_shape(torch.float32, probes)

    def prefixes(self, kind: str) -> Path:
        folder = self.root / kind
        if not folder.exists():
            config = self.config(folder, policy=STORED_BY[kind], bits="exact")
            with contextlib.closing(PrefixStore(config, IDENTITY, self.shape(kind))) as store:
                for prefix in range(len(self.engine.workload.lengths)):
                    store_planted(self.engine, store, prefix)
        return folder

    @contextlib.contextmanager
    def stored(
        self, policy: str, retention: float, bits: float | str = "exact"
    ) -> Iterator[StoredEngine]:
        folder, kind = Path(tempfile.mkdtemp(dir=self.root)), store_kind(policy)
        link_store(self.prefixes(kind), folder)
        config = self.config(folder, policy=policy, retention=retention, bits=bits)
        with contextlib.closing(StoredEngine(self.engine, config, self.shape(kind))) as engine:
            yield engine


@pytest.fixture(scope="module", params=["multi-head", "grouped"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    shape = SMALL if request.param == "multi-head" else SMALL_GROUPED
    model = Model(shape, CPU, torch.float32, distinct_layers=2, seed=5)
    planter = Planter(shape, CPU, torch.float32, seed=5)
    return Prepared(Engine(model, planter, workload_of()), tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize("policy", ["as", "as+h2o+lfu", "paper", "impress"])
def test_with_all_tokens_every_policy_answers_like_recompute(
    prepared: Prepared, policy: str
) -> None:
    workload = prepared.engine.workload
    expected = [prepared.engine.serve_computed(own).logits for own in workload.measured]
    with prepared.stored(policy, 1.0) as engine:
        for own in workload.warmup:
            engine.warm(own)
        if engine.reorders:
            engine.reorder()
        found = [engine.serve(own) for own in workload.measured]

    for one, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits, logits, rtol=1e-3, atol=1e-3)
        assert one.loads is not None and one.loads.layers_whole == SMALL.layers
        assert one.reads is not None and one.reads.chunks_accessed > 0
        assert list(one.stage_ms) == list(STAGES)
        assert sum(one.stage_ms.values()) == pytest.approx(one.ttft_ms)
        assert min(one.stage_ms[stage] for stage in (MODEL, ATTENTION, LOAD)) > 0
    # Not all prefixes fit in the caches.
    assert sum(one.reads.ssd_bytes for one in found if one.reads) > 0


def test_with_few_tokens_answers_differ_and_less_is_read(prepared: Prepared) -> None:
    """Guards the test above: logits that no prefix could change would pass it."""
    request = prepared.engine.workload.measured[0]
    expected = prepared.engine.serve_computed(request).logits
    needed = {}
    for retention in (0.1, 1.0):
        with prepared.stored("as+h2o+lru", retention) as engine:
            served = engine.serve(request)
        assert served.reads is not None and served.estimated_ms is not None
        needed[retention] = served.reads.important_bytes
        assert torch.allclose(served.logits, expected, rtol=1e-3, atol=1e-3) == (retention == 1.0)
    assert needed[0.1] < 0.2 * needed[1.0]


def test_more_bits_are_nearer_to_what_was_computed(prepared: Prepared) -> None:
    """The policy `impress` reads codes, for each request anew."""
    request = prepared.engine.workload.measured[0]
    expected, errors = prepared.engine.serve_computed(request).logits, []
    for bits in (5.0, 8.0):
        with prepared.stored("impress", 1.0, bits) as engine:
            engine.warm(request)
            served = engine.serve(request)
        assert served.loads is not None and served.loads.layers_whole == SMALL.layers
        assert served.reads is not None and served.reads.chunks_accessed > 0
        errors.append(float((served.logits - expected).abs().max()))
    assert 0 < errors[1] < errors[0] / 4


def test_what_was_never_stored_cannot_be_served(prepared: Prepared, tmp_path: Path) -> None:
    engine = StoredEngine(prepared.engine, prepared.config(tmp_path), prepared.shape("codes"))
    with contextlib.closing(engine), pytest.raises(BenchFailed, match="0 of"):
        engine.serve(prepared.engine.workload.measured[0])


def test_a_run_measures_all_policies_on_the_same_requests(tmp_path: Path) -> None:
    result = run(read(*TINY, "--ssd-dir", str(tmp_path)))
    (cell,) = result.figures["cells"]
    rows = {row["policy"]: row for row in cell["rows"]}
    assert list(rows) == list(POLICIES)
    expected = {**dict.fromkeys(POLICIES, 2), "recompute": 1}
    assert {name: row["requests"] for name, row in rows.items()} == expected
    assert all(row["speedup_over_best_baseline"] for row in rows.values())
    assert rows["as+h2o+lru"]["fallback_share"] == 1.0
    assert all(f"\n{name} " in str(table) for name in POLICIES for table in result.tables)


def test_one_prefix_is_refused() -> None:
    with pytest.raises(BenchFailed, match="at least 2"):
        run(read("--prefixes", "1"))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_on_an_accelerator_is_that_of_the_server(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(7, 8, 16, generator=generator)
    keys, values = torch.randn(2, 30, kv_heads, 16, generator=generator)
    found = engine_model.aligned_attention(queries, keys, values)
    torch.testing.assert_close(found, engine_model.attention(queries, keys, values))
