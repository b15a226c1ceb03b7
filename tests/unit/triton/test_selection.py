from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.importance import selection as oracle
from impress_sglang.triton import selection

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


def summed_groups(scores: Tensor, group_size: int) -> Tensor:
    return scores.view(-1, group_size, scores.shape[1]).sum(1)


def assert_sets(tokens: Tensor, rows: int, k: int, m: int) -> None:
    """Each row is k distinct tokens, ascending."""
    assert tokens.dtype == torch.int32 and tokens.shape == (rows, k)
    assert (tokens.diff(dim=1) > 0).all()
    assert tokens.min() >= 0 and tokens.max() < m


def assert_best(tokens: Tensor, summed: Tensor, k: int, rtol: float = 0) -> None:
    """The tokens' scores are the k best, whichever of equal ones were taken."""
    assert_sets(tokens, len(summed), k, summed.shape[1])
    found = summed.gather(1, tokens.long()).sort(descending=True).values
    torch.testing.assert_close(found, summed.topk(k).values, rtol=rtol, atol=0)


def distinct_sums(rows: int, group_size: int, m: int) -> Tensor:
    """Integers whose sums over groups differ, in random order, and are exact in float32."""
    scores = torch.randint(0, 30, (rows * group_size, m)).float() * m
    for row in range(rows):
        scores[row * group_size] += torch.randperm(m)
    return scores


@pytest.mark.parametrize(
    ("m", "group_size"),
    # One token, parts of a block, a block, a token more, blocks of the large size.
    [(1, 1), (2, 4), (37, 1), (37, 3), (37, 4), (2048, 1), (2049, 3), (20_000, 1), (20_000, 4)],
)
def test_top_tokens_are_the_oracles(device: str, m: int, group_size: int) -> None:
    scores = distinct_sums(2, group_size, m)
    for k in some_of(m):
        tokens = selection.top_tokens_per_head(scores.to(device), group_size, k)
        assert tokens.device.type == device
        assert_sets(tokens.cpu(), 2, k, m)
        assert torch.equal(tokens.cpu().long(), oracle.per_head_tokens(scores, group_size, k))


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("m", [37, 5000])
def test_heavy_ties(device: str, m: int, group_size: int) -> None:
    scores = torch.randint(-2, 3, (2 * group_size, m)).float()
    for k in some_of(m):
        tokens = selection.top_tokens_per_head(scores.to(device), group_size, k).cpu()
        assert_best(tokens, summed_groups(scores, group_size), k)


@pytest.mark.parametrize(
    ("m", "number"),
    [(9000, 0.25), *((300, number) for number in (0.0, -0.0, -3.5, TINY, INF, -INF, NAN))],
)
def test_equal_scores_give_k_distinct_tokens(device: str, m: int, number: float) -> None:
    scores = torch.full((2, m), number, device=device)
    for k in (1, m // 3, m):
        assert_sets(selection.top_tokens_per_head(scores, 1, k).cpu(), 2, k, m)


def test_order_of_special_numbers(device: str) -> None:
    ascending = [-INF, -1e30, -1.0, -TINY, 0.0, TINY, 2 * TINY, 1e-38, 1.0, 1e30, INF, NAN]
    order = torch.randperm(len(ascending))
    scores = torch.tensor(ascending)[order][None].to(device)
    for k in range(1, len(ascending) + 1):
        tokens = selection.top_tokens_per_head(scores, 1, k).cpu().long()
        assert sorted(order[tokens[0]].tolist()) == list(range(len(ascending) - k, len(ascending)))


def test_signs_of_zero_and_of_nan_do_not_matter(device: str) -> None:
    scores = torch.tensor([[-0.0, -NAN, 0.0, -1.0, NAN, -0.0]], device=device)
    assert selection.top_tokens_per_head(scores, 1, 2).tolist() == [[1, 4]]
    zeros = selection.top_tokens_per_head(scores, 1, 5).tolist()
    assert zeros == [[0, 1, 2, 4, 5]]


def test_importance_of_many_tokens(device: str) -> None:
    """Sums are rounded in another order than the oracle's."""
    m, k, group_size = 100_000, 25_000, 4
    scores = (4 * torch.randn(2 * group_size, m)).softmax(1)
    tokens = selection.top_tokens_per_head(scores.to(device), group_size, k).cpu()
    assert_best(tokens, summed_groups(scores, group_size), k, rtol=1e-6)


def test_rows_may_be_apart(device: str) -> None:
    whole = torch.full((4, 700), INF)
    whole[:, :601] = distinct_sums(2, 2, 601)
    tokens = selection.top_tokens_per_head(whole.to(device)[:, :601], 2, 50)
    assert torch.equal(tokens.cpu().long(), oracle.per_head_tokens(whole[:, :601], 2, 50))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_row(device: str, data: st.DataObject) -> None:
    """Few different numbers, so that most boundaries are ties."""
    numbers = st.sampled_from([0.0, -0.0, 1.0, 1.5, -1.0, TINY, INF])
    scores = torch.tensor([data.draw(st.lists(numbers, min_size=1, max_size=30))])
    k = data.draw(st.integers(1, scores.shape[1]))
    assert_best(selection.top_tokens_per_head(scores.to(device), 1, k).cpu(), scores, k)


def importance(heads: int, m: int, alike: float) -> Tensor:
    """Attention-like scores of heads that are more or less alike."""
    common = torch.randn(m)
    own = torch.randn(heads, m)
    return (3 * (alike * common + (1 - alike) * own)).softmax(1)


def run_choice(scores: Tensor, k: int, threshold: float, device: str) -> selection.Choice:
    choice = selection.paper_choice(scores.to(device), k, threshold)
    assert choice.buffer.dtype == torch.int32
    assert choice.buffer.shape == (selection.HEADER + k,)
    return choice.to_host()


@pytest.mark.parametrize(
    ("heads", "m"),
    [(1, 1), (1, 37), (2, 2), (2, 9000), (3, 1), (3, 37), (3, 2049), (5, 300), (12, 37)],
)
def test_choice_is_the_oracles(device: str, heads: int, m: int) -> None:
    for k, alike in itertools.product(some_of(m), (0.1, 0.9)):
        scores = importance(heads, m, alike)
        sets = oracle.top_tokens(scores, k)
        similarity = oracle.mean_jaccard(sets, m)
        threshold = oracle.similarity_threshold(k, m, 0.6)
        choice = run_choice(scores, k, threshold, device)
        assert choice.similarity == pytest.approx(similarity, abs=1e-6)
        assert choice.alike == (similarity > threshold or heads == 1)
        assert torch.equal(choice.tokens.long(), oracle.vote(scores, sets, k))


def test_decision_where_similarity_and_threshold_differ_by_rounding(device: str) -> None:
    """Two sets of four with three in common: 0.6, as float32 a little more."""
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 0.0, 0.0], [5.0, 4.0, 3.0, 0.0, 2.0, 0.0]])
    similarity = oracle.mean_jaccard(oracle.top_tokens(scores, 4), 6)
    assert similarity > 0.6
    for threshold in (0.6, similarity, similarity - 1e-12, similarity + 1e-12):
        choice = run_choice(scores, 4, threshold, device)
        assert choice.similarity == similarity
        assert choice.alike == (similarity > threshold)


