"""Codes of keys and values: how far off, who gets bits and by which queries, where they stand."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.codes.groups import codec
from impress_sglang.codes.groups.codec import CODE_BITS, GROUP_TOKENS, GroupLayout, code_keys, pack
from impress_sglang.codes.groups.energy import QueryMeter, energy_of, no_queries
from impress_sglang.codes.groups.slots import restore as restore_slots
from impress_sglang.config import BITS
from impress_sglang.errors import NotCodable
from impress_sglang.loops import groups as loops
from impress_sglang.storage.directory import CODING
from impress_sglang.storage.layout import PagedGroups
from impress_sglang.transfer import codecs
from tests.unit.codes_factory import check_groups, of_elements, random_kv, restore
from tests.unit.kv_factory import make_shape
from tests.unit.store_factory import Workbench
from tests.unit.waiting import calls_of

COUNTS = [1, 2, GROUP_TOKENS - 1, GROUP_TOKENS, GROUP_TOKENS + 1, 3 * GROUP_TOKENS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {"keys": code_keys, "values": codec.code_values}
RATES = [5, 6]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_no_element_is_off_by_more_than_half_a_cell(
    count: int, kind: str, dtype: torch.dtype, rate: int
) -> None:
    exact = random_kv(count).to(dtype)
    codes = KINDS[kind](exact, rate)
    found, bits = restore(codes), of_elements(codes, codes.bits)
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert bits.mean() == rate
    # Rounding to the nearest of all codes may put an element half a step beyond its cell.
    limit = (2 ** (CODE_BITS - bits) + (bits < CODE_BITS)) * of_elements(codes, codes.step) / 2
    assert ((found - exact.float()).abs() <= limit + 1e-4).all()


def test_packages_that_may_not_import_each_other_agree_on_numbers() -> None:
    assert list(BITS) == RATES and loops.GROUP_TOKENS == GROUP_TOKENS


def brute_pairs(weight: list[float], count: int) -> list[int]:
    """How many pairs each channel gets, one pair after another."""
    gains = np.float32([*weight, *(np.float32(weight) / 16)])
    found = [0] * len(weight)
    for _ in range(count):
        best = int(gains.argmax())
        gains[best] = -1.0
        found[best % len(weight)] += 1
    return found


WEIGHTS = st.sampled_from([0.0, 1e-45, 1e-20, 0.25, 1.0, 4.0, 16.0, 20.0, 300.0, torch.inf])


@given(st.lists(WEIGHTS, min_size=16, max_size=16), st.sampled_from(RATES))
def test_pairs_are_those_that_gain_most(weight: list[float], rate: int) -> None:
    """Of all heads; of equal gains (zeros too) upper pairs are first, and then lower channels."""
    found = codec.allocate_bit_pairs(torch.tensor([weight]).view(1, 2, 8), rate)
    assert found.flatten().tolist() == brute_pairs(weight, 8 * (rate - 4))


@pytest.mark.parametrize("rate", RATES)
def test_bits_go_where_errors_change_logits_most(rate: int) -> None:
    """By the squares of steps, and of queries if these are known; only what is kept differs."""
    keys, energy = random_kv(130), torch.rand(2, 8) ** 4
    plain, by_energy = code_keys(keys, rate), code_keys(keys, rate, energy)
    for codes, of_queries in ((plain, torch.ones(2, 8)), (by_energy, energy)):
        for bits, step in zip(codes.bits, codes.step.float(), strict=True):
            weight = (step.square() * of_queries).flatten().tolist()
            pairs = brute_pairs(weight, 8 * (rate - 4))
            assert bits.flatten().tolist() == [4 + 2 * count for count in pairs]
    assert torch.equal(plain.codes, by_energy.codes) and torch.equal(plain.step, by_energy.step)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_parts_are_where_the_format_says(width: int) -> None:
    parts = torch.randint(0, 2**width, (3, GROUP_TOKENS, 5), dtype=torch.uint8)
    packed, rows = pack(parts, width), GROUP_TOKENS * width // 8
    assert packed.shape == (3, rows, 5)
    for token in range(GROUP_TOKENS):
        part = packed[:, token % rows] >> (token // rows * width) & (2**width - 1)
        assert torch.equal(part, parts[:, token])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e9, -1e9, 65504.0])
def test_what_no_range_holds_is_refused(bad: float, kind: str) -> None:
    """The last one is finite in half precision, and its highest code is not."""
    exact = random_kv(70)
    exact[68, 1, 3] = exact[69, 1, 2] = -65504.0
    exact[69, 1, 3] = bad
    with pytest.raises(NotCodable):
        KINDS[kind](exact, 6)


@pytest.mark.parametrize(("rate", "share"), [(5, 0.34), (6, 0.402)])
def test_codes_are_as_long_as_the_documentation_says(rate: int, share: float) -> None:
    layout = GroupLayout(8, 128, 128, rate)
    assert layout.group_bytes / (GROUP_TOKENS * 8 * 256 * 2) == pytest.approx(share, abs=1e-3)


@given(
    span=st.tuples(st.integers(0, 150), st.integers(0, 150)).map(sorted),
    dims=st.sampled_from([(8, 16), (64, 64), (80, 96), (128, 128), (72, 56)]),
    rate=st.sampled_from(RATES),
    dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 1),
)
def test_slots_hold_what_codes_say(
    span: list[int], dims: tuple[int, int], rate: int, dtype: torch.dtype, gap: int
) -> None:
    check_groups(restore_slots, GroupLayout(3, *dims, rate), slice(*span), dtype, gap=gap)


@pytest.mark.parametrize("num_tokens", [1, 64, 600, 1100])
def test_a_layer_stands_on_disk_where_its_pages_say(num_tokens: int) -> None:
    kvs = [random_kv(num_tokens, 3, dim) for dim in (8, 8)]
    groups = codec.encode_layer(GroupLayout(3, 8, 8, 6), *kvs)
    for count in (1, 3, 8):
        pages = PagedGroups(num_tokens, GROUP_TOKENS, groups.shape[1], count)
        memory = torch.full((pages.num_bytes,), 255, dtype=torch.uint8)
        pages.put_groups(groups, memory)
        rest = torch.ones_like(memory, dtype=torch.bool)
        for group, content in enumerate(groups):
            at = pages.group_offset(group)
            assert torch.equal(memory[at : at + pages.group_bytes], content)
            rest[at : at + pages.group_bytes] = False
        assert not memory[rest].any() and len(memory) - 4096 < at + pages.group_bytes
        assert torch.equal(pages.groups_in(memory)[: len(groups)], groups)


HEADS, DIM = 3, 32
SHAPE = torch.Size((HEADS, DIM))


def some_queries(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 2 * HEADS, DIM, generator=generator)


@pytest.fixture
def meter() -> QueryMeter:
    """It has seen queries of layer 0."""
    meter = QueryMeter()
    meter.energy(0, SHAPE, lambda layer: some_queries(1))
    return meter


def test_energy_is_the_mean_square_of_the_queries_of_a_kv_head() -> None:
    queries = torch.zeros(2, 4, 3, dtype=torch.bfloat16)
    queries[0, 0] = torch.tensor([1.0, 2.0, 0.0])
    queries[1, 1] = torch.tensor([3.0, 0.0, 0.0])
    queries[1, 3] = torch.tensor([0.0, 0.0, -4.0])
    found = energy_of(queries, 2)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2.5, 1.0, 0.0], [0.0, 0.0, 4.0]]


def test_what_was_measured_serves_the_next_process(
    meter: QueryMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NumPy 1.26, too, which saves all keywords as arrays."""

    def savez(file: Any, **arrays: Any) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, array)

    monkeypatch.setattr(np, "savez", savez)
    later, right = QueryMeter(), energy_of(some_queries(1), HEADS)
    assert meter.has_news and not later.has_news
    later.restore(meter.dump())
    assert not meter.has_news and not later.has_news
    for each in (meter, later):
        assert torch.equal(each.energy(0, SHAPE), right)
    # Of other heads it says nothing.
    assert later.energy(0, torch.Size((2, DIM))) is None


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "flipped", "compressed", "other", "not a number"]
)
def test_what_is_damaged_is_measured_anew(
    damage: str, meter: QueryMeter, caplog: pytest.LogCaptureFixture
) -> None:
    later = QueryMeter()
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
    assert later.energy(0, SHAPE) is None
    if damage != "not a number":
        assert "damaged" in caplog.text and later.sample_next_prompt()


def test_a_store_codes_by_what_it_knows_of_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the offer with queries to the codes, and to those of the next process."""
    shape = make_shape(layers=2, query_heads=6, kv_heads=3, key_dim=DIM, probe=(), coded=True)
    bench, options = Workbench(tmp_path, shape), {"policy": "impress"}
    coded = calls_of(monkeypatch, codecs, "encode_layer")
    store = bench.open(**options)

    def put(count: int, queries: Any = no_queries) -> list[Any]:
        coded.clear()
        bench.put(store, range(count), queries=queries)
        return [None if (energy := call.args[3]) is None else energy.tolist() for call in coded]

    right = [energy_of(some_queries(layer), HEADS).tolist() for layer in range(2)]
    assert put(100) == [None, None]
    assert put(200, some_queries) == put(300) == right
    # Nothing is measured here, but the store has what was.
    store = bench.reopen(store, **options)
    assert put(400) == right
    bench.close(store)
    (kept,) = tmp_path.glob(f"*/{CODING}")
    kept.unlink()
    store = bench.open(**options)
    assert put(500) == [None, None]
    bench.close(store)
