"""One contract for every identification rule, then known answers of each."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.importance.selectors import H2OSelector, PaperSelector, TokenSelector
from tests.unit.test_selection import score_tables

RULES: dict[str, TokenSelector] = {
    "paper": PaperSelector(alpha=0.6),
    "paper that falls back": PaperSelector(alpha=0.01),
    "paper that votes": PaperSelector(alpha=0.9),
    "h2o": H2OSelector(),
}


@dataclasses.dataclass
class FakeEvidence:
    """Scores by hand; remembers what it was asked for. Without `probe` all heads are probed."""

    exact: Tensor
    group_size: int = 1
    probe: Tensor | None = None
    layer: int = 0
    asked: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.exact.shape[1]

    def probe_scores(self) -> Tensor:
        self.asked.append("probe")
        return self.exact if self.probe is None else self.probe

    def exact_scores(self) -> Tensor:
        self.asked.append("exact")
        return self.exact


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> TokenSelector:
    return RULES[request.param]


def check_sets(found: Tensor, evidence: FakeEvidence, k: int) -> None:
    assert found.dtype == torch.int64
    heads = evidence.exact.shape[0] // evidence.group_size
    assert found.shape in ((1, k), (heads, k))
    for tokens in found.tolist():
        assert tokens == sorted(set(tokens))
        assert tokens[0] >= 0 and tokens[-1] < evidence.num_tokens


@given(case=score_tables(multiple_of=2), layer=st.integers(0, 80), data=st.data())
@pytest.mark.parametrize("name", RULES)
def test_gives_k_distinct_ascending_tokens_in_range(
    name: str, case: tuple[Tensor, int], layer: int, data: st.DataObject
) -> None:
    """Also where scores tie or vanish."""
    scores, k = case
    probes = data.draw(st.integers(1, len(scores))) if name.startswith("paper") else len(scores)
    evidence = FakeEvidence(scores, 2, scores[:probes], layer)

    check_sets(RULES[name].select(evidence, k), evidence, k)


def test_is_pure(rule: TokenSelector) -> None:
    generator = torch.Generator().manual_seed(3)
    evidence = FakeEvidence(torch.rand(4, 50, generator=generator), 2)
    before = evidence.exact.clone()

    first = rule.select(evidence, 12)
    torch.manual_seed(99)
    random_state = torch.get_rng_state()
    second = rule.select(evidence, 12)

    assert torch.equal(first, second)
    assert torch.equal(evidence.exact, before)
    assert torch.equal(torch.get_rng_state(), random_state), "no one else's chance"


def test_asks_for_no_more_than_it_needs_and_says_what_comes_first() -> None:
    """Exact scores cost a read of all keys, and the probe column one of its own."""
    alike = torch.arange(50.0).repeat(4, 1)
    apart = torch.eye(4).repeat_interleave(13, 1)[:, :50] + 0.01
    asked = {}
    for name, scores in (("alike", alike), ("apart", apart)):
        for own, rule in RULES.items():
            evidence = FakeEvidence(scores, 1)
            rule.select(evidence, 12)
            asked[own, name] = evidence.asked
            # That is read before it asks.
            kinds = {"probe": ["probe"], "keys": ["exact"]}
            assert evidence.asked[:1] == kinds[rule.evidence]

    for name in ("alike", "apart"):
        assert asked["h2o", name] == ["exact"]
    assert asked["paper", "alike"] == ["probe"]
    assert asked["paper", "apart"] == ["probe", "exact"]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("k", [1, 2, 25, 99])
def test_a_first_token_that_towers_is_always_kept(name: str, k: int) -> None:
    """Attention rests on it: without it answers collapse."""
    scores = torch.rand(8, 100, generator=torch.Generator().manual_seed(k))
    scores[:, 0] = 50.0

    found = RULES[name].select(FakeEvidence(scores, 4, scores[:3] if "paper" in name else None), k)

    assert (found[:, 0] == 0).all()


def heads_that_like(*sets: list[int]) -> Tensor:
    scores = torch.full((len(sets), 20), 0.01)
    for row, liked in zip(scores, sets, strict=True):
        row[liked] = torch.arange(len(liked), 0, -1, dtype=torch.float32)
    return scores


# The probe heads' own KV heads like nothing in particular, so that a vote is not mistaken for them.
OTHERS = heads_that_like([12, 13, 14, 15, 16], [6, 7, 8, 9, 10])


@pytest.mark.parametrize(
    ("alpha", "liked", "expected"),
    [
        # Pairs: equal, 4 of 6, 4 of 6; the threshold is (1/7)**0.6 = 0.311. They have a common set.
        (0.6, [[3, 7, 11, 2, 5], [7, 3, 2, 5, 11], [3, 7, 11, 5, 19]], [[2, 3, 5, 7, 11]]),
        # They disagree, and each takes its own.
        (0.6, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[12, 13, 14, 15, 16], [6, 7, 8, 9, 10]]),
        # A single one speaks for all.
        (0.01, [[3, 7, 11, 2, 5]], [[2, 3, 5, 7, 11]]),
    ],
)
def test_paper_takes_one_set_if_probe_heads_agree(
    alpha: float, liked: list[list[int]], expected: list[list[int]]
) -> None:
    evidence = FakeEvidence(OTHERS, 1, heads_that_like(*liked))

    assert PaperSelector(alpha).select(evidence, 5).tolist() == expected
    assert evidence.asked == ["probe", "exact"][: len(expected)]


def test_paper_is_stricter_with_a_smaller_alpha() -> None:
    """Jaccard 3/7, between (1/7)**1 and (1/7)**0.1."""
    scores = heads_that_like([0, 1, 2, 3, 4], [0, 1, 2, 8, 9])
    loose, strict = FakeEvidence(OTHERS, 1, scores), FakeEvidence(OTHERS, 1, scores)

    assert len(PaperSelector(alpha=1.0).select(loose, 5)) == 1
    assert len(PaperSelector(alpha=0.1).select(strict, 5)) == 2
    assert (loose.asked, strict.asked) == (["probe"], ["probe", "exact"])


@pytest.mark.parametrize("name", ["h2o", "paper that falls back"])
def test_each_kv_head_takes_the_best_by_the_sum_of_its_query_heads(name: str) -> None:
    scores = heads_that_like([1, 2], [3, 4], [5, 6], [5, 7])

    assert RULES[name].select(FakeEvidence(scores, 2), 2).tolist() == [[1, 3], [5, 6]]
