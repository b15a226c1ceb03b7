"""From scores to tokens: k, the threshold, similarity, the vote, the best of each head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.paper.scores import (
    agreed_tokens,
    own_tokens,
    retained_tokens,
    similarity_threshold,
    top_tokens,
)


@pytest.mark.parametrize(
    ("num_tokens", "retention", "k"),
    [
        (5, 0.25, 2),
        (10, 1.0, 10),
        (10, 1e-9, 1),
        (30, 0.1, 3),  # 0.1 * 30 is a little more than 3 in binary
        (3, 1 / 3, 1),
        (10**6, 0.3, 300_000),
    ],
)
def test_retained_tokens(num_tokens: int, retention: float, k: int) -> None:
    assert retained_tokens(num_tokens, retention) == k


@pytest.mark.parametrize(
    ("k", "num_tokens", "alpha", "threshold"),
    [
        (100, 100, 0.6, 1.0),
        (50, 100, 1.0, 1 / 3),
        (25, 100, 1.0, 1 / 7),
        (25, 100, 0.5, 7**-0.5),
        (25, 100, 0.6, 0.31113),
    ],
)
def test_similarity_threshold(k: int, num_tokens: int, alpha: float, threshold: float) -> None:
    assert similarity_threshold(k, num_tokens, alpha) == pytest.approx(threshold, abs=1e-5)


# Multiples of 1/8 below 2**20: sums are exact, and ties do occur.
SCORES = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def score_tables(draw: st.DrawFn, multiple_of: int = 1) -> tuple[Tensor, int]:
    """Scores [H, m] and a k."""
    num_tokens = draw(st.integers(1, 30))
    num_heads = multiple_of * draw(st.integers(1, 5))
    row = st.lists(SCORES, min_size=num_tokens, max_size=num_tokens)
    table = draw(st.lists(row, min_size=num_heads, max_size=num_heads))
    return torch.tensor(table), draw(st.integers(1, num_tokens))


@given(score_tables())
def test_top_tokens_are_the_highest_of_each_row(case: tuple[Tensor, int]) -> None:
    scores, k = case

    found = top_tokens(scores, k)

    for row, picked in zip(scores.tolist(), found.tolist(), strict=True):
        assert len(set(picked)) == k
        assert sorted((row[i] for i in picked), reverse=True) == sorted(row, reverse=True)[:k]


@given(score_tables())
def test_vote_prefers_votes_then_summed_score(case: tuple[Tensor, int]) -> None:
    """A token outside has no more votes, or as many and no higher sum, than any inside."""
    scores, k = case
    agreed = agreed_tokens(scores, k, threshold=-1.0)

    assert agreed is not None
    found, sets = agreed.tolist(), top_tokens(scores, k).tolist()
    assert len(found) == k
    assert found == sorted(set(found))
    votes = [sum(token in row for row in sets) for token in range(scores.shape[1])]
    sums = scores.sum(0).tolist()
    rank = [(votes[token], sums[token]) for token in range(scores.shape[1])]
    outside = set(range(scores.shape[1])) - set(found)
    assert all(rank[out] <= rank[kept] for out in outside for kept in found)


@given(score_tables(multiple_of=3))
def test_per_head_tokens_are_the_best_by_the_sum_of_their_query_heads(
    case: tuple[Tensor, int],
) -> None:
    scores, k = case

    found = own_tokens(scores, 3, k)

    assert found.shape == (len(scores) // 3, k)
    for head, picked in enumerate(found.tolist()):
        sums = scores[3 * head : 3 * head + 3].double().sum(0).numpy()
        assert picked == sorted(set(picked))
        assert np.array_equal(np.sort(sums[picked]), np.sort(sums)[-k:])


def heads_that_like(*sets: list[int]) -> Tensor:
    scores = torch.full((len(sets), 20), 0.01)
    for row, liked in zip(scores, sets, strict=True):
        row[liked] = torch.arange(len(liked), 0, -1, dtype=torch.float32)
    return scores


@pytest.mark.parametrize(
    ("alpha", "liked", "expected"),
    [
        # Pairs: equal, 4 of 6, 4 of 6; the threshold is (1/7)**0.6 = 0.311. They have a common set.
        (0.6, [[3, 7, 11, 2, 5], [7, 3, 2, 5, 11], [3, 7, 11, 5, 19]], [2, 3, 5, 7, 11]),
        # They disagree.
        (0.6, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], None),
        # A single one speaks for all.
        (0.01, [[3, 7, 11, 2, 5]], [2, 3, 5, 7, 11]),
        # Jaccard 3/7, between (1/7)**1 and (1/7)**0.1: a smaller alpha is stricter.
        (1.0, [[0, 1, 2, 3, 4], [0, 1, 2, 8, 9]], [0, 1, 2, 3, 8]),
        (0.1, [[0, 1, 2, 3, 4], [0, 1, 2, 8, 9]], None),
    ],
)
def test_heads_have_one_set_if_they_agree(
    alpha: float, liked: list[list[int]], expected: list[int] | None
) -> None:
    found = agreed_tokens(heads_that_like(*liked), 5, similarity_threshold(5, 20, alpha))

    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize("k", [1, 2, 25, 99])
def test_a_first_token_that_towers_is_always_kept(k: int) -> None:
    """Attention rests on it: without it answers collapse."""
    scores = torch.rand(8, 100, generator=torch.Generator().manual_seed(k))
    scores[:, 0] = 50.0

    agreed = agreed_tokens(scores, k, 0.0)
    assert agreed is not None and agreed[0] == 0
    assert (own_tokens(scores, 4, k)[:, 0] == 0).all()
