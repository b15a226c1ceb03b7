"""Codes of keys and values: how far off they are, how planes add up, and who gets them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.codes.planes.codec import (
    CODE_BITS,
    GROUP_TOKENS,
    LEVELS,
    NUM_PLANES,
    NUM_SECTIONS,
    PLANE_BITS,
    Codes,
    NotCodable,
    code_keys,
    code_values,
    pack,
    packed_base,
    packed_sections,
    restore,
    sections_of,
    unpack,
)
from impress_sglang.codes.planes.layer import CodedLayer, encode_layer
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.codes.planes.slots import raise_units, restore_base
from impress_sglang.codes.planes.tokens import CodedTokens
from impress_sglang.loops import packed
from impress_sglang.options import BITS
from tests.unit.coded_factory import check_pool, gained_of, restored

COUNTS = [1, 2, GROUP_TOKENS - 1, GROUP_TOKENS, GROUP_TOKENS + 1, 3 * GROUP_TOKENS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {"keys": code_keys, "values": code_values}


def random_kv(num_tokens: int, heads: int = 2, dim: int = 8, seed: int = 1) -> Tensor:
    """Rows with an offset and a scale of their own in each channel, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, heads, dim, generator=generator)
    scale = 10 ** (2 * torch.rand(heads, dim, generator=generator) - 1)
    return rows * scale + 100 * torch.randn(heads, dim, generator=generator)


def known_bits(codes: Codes, planes: int) -> Tensor:
    """How many bits of each element so many planes tell, float32 [t, G, D] or [1]."""
    if codes.sections is None:
        return torch.tensor([5.0 + planes])
    both = torch.stack([codes.sections & 15, codes.sections >> 4])
    known = 4 + 2 * (both <= planes).sum(0).float()
    return known.repeat_interleave(GROUP_TOKENS, 0)[: len(codes.codes)]


