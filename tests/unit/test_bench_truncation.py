"""The texts of the truncation benchmark, and its controls."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch

from bench.quality.truncation import Controls, cut_of, documents
from tests.serving.tiny_models import make_model, random_tokens

ARGS = argparse.Namespace(window=160, scored=20)


def test_short_documents_are_joined() -> None:
    rows = [{"text": "a" * 5}, {"text": "b" * 7}, {"text": "c" * 12}, {"text": "d" * 9}]
    found = documents(rows, lambda text: [ord(own) for own in text], 10)
    assert ["".join(map(chr, own)) for own in found] == ["aaaaabbbbb", "c" * 10]


def test_half_of_the_room_is_cut() -> None:
    assert cut_of(1024) == range(16, 520)


def test_controls(tmp_path: Path) -> None:
    """KVs that stay where they were give the model's own loss; others do not."""
    folder = make_model("llama", tmp_path)
    controls = Controls(folder)
    text = random_tokens(180, seed=1)
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = model(torch.tensor([text])).logits[0, 159:-1]
        right = float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[160:])))
        cache = model(torch.tensor([text[:159]])).past_key_values
        pairs = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        places = torch.arange(159)
        assert controls._behind(pairs, places, places, text[159:]) == pytest.approx(right, abs=1e-4)
    scores = controls.score([text], ARGS)
    assert all(not math.isclose(own, right, abs_tol=1e-2) for (own,) in scores.values())
