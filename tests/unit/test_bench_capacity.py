"""The product's store on traces without files: what it finds, and the bounds beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from bench.core.options import parse
from bench.policies import capacity
from bench.policies.capacity import KINDS, MODELS, Ask, Model, Store, bound, lru, replay
from impress_sglang.config import ImpressConfig
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit.store_checks import check_tree

MODEL = Model(4096, 1e4)
ARGS = parse("capacity", capacity.__doc__, capacity.OPTIONS, ["--gpus=1"])


def ask(*blocks: int, at: float = 0.0, size: int = 512) -> Ask:
    count = len(blocks) * size
    return Ask(at, np.array(blocks), size, count, count)


def store(kind: str = "exact", **options: Any) -> Store:
    given = {"ssd_gb": 1.0, "min_free_gb": 0.0, "write_after": 1, "host_gb": 0.0} | options
    return Store(ImpressConfig(**given), MODEL, KINDS[kind])


def test_shares_of_bytes_are_those_of_files() -> None:
    shape = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), 6.0, exact=False)
    assert shape.num_layers * shape.token_bytes == MODELS["llama-3-8b"].token_bytes
    layout = SegmentLayout(shape, 64, 8192, 0)
    exact = 8192 * MODELS["llama-3-8b"].token_bytes
    share = layout.file_bytes / exact
    assert share == pytest.approx(KINDS["6 bits alone"].read, abs=0.01)
    assert share == pytest.approx(KINDS["6 bits alone"].file, abs=0.01)


def test_a_stored_prompt_is_loaded_and_written_once() -> None:
    row = replay([ask(1, 2, 3), ask(1, 2, 3), ask(1, 2, 4)], own := store(), MODEL, ARGS)
    assert row["loaded"] == pytest.approx(100 * 5 / 9, abs=0.1) and row["crowded"] == 0
    assert row["written"] == pytest.approx(4096 * 4 / 9, rel=0.02)
    check_tree(own.tree)


def test_what_does_not_fit_leaves_and_takes_its_places_in_the_cache_along() -> None:
    own = store(ssd_gb=0.005, host_gb=0.01)
    row = replay([ask(1, 2), ask(3, 4), ask(1, 2), ask(1, 2)], own, MODEL, ARGS)
    assert row["loaded"] == 25.0 and row["crowded"] == 2
    check_tree(own.tree)


@pytest.mark.parametrize(("room", "found"), [(1, 64), (2, 128), (math.inf, 128)])
def test_no_choice_finds_more_than_the_bound(room: float, found: int) -> None:
    asks = [ask(1, size=64), ask(2, size=64), ask(3, size=64), ask(2, size=64), ask(1, size=64)]
    assert bound(asks, room) == found
    assert lru(asks, room)[0] <= found


def test_all_kinds_and_rooms_have_a_row() -> None:
    given = ["--quick", "--kinds=exact,basis alone", "--tb=0.01,1"]
    rows = capacity.run(parse("capacity", "", capacity.OPTIONS, given)).figures["rows"]
    assert [(row["kind"], row["tb"]) for row in rows] == [
        (kind, tb) for kind in ("exact", "basis alone") for tb in (0.01, 1.0)
    ]
    assert all(row["loaded"] <= row["bound"] for row in rows)
    assert rows[0]["bound"] < rows[1]["bound"]
