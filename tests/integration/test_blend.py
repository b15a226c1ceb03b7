"""The model is run over what is computed of a blended prefix: rows are dropped between layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.opt import OPTForCausalLM, OPTLearnedPositionalEmbedding
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.errors import SegmentUnreadable, UnsupportedError
from impress_sglang.integration.judged_models import ARCHITECTURES, ROPE_TYPES
from impress_sglang.integration.paper.blend import PrefixBlend, blend_prefix, rotation_of
from impress_sglang.serving.paper.blend_plan import Kind, share_of_layer
from impress_sglang.storage.quality import Quality
from impress_sglang.transfer.slots import LayerSlots
from tests.integration.tiny_model import SCALING, KVs, Model, Pool, tokens_of
from tests.unit.kv_factory import make_shape
from tests.unit.request_factory import stored_request

LAYERS = 6
SHAPE = make_shape(layers=LAYERS, probe=())


@pytest.fixture(autouse=True)
def _in_a_pass() -> Iterator[None]:
    with forward_context(ForwardContext(attn_backend=SimpleNamespace())):
        yield


class Loading:
    """Puts given KVs where tokens are stored."""

    def __init__(self, stored: KVs, kinds: np.ndarray, share: float, resident: int, size: int):
        self.stored, self.resident, self.num_layers = stored, resident, LAYERS
        self.plan, self.kinds = SimpleNamespace(share=share), kinds
        self.reused = int((kinds == Kind.REUSED).sum())
        self.begun: list[int] = []
        stop = resident + len(kinds)
        self.blocks = [
            SimpleNamespace(start=start, stop=min(start + size, stop))
            for start in range(resident, stop, size)
        ]
        self.ended: list[int] = []
        self.restored: list[tuple[int, int]] = []
        self.blended = False
        self.bad: tuple[int, int] | None = None
        self.drops = True

    def compute_instead(self, number: int, error: SegmentUnreadable) -> bool:
        """All from this block on was in that segment."""
        self.kinds[self.blocks[number].start - self.resident :] = Kind.COMPUTED
        return self.drops

    def restore(self, number: int, layer: int, pools: LayerSlots, slots: Tensor, _: Any) -> None:
        self.restored.append((number, layer))
        if (number, layer) == self.bad:
            self.bad = None
            raise SegmentUnreadable("s", "a test")
        block = self.blocks[number]
        kinds = self.kinds[block.start - self.resident : block.stop - self.resident]
        there = np.flatnonzero(kinds != Kind.COMPUTED)
        for pool, rows in zip(
            (pools.keys.pool, pools.values.pool), self.stored[layer], strict=True
        ):
            pool[slots[there]] = rows[block.start + there]

    def begin_block(self, number: int) -> None:
        self.begun.append(number)

    def end_block(self, number: int) -> None:
        self.ended.append(number)


def blend(
    tokens: Tensor,
    stored: KVs,
    kinds: Sequence[int],
    share: float,
    *,
    size: int = 1000,
    resident: int = 0,
    deadline: float = math.inf,
    bad: tuple[int, int] | None = None,
    drops: bool = True,
) -> tuple[KVs, Model, Loading]:
    """The KVs of all tokens in the pool, after those from `resident` on were blended."""
    model, pool = Model(SHAPE), Pool(SHAPE, 400)
    generator = torch.Generator().manual_seed(9)
    row = torch.randperm(399, generator=generator)[: len(tokens)] + 1
    for layer, (keys, values) in enumerate(model.kvs(tokens)):
        pool.keys[layer][row[:resident]] = keys[:resident]
        pool.values[layer][row[:resident]] = values[:resident]
    quality = Quality(1, share=share)
    request = stored_request(tokens, row[:resident], row[resident:], quality=quality)
    loading: Any = Loading(stored, np.asarray(kinds, np.uint8), share, resident, size)
    loading.bad, loading.drops = bad, drops
    own = PrefixBlend(pool, request, loading)
    model.attend = own.attend
    loading.done = blend_prefix(model, request, own, loading, deadline)
    found = [(pool.keys[layer][row], pool.values[layer][row]) for layer in range(LAYERS)]
    return found, model, loading


def stored_behind_others(tokens: Tensor, start: int) -> KVs:
    """KVs of tokens from `start` on behind other ones than here, at the places that they have."""
    other = torch.cat([tokens_of(77, start), tokens[start:]])
    return Model(SHAPE).kvs(other)


def error(found: KVs, expected: KVs, start: int, layers: slice = slice(None)) -> float:
    return max(
        float((own - other)[start:].abs().max())
        for pair in zip(found[layers], expected[layers], strict=True)
        for own, other in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("size", [7, 40, 1000])
@pytest.mark.parametrize("resident", [0, 13])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_computed_is_the_model_itself(size: int, resident: int, share: float) -> None:
    """In both ways to say so, in blocks of any size, behind tokens that are resident."""
    tokens = tokens_of(1, 90)
    expected = Model(SHAPE).kvs(tokens)
    kinds = np.full(90 - resident, Kind.REUSED if share else Kind.COMPUTED)
    found, _, loading = blend(
        tokens, stored_behind_others(tokens, 30), kinds, share, size=size, resident=resident
    )
    assert loading.done and loading.blended
    assert loading.begun == loading.ended == list(range(len(loading.blocks)))
    assert error(found, expected, 0) < 1e-5


def test_new_text_between_exact_text_is_exact() -> None:
    """Where all that is restored is right, so is what is computed between it."""
    tokens = tokens_of(1, 90)
    expected = Model(SHAPE).kvs(tokens)
    kinds = np.full(90, Kind.KEPT)
    kinds[20:25] = kinds[60:90] = kinds[0:2] = Kind.COMPUTED
    found, model, _ = blend(tokens, expected, kinds, 0.0, size=50)
    assert error(found, expected, 0) < 1e-5
    assert [count for _, count in model.computed] == [7] * LAYERS + [30] * LAYERS


def test_reuse_as_is_runs_no_model() -> None:
    tokens = tokens_of(1, 90)
    stored = stored_behind_others(tokens, 30)
    found, model, loading = blend(tokens, stored, [Kind.REUSED] * 90, 0.0, size=40)
    assert error(found, stored, 0) == 0.0 and not model.computed
    assert loading.restored == [(block, layer) for block in range(3) for layer in range(LAYERS)]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_cannot_be_read_is_computed_and_the_rest_is_not(share: float) -> None:
    """A block begins again without the segment, whose first layers it had already."""
    tokens = tokens_of(1, 90)
    expected = Model(SHAPE).kvs(tokens)
    kinds = np.full(90, Kind.KEPT)
    kinds[50:60] = Kind.REUSED
    found, model, loading = blend(tokens, expected, kinds, share, size=30, bad=(1, 3))
    assert error(found, expected, 0) < 1e-5 and loading.blended
    assert loading.begun == [0, 1, 1, 2] and loading.ended == [0, 1, 2]
    assert model.computed[-2 * LAYERS :] == [[own, 30] for own in [*range(LAYERS)] * 2]
    assert loading.computed == pytest.approx(sum(own for _, own in model.computed) / LAYERS)


def test_where_nothing_is_left_all_is_computed() -> None:
    tokens = tokens_of(1, 90)
    with pytest.raises(SegmentUnreadable):
        blend(tokens, Model(SHAPE).kvs(tokens), [Kind.REUSED] * 90, 0.0, bad=(0, 3), drops=False)


def by_hand(tokens: Tensor, stored: KVs, kinds: np.ndarray, share: float) -> KVs:
    """CacheBlend's filtering over one block, without dropping a row."""
    model, found = Model(SHAPE), []
    hidden, positions = model.embedding[tokens], torch.arange(len(tokens))
    reused = torch.from_numpy(kinds == Kind.REUSED)
    computed = torch.from_numpy(kinds != Kind.KEPT)
    for layer, own in enumerate(model.projections):
        q, k, v = model.projected(hidden, positions, layer)
        mask = computed[:, None, None]
        keys = torch.where(mask, k, stored[layer][0])
        values = torch.where(mask, v, stored[layer][1])
        found.append((keys, values))
        if layer >= 1:
            squares = (keys - stored[layer][0]).square() + (values - stored[layer][1]).square()
            deviation = squares.sum((1, 2)).masked_fill(~(reused & computed), -1.0)
            count = round(share_of_layer(share, layer + 1, LAYERS) * int(reused.sum()))
            computed = computed & ~reused
            computed[deviation.topk(count).indices] = True
        output = rectangular_attention(q, keys, values, scaling=SCALING, causal=True)
        hidden = hidden + output.flatten(1) @ own[3]
    return found


