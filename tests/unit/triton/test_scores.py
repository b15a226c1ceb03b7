"""Scores from kernels, against the torch reference; all scratch memory begins as NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from impress_sglang.errors import UnsupportedError
from impress_sglang.importance.scores import column_sums as oracle
from impress_sglang.triton import score_kernels, scores
from impress_sglang.triton.scores import KeyRows, Lengths, column_sums, tile_shape

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SCALING = 0.1

# What numpy says of arithmetic with infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("error:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it was written, or never written, shows."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return (2 * torch.randn(shape)).to(device, dtype)


def assert_same(found: Tensor, expected: Tensor, rtol: float = 5e-5) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


class Batch:
    """Random queries and keys of a batch, and what the reference says of each request."""

    def __init__(
        self,
        device: str,
        new: Sequence[int],
        prefix: Sequence[int],
        resident: Sequence[int],
        heads: int,
        key_heads: int,
        dim: int = 64,
        dtype: torch.dtype = HALF,
    ) -> None:
        self.lengths = (new, prefix, resident)
        self.queries = random(sum(new), heads, dim, dtype=dtype, device=device)
        self.prefix, self.resident, self.new = (
            random(sum(lengths), key_heads, dim, dtype=dtype, device=device)
            for lengths in (prefix, resident, new)
        )

    def expected(self, prefix: Tensor | None = None, *, squares: bool = False) -> Tensor:
        new, stored, resident = self.lengths
        parts = zip(
            self.queries.split(list(new)),
            (self.prefix if prefix is None else prefix).split(list(stored)),
            self.resident.split(list(resident)),
            self.new.split(list(new)),
            strict=True,
        )
        found = [oracle(*each, SCALING, squares=squares) for each in parts if len(each[1])]
        return torch.cat(found, 1)

    def found(
        self,
        prefix: KeyRows | None = None,
        resident: KeyRows | None = None,
        new: KeyRows | None = None,
        queries: Tensor | None = None,
        *,
        squares: bool = False,
    ) -> Tensor:
        return column_sums(
            self.queries if queries is None else queries,
            prefix or KeyRows(self.prefix),
            resident or KeyRows(self.resident),
            new or self.new,
            SCALING,
            new_lengths=self.lengths[0],
            prefix_lengths=self.lengths[1],
            resident_lengths=self.lengths[2],
            squares=squares,
        )


def scattered(keys: Tensor, heads: Sequence[int], num_heads: int, index: torch.dtype) -> KeyRows:
    """The same keys in slots and heads of a pool that is NaN everywhere else."""
    num_tokens, _, dim = keys.shape
    pool = keys.new_full((3, 2 * num_tokens + 5, num_heads, dim + 8), math.nan)
    layer = pool[1, ..., :dim]
    slots = torch.randperm(layer.shape[0], device=keys.device)[:num_tokens]
    for own, head in enumerate(heads):
        layer[slots, head] = keys[:, own]
    return KeyRows(layer, slots.to(index), tuple(heads))


@pytest.mark.parametrize(
    ("n", "m", "c", "heads", "key_heads", "dim", "dtype"),
    [
        (5, 70, 10, 3, 3, 64, HALF),
        (1, 65, 0, 4, 1, 96, HALF),
        (1, 1, 0, 1, 1, 16, HALF),
        (20, 130, 3, 8, 2, 128, BRAIN),
        (50, 64, 64, 3, 1, 80, BRAIN),
        (150, 30, 0, 2, 2, 64, HALF),
        (40, 200, 70, 5, 1, 64, BRAIN),
        (17, 40, 9, 3, 1, 256, HALF),
        (6, 40, 33, 6, 2, 80, SINGLE),
        (18, 10, 0, 1, 1, 128, SINGLE),
        (3, 20, 0, 1, 1, 256, SINGLE),
    ],
)
def test_equals_the_reference(
    device: str, n: int, m: int, c: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype
) -> None:
    batch = Batch(device, [n], [m], [c], heads, key_heads, dim, dtype)

    for squares in (False, True):
        found = batch.found(squares=squares)

        assert found.shape == (heads, m)
        assert_same(found, batch.expected(squares=squares))


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
def test_requests_of_a_batch_do_not_see_each_other(
    device: str, dtype: torch.dtype, squares: bool
) -> None:
    new, prefix, resident = [5, 1, 9, 0, 2], [70, 0, 33, 10, 64], [0, 7, 65, 3, 0]
    batch = Batch(device, new, prefix, resident, 4, 2, dtype=dtype)

    assert_same(batch.found(squares=squares), batch.expected(squares=squares))


@pytest.mark.parametrize("processors", [1, 3, 100])
def test_the_number_of_parts_does_not_change_the_sums(
    device: str, monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    """Parts that hold one kind of keys, several, or only some that a tile does not see."""
    monkeypatch.setattr(scores, "_processors", lambda _: processors)
    batch = Batch(device, [70, 130], [200, 10], [130, 0], 2, 2)

    assert_same(batch.found(), batch.expected())


def test_more_parts_than_are_added_up_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_processors", lambda _: 100)
    batch = Batch(device, [100], [33 * 64 - 7], [0], 1, 1)

    for squares in (False, True):
        assert_same(batch.found(squares=squares), batch.expected(squares=squares))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_keys_may_stand_anywhere_in_a_pool(device: str, index: torch.dtype) -> None:
    batch = Batch(device, [7, 3], [70, 20], [30, 66], 6, 2, dtype=BRAIN)
    keys = (
        scattered(batch.prefix, (2, 0), 3, index),
        scattered(batch.resident, (1, 3), 4, index),
        scattered(batch.new, (4, 1), 5, index),
    )

    for squares in (False, True):
        assert_same(batch.found(*keys, squares=squares), batch.expected(squares=squares))


def test_a_staging_buffer_and_a_pool_in_one_call(device: str) -> None:
    """Rows in order for the prefix, but only some of its heads; slots for resident tokens."""
    batch = Batch(device, [4], [70], [30], 4, 2)
    staging = torch.full((100, 5, 72), math.nan, dtype=HALF, device=device)[..., :64]
    staging[:70, 3], staging[:70, 1] = batch.prefix.unbind(1)

    resident = scattered(batch.resident, (0, 1), 2, torch.int64)
    found = batch.found(KeyRows(staging, heads=(3, 1)), resident)

    assert_same(found, batch.expected())


def test_queries_may_be_a_view(device: str) -> None:
    batch = Batch(device, [9], [40], [2], 4, 2, dtype=BRAIN)
    wide = torch.full((9, 8, 100), math.nan, dtype=BRAIN, device=device)
    view = wide[:, ::2, 3:67]
    view.copy_(batch.queries)

    assert_same(batch.found(queries=view), batch.expected())


def test_a_new_token_does_not_see_later_ones(device: str) -> None:
    """All but the first query look at the last new token as soon as they may: only the last can."""
    n = 70
    queries = torch.ones(n, 1, 64, dtype=HALF, device=device)
    prefix = torch.zeros(1, 1, 64, dtype=HALF, device=device)
    new = torch.full((n, 1, 64), -10.0, dtype=HALF, device=device)
    new[-1] = 10.0

    found = column_sums(
        queries,
        KeyRows(prefix),
        None,
        new,
        1.0,
        new_lengths=[n],
        prefix_lengths=[1],
        resident_lengths=[0],
    )

    assert found.item() == pytest.approx(n - 1, rel=1e-5)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_very_large_logits_do_not_overflow(device: str, dtype: torch.dtype) -> None:
    batch = Batch(device, [9], [50], [3], 2, 1, dtype=dtype)
    for keys in (batch.queries, batch.prefix, batch.resident, batch.new):
        keys *= 100

    for squares in (False, True):
        found = batch.found(squares=squares)

        assert torch.isfinite(found).all()
        assert (found.sum(1) <= 9 * (1 + 1e-5)).all()
        expected = batch.expected(squares=squares)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_the_weights_of_a_row_sum_to_one(device: str) -> None:
    """What goes to the prefix, and what would go to the rest, were it the prefix."""
    n, m, c = 5, 70, 40
    batch = Batch(device, [n], [m], [c], 6, 2, dtype=BRAIN)
    # No query looks at the new tokens: their logits are far below all others.
    batch.queries[..., 0] = 50.0
    batch.new.zero_()[..., 0] = -50.0
    turned = Batch(device, [n], [c], [m], 6, 2, dtype=BRAIN)
    turned.queries, turned.new = batch.queries, batch.new
    turned.prefix, turned.resident = batch.resident, batch.prefix

    total = batch.found().sum(1) + turned.found().sum(1)

    torch.testing.assert_close(total, torch.full_like(total, n), rtol=1e-5, atol=0)


def test_nothing_to_score(device: str) -> None:
    assert Batch(device, [3, 1], [0, 0], [5, 0], 2, 1).found().shape == (2, 0)
    no_queries = Batch(device, [0], [20], [5], 2, 1).found()
    assert torch.equal(no_queries, torch.zeros(2, 20, device=device))


def test_inputs_are_not_changed(device: str) -> None:
    batch = Batch(device, [3], [20], [4], 2, 1)
    inputs = [batch.queries, batch.prefix, batch.resident, batch.new]
    before = [tensor.clone() for tensor in inputs]

    batch.found()

    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_waits_for_the_device(device: str) -> None:
    batch = Batch(device, [5, 3], [100, 70], [0, 4], 4, 2)
    batch.found()
    scores._plan.cache_clear()

    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.found()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("queries", "keys"), [(HALF, BRAIN), (torch.float64, torch.float64), (BRAIN, SINGLE)]
)
def test_dtypes_without_a_kernel_are_refused(queries: torch.dtype, keys: torch.dtype) -> None:
    batch = Batch("cpu", [3], [20], [4], 2, 1, dtype=keys)

    with pytest.raises(UnsupportedError, match="float"):
        batch.found(queries=batch.queries.to(queries))


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("group", [1, 3, 32])
@pytest.mark.parametrize("dim", [16, 80, 256])
@pytest.mark.parametrize("n", [1, 5000])
def test_tiles_hold_whole_tokens_and_fit_into_shared_memory(
    n: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    lengths = Lengths((n,), (100_000,), (0,))

    tile = tile_shape(lengths, 8, group, dim, dtype, 132)

    assert tile.tokens >= 1 and tile.group >= group and tile.dim >= dim
    assert min(tile.rows, tile.keys, tile.dim) >= 16
    # Queries, and two stages of keys.
    vectors = tile.rows + tile.keys * tile.stages
    assert vectors * tile.dim * dtype.itemsize <= 227 * 1024


def test_tiles_are_not_given_keys_that_they_cannot_see() -> None:
    tile = tile_shape(Lengths((300,), (100,), (70,)), 1, 1, 64, HALF, 4)
    assert (tile.tokens, tile.keys) == (128, 64)

    plan = scores._plan(Lengths((300,), (100,), (70,)), tile, 1, 4, torch.device("cpu"), stream=0)

    seen: dict[int, list[int]] = {}
    for _, first, _, begin, end, *_ in plan.row_items.tolist():
        seen.setdefault(first, []).extend(range(begin, end))
    # Two blocks of resident tokens, two of the prefix, and new ones up to the tile's last.
    assert seen == {0: list(range(6)), 128: list(range(8)), 256: list(range(9))}


Launch = tuple[Any, tuple[Any, ...], scores.Tile, dict[str, int]]
Launcher = Callable[..., list[Launch]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """What would be launched on an H100, without running it."""
    launches: list[Launch] = []

    def note(
        kernel: Any, items: Tensor, *arguments: Any, tile: scores.Tile, **options: int
    ) -> None:
        launches.append((kernel, arguments, tile, options))

    def run(batch: Batch, *, squares: bool = False) -> list[Launch]:
        monkeypatch.setattr(scores, "_launch", note)
        monkeypatch.setattr(scores, "_processors", lambda _: 132)
        batch.found(squares=squares)
        return launches

    return run


@pytest.mark.skipif(
    not isinstance(score_kernels.row_sums, triton.JITFunction), reason="interpreted"
)
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "squares"),
    [(BRAIN, 8, 128, True), (HALF, 6, 80, False), (SINGLE, 2, 64, True)],
)
def test_kernels_compile_for_hopper(
    launched: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    squares: bool,
) -> None:
    """The interpreter lets things pass that the compiler does not; no GPU is needed for that."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    batch = Batch("cpu", [100], [200], [70], heads, 2, dim, dtype)

    for kernel, arguments, tile, constants in launched(batch, squares=squares):
        code = compiled(kernel, arguments, tile, constants)
        assert "tf32" not in code.asm["ptx"]
        assert code.metadata.shared <= 227 * 1024
        if dtype != SINGLE:
            assert "wgmma" in code.asm["ptx"]


TYPES = {
    HALF: "*fp16",
    BRAIN: "*bf16",
    SINGLE: "*fp32",
    torch.int32: "*i32",
}


def compiled(
    kernel: Any, arguments: tuple[Any, ...], tile: scores.Tile, constants: dict[str, int]
) -> Any:
    names = kernel.arg_names
    values = {name: value for name, value in constants.items() if name in names}
    types = [
        TYPES[each.dtype]
        if isinstance(each, Tensor)
        else "i32"
        if isinstance(each, int)
        else "fp32"
        for each in arguments
    ]
    signature = dict(zip(names, types + ["constexpr"] * len(values), strict=True))
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(types) if kind[0] == "*"
    }
    return triton.compile(
        ASTSource(kernel, signature, values, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def test_a_batch_takes_two_launches(launched: Launcher) -> None:
    assert len(launched(Batch("cpu", [50, 3], [100, 70], [0, 4], 4, 2))) == 2