def steps_of(codes: Codes) -> Tensor:
    """The step of each element, float32 [t, G, D] or what broadcasts to it."""
    if codes.step.ndim == 2:
        return codes.step.float()[..., None]
    return codes.step.float().repeat_interleave(GROUP_TOKENS, 0)[: len(codes.codes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_no_element_is_off_by_more_than_half_a_cell(
    count: int, kind: str, dtype: torch.dtype
) -> None:
    exact = random_kv(count).to(dtype)
    codes = KINDS[kind](exact)
    for planes, bits in enumerate(LEVELS):
        found = restore(codes, bits)
        assert found.shape == exact.shape and found.dtype == torch.float32
        known = known_bits(codes, planes)
        cell = 2 ** (CODE_BITS - known) * steps_of(codes)
        # Rounding to the nearest of all codes may put an element half a step beyond its cell.
        limit = cell / 2 + steps_of(codes) / 2 * (known < CODE_BITS)
        assert ((found - exact.float()).abs() <= limit + 1e-4).all()


@pytest.mark.parametrize("count", COUNTS)
def test_ranges_are_no_wider_than_half_precision_makes_them(count: int) -> None:
    keys = random_kv(count)
    codes = code_keys(keys)
    for group, rows in enumerate(keys.split(GROUP_TOKENS)):
        low, step = codes.low[group].float(), codes.step[group].float()
        high = low + (2**CODE_BITS - 1) * step
        assert (low <= rows.amin(0)).all() and (high >= rows.amax(0)).all()
        # Numbers of some hundred are a quarter apart in half precision.
        assert (high - low <= (rows.amax(0) - rows.amin(0)) * 1.001 + 0.51).all()


def test_packages_that_may_not_import_each_other_agree_on_numbers() -> None:
    assert BITS == LEVELS
    assert (packed.GROUP_TOKENS, packed.NUM_SECTIONS) == (GROUP_TOKENS, NUM_SECTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_plane_adds_its_bits_to_what_is_there(kind: str) -> None:
    codes = KINDS[kind](random_kv(200))
    value = restore(codes, LEVELS[0])
    for plane, bits in enumerate(LEVELS[1:]):
        value = value + gained_of(codes, plane)
        assert torch.allclose(value, restore(codes, bits), atol=1e-4)


def brute_sections(weight: list[float]) -> list[int]:
    """Sections of the pairs of one head, one pair after another."""
    gains = [np.float32(weight), np.float32(weight) / np.float32(16)]
    left = [(lower, channel) for lower in range(2) for channel in range(len(weight))]
    found = [0] * len(weight)
    for rank in range(2 * len(weight)):
        best = left[0]
        for pair in left:
            if gains[pair[0]][pair[1]] > gains[best[0]][best[1]]:
                best = pair
        left.remove(best)
        found[best[1]] |= rank // (len(weight) // 2) << 4 * best[0]
    return found


WEIGHTS = st.sampled_from([0.0, 1e-45, 1e-20, 0.25, 1.0, 4.0, 16.0, 20.0, 300.0, torch.inf])


@given(st.sampled_from([8, 16]).flatmap(lambda n: st.lists(WEIGHTS, min_size=n, max_size=n)))
def test_pairs_are_in_the_order_of_what_they_gain(weight: list[float]) -> None:
    """Of equal gains (zeros too) upper pairs are first, and then lower channels."""
    found = sections_of(torch.tensor([[weight]]))
    assert found.tolist() == [[brute_sections(weight)]]
    upper, lower = found & 15, found >> 4
    assert (upper <= lower).all()
    counts = torch.bincount(torch.cat([upper, lower]).flatten().int(), minlength=NUM_SECTIONS)
    assert counts.tolist() == [len(weight) // 2] * NUM_SECTIONS


def test_channels_that_count_alike_get_their_upper_bits_first() -> None:
    for weight in (torch.zeros(8), torch.ones(8), torch.full((8,), torch.nan)):
        assert sections_of(weight).tolist() == [0x20] * 4 + [0x31] * 4


def test_a_channel_with_a_large_range_and_large_queries_gets_its_bits_first() -> None:
    keys, energy = torch.randn(100, 2, 16), torch.ones(2, 16)
    keys[:, :, 3] *= 30.0
    codes = code_keys(keys, energy)
    assert codes.sections is not None
    assert (codes.sections[:, :, 3] == 0).all() and (codes.sections[..., 4:] > 0).all()
    # A head whose queries have nothing there does without.
    energy[1, 3] = 0.0
    other = code_keys(keys, energy)
    assert other.sections is not None
    assert torch.equal(other.sections[:, 0], codes.sections[:, 0])
    assert (other.sections[:, 1, 3] == 0x33).all()
    # Only the order of bits differs.
    assert torch.equal(other.codes, codes.codes) and torch.equal(other.step, codes.step)
    assert torch.equal(restore(other, LEVELS[-1]), restore(codes, LEVELS[-1]))
    assert not torch.equal(restore(other, LEVELS[0])[:, 1], restore(codes, LEVELS[0])[:, 1])


def test_logits_are_nearer_with_the_energy_of_their_queries() -> None:
    keys = random_kv(GROUP_TOKENS * 4, dim=32)
    queries = torch.randn(16, 2, 32) * 10 ** (2 * torch.rand(2, 32) - 1)
    energy = queries.square().mean(0)
    for bits in LEVELS[:-1]:
        found = [
            torch.einsum("nhd,thd->hnt", queries, restore(own, bits) - keys).square().mean()
            for own in (code_keys(keys, energy), code_keys(keys))
        ]
        assert found[0] < 0.9 * found[1]


@pytest.mark.parametrize("dim", [8, 80, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_in_the_base_or_a_plane_once(kind: str, dim: int) -> None:
    """Put together from packed bytes, by the definition, they are the codes."""
    codes = KINDS[kind](random_kv(70, dim=dim))
    sections = packed_sections(codes)
    assert sections.shape == (NUM_SECTIONS, 70, 2, dim // 8)
    whole = unpack(packed_base(codes), 4).int() << 4
    if codes.sections is None:
        for section, rows in enumerate(sections):
            whole |= unpack(rows, 1).int() << 3 - section
    for token, head in itertools.product(range(70), range(2)) if kind == "keys" else ():
        own = codes.sections[token // GROUP_TOKENS, head].tolist()
        rows = [unpack(sections[section, token, head], 2).tolist() for section in range(4)]
        for shift, nibble in ((2, 0), (0, 4)):
            for channel, both in enumerate(own):
                whole[token, head, channel] |= rows[both >> nibble & 15].pop(0) << shift
    assert torch.equal(whole, codes.codes.int())


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_packed_codes_are_found_again(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 3, 16), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, 16 * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_the_first_element_is_in_the_lowest_bits_and_neighbours_in_neighbouring_bytes() -> None:
    assert pack(torch.tensor([1, 2], dtype=torch.uint8), 4).tolist() == [0x21]
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00111001]
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x31, 0x42]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e9, -1e9])
def test_what_no_range_holds_is_refused(bad: float, kind: str) -> None:
    exact = random_kv(70)
    exact[69, 1, 3] = bad
    with pytest.raises(NotCodable):
        KINDS[kind](exact)


SHAPES = [(3, 64, 64), (8, 128, 128), (4, 256, 256), (8, 80, 80), (2, 192, 128), (1, 8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 3000])
def test_layouts_hold_every_bit(shape: tuple[int, int, int], num_tokens: int) -> None:
    heads, key_dim, value_dim = shape
    layout = CodeLayout(num_tokens, heads, key_dim, value_dim, 4096)
    elements = num_tokens * heads * (key_dim + value_dim)
    assert layout.base_bytes >= elements * 5 / 8
    assert layout.planes_bytes >= elements * 3 / 8
    assert 0.93 * 4096 < layout.unit_bytes <= layout.unit_stride == 4096
    assert not layout.base_bytes % 4096 and not layout.page_bytes % 4096
    ends = [layout.group_offset(group) + layout.group_bytes for group in range(layout.num_groups)]
    begins = [0, *ends[:-1]]
    for group, begin in enumerate(begins):
        padding = layout.group_offset(group) - begin
        assert 0 <= padding < 4096 and (not padding or not layout.group_offset(group) % 4096)
    assert layout.base_bytes - 4096 < ends[-1] <= layout.base_bytes
    assert layout.total_units == NUM_PLANES * heads * layout.num_units
    assert layout.layer_bytes == layout.base_bytes + layout.total_units * 4096


def test_a_layer_in_codes_is_as_long_as_the_documentation_says() -> None:
    layout = CodeLayout(3008, 8, 128, 128, 4096)
    exact = 3008 * 8 * 256 * 2
    ranges = layout.num_groups * layout.group_range_bytes
    assert layout.base_bytes / exact == pytest.approx(5 / 16 + 0.0273, abs=1e-3)
    assert ranges / exact == pytest.approx(0.0273, abs=1e-4)
    # The last unit of 24 is half empty.
    assert layout.planes_bytes / exact == pytest.approx(3 / 16 * 24 / 23.5)


def test_parts_of_a_group_stand_one_behind_the_other() -> None:
    layout = CodeLayout(100, 3, 16, 24, 4096)
    assert layout.group_bounds_bytes == 3 * 2 * 16 * 2 + 64 * 3 * 2 * 2 == 960
    assert layout.group_range_bytes == 960 + 3 * 16 == 1008
    assert layout.base_places == (1008, 1008 + 1536, 1008 + 1536 + 384, 1008 + 1536 + 384 + 2304)
    assert layout.group_bytes == 1008 + 1536 + 384 + 2304 + 576
    assert layout.token_unit_bytes == 5 and layout.unit_tokens == 816


@pytest.mark.parametrize("dims", [(12, 16), (16, 4), (100, 100)])
def test_dimensions_are_multiples_of_eight(dims: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        CodeLayout(100, 3, *dims, 4096)


class Coded:
    """A layer, its codes and its bytes."""

    def __init__(self, num_tokens: int, heads: int = 2, dims: tuple[int, int] = (16, 8)) -> None:
        self.keys = random_kv(num_tokens, heads, dims[0])
        self.values = random_kv(num_tokens, heads, dims[1], seed=2)
        energy = random_kv(heads, 1, dims[0], seed=3)[:, 0].square()
        # Units of 32 tokens, half a group.
        self.layout = CodeLayout(num_tokens, heads, *dims, 32 * sum(dims) * PLANE_BITS // 8)
        self.coded = CodedLayer.empty(self.layout)
        encode_layer(self.layout, self.keys, self.values, self.coded, energy)
        self.codes = code_keys(self.keys, energy), code_values(self.values)

    def tokens(self, start: int, stop: int, slots: Tensor) -> CodedTokens:
        groups = self.coded.groups[start // GROUP_TOKENS : -(-stop // GROUP_TOKENS)]
        return CodedTokens(self.layout, groups, start, slots)


DIMS = [(8, 16), (64, 64), (80, 96), (96, 80), (128, 128), (72, 56)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("num_tokens", "start"), [(200, 0), (150, 37), (64, 3), (1, 0)])
def test_slots_hold_what_codes_say_bit_by_bit(
    num_tokens: int, start: int, dims: tuple[int, int]
) -> None:
    """The base, and any planes that are added to it at once."""
    layer = Coded(num_tokens, 3, dims)
    tokens = layer.tokens(start, num_tokens, torch.randperm(num_tokens + 3)[start:num_tokens])
    pools = [torch.zeros(num_tokens + 3, 3, dim) for dim in dims]
    restore_base(tokens, *pools)
    for pool, codes in zip(pools, layer.codes, strict=True):
        assert torch.equal(pool[tokens.slots], restore(codes, LEVELS[0])[start:])
    units = range(start // layer.layout.unit_tokens, layer.layout.num_units)
    for count in range(1, NUM_PLANES + 1):
        for some in itertools.combinations(range(NUM_PLANES), count):
            copies = [pool.clone() for pool in pools]
            places = torch.tensor(list(itertools.product(some, range(3), units)))
            raise_units(tokens, places, layer.coded.planes[places.unbind(1)], *copies)
            for pool, copy, codes in zip(pools, copies, layer.codes, strict=True):
                # In steps, which are exact; so they are added in one rounding.
                whole = dataclasses.replace(codes, step=torch.ones_like(codes.step))
                gained = sum(gained_of(whole, plane) for plane in some) * steps_of(codes)
                assert torch.equal(copy[tokens.slots], pool[tokens.slots] + gained[start:])
            if some == tuple(range(count)):
                for copy, codes in zip(copies, layer.codes, strict=True):
                    expected = restore(codes, LEVELS[count])[start:]
                    assert torch.allclose(copy[tokens.slots], expected, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 31, 64, 65, 200])
@given(seed=st.integers(0, 2**32 - 1))
def test_units_are_raised_where_they_are(num_tokens: int, dtype: torch.dtype, seed: int) -> None:
    """In any order of questions, each with its own wishes, and nowhere else."""
    layer, die = Coded(num_tokens), torch.Generator().manual_seed(seed)
    layout, heads = layer.layout, layer.layout.num_heads
    start = int(torch.randint(0, num_tokens, (), generator=die))
    slots = torch.randperm(num_tokens + 3, generator=die)[start:num_tokens]
    dims = layout.key_dim, layout.value_dim
    pools = [torch.zeros(num_tokens + 3, heads, dim, dtype=dtype) for dim in dims]
    tokens = layer.tokens(start, num_tokens, slots)
    restore_base(tokens, *pools)
    have = torch.zeros(heads, layout.num_units, dtype=torch.int64)
    for _ in range(2):
        want = torch.randint(0, NUM_PLANES + 1, have.shape, generator=die).maximum(have)
        raised_now = [
            (plane, head, unit)
            for head, unit in itertools.product(range(heads), range(layout.num_units))
            for plane in range(int(have[head, unit]), int(want[head, unit]))
        ]
        planes = torch.tensor(raised_now, dtype=torch.int64).view(-1, 3)
        raise_units(tokens, planes, layer.coded.planes[tuple(planes.T)], *pools)
        have = want
    planes_of_tokens = have.repeat_interleave(layout.unit_tokens, 1)[:, :num_tokens].T[..., None]
    for pool, codes in zip(pools, layer.codes, strict=True):
        # A pool of few bits is rounded each time.
        check_pool(pool, slots, restored(codes, planes_of_tokens)[start:], empty=0.0)


@pytest.mark.parametrize("num_tokens", [1, 64, 600, 1100])
def test_a_layer_stands_on_disk_where_its_layout_says(num_tokens: int) -> None:
    layer = Coded(num_tokens, heads=3, dims=(8, 8))
    layout = CodeLayout(num_tokens, 3, 8, 8, 256)
    coded = CodedLayer.empty(layout)
    encode_layer(layout, layer.keys, layer.values, coded)
    memory = torch.full((layout.layer_bytes,), 255, dtype=torch.uint8)
    coded.put(layout, memory)
    rest = torch.ones_like(memory, dtype=torch.bool)
    for group, content in enumerate(coded.groups):
        at = layout.group_offset(group)
        assert torch.equal(memory[at : at + layout.group_bytes], content)
        rest[at : at + layout.group_bytes] = False
    units = itertools.product(range(NUM_PLANES), range(3), range(layout.num_units))
    for index, (plane, head, unit) in enumerate(units):
        at = layout.base_bytes + index * layout.unit_stride
        content = coded.planes[plane, head, unit]
        assert torch.equal(memory[at : at + layout.unit_bytes], content)
        rest[at : at + layout.unit_bytes] = False
    assert not memory[rest].any()
