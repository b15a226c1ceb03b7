"""What is sampled of queries, and that modules have hooks only meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from impress_sglang.codes.groups.energy import MEASURED_QUERIES
from impress_sglang.plugin.prefix_saves import QuerySampler

HEADS, DIM, SCALING = 2, 8, 0.5


class Model(torch.nn.Module):
    """Two layers of attention which compute nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(RadixAttention, "forward", lambda *_, **__: None)
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS, DIM, SCALING, 1, layer_id=layer) for layer in range(2)
        )

    def hooks(self) -> int:
        return sum(len(layer._forward_pre_hooks) for layer in self.layers)

    def extend(self, queries: torch.Tensor, lengths: dict[str, int]) -> None:
        batch: Any = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
            rids=list(lengths),
            extend_seq_lens_cpu=list(lengths.values()),
        )
        for number, layer in enumerate(self.layers):
            layer(queries + number, None, None, batch)


def test_the_last_queries_of_wanted_prompts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, numbers = Model(monkeypatch), {0: 3, 1: 2}
    sampler = QuerySampler(model, numbers.__getitem__)
    lengths = {"a": 3, "b": MEASURED_QUERIES + 5, "c": 2}
    queries = torch.randn(sum(lengths.values()), HEADS * DIM)
    assert model.hooks() == 0
    sampler.sample_next_prompt("b")
    sampler.sample_next_prompt("c")
    assert model.hooks() == 2

    model.extend(queries, lengths)

    found = sampler.take("b")
    expected = queries[8 : 8 + MEASURED_QUERIES].view(MEASURED_QUERIES, HEADS, DIM)
    assert len(found) == 2
    for layer, number in numbers.items():
        assert torch.equal(found[number], expected + layer)
    assert sampler.take("b") == sampler.take("a") == {}
    assert model.hooks() == 2
    assert len(sampler.take("c")[3]) == 2
    assert model.hooks() == 0
    model.extend(queries, lengths)
    assert sampler.take("c") == {}
