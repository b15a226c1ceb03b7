"""The model is run over what is computed of a blended prefix: rows are dropped between layers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
)
from sglang.srt.model_executor.forward_context import has_forward_context
from sglang.srt.models.opt import OPTForCausalLM, OPTLearnedPositionalEmbedding
from torch import Tensor

from impress_sglang.blend.job import TokenKind, ratio_of_layer
from impress_sglang.blend.plugin.steps import BlendSteps, attention_at, check_blended
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.rectangular import rectangular_attention
from impress_sglang.plugin.rotation import rotation_of
from impress_sglang.plugin.unsupported import ROPE_TYPES
from tests.integration.tiny_model import SCALING, KVs, Model, Pool, tokens_of
from tests.unit.kv_factory import make_shape

LAYERS = 6
SHAPE = make_shape(layers=LAYERS, probe=())


class Job:
    """What was read of a blended prefix is in its slots."""

    def __init__(self, tokens: Tensor, row: Tensor, kinds: np.ndarray, ratio: float, start: int):
        self.tokens, self.row, self.kinds = tokens.numpy().astype(np.int32), row, kinds
        self.recompute_ratio, self.start, self.position = ratio, start, start
        self.token_layers, self.spent = 0, 0.0


def blend(
    tokens: Tensor,
    stored: KVs,
    kinds: Sequence[int],
    ratio: float,
    *,
    size: int = 1000,
    resident: int = 0,
) -> tuple[KVs, Model, Any]:
    """The KVs of all tokens in the pool, after those from `resident` on were blended."""
    model, pool = Model(SHAPE), Pool(SHAPE, 400)
    row = torch.randperm(399)[: len(tokens)] + 1
    kind_array = np.asarray(kinds, np.uint8)
    there = resident + np.flatnonzero(kind_array != TokenKind.COMPUTED)

    def pools(layer: int) -> tuple[Tensor, Tensor]:
        return pool.keys[layer], pool.values[layer]

    for layer, computed in enumerate(model.kvs(tokens)):
        for kvs, others, mine in zip(pools(layer), computed, stored[layer], strict=True):
            kvs[row[:resident]], kvs[row[there]] = others[:resident], mine[there]
    job: Any = Job(tokens, row, kind_array, ratio, resident)
    steps = BlendSteps(model, pool, pools, LAYERS, None, size, lambda _: None)
    steps.step_tokens = size
    while not steps.step(job):
        assert not has_forward_context(), "a pass of SGLang's would take it for its own"
    blended = [(keys[row], values[row]) for keys, values in map(pools, range(LAYERS))]
    return blended, model, job


def stored_behind_others(tokens: Tensor, start: int) -> KVs:
    """KVs of tokens from `start` on behind other ones than here, at the places that they have."""
    other = torch.cat([tokens_of(77, start), tokens[start:]])
    return Model(SHAPE).kvs(other)


def error(found: KVs, expected: KVs) -> float:
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    return max(float((kv - other).abs().max()) for kv, other in pairs)


@pytest.mark.parametrize("size", [7, 40, 1000])
@pytest.mark.parametrize("resident", [0, 13])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_all_computed_is_the_model_itself(size: int, resident: int, ratio: float) -> None:
    """In both ways to say so, in blocks of any size, behind tokens that are resident."""
    tokens = tokens_of(1, 90)
    expected = Model(SHAPE).kvs(tokens)
    kinds = np.full(90 - resident, TokenKind.REUSED if ratio else TokenKind.COMPUTED)
    found, model, job = blend(
        tokens, stored_behind_others(tokens, 30), kinds, ratio, size=size, resident=resident
    )
    assert error(found, expected) < 1e-5
    assert job.token_layers == LAYERS * len(kinds) and job.spent > 0
    blocks = [count for layer, count in model.computed if layer == 0]
    assert sum(blocks) == len(kinds) and max(blocks) == min(size, len(kinds))


def test_new_text_between_exact_text_is_exact() -> None:
    """Where all that is restored is right, so is what is computed between it."""
    tokens = tokens_of(1, 90)
    expected = Model(SHAPE).kvs(tokens)
    kinds = np.full(90, TokenKind.KEPT)
    kinds[20:25] = kinds[60:90] = kinds[0:2] = TokenKind.COMPUTED
    found, model, _ = blend(tokens, expected, kinds, 0.0, size=20)
    assert error(found, expected) < 1e-5
    assert [count for layer, count in model.computed if not layer] == [20, 17]


def test_reuse_as_is_runs_no_model() -> None:
    tokens = tokens_of(1, 90)
    stored = stored_behind_others(tokens, 30)
    found, model, job = blend(tokens, stored, [TokenKind.REUSED] * 90, 0.0, size=40)
    assert error(found, stored) == 0.0 and not model.computed and not job.spent


def test_blocks_take_no_longer_than_a_chunk() -> None:
    nothing: Any = None
    steps = [BlendSteps(*5 * [nothing], limit, nothing) for limit in (2048, 16)]
    assert [step.step_tokens for step in steps] == [512, 16]
    for tokens, seconds, limit, expected in (
        (512, 0.1, None, 1024),
        (1024, 0.1, 0.5, 2048),
        (2048, 0.1, 0.5, 2048),
        (2048, 1.0, 0.5, 1024),
        (1024, 0.4, 0.5, 1024),  # it fits, but not twice as much
        (10, 0.1, 0.5, 1024),  # so few tokens say nothing
        *((tokens, 1.0, 0.1, max(tokens // 10, 32)) for tokens in (1024, 102, 32)),
    ):
        steps[0].observe_step(tokens, seconds, limit)
        assert steps[0].step_tokens == expected


@pytest.mark.parametrize("size", [1, 40, 256, 1000])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2), (4, 1)])
def test_tokens_here_and_there_see_all_before_them(size: int, heads: int, key_heads: int) -> None:
    """Each sees what it would see among all queries."""
    pick = torch.Generator().manual_seed(size)
    queries = torch.randn(1000, heads, 16, generator=pick)
    keys = torch.randn(1000, key_heads, 16, generator=pick)
    values = torch.randn(1000, key_heads, 24, generator=pick)
    places = torch.randperm(1000, generator=pick)[:size].sort().values
    expected = rectangular_attention(queries, keys, values, scaling=0.4, causal=True)[places]

    found = attention_at(places, queries[places], keys, values, 0.4)

    assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)


def by_hand(tokens: Tensor, stored: KVs, kinds: np.ndarray, ratio: float) -> KVs:
    """CacheBlend's filtering over one block, without dropping a row."""
    model, found = Model(SHAPE), []
    hidden, positions = model.embedding[tokens], torch.arange(len(tokens))
    reused = torch.from_numpy(kinds == TokenKind.REUSED)
    computed = torch.from_numpy(kinds != TokenKind.KEPT)
    for layer, weights in enumerate(model.projections):
        q, k, v = model.projected(hidden, positions, layer)
        mask = computed[:, None, None]
        keys = torch.where(mask, k, stored[layer][0])
        values = torch.where(mask, v, stored[layer][1])
        found.append((keys, values))
        if layer >= 1:
            squares = (keys - stored[layer][0]).square() + (values - stored[layer][1]).square()
            deviation = squares.sum((1, 2)).masked_fill(~(reused & computed), -1.0)
            count = round(ratio_of_layer(ratio, layer + 1, LAYERS) * int(reused.sum()))
            computed = computed & ~reused
            computed[deviation.topk(count).indices] = True
        output = rectangular_attention(q, keys, values, scaling=SCALING, causal=True)
        hidden = hidden + output.flatten(1) @ weights[3]
    return found


