"""Heads that do not bear the bits of the base: what is measured, and that readers honour it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.codes.planes import floors as measuring
from impress_sglang.codes.planes.codec import GROUP_TOKENS, NUM_PLANES
from impress_sglang.codes.planes.floors import (
    FIRST_PROMPTS,
    MEASURED_TOKENS,
    ONE_OF_PROMPTS,
    CodingMeter,
    LayerQueries,
    energy_of,
    floors_of,
    no_queries,
    sampled_groups,
)
from impress_sglang.storage import layer_codec
from impress_sglang.storage.directory import CODING
from impress_sglang.store.store import PrefixStore
from tests.unit.coded_factory import BLOCK, SHAPE, CodedPart
from tests.unit.kv_factory import make_shape
from tests.unit.spying import calls_of
from tests.unit.store_factory import Workbench, look_up
from tests.unit.test_coded import FLOORS, Coded, load_all

HEADS, DIM, GROUP = 3, 32, 2


def some_layer(num_tokens: int, biases: tuple[float, ...]) -> tuple[Tensor, ...]:
    """Keys, values and queries of a head that finds a few tokens; keys turn around a bias."""
    generator = torch.Generator().manual_seed(num_tokens)
    keys = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    values = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    queries = 2 * torch.randn(16, HEADS * GROUP, DIM, generator=generator)
    for head, bias in enumerate(biases):
        keys[:, head] += bias * torch.cos(0.7 * torch.arange(num_tokens))[:, None]
    return keys, values, queries


def measured(
    meter: CodingMeter, num_tokens: int, biases: tuple[float, ...], behind: int = 0
) -> list[int]:
    keys, values, queries = some_layer(num_tokens, biases)
    rule = meter.rule(lambda layer: LayerQueries(queries, DIM**-0.5), behind)
    return rule(0, keys, values).floors.tolist()


@pytest.mark.parametrize("num_tokens", [100, 1000, 1016, 5000])
@pytest.mark.parametrize("behind", [0, 5, 400])
def test_heads_with_large_biases_are_raised_and_no_others(num_tokens: int, behind: int) -> None:
    floors = measured(CodingMeter(0.5), num_tokens, (0.0, 0.0, 3000.0), behind)
    assert floors == [0, 0, NUM_PLANES]
    assert measured(CodingMeter(0.5), num_tokens, (0.0, 0.0, 0.0), behind) == [0, 0, 0]


def test_less_is_bearable_than_more() -> None:
    sums = [
        sum(measured(CodingMeter(own), 900, (0.0, 20.0, 60.0))) for own in (1e-4, 0.1, 0.4, 9.0)
    ]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] == NUM_PLANES * HEADS and sums[-1] == 0


def test_the_own_tokens_of_the_queries_are_not_rounded() -> None:
    """A request computes them; so they are exact, and later ones are hidden."""
    keys, values, queries = some_layer(200, (0.0, 0.0, 3000.0))
    given = LayerQueries(queries, DIM**-0.5)
    late = keys.clone()
    late[-15:] *= 50.0
    # The first query sees none of them.
    one = LayerQueries(torch.cat([queries[:1]] + [torch.zeros_like(queries[:1])] * 15), DIM**-0.5)
    for own, changed in ((given, keys), (one, late)):
        rule = CodingMeter(0.5).rule(lambda layer, own=own: own, 0)
        assert rule(0, changed, values).floors.tolist() == [0, 0, NUM_PLANES]


def test_without_queries_what_was_measured_last_holds() -> None:
    meter = CodingMeter(0.5)
    keys, values, _ = some_layer(300, (0.0, 0.0, 3000.0))
    unknown = meter.rule(no_queries, 0)
    assert unknown(0, keys, values).floors.tolist() == [NUM_PLANES] * HEADS
    # What nobody has measured says nothing.
    meter.note(np.full((1, HEADS), NUM_PLANES, np.uint8))
    assert meter.mean_planes == 0.0
    assert measured(meter, 300, (0.0, 0.0, 3000.0)) == [0, 0, NUM_PLANES]
    assert unknown(0, keys, values).floors.tolist() == [0, 0, NUM_PLANES]
    assert unknown(1, keys, values).floors.tolist() == [NUM_PLANES] * HEADS
    meter.note(np.array([[1, 0, 0], [0, 1, 0]], np.uint8))
    assert unknown(0, keys, values).floors.tolist() == [1, 0, 0]
    assert unknown(1, keys, values).floors.tolist() == [0, 1, 0]
    assert meter.mean_planes == pytest.approx(1 / 3)
    # Too few tokens before the queries to say anything.
    short = meter.rule(lambda layer: LayerQueries(some_layer(70, (0.0,))[2], 1.0), 0)
    assert short(0, keys[:70], values[:70]).floors.tolist() == [1, 0, 0]


def test_what_was_measured_serves_the_next_process() -> None:
    meter, later = CodingMeter(0.5), CodingMeter(0.5)
    keys, values, _ = some_layer(300, (0.0, 0.0, 3000.0))
    assert not meter.has_news
    measured(meter, 300, (0.0, 0.0, 3000.0))
    assert meter.has_news
    later.restore(meter.dump())
    assert not meter.has_news and not later.has_news
    known, found = (own.rule(no_queries, 0)(0, keys, values) for own in (meter, later))
    assert found.floors.tolist() == known.floors.tolist() == [0, 0, NUM_PLANES]
    assert known.energy is not None and found.energy is not None
    assert torch.equal(found.energy, known.energy)
    # Of other heads it says nothing.
    other = later.rule(no_queries, 0)(0, keys[:, :2], values[:, :2])
    assert other.floors.tolist() == [NUM_PLANES] * 2 and other.energy is None


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "not a number"])
def test_what_is_damaged_is_measured_anew(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    meter, later = CodingMeter(0.5), CodingMeter(0.5)
    keys, values, _ = some_layer(300, (0.0, 0.0, 3000.0))
    measured(meter, 300, (0.0, 0.0, 3000.0))
    if damage == "not a number":
        meter._energies[0][1] = torch.nan
    content = bytearray(meter.dump())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    content = {"empty": content[:0], "cut": content[:-30], "other": b"[]"}.get(damage, content)
    later.restore(bytes(content))
    coding = later.rule(no_queries, 0)(0, keys, values)
    assert coding.energy is None
    if damage != "not a number":
        assert coding.floors.tolist() == [NUM_PLANES] * HEADS and "damaged" in caplog.text
        assert later.wants()


def test_the_first_prompts_are_measured_and_then_some() -> None:
    meter, later = CodingMeter(0.5), CodingMeter(0.5)
    wanted = [meter.wants() for _ in range(100)]
    assert all(wanted[:FIRST_PROMPTS])
    assert sum(wanted[FIRST_PROMPTS:]) == 100 // ONE_OF_PROMPTS
    measured(meter, 300, (0.0,))
    later.restore(meter.dump())
    assert sum(later.wants() for _ in range(ONE_OF_PROMPTS)) == 1


def test_no_floors_are_measured_if_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """But which channels are used is known."""
    monkeypatch.setattr(measuring, "floors_of", None)
    keys, values, queries = some_layer(300, (3000.0,))
    rule = CodingMeter(0.0).rule(lambda layer: LayerQueries(queries, DIM**-0.5), 0)
    found = rule(0, keys, values)
    assert found.floors.tolist() == [0, 0, 0] and found.energy is not None


def test_energy_is_the_mean_square_of_the_queries_of_a_kv_head() -> None:
    queries = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    queries[0, 0] = torch.tensor([1.0, 2.0, 0.0])
    queries[1, 1] = torch.tensor([3.0, 0.0, 0.0])
    queries[1, 3] = torch.tensor([0.0, 0.0, -4.0])
    found = energy_of(queries, 2)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2.5, 1.0, 0.0], [0.0, 0.0, 4.0]]


@pytest.mark.parametrize("bearable", [0.0, 0.5])
def test_the_energy_of_a_layer_is_that_measured_last(bearable: float) -> None:
    meter = CodingMeter(bearable)
    keys, values, queries = some_layer(300, (0.0,))
    unknown = meter.rule(no_queries, 0)
    assert unknown(0, keys, values).energy is None
    found = []
    # Also of too few tokens to measure floors, and of queries behind the segment.
    for factor, tokens, behind in ((1.0, 300, 0), (2.0, 20, 0), (3.0, 300, 50)):
        given = LayerQueries(factor * queries, 1.0)
        rule = meter.rule(lambda layer, given=given: given, behind)
        found.append(rule(0, keys[:tokens], values[:tokens]).energy)
        assert torch.equal(found[-1], energy_of(factor * queries, HEADS))
        assert torch.equal(unknown(0, keys, values).energy, found[-1])
        assert unknown(1, keys, values).energy is None
    # Floors of headers say nothing of it.
    meter.note(np.zeros((2, HEADS), np.uint8))
    assert torch.equal(unknown(0, keys, values).energy, found[-1])
    assert unknown(1, keys, values).energy is None


def test_floors_are_those_of_keys_in_the_order_of_the_energy() -> None:
    """Queries that have nothing in a channel with a large range lose nothing there."""
    keys, values, queries = some_layer(300, ())
    keys[:, 1, :8] *= 30.0
    queries[:, GROUP : 2 * GROUP, :8] *= 1e-3
    given = LayerQueries(queries, DIM**-0.5)
    floors = CodingMeter(0.1).rule(lambda layer: given, 0)(0, keys, values).floors
    other = floors_of((keys[:-16], values[:-16]), (keys[-16:], values[-16:]), given, 0.1)
    assert floors[1] < other[1] and floors[0] <= other[0] and floors[2] <= other[2]


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1000, 4096, 5001])
@pytest.mark.parametrize("most", [MEASURED_TOKENS, 1024, 10_000])
def test_a_sample_is_of_whole_groups_from_the_first_to_the_last(num_tokens: int, most: int) -> None:
    sample = sampled_groups(num_tokens, most)
    assert len(sample) <= most and len(sample) >= min(num_tokens, most - GROUP_TOKENS)
    assert (sample.diff() > 0).all()
    assert int(sample[0]) == 0 and int(sample[-1]) == num_tokens - 1
    groups = sample // GROUP_TOKENS
    for group in groups.unique().tolist():
        size = min(GROUP_TOKENS, num_tokens - group * GROUP_TOKENS)
        assert int((groups == group).sum()) == size


def test_what_was_measured_says_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it took: bits of a prompt are no matter of the machine's load."""
    sizes = []
    rounded = measuring.code_keys

    def code_keys(keys: Tensor, energy: Tensor) -> object:
        sizes.append(len(keys))
        time.sleep(0.03 * (len(sizes) % 2))
        return rounded(keys, energy)

    monkeypatch.setattr(measuring, "code_keys", code_keys)
    meter = CodingMeter(0.5)
    floors = [measured(meter, 5000, (0.0, 20.0, 60.0)) for _ in range(3)]
    assert floors == floors[:1] * 3
    assert max(sizes) <= MEASURED_TOKENS and len(set(sizes)) == 1


