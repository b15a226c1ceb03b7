"""The small engine: planted importance, equal work for all systems, its report, and its answers."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import itertools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.engine.model import (
    IDENTITY,
    Engine,
    EngineFailed,
    Model,
    StoredEngine,
    _agree,
    aligned_attention,
    compute_and_store,
)
from bench.engine.report import EventTimeline, Served, add_speedups, format_tables, make_row
from bench.engine.run import (
    COMPARED,
    CellRun,
    System,
    command_of,
    link_segments,
    make_cells,
    parse_arguments,
    report,
    run,
    tokens_of,
)
from bench.engine.workload import (
    MODELS,
    ModelShape,
    Planter,
    Request,
    WorkloadOptions,
    make_workload,
    measure_planting,
)
from bench.policies.stores import STORED_BY, store_kind
from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.identify import probe_kv_heads
from impress_sglang.management.store import PrefixStore
from impress_sglang.options import POLICIES
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.writer import WriteAbandoned
from impress_sglang.timeline import ATTENTION, COPY, PROBE_READ, REST, SSD_READ, STAGES
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.planner import ReadStats

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
MULTI_HEAD = ModelShape("mha", 6, 8, 8, 64, 100, gated=False, head_dim=32)
GROUPED = ModelShape("gqa", 4, 16, 4, 64, 100, gated=True, head_dim=32)
SMALL = ModelShape("small", 2, 4, 4, 48, 64, gated=False, head_dim=32)
SMALL_GROUPED = dataclasses.replace(SMALL, query_heads=8, gated=True)
OPTIONS = WorkloadOptions(
    prefixes=3,
    prefix_tokens=(260, 300),
    new_tokens=(5, 9),
    warmup=6,
    settle=1,
    requests=4,
    popularity="normal",
    sigma=None,
    seed=3,
)
NEEDED = {"torch", "numpy", "xxhash", "impress_sglang", "bench"}
# Taken where they are, done without where they are not.
OPTIONAL = {"triton", "numba", "llvmlite"}
TINY = [
    *("--quick", "--device", "cpu", "--scale", "0.0625", "--layers", "2", "--prefixes", "2"),
    *("--prefix-tokens", "150-300", "--new-tokens", "4-8", "--warmup", "3", "--requests", "2"),
    *("--recompute-requests", "1", "--ssd-mbps", "0"),
]


# --- planted importance


@pytest.fixture(scope="module")
def multi_head() -> dict[str, float]:
    planter = Planter(MULTI_HEAD, CPU, torch.float32, seed=1)
    return measure_planting(planter, 1500, 32, 0.25)


def test_planted_sets_are_as_alike_as_those_of_real_models(multi_head: dict[str, float]) -> None:
    assert 0.66 <= multi_head["questions"] <= 0.79
    assert 0.33 <= multi_head["heads"] <= 0.45
    assert multi_head["layers_passed"] > 0.5
    assert multi_head["probe"] > multi_head["threshold"]


def test_token_0_is_a_sink_and_the_rest_has_a_heavy_tail(multi_head: dict[str, float]) -> None:
    assert 0.36 <= multi_head["sink_mass"] <= 0.51
    # Of flat attention a quarter of the tokens would keep a quarter of the rest.
    assert multi_head["kept_mass"] > 0.9


def test_important_tokens_stand_together_as_in_real_text(multi_head: dict[str, float]) -> None:
    """Measured on SmolLM2: 0.91 to 0.97 of runs of 64 tokens, and 0.73 to 0.75 of 16."""
    assert multi_head["touched_64"] > 0.9
    assert 0.7 <= multi_head["touched_16"] <= 0.85


def test_the_vote_passes_in_most_layers_at_half_the_tokens_too() -> None:
    planter = Planter(MULTI_HEAD, CPU, torch.float32, seed=1)

    assert measure_planting(planter, 1500, 32, 0.5)["layers_passed"] > 0.5


def test_query_heads_of_a_kv_head_differ() -> None:
    found = measure_planting(Planter(GROUPED, CPU, torch.float32, seed=1), 1500, 32, 0.25)

    # The probe heads are the query heads of the first KV head.
    assert 0.42 <= found["probe"] <= 0.6
    assert 0.66 <= found["questions"] <= 0.79
    assert 0.3 <= found["heads"] <= 0.45


def test_equal_seeds_plant_equal_kvs() -> None:
    one, same, other = (Planter(SMALL, CPU, torch.float32, seed=seed) for seed in (1, 1, 2))
    keys, values = next(one.prefix(4, 50))

    assert torch.equal(keys, next(same.prefix(4, 50))[0])
    assert torch.equal(values, next(same.prefix(4, 50))[1])
    assert not torch.equal(keys, next(one.prefix(5, 50))[0])
    assert not torch.equal(keys, next(other.prefix(4, 50))[0])
    assert torch.equal(one.question(7, 3).queries[1], same.question(7, 3).queries[1])
    assert not torch.equal(one.question(7, 3).queries[1], one.question(8, 3).queries[1])


# --- the workload


def test_equal_options_give_equal_workloads() -> None:
    assert make_workload(OPTIONS) == make_workload(OPTIONS)
    assert make_workload(OPTIONS) != make_workload(dataclasses.replace(OPTIONS, seed=4))


def test_a_workload_has_what_was_asked_for() -> None:
    found = make_workload(dataclasses.replace(OPTIONS, prefixes=5, requests=40))
    requests = [*found.warmup, *found.settle, *found.measured]

    assert sorted(found.lengths) == [260, 270, 280, 290, 300]
    assert [len(found.warmup), len(found.settle), len(found.measured)] == [6, 1, 40]
    assert {own.new_tokens for own in requests} == {5, 6, 7, 8, 9}
    assert found.longest_new == 9
    # No question is asked twice, and no prefix twice in a row.
    assert len({own.question for own in requests}) == len(requests)
    assert all(one.prefix != other.prefix for one, other in itertools.pairwise(requests))


def test_prompts_share_their_prefix_and_prefixes_share_nothing() -> None:
    found = make_workload(OPTIONS)
    prompt = found.prompt(Request(1, 0, 4))

    assert prompt[: found.lengths[1]].tolist() == found.tokens(1).tolist()
    assert len(prompt) == found.lengths[1] + 4
    assert found.tokens(0)[0] != found.tokens(1)[0]


@pytest.mark.parametrize(("popularity", "favourite"), [("normal", 4), ("zipf", 0)])
def test_popularity(popularity: str, favourite: int) -> None:
    options = dataclasses.replace(OPTIONS, prefixes=9, requests=600, popularity=popularity)
    counts = Counter(own.prefix for own in make_workload(options).measured)

    assert set(counts) == set(range(9))
    assert counts[favourite] > 2 * counts[8]
    assert max(counts, key=counts.__getitem__) in (favourite - 1, favourite, favourite + 1)


def test_scaled_models_keep_their_groups() -> None:
    scaled = MODELS["llama-3-8b"].scaled(0.25, 5)

    assert (scaled.layers, scaled.query_heads, scaled.kv_heads) == (5, 8, 2)
    assert (scaled.hidden, scaled.ffn) == (1024, 3584)
    assert MODELS["opt-13b"].hidden == 5120
    # 40 layers, keys and values, 5120 elements of 2 bytes.
    assert MODELS["opt-13b"].kv_bytes(torch.float16) == 40 * 2 * 5120 * 2


# --- attention


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_aligned_attention_is_that_of_the_server(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(7, 8, 16, generator=generator)
    keys, values = torch.randn(2, 30, kv_heads, 16, generator=generator)

    found = aligned_attention(queries, keys, values, 0.3)

    expected = rectangular_attention(queries, keys, values, scaling=0.3, causal=True)
    torch.testing.assert_close(found, expected)


def test_an_attention_that_differs_or_fails_is_not_taken() -> None:
    def good(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return rectangular_attention(queries, keys, values, scaling=0.2, causal=True)

    def acausal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return rectangular_attention(queries, keys, values, scaling=0.2, causal=False)

    def broken(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    results = [
        _agree(own, good, SMALL_GROUPED, CPU, torch.float32) for own in (good, acausal, broken)
    ]
    assert results == [True, False, False]


# --- the report


class FakeEvent:
    """An accelerator that is `lag` seconds behind whoever records."""

    now = 0.0
    lag = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now + FakeEvent.lag

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return (end_event.at - self.at) * 1e3


def test_stages_on_an_accelerator_last_until_it_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 100.0, 101.0])
    monkeypatch.setattr(report, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("impress_sglang.timeline.perf_counter", lambda: next(clock))
    FakeEvent.now = FakeEvent.lag = 0.0
    timeline = EventTimeline("a", FakeEvent)
    with timeline.span(ATTENTION, 0):
        # Queued at once; the device is busy with it until 0.5 s.
        FakeEvent.lag = 0.5
    with timeline.span(COPY, 0):
        # The host reads for 0.3 s meanwhile, all of which is hidden, and copies for 0.1 s.
        with timeline.span(SSD_READ, 0):
            FakeEvent.now, FakeEvent.lag = 0.3, 0.2
        FakeEvent.now, FakeEvent.lag = 0.6, 0.0
    timeline.finish()

    totals = timeline.totals()

    assert timeline.duration_ms == pytest.approx(1000)
    assert totals[ATTENTION] == pytest.approx(500)
    assert totals[SSD_READ] == pytest.approx(0)
    assert totals[COPY] == pytest.approx(100)
    assert totals[REST] == pytest.approx(400)


def served(ttft: float, **counters: int) -> Served:
    stages = {SSD_READ: ttft / 2, PROBE_READ: ttft / 10, COPY: ttft / 10, REST: 3 * ttft / 10}
    reads = ReadStats(**counters) if counters else None
    loads = LoadStats(layers_by_probe=3, layers_by_fallback=1) if counters else None
    return Served(ttft, stages, torch.zeros(1), reads, loads, 7.0 if counters else None)


def test_a_row_sums_counters_and_takes_means_of_times() -> None:
    counters = {"ssd_bytes": 30, "ssd_needed_bytes": 10, "ssd_chunks": 1, "device_chunks": 3}
    row = make_row("paper", "paper", [served(100.0, **counters), served(300.0, **counters)])

    assert row["requests"] == 2
    assert row["ttft_ms"] == [100.0, 300.0]
    assert row["ttft_ms_mean"] == row["ttft_ms_p50"] == 200.0
    assert row["ttft_ms_p99"] == pytest.approx(298.0)
    assert (row["io_ms"], row["io_share"]) == (120.0, 0.6)
    assert (row["load_ms"], row["load_share"]) == (140.0, 0.7)
    assert (row["probe_ms"], row["probe_share"]) == (20.0, 0.1)
    assert row["ssd_bytes"] == 60
    assert row["read_amplification"] == 3.0
    assert (row["device_hit_ratio"], row["ssd_ratio"]) == (0.75, 0.25)
    assert row["fallback_share"] == 0.25
    assert row["estimated_ms"] == 7.0


def test_ratios_of_nothing_are_none() -> None:
    row = make_row("recompute", "recompute", [served(10.0)])

    names = ("device_hit_ratio", "read_amplification", "fallback_share", "estimated_ms")
    assert [row[name] for name in names] == [None] * len(names)


def test_speedups_are_over_the_fastest_baseline_of_the_cell() -> None:
    times = {"cold": 1.0, "recompute": 50.0, "as": 80.0, "impress": 20.0}
    rows = [make_row(name, name, [served(ms)]) for name, ms in times.items()]

    add_speedups(rows)

    assert [row["speedup_over_best_baseline"] for row in rows] == [50.0, 1.0, 0.625, 2.5]


def test_tables_have_a_line_per_system() -> None:
    rows = [make_row(name, name, [served(10.0)]) for name in ("recompute", "as", "impress")]
    add_speedups(rows)

    for table in format_tables(rows).split("\n\n"):
        lines = table.splitlines()
        assert [line.split()[0] for line in lines] == ["system", "recompute", "as", "impress"]
        assert len({len(line) for line in lines}) == 1


# --- what it needs


def imports_below(name: str) -> set[str]:
    """Top-level names outside the standard library that a module and its own modules import."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        for imported in imported_names(ast.parse(Path(spec.origin).read_text())):
            found.add(imported.split(".")[0])
            if imported.split(".")[0] in ("bench", "impress_sglang"):
                waiting.append(imported if is_module(imported) else imported.rpartition(".")[0])
    return found - set(sys.stdlib_module_names)


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_it_needs_nothing_but_torch_numpy_and_xxhash() -> None:
    found = imports_below("bench.engine.run")

    assert found >= NEEDED
    assert found <= NEEDED | OPTIONAL