@pytest.mark.parametrize("share", [0.05, 0.2, 0.8])
def test_rows_are_dropped_with_all_that_belongs_to_them(share: float) -> None:
    tokens = tokens_of(1, 300)
    kinds = np.full(300, Kind.REUSED)
    kinds[:30], kinds[100:120], kinds[290:] = Kind.KEPT, Kind.COMPUTED, Kind.COMPUTED
    expected, stored = Model(SHAPE).kvs(tokens), stored_behind_others(tokens, 30)
    stored = [
        (torch.cat([a[:30], k[30:]]), torch.cat([b[:30], v[30:]]))
        for (a, b), (k, v) in zip(expected, stored, strict=True)
    ]
    found, model, _ = blend(tokens, stored, kinds, share)
    assert error(found, by_hand(tokens, stored, kinds, share), 0) < 1e-4
    counts = [count for _, count in model.computed]
    assert counts[:2] == [270, 270] and counts[2:] == sorted(counts[2:], reverse=True)
    assert np.mean(counts[2:]) == pytest.approx(30 + share * 240, rel=0.02)


def test_what_takes_too_long_is_left() -> None:
    tokens = tokens_of(1, 90)
    _, model, loading = blend(
        tokens, Model(SHAPE).kvs(tokens), [Kind.COMPUTED] * 90, 0.0, deadline=-math.inf
    )
    assert not loading.done and not loading.blended and not model.computed


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("layers", [3, 12, 80])
def test_shares_of_layers(share: float, layers: int) -> None:
    shares = [share_of_layer(share, layer, layers) for layer in range(2, layers)]
    assert shares == sorted(shares, reverse=True) and 0.0 <= min(shares) <= max(shares) <= 1.0
    if layers > 3:
        assert np.mean(shares) == pytest.approx(share)


