from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.triton import selection

# Poisoned words behind each tensor, more than a block of tokens.
GUARD = 10_000
POISON = 0x7FFFFFFF
NAN, INF, TINY = float("nan"), float("inf"), 2.0**-149


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and scratch begin as NaN, high numbers, set flags; what is behind them stays."""
    poison = torch.tensor([POISON], dtype=torch.int32).view(torch.uint8)
    behind: list[Tensor] = []
    new_empty: Callable[..., Tensor] = Tensor.new_empty

    def poisoned(
        self: Tensor, shape: int | tuple[int, ...], *, dtype: torch.dtype | None = None, **more: Any
    ) -> Tensor:
        if dtype is None:
            # Triton's interpreter asks for that.
            return new_empty(self, shape, **more)
        shape = (shape,) if isinstance(shape, int) else shape
        size = math.prod(shape) * dtype.itemsize
        words = -(-size // len(poison)) + GUARD
        raw = torch.full((words,), POISON, dtype=torch.int32, device=self.device).view(torch.uint8)
        behind.append(raw[size:])
        return raw[:size].view(dtype).view(shape)

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    yield
    for guard in behind:
        assert torch.equal(guard.cpu(), poison.repeat(len(guard))[-len(guard) :])


def some_of(m: int) -> list[int]:
    return sorted({1, max(1, m // 4), m})


def assert_sets(tokens: Tensor, rows: int, k: int, m: int) -> None:
    """Each row is k distinct tokens, ascending."""
    assert tokens.dtype == torch.int32 and tokens.shape == (rows, k)
    assert (tokens.diff(dim=1) > 0).all()
    assert tokens.min() >= 0 and tokens.max() < m


def assert_best(tokens: Tensor, scores: Tensor, k: int) -> None:
    """The tokens' scores are the k best, whichever of equal ones were taken."""
    assert_sets(tokens, len(scores), k, scores.shape[1])
    found = scores.gather(1, tokens.long()).sort(descending=True).values
    assert torch.equal(found, scores.topk(k).values)


def distinct(rows: int, m: int) -> Tensor:
    """Rows of different numbers in random order."""
    return torch.stack([torch.randperm(m).float() for _ in range(rows)])


@pytest.mark.parametrize(
    "m",
    # One token, parts of a block, a block, a token more, blocks of the large size.
    [1, 2, 37, 2048, 2049, 20_000],
)
def test_top_tokens_are_the_oracles(device: str, m: int) -> None:
    scores = distinct(3, m)
    for k in some_of(m):
        tokens = selection.top_tokens(scores.to(device), k)
        assert tokens.device.type == device
        assert_sets(tokens.cpu(), 3, k, m)
        assert torch.equal(tokens.cpu().long(), scores.topk(k).indices.sort().values)


@pytest.mark.parametrize("m", [37, 5000])
def test_heavy_ties(device: str, m: int) -> None:
    scores = torch.randint(-2, 3, (2, m)).float()
    for k in some_of(m):
        assert_best(selection.top_tokens(scores.to(device), k).cpu(), scores, k)


@pytest.mark.parametrize(
    ("m", "number"),
    [(9000, 0.25), *((300, number) for number in (0.0, -0.0, -3.5, TINY, INF, -INF, NAN))],
)
def test_equal_scores_give_k_distinct_tokens(device: str, m: int, number: float) -> None:
    scores = torch.full((2, m), number, device=device)
    for k in (1, m // 3, m):
        assert_sets(selection.top_tokens(scores, k).cpu(), 2, k, m)


def test_order_of_special_numbers(device: str) -> None:
    ascending = [-INF, -1e30, -1.0, -TINY, 0.0, TINY, 2 * TINY, 1e-38, 1.0, 1e30, INF, NAN]
    order = torch.randperm(len(ascending))
    scores = torch.tensor(ascending)[order][None].to(device)
    for k in range(1, len(ascending) + 1):
        tokens = selection.top_tokens(scores, k).cpu().long()
        assert sorted(order[tokens[0]].tolist()) == list(range(len(ascending) - k, len(ascending)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_row(device: str, data: st.DataObject) -> None:
    """Few different numbers, so that most boundaries are ties."""
    numbers = st.sampled_from([0.0, -0.0, 1.0, 1.5, -1.0, TINY, INF])
    scores = torch.tensor([data.draw(st.lists(numbers, min_size=1, max_size=30))])
    k = data.draw(st.integers(1, scores.shape[1]))
    assert_best(selection.top_tokens(scores.to(device), k).cpu(), scores, k)
