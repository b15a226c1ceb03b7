"""`bench.identification` on a tiny random model: what must hold for any model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.attention_lab import AttentionLab, PrefixKV, compute_prefix
from bench.identification import Study, _budgets, _sketched, make_tables
from bench.identification_rules import (
    History,
    LayerView,
    Sketch,
    follow_surprise,
    keeping_last,
    log_importance,
    pooled,
)

RATIOS = (0.25, 1.0)
PREFIX_TOKENS = 64


@pytest.fixture(scope="module")
def lab() -> AttentionLab:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    return AttentionLab(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def prefix(lab: AttentionLab) -> PrefixKV:
    return compute_prefix(lab, [(7 * i + 3) % 97 for i in range(PREFIX_TOKENS)])


@pytest.fixture(scope="module")
def study(lab: AttentionLab, prefix: PrefixKV) -> Study:
    study = Study(lab, RATIOS, kv_bits=16)
    questions = [[(11 * i + j) % 97 for i in range(6)] for j in range(5)]
    study.run(prefix, questions[:2], questions[2:])
    return study


def measured(study: Study, ratio: float, rule: str) -> dict[str, float]:
    return study.results[ratio, rule].as_dict()


def test_the_whole_prefix_is_exact_for_every_rule(study: Study) -> None:
    for (ratio, rule), found in study.results.items():
        if ratio == 1.0:
            row = found.as_dict()
            assert row["error"] < 1e-5, rule
            assert row["mass"] == row["mass_5"] == row["recall"] == 1.0, rule


def test_h2o_keeps_most_mass_of_rules_with_as_many_tokens(study: Study) -> None:
    best = measured(study, 0.25, "h2o")
    assert best["recall"] == 1.0
    for (ratio, rule), found in study.results.items():
        if ratio == 0.25 and "by layer" not in rule:
            assert found.as_dict()["mass"] <= best["mass"] + 1e-6, rule


def test_a_fine_sketch_chooses_what_h2o_chooses(study: Study) -> None:
    assert measured(study, 0.25, "sketch 8 bits")["recall"] > 0.97
    coarse, fine = (measured(study, 0.25, f"sketch {bits} bits")["recall"] for bits in (2, 4))
    assert coarse < fine


def test_random_tokens_are_told_apart(study: Study) -> None:
    best, worst = measured(study, 0.25, "h2o"), measured(study, 0.25, "random-nosink")
    assert worst["mass"] < best["mass"] and worst["error"] > best["error"]
    assert worst["recall"] == pytest.approx(0.25, abs=0.12)


@pytest.mark.parametrize(
    ("rule", "share"),
    [
        ("h2o", 0.625),
        ("sketch 4 bits", 0.25 + 0.125),
        ("sketch 2 bits", 0.25 + 0.0625),
        ("prior", 0.25),
        ("recent", 0.25),
        ("prior + surprise", 0.25 + 0.75 * 0.25),
    ],
)
def test_bytes(study: Study, rule: str, share: float) -> None:
    """One of two KV heads is a probe head; sketches are of 16-bit elements."""
    assert measured(study, 0.25, rule)["bytes"] == pytest.approx(share, abs=1e-4)


def test_other_probe_heads_are_tried(study: Study) -> None:
    """One of two KV heads is probed by default; with both, all keys have been read."""
    both = measured(study, 0.25, "paper, probe KV heads 0+1")
    assert both["bytes"] == pytest.approx(0.625, abs=1e-4)
    other = measured(study, 0.25, "paper, probe KV heads 1")
    assert 0.25 + 0.75 * 0.25 - 1e-4 <= other["bytes"] <= 0.625 + 1e-4
    assert (0.25, "paper, probe KV heads 0") not in study.results


def test_retention_by_layer_keeps_the_total(study: Study) -> None:
    uniform, by_layer = (
        measured(study, 0.25, rule) for rule in ("sketch 4 bits", "sketch 4 bits, by layer")
    )
    assert by_layer["bytes"] == pytest.approx(uniform["bytes"], abs=0.02)


def test_budgets_go_where_attention_is_spread() -> None:
    sharp, flat = torch.ones(100), torch.linspace(0.01, 1.0, 100)
    shares = _budgets([sharp, flat], 0.25)
    assert sum(shares) == pytest.approx(0.5, abs=0.01)
    assert shares[0] == pytest.approx(0.02) and shares[1] > 0.45
    assert max(_budgets([sharp, flat], 0.9)) <= 1.0


def test_widths_that_cannot_be_packed_round_alike() -> None:
    keys = torch.randn(40, 2, 8)
    errors = [float((_sketched(keys, bits) - keys).abs().max()) for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)


def view_of(weights: Tensor, history: History | None = None) -> LayerView:
    """Two query heads of one KV head, which is the probe head; the sketch is exact."""
    past = history or History()
    scores = weights.sum(1)
    return LayerView(
        0, weights.shape[2], 2, (0,), weights, {4: scores}, torch.ones(1, weights.shape[2]), past
    )


def test_known_answers_of_the_studied_scores() -> None:
    weights = torch.tensor([[[0.1, 0.5, 0.1, 0.3]], [[0.2, 0.2, 0.5, 0.1]]])
    view = view_of(weights)
    assert view.own_scores().tolist() == [pytest.approx([0.3, 0.7, 0.6, 0.4])]
    assert Sketch(4, 16).select(view, 2).sort().values.tolist() == [[1, 2]]
    kept = Sketch(4, 16, keeping_last(1)).select(view, 2)
    assert kept.sort().values.tolist() == [[1, 3]]
    smooth = pooled(3)(view)
    assert smooth.tolist() == [pytest.approx([0.5, 1.6 / 3, 1.7 / 3, 0.5])]


def test_surprise_is_what_the_history_did_not_expect() -> None:
    usual = torch.tensor([[[0.7, 0.2, 0.1]], [[0.7, 0.2, 0.1]]])
    history = History()
    history.add(log_importance(view_of(usual).own_scores(), 1)[None])
    assert follow_surprise(None, view_of(usual, history)).abs().max() < 1e-6
    other = torch.tensor([[[0.1, 0.2, 0.7]], [[0.1, 0.2, 0.7]]])
    first = follow_surprise(None, view_of(other, history))
    assert first.tolist() == pytest.approx([-math.log(7), 0.0, math.log(7)], abs=1e-5)
    smoothed = follow_surprise(torch.zeros(3), view_of(other, history))
    assert smoothed.tolist() == pytest.approx((0.3 * first).tolist(), abs=1e-5)


def test_tables_have_the_least_error_first() -> None:
    row = {"bytes": 0.3, "mass": 0.9, "mass_5": 0.8, "recall": 0.7}
    rows = [
        {"retention": 0.25, "rule": "worse", "error": 0.2, **row},
        {"retention": 0.25, "rule": "better", "error": 0.1, **row},
        {"retention": 0.5, "rule": "worse", "error": 0.1, **row},
    ]
    tables = list(make_tables(rows))
    assert [table.row_count for table in tables] == [2, 1]
    assert list(tables[0].columns[0].cells) == ["better", "worse"]
