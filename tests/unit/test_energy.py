"""What queries look at: measured with the first prompts, kept, and used for all later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.codes.groups import energy as energy_module
from impress_sglang.codes.groups.energy import (
    QueryMeter,
    energy_of,
    no_queries,
)
from impress_sglang.storage.directory import CODING
from tests.unit.kv_factory import make_shape
from tests.unit.store_factory import Workbench
from tests.unit.waiting import calls_of

HEADS, DIM = 3, 32
KEYS = torch.zeros(20, HEADS, DIM)


def some_queries(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 2 * HEADS, DIM, generator=generator)


def measured() -> QueryMeter:
    """A meter that has seen queries of layer 0."""
    meter = QueryMeter()
    meter.energy(0, KEYS.shape[1:], lambda layer: some_queries(1))
    return meter


def known(meter: QueryMeter, layer: int = 0, keys: Tensor = KEYS) -> Tensor | None:
    return meter.energy(layer, keys.shape[1:])


def same(found: Tensor | None, right: Tensor | None) -> bool:
    return found is not None and right is not None and torch.equal(found, right)


def test_energy_is_the_mean_square_of_the_queries_of_a_kv_head() -> None:
    queries = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    queries[0, 0] = torch.tensor([1.0, 2.0, 0.0])
    queries[1, 1] = torch.tensor([3.0, 0.0, 0.0])
    queries[1, 3] = torch.tensor([0.0, 0.0, -4.0])
    found = energy_of(queries, 2)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2.5, 1.0, 0.0], [0.0, 0.0, 4.0]]


def test_what_was_measured_serves_the_next_process() -> None:
    assert not QueryMeter().has_news
    meter, later = measured(), QueryMeter()
    assert meter.has_news
    later.restore(meter.dump())
    assert not meter.has_news and not later.has_news
    assert same(known(later), known(meter))
    # Of other heads it says nothing.
    assert known(later, keys=KEYS[:, :2]) is None


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "flipped", "compressed", "other", "not a number"]
)
def test_what_is_damaged_is_measured_anew(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    meter, later = measured(), QueryMeter()
    if damage == "not a number":
        meter._energies[0][1] = torch.nan
    content = bytearray(meter.dump())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "compressed":
        # The method, in the archive's list of files: one that nobody knows.
        content[content.index(b"PK\x01\x02") + 10] ^= 64
    content = {"empty": content[:0], "cut": content[:-30], "other": b"[]"}.get(damage, content)
    later.restore(bytes(content))
    assert known(later) is None
    if damage != "not a number":
        assert "damaged" in caplog.text and later.wants()


def test_a_store_codes_by_what_it_knows_of_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the offer with queries to the codes, and to those of the next process."""
    shape = make_shape(layers=2, query_heads=6, kv_heads=3, key_dim=DIM, probe=(), coded=True)
    bench, options = Workbench(tmp_path, shape), {"policy": "impress"}
    coded = calls_of(monkeypatch, energy_module, "encode_layer")
    store = bench.open(**options)

    def put(count: int, queries: Any = no_queries) -> list[Tensor | None]:
        coded.clear()
        bench.put(store, range(count), queries=queries)
        return [call.args[3] for call in coded]

    right = [energy_of(some_queries(layer), HEADS) for layer in range(2)]
    assert put(100) == [None, None]
    assert all(map(same, put(200, some_queries), right))
    assert all(map(same, put(300), right))
    # Nothing is measured here, but the store has what was.
    store = bench.reopen(store, **options)
    assert all(map(same, put(400), right))
    bench.close(store)
    (kept,) = tmp_path.glob(f"*/{CODING}")
    kept.unlink()
    store = bench.open(**options)
    assert put(500) == [None, None]
    bench.close(store)