def test_bytes_of_a_raised_base_are_counted_and_read_ahead(coded: Coded) -> None:
    case = coded([CodedPart(1500)], floors=FLOORS)
    (span,) = case.spans
    units = int(FLOORS.sum()) * len(span.units)
    wanted = SHAPE.num_layers * span.layout.base_bytes + units * BLOCK
    load_all(case, 0)
    assert case.source.stats.ssd_needed_bytes == wanted
    # Of the report, these are among the planes.
    assert case.source.stats.selected_chunks == units
    case.request()
    case.read_ahead(0.0)
    case.source.close()
    assert case.source.stats.ahead_bytes == wanted


def test_a_store_raises_what_must_be_raised_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the offer with queries to the header, and from there to what is read and estimated."""
    shape = make_shape(
        layers=2, query_heads=6, kv_heads=3, key_dim=DIM, value_dim=DIM, probe=(), coded=True
    )
    kvs = {0: some_layer(400, (0.0, 0.0, 3000.0)), 1: some_layer(401, (0.0, 0.0, 0.0))}
    bench, options = Workbench(tmp_path, shape), {"policy": "impress", "base_error": 0.33}

    def put(tokens: range, queries: Any = no_queries) -> None:
        def read_layers(start: int) -> Any:
            return lambda layer: tuple(own[start : len(tokens)] for own in kvs[layer][:2])

        bench.put(store, tokens, read_layers=read_layers, queries=queries)

    def floors_in(store: PrefixStore) -> list[list[list[int]]]:
        found = []
        for span in look_up(store, range(400)).spans:
            segment = store.segments.acquire(span.segment)
            found.append(segment.floors.tolist())
            store.segments.release(segment.segment_id)
        return found

    coded = calls_of(monkeypatch, layer_codec, "encode_codes")
    store = bench.open(**options)
    put(range(200), lambda layer: LayerQueries(kvs[layer][2], DIM**-0.5))
    assert floors_in(store) == [[[0, 0, NUM_PLANES], [0, 0, 0]]]
    put(range(300))
    # The layers of both, in the order of the energy that is known.
    energies = [energy_of(kvs[layer][2], HEADS) for layer in (0, 1, 0, 1)]
    assert all(map(torch.equal, [call.args[4] for call in coded], energies)) and len(coded) == 4
    assert floors_in(store)[1] == [[0, 0, NUM_PLANES], [0, 0, 0]]
    stored = store.forecast.coded_bytes(look_up(store, range(400)).spans)
    assert 0 < stored.base == stored.expected(0) < stored.expected(1)
    assert stored.expected(2) == stored.base + sum(stored.planes[:2])
    # Nothing is measured here, but the store has what was.
    store = bench.reopen(store, **options)
    put(range(400))
    assert torch.equal(coded[-1].args[4], energies[1])
    assert floors_in(store)[2] == [[0, 0, NUM_PLANES], [0, 0, 0]]
    bench.close(store)
    # Without that, headers say what floors were, and nothing of energies.
    (kept,) = tmp_path.glob(f"*/{CODING}")
    kept.unlink()
    store = bench.open(**options)
    assert floors_in(store) == [[[0, 0, NUM_PLANES], [0, 0, 0]]] * 3
    put(range(400, 600))
    assert coded[-1].args[4] is None
    assert floors_in(store)[2] == [[0, 0, NUM_PLANES], [0, 0, 0]]
    bench.close(store)