WITHOUT = """
import sys

for name in ("sglang", "requests", "rich", "transformers", "matplotlib", "numba", "triton"):
    sys.modules[name] = None
from bench.engine.run import parse_arguments, run

result = run(parse_arguments(sys.argv[1:]))
assert [row["system"] for row in result["cells"][0]["rows"]] == ["cold", "as+h2o+lru", "paper"]
assert not any(name.startswith("impress_sglang.integration") for name in sys.modules)
"""


def test_it_runs_where_sglang_is_not(tmp_path: Path) -> None:
    # On a CPU codes take Numba, which a GPU machine without SGLang need not have.
    options = [*TINY, "--policies", "as+h2o+lru,paper", "--ssd-dir", str(tmp_path)]
    command = [sys.executable, "-c", WITHOUT, *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    assert result.returncode == 0, result.stderr


# --- answers


@dataclasses.dataclass
class Bench:
    """An engine, and its prefixes stored by serving one request for each."""

    engine: Engine
    root: Path
    cold: dict[str, list[Served]] = dataclasses.field(default_factory=dict)

    def config(self, folder: Path, **options: object) -> ImpressConfig:
        return ImpressConfig.from_options(
            {
                "ssd_dir": str(folder),
                "min_free_gb": 0.0,
                "reorder_interval": 0.0,
                "bits": "exact",
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

    def prepared(self, kind: str) -> Path:
        folder = self.root / kind
        if kind not in self.cold:
            workload = self.engine.workload
            config = self.config(folder, policy=STORED_BY[kind])
            with contextlib.closing(PrefixStore(config, IDENTITY, self.shape(kind))) as store:
                self.cold[kind] = [
                    compute_and_store(self.engine, store, Request(prefix, 100 + prefix, 6))
                    for prefix in range(len(workload.lengths))
                ]
        return folder

    @contextlib.contextmanager
    def stored(
        self, policy: str, retention: float, bits: float | str = "exact"
    ) -> Iterator[StoredEngine]:
        folder, kind = Path(tempfile.mkdtemp(dir=self.root)), store_kind(policy)
        link_segments(self.prepared(kind), folder)
        config = self.config(folder, policy=policy, retention=retention, bits=bits)
        engine = StoredEngine(self.engine, config, self.shape(kind))
        with contextlib.closing(engine.store):
            yield engine


@pytest.fixture(scope="module", params=["multi-head", "grouped"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    shape = SMALL if request.param == "multi-head" else SMALL_GROUPED
    model = Model(shape, CPU, torch.float32, distinct_layers=2, seed=5)
    planter = Planter(shape, CPU, torch.float32, seed=5)
    engine = Engine(model, planter, make_workload(OPTIONS))
    return Bench(engine, tmp_path_factory.mktemp("kv"))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "recompute"])
def test_with_all_tokens_every_policy_answers_like_recompute(answers: Bench, policy: str) -> None:
    workload = answers.engine.workload
    expected = [answers.engine.serve_computed(own).logits for own in workload.measured]
    with answers.stored(policy, 1.0) as engine:
        for own in workload.warmup:
            engine.warm(own)
        if engine.policy.reorders:
            engine.reorder()
            assert engine.store.reorders.summary()["segments"] > 0
        found = [engine.serve(own) for own in workload.measured]
        engine.store.check_integrity()

    for one, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits, logits, rtol=1e-3, atol=1e-3)
        assert one.loads is not None and one.loads.layers_whole == answers.engine.model.shape.layers
        assert one.reads is not None and one.reads.chunks_accessed > 0
    # Not all prefixes fit in the caches.
    assert sum(one.reads.ssd_bytes for one in found if one.reads) > 0


def test_with_few_tokens_answers_differ_and_less_is_read(answers: Bench) -> None:
    """Guards the test above: logits that no prefix could change would pass it."""
    request = answers.engine.workload.measured[0]
    expected = answers.engine.serve_computed(request).logits
    needed = {}
    for retention in (0.1, 1.0):
        with answers.stored("as+h2o+lru", retention) as engine:
            served = engine.serve(request)
        assert served.reads is not None
        needed[retention] = served.reads.important_bytes
        assert torch.allclose(served.logits, expected, rtol=1e-3, atol=1e-3) == (retention == 1.0)

    assert needed[0.1] < 0.2 * needed[1.0]


def test_more_bits_are_nearer_to_what_was_computed(answers: Bench) -> None:
    """The policy `impress` reads codes; the second request finds some in the caches."""
    request = answers.engine.workload.measured[0]
    expected, errors = answers.engine.serve_computed(request).logits, []
    for bits in (4.0, 8.0):
        with answers.stored("impress", 1.0, bits) as engine:
            engine.warm(request)
            served = engine.serve(request)
            engine.store.check_integrity()
        assert served.loads is not None and served.loads.mean_bits == bits
        assert served.reads is not None and served.reads.chunks_accessed > 0
        errors.append(float((served.logits - expected).abs().max()))
    assert 0 < errors[1] < errors[0] / 4


def test_stages_of_a_request_sum_to_its_ttft(answers: Bench) -> None:
    request = answers.engine.workload.measured[0]
    with answers.stored("paper", 0.25) as engine:
        found = [answers.engine.serve_computed(request), engine.serve(request)]

    for own in found:
        assert set(STAGES) < set(own.stage_ms)
        assert sum(own.stage_ms.values()) == pytest.approx(own.ttft_ms)
        assert own.stage_ms[ATTENTION] > 0 and own.stage_ms[report.MODEL] > 0


def test_loading_is_estimated_from_what_was_computed_before(answers: Bench) -> None:
    request = answers.engine.workload.measured[0]
    with answers.stored("as", 1.0) as engine:
        assert engine.serve(request).estimated_ms is not None
    passes = answers.engine.passes.copy()
    answers.engine.passes.clear()
    with answers.stored("as", 1.0) as engine:
        # Its own questions have too few tokens to say anything of the model's speed.
        found = [engine.serve(request).estimated_ms for _ in range(2)]
    answers.engine.passes.extend(passes)

    assert found == [None, None]


def test_what_was_never_stored_cannot_be_served(answers: Bench, tmp_path: Path) -> None:
    config = answers.config(tmp_path)
    engine = StoredEngine(answers.engine, config, answers.shape("codes"))
    with contextlib.closing(engine.store), pytest.raises(EngineFailed, match="0 of"):
        engine.serve(answers.engine.workload.measured[0])


def test_a_pass_that_fails_stores_nothing(
    answers: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread must not wait for layers that never come."""

    def fail(*_: object) -> None:
        raise WriteAbandoned("stop")

    store = PrefixStore(answers.config(tmp_path), IDENTITY, answers.shape("codes"))
    monkeypatch.setattr(answers.engine.model, "finish", fail)
    with contextlib.closing(store), pytest.raises(WriteAbandoned):
        compute_and_store(answers.engine, store, Request(0, 0, 5))

    assert store.stats.segments_abandoned == 1
    assert store.stats.segments_written == 0


# --- the command


def test_a_run_measures_all_systems_on_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(parse_arguments([*TINY, "--ssd-dir", str(tmp_path)]))

    (cell,) = result["cells"]
    rows = {row["system"]: row for row in cell["rows"]}
    assert list(rows) == ["cold", *COMPARED]
    assert {name: row["requests"] for name, row in rows.items()} == {
        **dict.fromkeys(COMPARED, 2),
        "cold": 2,
        "recompute": 1,
    }
    assert all(row["speedup_over_best_baseline"] for row in rows.values())
    assert rows["as"]["layers_whole"] == 4 and rows["as+h2o+lru"]["layers_by_fallback"] == 4
    assert cell["planted"]["questions"] > 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in COMPARED)
    assert "emulated" not in out
    # Stores are gone.
    assert list(tmp_path.iterdir()) == []


def test_figure_3_finds_whole_prefixes_in_one_tier(tmp_path: Path) -> None:
    options = ["--figure", "3", "--shrink", "0.03", "--ssd-dir", str(tmp_path)]
    args = parse_arguments([*TINY, *options])
    cell = make_cells(args)[-1]

    rows = {row["system"]: row for row in CellRun(args, cell, tmp_path).measure()["rows"]}

    assert rows["as, device"]["device_hit_ratio"] == 1.0
    assert rows["as, host"]["host_hit_ratio"] == 1.0
    assert rows["as, SSD"]["ssd_ratio"] == 1.0
    assert rows["as, SSD"]["ssd_bytes"] > 0


def test_figures_have_the_papers_cells() -> None:
    sixteen = make_cells(parse_arguments(["--figure", "16"]))
    some = make_cells(
        parse_arguments(["--figure", "16", "--models", "opt-30b", "--datasets", "copa"])
    )
    chunks = make_cells(parse_arguments(["--figure", "23"]))
    lengths = make_cells(parse_arguments(["--figure", "3"]))

    assert len(sixteen) == 12
    assert {cell.retention for cell in sixteen if cell.label == "copa"} == {0.5}
    assert {cell.retention for cell in sixteen if cell.label != "copa"} == {0.25}
    assert [(cell.model, cell.prefix_tokens) for cell in some] == [("opt-30b", (2000, 4000))]
    assert [cell.chunk_tokens for cell in chunks] == [16, 32, 64, 128, 256]
    assert [cell.prefix_tokens[0] for cell in lengths] == [128, 512, 2048, 8192]


def test_prefixes_of_a_data_set_lie_around_its_mean() -> None:
    assert tokens_of("piqa", 10_000, 1.0) == (2000, 7600)
    assert tokens_of("openbookqa", 10_000, 1.0) == (2000, 9400)
    assert tokens_of("piqa", 4000, 0.5) == (1000, 2000)


def test_systems_are_named_as_in_bench_serving() -> None:
    args = parse_arguments(["--policies", "recompute,paper,as"])

    (cell,) = make_cells(args)

    shares = args.device_share, args.host_share
    assert cell.systems == (
        System("recompute", "recompute", *shares),
        System("paper", "paper", *shares),
        System("as", "as", *shares),
    )
    assert shares == pytest.approx((0.166, 0.531), abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        ["--policies", "as@nothing"],
        ["--policies", "lru"],
        ["--models", "gpt"],
        ["--prefix-tokens", "9-3"],
        ["--prefixes", "1"],
    ],
)
def test_wrong_options_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(options)


def test_a_recorded_command_has_no_paths() -> None:
    options = ["--quick", "--json", "/a/b.json", "--ssd-dir=/nvme", "--seed", "2"]

    assert command_of(options) == "python -m bench engine --quick --seed 2"


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    args = parse_arguments([*TINY, "--prefixes", "2", "--ssd-dir", str(tmp_path)])
    huge = dataclasses.replace(make_cells(args)[0])
    cell = CellRun(args, huge, tmp_path)
    cell._kv_bytes = 10**18

    with pytest.raises(EngineFailed, match="--prefixes"):
        cell.measure()
    assert list(tmp_path.iterdir()) == []