@pytest.mark.parametrize("k", [16, 700])
def test_equal_votes_and_sums_give_some_of_the_chosen(device: str, k: int) -> None:
    """Two heads want different tokens equally: any k of the 2k may be taken."""
    scores = torch.zeros(2, 5 * k)
    wanted = torch.randperm(5 * k)[: 2 * k]
    scores[0, wanted[:k]] = 1.0
    scores[1, wanted[k:]] = 1.0
    tokens = run_choice(scores, k, 0.5, device).tokens
    assert_sets(tokens[None], 1, k, 5 * k)
    assert set(tokens.tolist()) <= set(wanted.tolist())


@pytest.mark.parametrize("mirrored", [False, True])
def test_sums_that_differ_less_than_float32_tells(device: str, mirrored: bool) -> None:
    """Token 0 sums to 1, token 1 to 1 + 2**-30: the same float32; each has one vote."""
    scores = torch.tensor([[1.0, 1 - 2.0**-24, 0.0], [0.0, 2.0**-24 + 2.0**-30, 0.0]])
    if mirrored:
        scores = scores.flip(1)
    assert oracle.vote(scores, oracle.top_tokens(scores, 1), 1).tolist() == [1]
    assert run_choice(scores, 1, 0.5, device).tokens.tolist() == [1]


def test_tokens_that_nobody_looks_at(device: str) -> None:
    """What is beyond m has no votes either, and is not taken instead."""
    scores = torch.zeros(3, 50)
    seen = torch.randperm(50)[:5]
    scores[:, seen] = 1.0
    for k in (20, 50):
        tokens = run_choice(scores, k, 0.5, device).tokens
        assert_sets(tokens[None], 1, k, 50)
        assert set(tokens.tolist()) >= set(seen.tolist())


@pytest.mark.parametrize("number", [NAN, -NAN, INF])
def test_choice_comes_to_an_end_whatever_the_scores(device: str, number: float) -> None:
    scores = importance(3, 3000, 0.5)
    scores[:, ::7] = number
    tokens = run_choice(scores, 1000, 0.5, device).tokens
    assert_sets(tokens[None], 1, 1000, 3000)


class CountedKernel:
    """A kernel that notes its launches."""

    def __init__(self, kernel: object, launches: list[str], name: str) -> None:
        self._kernel, self._launches, self._name = kernel, launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self._launches.append(self._name)
        return self._kernel[grid]  # type: ignore[index]


def test_number_of_launches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for name in ("top_kernel", "vote_kernel", "choice_kernel"):
        kernel = CountedKernel(getattr(selection, name), launches, name)
        monkeypatch.setattr(selection, name, kernel)
    scores = importance(3, 100, 0.5).to(device)
    selection.top_tokens_per_head(scores, 3, 10)
    assert launches == ["top_kernel"]
    launches.clear()
    selection.paper_choice(scores, 10, 0.5)
    assert launches == ["top_kernel", "vote_kernel", "choice_kernel"]


def test_to_host_copies(device: str) -> None:
    buffer = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    copied = selection.to_host(buffer)
    buffer.zero_()
    assert copied.device.type == "cpu"
    assert torch.equal(copied, torch.arange(12, dtype=torch.int32).view(3, 4))


@needs_cuda
def test_only_the_copy_is_waited_for(device: str, no_synchronisation: Callable[[], None]) -> None:
    scores = importance(4, 16_384, 0.5)
    on_device = scores.to(device)
    no_synchronisation()
    tokens = selection.to_host(selection.top_tokens_per_head(on_device, 4, 4096))
    choice = selection.paper_choice(on_device, 4096, 0.5).to_host()
    torch.cuda.set_sync_debug_mode("default")
    assert tokens.is_pinned() and choice.buffer.is_pinned()
    assert_sets(tokens, 1, 4096, 16_384)
    sets = oracle.top_tokens(scores, 4096)
    assert torch.equal(choice.tokens.long(), oracle.vote(scores, sets, 4096))
