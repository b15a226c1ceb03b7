"""Kernels restore and raise coded keys and values as the codec says."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
from torch import Tensor

from impress_sglang.codes.planes import slots as loops
from impress_sglang.codes.planes.codec import (
    GROUP_TOKENS,
    LEVELS,
    NUM_PLANES,
    code_keys,
    code_values,
    restore,
)
from impress_sglang.codes.planes.layer import CodedLayer, encode_layer
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.codes.planes.tokens import CodedTokens
from impress_sglang.transfer.coded_slots import KernelCodeWriter
from impress_sglang.triton import codes
from impress_sglang.triton.sizes import power_of_two
from tests.unit.coded_factory import gained_of
from tests.unit.triton.conftest import compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64, 64), (3, 80, 48), (2, 128, 64)]
UNIT_TOKENS = 32


class Case:
    """A coded layer with gaps between groups, units anywhere in memory, and pools with gaps."""

    def __init__(
        self, device: str, shape: tuple[int, int, int], num_tokens: int, dtype: torch.dtype
    ) -> None:
        heads, key_dim, value_dim = shape
        self.num_tokens = num_tokens
        bits = UNIT_TOKENS * (key_dim + value_dim)
        self.layout = CodeLayout(num_tokens, *shape, bits // 8)
        assert self.layout.unit_tokens == UNIT_TOKENS
        keys, values = (
            torch.randn(num_tokens, heads, dim) * 3 + torch.randn(heads, dim) * 10
            for dim in (key_dim, value_dim)
        )
        self.coded = CodedLayer.empty(self.layout)
        energy = torch.rand(heads, key_dim) ** 4
        encode_layer(self.layout, keys, values, self.coded, energy)
        self.codes = code_keys(keys, energy), code_values(values)
        self.slots = torch.randperm(num_tokens + 7)[:num_tokens]
        memory = torch.zeros(num_tokens + 7, heads + 1, max(key_dim, value_dim) + 16, dtype=dtype)
        self.pools = [memory.clone().to(device) for _ in range(2)]
        self.expected = [memory.clone() for _ in range(2)]
        self._device = device
        self._groups = torch.nn.functional.pad(self.coded.groups, (4, 2)).to(device)[:, 4:-2]
        # One memory of the device and one of the host, each with every second unit.
        self._planes = self._own(self.coded.planes.flatten(0, 2))

    def _own(self, rows: Tensor) -> list[Tensor]:
        host = rows.flip(0).contiguous()
        return [rows.to(self._device), host.pin_memory() if self._device == "cuda" else host]

    def _address(self, memories: list[Tensor], row: int) -> int:
        count = len(memories[0])
        if row % 2:
            return memories[1][count - 1 - row].data_ptr()
        return memories[0][row].data_ptr()

    def views(self, pools: list[Tensor]) -> list[Tensor]:
        dims = (self.layout.key_dim, self.layout.value_dim)
        heads = self.layout.num_heads
        return [pool[:, :heads, :dim] for pool, dim in zip(pools, dims, strict=True)]

    def groups(self, first: int, start: int, stop: int) -> codes.CodedGroups:
        """Tokens [start, stop), of the groups from the first on that are told."""
        slots, range_bytes = self.slots[start:stop].to(self._device), self.layout.group_range_bytes
        place = start - first * GROUP_TOKENS
        return codes.CodedGroups(self._groups[first:], range_bytes, slots, place, GROUP_TOKENS)

    def restore(self, start: int, stop: int) -> codes.CodedGroups:
        first = start // GROUP_TOKENS
        groups = self.groups(first, start, stop)
        codes.restore_base(groups, *self.views(self.pools))
        for view, own in zip(self.views(self.expected), self.codes, strict=True):
            view[self.slots[start:stop]] = restore(own, LEVELS[0])[start:stop].to(view.dtype)
        return groups

    def raise_units(self, groups: codes.CodedGroups, planes: Tensor, start: int, stop: int) -> None:
        """`planes` bool [NUM_PLANES, G, units]."""
        entries, units = [], self.layout.num_units
        first = start // GROUP_TOKENS * GROUP_TOKENS
        for head, unit in planes.any(0).nonzero().tolist():
            own = [
                self._address(self._planes, (plane * self.layout.num_heads + head) * units + unit)
                if planes[plane, head, unit]
                else 0
                for plane in range(NUM_PLANES)
            ]
            entries.append([head, unit * UNIT_TOKENS - first, *own])
        uploaded = (
            torch.tensor(entries, dtype=torch.int64).view(-1, 2 + NUM_PLANES).to(self._device)
        )
        codes.raise_units(groups, uploaded, UNIT_TOKENS, *self.views(self.pools))
        for view, own in zip(self.views(self.expected), self.codes, strict=True):
            gained = torch.zeros(own.codes.shape)
            for plane in range(NUM_PLANES):
                part = gained_of(own, plane)
                wanted = planes[plane].repeat_interleave(UNIT_TOKENS, 1)[:, : self.num_tokens]
                gained += part * wanted.T[..., None]
            slots = self.slots[start:stop]
            view[slots] = (view[slots].float() + gained[start:stop]).to(view.dtype)

    def check(self) -> None:
        for pool, expected in zip(self.pools, self.expected, strict=True):
            # Steps of the dtype at the largest number: the interpreter cuts off, and rounds not.
            slack = 4 * torch.finfo(pool.dtype).eps * float(expected.abs().max())
            assert torch.allclose(pool.cpu().float(), expected.float(), rtol=0, atol=slack)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, SHAPES[0]) for dtype in DTYPES), *((torch.float32, own) for own in SHAPES[1:])],
    ids=str,
)
@pytest.mark.parametrize("span", [(0, 150), (70, 75), (100, 129)], ids=str)
def test_slots_hold_what_the_oracle_restores(
    device: str, span: tuple[int, int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = Case(device, shape, 150, dtype)
    groups = case.restore(*span)
    case.check()
    # No plane, the first, the second, both, and so on, in turn.
    turn = (torch.arange(case.layout.num_units) + 3 * torch.arange(shape[0])[:, None]) % 8
    planes = torch.stack([turn >> plane & 1 == 1 for plane in range(NUM_PLANES)])
    case.raise_units(groups, planes, *span)
    case.check()


@pytest.mark.parametrize("shape", [*SHAPES, (2, 96, 80)], ids=str)
def test_kernels_and_loops_agree_bit_by_bit(interpreted: None, shape: tuple[int, int, int]) -> None:
    """Where no device contracts a product and a sum to one rounding."""
    case = Case("cpu", shape, 150, torch.float32)
    layout, slots = case.layout, case.slots[37:]
    tokens = CodedTokens(layout, case.coded.groups, 37, slots)
    dims = layout.key_dim, layout.value_dim
    pools = [[torch.zeros(157, shape[0], dim) for dim in dims] for _ in range(2)]
    units = range(37 // UNIT_TOKENS, layout.num_units)
    for writer, own in zip((loops, KernelCodeWriter(torch.device("cpu"))), pools, strict=True):
        writer.restore_base(tokens, *own)
        # The second plane later than the two others.
        for planes in ((0, 2), (1,)):
            raised = torch.tensor(list(itertools.product(planes, range(shape[0]), units)))
            writer.raise_units(tokens, raised, case.coded.planes[raised.unbind(1)], *own)
    for found, expected in zip(pools[1], pools[0], strict=True):
        assert torch.equal(found, expected)


def test_nothing_to_do_is_done(device: str) -> None:
    case = Case(device, SHAPES[0], 64, torch.float32)
    groups = case.restore(10, 10)
    case.raise_units(groups, torch.zeros(NUM_PLANES, 1, 2, dtype=torch.bool), 10, 10)
    case.check()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48)])
@pytest.mark.parametrize("kernel", [codes._restore_kernel, codes._raise_kernel])
def test_kernels_compile_for_an_h100(
    kernel: triton.runtime.JITFunction, dims: tuple[int, int]
) -> None:
    constants = {
        "RANGE_BYTES": 32 * (dims[0] + 64) + 8 * dims[0],
        "GROUP_TOKENS": 64,
        "UNIT_TOKENS": 32768 // sum(dims) // 16 * 16,
        "HEADS": 8,
        "KEY_DIM": dims[0],
        "VALUE_DIM": dims[1],
        "KEY_PADDED": power_of_two(dims[0]),
        "VALUE_PADDED": power_of_two(dims[1]),
        "TILE_TOKENS": codes.TILE_TOKENS,
    }
    kinds = {"keys": "*bf16", "values": "*bf16", "start": "i32", "count": "i32", "groups": "*u8"}
    for name in set(kernel.arg_names) - constants.keys() - kinds.keys():
        kinds[name] = "i32" if name.endswith("stride") else "*i64"
    aligned = kinds.keys() - {"start", "count", "slots", "groups"}
    ptx = compiled(kernel, kinds, constants, aligned).asm["ptx"]
    assert "st.global" in ptx