@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.8])
def test_rows_are_dropped_with_all_that_belongs_to_them(ratio: float) -> None:
    tokens = tokens_of(1, 300)
    kinds = np.full(300, TokenKind.REUSED)
    kinds[:30], kinds[100:120], kinds[290:] = TokenKind.KEPT, TokenKind.COMPUTED, TokenKind.COMPUTED
    expected, stored = Model(SHAPE).kvs(tokens), stored_behind_others(tokens, 30)
    stored = [
        (torch.cat([a[:30], k[30:]]), torch.cat([b[:30], v[30:]]))
        for (a, b), (k, v) in zip(expected, stored, strict=True)
    ]
    found, model, _ = blend(tokens, stored, kinds, ratio)
    assert error(found, by_hand(tokens, stored, kinds, ratio)) < 1e-4
    counts = [count for _, count in model.computed]
    assert counts[:2] == [270, 270] and counts[2:] == sorted(counts[2:], reverse=True)
    assert np.mean(counts[2:]) == pytest.approx(30 + ratio * 240, rel=0.02)


class LlamaForCausalLM(torch.nn.ModuleList):
    """Of a name that is known, with its positions."""


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang is told by its command line."""
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)


class AnotherRotary(RotaryEmbedding):
    pass


def llama_with(kind: type[Any], *scaling: float) -> LlamaForCausalLM:
    return LlamaForCausalLM([kind(8, 8, 64, 10000, True, *scaling, torch.float32)])


CANNOT: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    # Nor if somebody judged how it is run: there is nothing to turn.
    "no rotary embedding": (
        lambda: LlamaForCausalLM([OPTLearnedPositionalEmbedding(64, 8)]),
        "no rotary embedding",
    ),
    "opt": (lambda: object.__new__(OPTForCausalLM), "OPTForCausalLM"),
    "another class": (lambda: torch.nn.ModuleList([]), "with ModuleList, only with Llama"),
    "another rotation": (lambda: llama_with(AnotherRotary), "AnotherRotary"),
    # Rows that are added to their tables have other factors than the first ones.
    **{
        rotary.__name__: (lambda rotary=rotary: llama_with(rotary, 2.0), rotary.__name__)
        for rotary in (DynamicNTKScalingRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding)
    },
}


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize(("model", "words"), CANNOT.values(), ids=CANNOT)
def test_which_models_cannot_be_blended(model: Callable[[], torch.nn.Module], words: str) -> None:
    assert "dynamic" in ROPE_TYPES
    with pytest.raises(UnsupportedError, match=f"{words}.*drop --impress-blend"):
        check_blended(model())


@pytest.mark.usefixtures("_on_a_cpu")
def test_keys_move_as_sglang_rotates() -> None:
    """Beyond the table that is there at first, too."""
    model = llama_with(RotaryEmbedding)
    rotary, rotation = model[0], rotation_of(model, "--impress-blend")
    keys = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))

    def at(positions: Tensor) -> Tensor:
        rotary._ensure_cos_sin_cache_length(int(positions.max()))
        flat = keys.flatten(1).clone()
        return rotary.forward_native(positions, flat.clone(), flat)[1].view_as(keys)

    old, new = torch.tensor([0, 5, 63, 70, 9]), torch.tensor([8, 4, 500, 1, 9])
    moved = rotation.move(at(old), rotation.factors(old, new))
    assert torch.allclose(moved, at(new), atol=1e-5)
    before, rows = weakref.ref(rotary.cos_sin_cache), len(rotary.cos_sin_cache)
    rotation.prepare(rows + 1)
    assert before() is not None, "graphs read what is freed"
    assert len(rotary.cos_sin_cache) >= 2 * rows, "all that are kept take more than the last one"
