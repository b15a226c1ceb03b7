"""`bench precision` on a tiny random model: what must hold for any model."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.quality.lab import AttentionLab
from bench.quality.precision import (
    CodedPrefix,
    Rule,
    Study,
    answer,
    measure_answers,
    measure_continuation,
)
from bench.quality.tasks import Item

PREFIX_TOKENS = 130
QUESTION, OPTIONS = [5, 9, 23, 41, 3], ([7, 8], [11])
CONFIG = LlamaConfig(
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=97,
    max_position_embeddings=256,
    initializer_range=0.5,
)


@pytest.fixture(scope="module")
def lab() -> AttentionLab:
    torch.manual_seed(0)
    return AttentionLab(LlamaForCausalLM(CONFIG))


@pytest.fixture
def prefix(lab: AttentionLab) -> CodedPrefix:
    tokens = [(7 * i + 3) % 97 for i in range(PREFIX_TOKENS)]
    return Study(lab).coded(tokens)


def item(question: list[int]) -> Item:
    return Item(0, question, OPTIONS, (1, 1), 0)


def change(lab: AttentionLab, prefix: CodedPrefix, rule: str) -> tuple[float, float]:
    """The share of bytes, and the largest change of a log-probability."""
    options = [list(own) for own in OPTIONS]
    study = Study(lab)
    found, share = study.run(Rule.parse(rule), prefix, QUESTION, options)
    exact, _ = study.run(None, CodedPrefix.of(prefix.exact), QUESTION, options)
    pairs = zip(found, exact, strict=True)
    return share, max(float((own - other).abs().max()) for own, other in pairs)


def test_more_bits_change_less_and_cost_more(lab: AttentionLab, prefix: CodedPrefix) -> None:
    results = [change(lab, prefix, f"uniform {bits}") for bits in (4, 5, 6, 8)]
    shares, changes = zip(*results, strict=True)
    assert list(shares) == sorted(shares) and list(changes) == sorted(changes, reverse=True)
    # 4 bits of 16 and what 130 tokens take of three groups; then 2 bits for each plane.
    assert shares[0] > 4 / 16 and shares[3] - shares[2] == pytest.approx(2 / 16, abs=1e-6)


def test_all_planes_are_the_same_whoever_gives_them(lab: AttentionLab, prefix: CodedPrefix) -> None:
    everything = {
        rule: change(lab, prefix, f"{rule} 8")
        for rule in ("uniform", "query", "random", "history", "shared")
    }
    assert len(set(everything.values())) == 1


def test_all_tokens_are_exact(lab: AttentionLab, prefix: CodedPrefix) -> None:
    assert change(lab, prefix, "drop 1")[1] < 1e-4


def test_rules_spend_what_they_say(lab: AttentionLab, prefix: CodedPrefix) -> None:
    base = change(lab, prefix, "uniform 4")[0]
    for kind in ("uniform", "query", "random"):
        # A unit is all tokens of a head here, so half of them get one plane of 2 bits.
        assert change(lab, prefix, f"{kind} 5")[0] == pytest.approx(base + 1 / 16, rel=0.1)


def test_a_resident_prefix_only_rises(lab: AttentionLab, prefix: CodedPrefix) -> None:
    rule, before = Rule.parse("shared 5"), None
    study = Study(lab)
    for question in (QUESTION, [60, 61, 62], [90, 2]):
        study.run(rule, prefix, question, [])
        now = torch.stack([prefix.raised[str(rule), layer] for layer in range(2)])
        assert before is None or ((now >= before).all() and now.sum() >= before.sum())
        before = now


def test_history_knows_the_questions_before(lab: AttentionLab, prefix: CodedPrefix) -> None:
    list(measure_answers(Study(lab), prefix, [item(QUESTION)], []))
    assert prefix.requests == len(OPTIONS)
    weights = prefix.history.clone()
    list(measure_answers(Study(lab), prefix, [item([60, 61])], []))
    assert prefix.requests == 2 * len(OPTIONS) and not torch.equal(weights, prefix.history)


def test_answers_are_compared_with_those_of_exact_kvs(
    lab: AttentionLab, prefix: CodedPrefix
) -> None:
    rules = [Rule.parse("uniform 8"), Rule.parse("drop 0.1")]
    rows = list(measure_answers(Study(lab), prefix, [item(QUESTION)], rules))
    assert [row[0] for row in rows] == rules
    (_, _, agrees, small), (_, share, _, large) = rows
    assert agrees == 1.0 and small < large and share > 0.1
    found, _ = Study(lab).run(None, prefix, QUESTION, [list(own) for own in OPTIONS])
    assert float(answer(item(QUESTION), found).sum()) == pytest.approx(0, abs=1e-4)


def test_continuations_are_compared_token_by_token(lab: AttentionLab, prefix: CodedPrefix) -> None:
    rules = [Rule.parse("uniform 8"), Rule.parse("uniform 4")]
    fine, coarse = measure_continuation(Study(lab), prefix, list(range(20)), rules)
    assert 0 <= fine[3] < coarse[3] and fine[2] >= coarse[2]


@pytest.mark.parametrize("text", ["", "query", "best 5", "5 query"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a rule"):
        Rule.parse(text)


def test_a_rule_is_written_as_it_was_read() -> None:
    for text in ("query 4.5", "drop 0.25"):
        assert str(Rule.parse(text)) == text