class LlamaForCausalLM(torch.nn.Module):
    """Of a name that is known."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary


@pytest.fixture
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang is told by its command line."""
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)


class AnotherRotary(RotaryEmbedding):
    pass


def rotary_of(kind: type[Any], *scaling: float) -> Any:
    return kind(8, 8, 64, 10000, True, *scaling, torch.float32)


def llama_with(kind: type[Any], *scaling: float) -> LlamaForCausalLM:
    return LlamaForCausalLM(rotary_of(kind, *scaling))


CANNOT: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "no positions": (lambda: LlamaForCausalLM(None), "no rotary embedding"),
    # Nor if somebody judged how it is run: there is nothing to turn.
    "learned positions": (
        lambda: LlamaForCausalLM(OPTLearnedPositionalEmbedding(64, 8)),
        "no rotary embedding",
    ),
    "opt": (lambda: object.__new__(OPTForCausalLM), "OPTForCausalLM"),
    "another class": (lambda: torch.nn.ModuleList([]), "with ModuleList, only with Llama"),
    "another rotation": (lambda: llama_with(AnotherRotary), "AnotherRotary"),
    # Rows that are added to their tables have other factors than the first ones.
    **{
        own.__name__: (lambda own=own: llama_with(own, 2.0), own.__name__)
        for own in (DynamicNTKScalingRotaryEmbedding, DynamicNTKAlphaRotaryEmbedding)
    },
}


@pytest.mark.usefixtures("_on_a_cpu")
@pytest.mark.parametrize(("model", "words"), CANNOT.values(), ids=CANNOT)
def test_which_models_cannot_be_blended(model: Callable[[], torch.nn.Module], words: str) -> None:
    """Though some are served."""
    assert OPTForCausalLM.__name__ in ARCHITECTURES and "dynamic" in ROPE_TYPES
    with pytest.raises(UnsupportedError, match=f"{words}.*drop --impress-blend"):
        rotation_of(model())


@pytest.mark.usefixtures("_on_a_cpu")
def test_keys_move_as_sglang_rotates() -> None:
    """Beyond the table that is there at first, too."""
    rotary = rotary_of(RotaryEmbedding)
    rotation = rotation_of(LlamaForCausalLM(rotary))
    keys = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1))

    def at(positions: Tensor) -> Tensor:
        rotary._ensure_cos_sin_cache_length(int(positions.max()))
        flat = keys.flatten(1).clone()
        return rotary.forward_native(positions, flat.clone(), flat)[1].view_as(keys)

    old, new = torch.tensor([0, 5, 63, 70, 9]), torch.tensor([8, 4, 500, 1, 9])
    moved = rotation.move(at(old), rotation.turns(old, new))
    assert torch.allclose(moved, at(new), atol=1e-5)
