"""The Triton kernels on a GPU, against what the card itself can do.

Measures the card first (reading its memory, copying from pinned host memory), then

  * restoring a layer in 6 bits, against moving as many bytes in device memory;
  * restoring a layer by a basis of 4 bits, against moving as many bytes and against the product of
    matrices alone.

Times are medians of CUDA events; before each run a buffer larger than the L2 cache is written, so
that nothing is found there, and what is measured is queued before it begins. Results are compared
with the reference before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.core.options import Option
from bench.core.report import Result, Table
from bench.core.session import BenchFailed
from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups.codec import GroupLayout, encode_layer
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.codes.rows.basis import Basis, LayerBasis
from impress_sglang.codes.rows.coder import product_matrix
from impress_sglang.codes.rows.row import GAINS
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.sources import Piece
from impress_sglang.triton import groups as kernels

# Writing it takes longer than queueing what is measured.
FLUSH_BYTES = 2 << 30
PLAIN_BYTES = 1 << 30


OPTIONS = (
    Option("tokens", 8192, "of the prefix", quick=2048),
    Option("kv-heads", 8, "of the model"),
    Option("dim", 128, "of a head"),
    Option("repeat", 50, "runs of each kernel", quick=5),
)


def run(args: argparse.Namespace) -> Result:
    """Measure the card, then the kernels.

    Raises:
        BenchFailed: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise BenchFailed("there is no CUDA device; on a CPU kernels are only tested")
    torch.manual_seed(0)
    watch, device = Watch(args.repeat), torch.device("cuda")
    codes, basis = by_codes(args, watch), by_a_basis(args, watch, device)
    figures = {"card": watch.card, "codes": codes, "basis": basis}
    rows = [
        {"of": name, "figure": key, "value": value}
        for name, part in figures.items()
        for key, value in part.items()
        if not isinstance(value, dict)
    ]
    return Result(figures, [Table(rows)])


class Watch:
    """Times work on the device, and the device itself first."""

    def __init__(self, repeat: int) -> None:
        self._repeat = repeat
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        words = torch.ones(PLAIN_BYTES // 4, dtype=torch.float32, device="cuda")
        pinned = torch.empty(PLAIN_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda")
        read = self.microseconds(lambda: words.sum())
        copy = self.microseconds(lambda: target.copy_(pinned, non_blocking=True))
        self.card = {
            "memory_gbps": round(PLAIN_BYTES / read / 1e3, 1),
            "host_to_device_gbps": round(PLAIN_BYTES / copy / 1e3, 2),
            "empty_launch_us": round(self.microseconds(lambda: words[:1].add_(1)), 2),
        }

    def microseconds(self, work: Callable[[], Any]) -> float:
        """Median over the repeats, caches cold."""
        for _ in range(3):
            work()
        times = []
        for _ in range(self._repeat):
            self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        return float(statistics.median(times))

    def measured(self, work: Callable[[], Any], num_bytes: int) -> dict[str, float]:
        """Its time, and how fast it moves so many bytes, beside the card's own memory."""
        microseconds = self.microseconds(work)
        gbps = num_bytes / microseconds / 1e3
        return {
            "us": round(microseconds, 1),
            "gbps": round(gbps, 2),
            "share_of_card": round(gbps / self.card["memory_gbps"], 3),
        }


def by_codes(args: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """A prefix in codes, all heads of it, into slots."""
    m, heads, dim = args.tokens, args.kv_heads, args.dim
    layout = GroupLayout(heads, dim, dim, 6)
    groups = encode_layer(layout, torch.randn(m, heads, dim), torch.randn(m, heads, dim))
    slots = torch.randperm(m) + 1
    pools = [torch.zeros(m + 1, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    expected = [pool.cpu() for pool in pools]
    on_card, slots_on_card = groups.cuda(), slots.cuda()

    def restore() -> None:
        kernels.restore(layout, on_card, 0, slots_on_card, *pools)

    restore()
    # Only here, because it needs Numba.
    from impress_sglang.codes.groups import slots as on_cpu

    on_cpu.restore(layout, groups, 0, slots, *expected)
    for pool, wanted in zip(pools, expected, strict=True):
        torch.testing.assert_close(pool.cpu(), wanted, rtol=2**-6, atol=4e-3)

    moved = on_card.numel() + 2 * m * heads * dim * pools[0].element_size()
    return {"shape": {"m": m, "kv_heads": heads, "dim": dim}, **watch.measured(restore, moved)}


def by_a_basis(args: argparse.Namespace, watch: Watch, device: torch.device) -> dict[str, Any]:
    """A layer of a prefix, predicted from the one below, into slots."""
    m, heads, dim = args.tokens, args.kv_heads, args.dim
    size = 2 * heads * dim
    # As many components of each number of bits, and as many of none.
    bits = tuple(width for width in range(8, 0, -1) for _ in range(size // 9))
    layer = LayerBasis(
        bits,
        torch.randn(size),
        torch.randn(size, size).div(2 * size**0.5).bfloat16(),
        torch.zeros(size, len(bits)),
        torch.randn(len(bits), size).bfloat16(),
    )
    basis = Basis("random", ((heads, dim),) * 2, (dataclasses.replace(layer, predict=None), layer))
    angles = torch.rand(m, dim // 2)
    rotation = KeyRotation(lambda _: torch.cat([angles.cos(), angles.sin()], 1), halves=True)
    codec = BasisCodec(basis, rotation, kernels=True)
    places = torch.arange(m)
    turns = rotation.factors(torch.zeros_like(places), places).to(device)
    codes_of_rows = torch.randint(0, 256, (m, len(bits))) % 2 ** torch.tensor(bits)
    gains = torch.randint(4, 21, (m, GAINS))
    rows = basis.layouts[1].pack(codes_of_rows.byte(), gains.byte()).to(device)
    below = torch.randn(m, size).bfloat16()
    slots = (torch.randperm(m) + 1).to(device)
    pools = [torch.zeros(m + 1, heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
    layer_below = below.to(device)

    def restore() -> Tensor:
        piece, into = Piece([rows], 0, 0, m), Rows(*pools, slots)
        return codec.restore(1, [piece], into, (layer_below, turns))[0]

    few = min(m, 256)
    on_cpu = BasisCodec(basis, rotation, kernels=False)
    some, spare = turns.to(torch.device("cpu")), [pool[:few].cpu() for pool in pools]
    piece, into = Piece([rows[:few].cpu()], 0, 0, few), Rows(*spare, places[:few])
    wanted, _ = on_cpu.restore(1, [piece], into, (below[:few], some))
    slack = 2**-6 * float(wanted.abs().max())
    torch.testing.assert_close(restore()[:few].cpu(), wanted, rtol=0, atol=slack)
    matrix = product_matrix(layer).to(device, torch.bfloat16)
    factors = torch.randn(m, len(matrix)).to(device, torch.bfloat16)
    product = watch.microseconds(lambda: factors @ matrix)
    # Components are written and read between the two kernels; the layer, below and of its own, is
    # read and written, and slots are written.
    moved = rows.numel() + 2 * m * (2 * len(bits) + 3 * size)
    own_figures = watch.measured(restore, moved)
    return {
        "shape": {"m": m, "kv_heads": heads, "dim": dim, "components": len(bits)},
        **own_figures,
        "product_us": round(product, 1),
        "over_product": round(own_figures["us"] / product, 2),
        "tflops": round(2e-6 * factors.numel() * size / own_figures["us"], 2),
    }
