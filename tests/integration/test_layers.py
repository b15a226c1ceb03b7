"""A loaded model is walked layer by layer: what is not as its configuration says is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.factory import kv_shape
from impress_sglang.integration.layers import check_layers
from impress_sglang.management.policies import make_policy


class LlamaForCausalLM(torch.nn.Module):
    """Two attention layers under the name of a known class."""

    def __init__(self, ids: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(attention(layer_id) for layer_id in ids)


class StrangeForCausalLM(LlamaForCausalLM):
    pass


class ImprovedAttention(RadixAttention):
    pass


class CompressedPool(MHATokenToKVPool):
    pass


def attention(layer_id: int, **fields: Any) -> RadixAttention:
    return RadixAttention(8, 16, 0.25, num_kv_heads=2, layer_id=layer_id, **fields)


def runner(model: torch.nn.Module, pool: Any = None) -> Any:
    config = SimpleNamespace(dtype=torch.float32, num_attention_heads=8)
    return SimpleNamespace(model=model, token_to_kv_pool=pool or make_pool(), model_config=config)


def make_pool(**changed: Any) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(64, 1, torch.float32, 2, 16, 2, "cpu", enable_memory_saver=False)
    for name, value in changed.items():
        setattr(pool, name, value)
    return pool


def test_plain_layers() -> None:
    check_layers(runner(LlamaForCausalLM()))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sliding_window_size": 128}, "sliding_window_size"),
        ({"logit_cap": 50.0}, "logit_cap"),
        ({"is_cross_attention": True}, "is_cross_attention"),
        ({"use_irope": True}, "use_irope"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attn_type"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type"),
        ({"tp_k_head_num": 4}, "other heads"),
        ({"tp_q_head_num": 4}, "other heads"),
        ({"v_head_dim": 8}, "other widths"),
        ({"sinks": torch.nn.Parameter(torch.zeros(8))}, "sinks"),
        ({"teleport": 1}, "teleport"),
        ({"__class__": ImprovedAttention}, "ImprovedAttention"),
    ],
)
def test_changed_layer(changes: dict[str, Any], word: str) -> None:
    model = LlamaForCausalLM()
    for name, value in changes.items():
        setattr(model.layers[1], name, value)
    with pytest.raises(UnsupportedError, match=word):
        check_layers(runner(model))


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (lambda: StrangeForCausalLM(), "how StrangeForCausalLM attends"),
        (lambda: LlamaForCausalLM((0,)), "one attention layer per layer"),
        (lambda: LlamaForCausalLM((1, 0)), "one attention layer per layer"),
        (lambda: LlamaForCausalLM((0, 0, 1)), "one attention layer per layer"),
    ],
    ids=["class", "missing", "order", "twice"],
)
def test_changed_model(model: Callable[[], torch.nn.Module], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        check_layers(runner(model()))


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"kv_cache_layout": "hnd"}, "layout hnd"),
        ({"start_layer": 1}, "token by token"),
        ({"post_capture_active": True}, "token by token"),
        ({"store_dtype": torch.uint8}, "--kv-cache-dtype auto"),
        ({"dtype": torch.bfloat16}, "--kv-cache-dtype auto"),
        ({"__class__": CompressedPool}, "CompressedPool"),
    ],
)
def test_changed_pool(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        check_layers(runner(LlamaForCausalLM(), make_pool(**changed)))


@pytest.mark.parametrize("changed", [{"head_dim": 100}, {"v_head_dim": 12}])
def test_vectors_that_do_not_fill_bytes_of_bits(changed: dict[str, int]) -> None:
    """They are refused where they would be coded."""
    own = runner(LlamaForCausalLM(), make_pool(**changed))
    coded, paper = (make_policy(ImpressConfig(policy=name)) for name in ("impress", "paper"))
    assert kv_shape(runner(LlamaForCausalLM()), coded, 1).coded
    assert not kv_shape(own, paper, 1).coded
    with pytest.raises(UnsupportedError, match="multiples of 8"):
        kv_shape(own, coded, 1)
