"""The self-test of the start finds a pool that does not give back what a pass gave to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups import slots
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin import self_test
from impress_sglang.plugin.factory import kv_shape
from impress_sglang.plugin.pools import PoolLayers, index_keys, state_layers, window_pool
from impress_sglang.plugin.self_test import check_kvs
from impress_sglang.plugin.unsupported import check_layers
from impress_sglang.store.policies import make_policy
from impress_sglang.store.store import PrefixStore
from impress_sglang.transfer.codecs import plain_codec
from impress_sglang.transfer.filling import PackedLayers, fill
from tests.integration.test_capabilities import Layers, runner

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def forgetting(packed: PackedLayers, layer: int, slots: Tensor) -> AbstractContextManager[Rows]:
    """Rows that go nowhere."""
    keys, values = packed.read(layer, slots)
    return nullcontext(Rows(keys, values, torch.arange(len(keys))))


def plain(
    dtype: torch.dtype = torch.float32,
    kind: type[MHATokenToKVPool] = MHATokenToKVPool,
    *,
    size: int = 300,
    heads: int = 2,
    dim: int = 16,
) -> MHATokenToKVPool:
    return kind(size, 1, dtype, heads, dim, 2, "cpu", enable_memory_saver=False)


def run(
    pool: KVCache,
    policy: str = "impress",
    draft: KVCache | None = None,
    states: MambaPool | None = None,
    raw: bool = True,
) -> float:
    model_runner = runner(Layers(), pool)
    # The model computes in 16 bits what is kept in 8.
    model_dtype = torch.bfloat16 if pool.dtype in EIGHT_BITS else pool.dtype
    model_runner.model_config.dtype, model_runner.forward_stream = model_dtype, None
    if (windows := window_pool(pool)) is not None:
        model_runner.model.layers[1] = RadixAttention(8, windows.head_dim, 1.0, windows.head_num, 1)
    if not isinstance(pool, Scaled | Shifted | Copied):
        check_layers(model_runner, windows=True)
    config = ImpressConfig(policy=policy)
    shape = kv_shape(model_runner, make_policy(config), config)
    shape = dataclasses.replace(shape, exact=not shape.coded)
    layers, runners = PoolLayers(pool), [model_runner]
    if windows is not None:
        shape = layers.add(shape, [windows], 8, raw=raw)
    if states is not None:
        layers.states = state_layers(SimpleNamespace(mamba_pool=states), shape)
    drafts = [] if draft is None else [draft]
    if drafts or index_keys(pool):
        runners += [SimpleNamespace(token_to_kv_pool=draft, model=Layers()) for draft in drafts]
        shape = layers.add(shape, drafts)
    assert layers.draft_offset == len(drafts)
    return check_kvs(runners, layers, policy, shape, plain_codec(shape))


@pytest.mark.parametrize("policy", ["impress", "as", "paper"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_pools(dtype: torch.dtype, policy: str) -> None:
    assert run(plain(dtype), policy) > 0.0
    assert run(plain(dtype, size=16), policy) > 0.0


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_pools_of_eight_bits(dtype: torch.dtype) -> None:
    assert run(plain(dtype)) > 0.0


def latents(dtype: torch.dtype) -> MLATokenToKVPool:
    how: dict[str, Any] = {"enable_memory_saver": False, "dcp_replicated": True}
    return MLATokenToKVPool(300, 1, dtype, 64, 16, 2, "cpu", **how)


@pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT_BITS])
def test_pools_of_latent_vectors(dtype: torch.dtype) -> None:
    """Their two parts are what storage calls keys and values."""
    run(latents(dtype))
    run(latents(dtype), draft=latents(dtype))


def sparse(dtype: torch.dtype) -> memory_pool.DSATokenToKVPool:
    """Latent vectors with keys by which tokens are chosen, which the first layer has not."""
    packed = dtype.itemsize == 1
    with get_parallel().override(attn_dcp_size=1):
        return memory_pool.DSATokenToKVPool(
            *(256, 64, 512 if packed else 64, dtype, 64 if packed else 16, 2, "cpu", 128, False),
            kv_cache_dim=656 if packed else 80,
            skip_topk_layers=[True, False],
            dcp_replicated=True,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pools_of_sparse_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sparse(dtype))
    run(sparse(dtype), draft=sparse(dtype))
    shared = sparse(dtype)
    shared.index_kpool = 4
    with pytest.raises(UnsupportedError, match="index keys of several tokens"):
        run(shared)
    monkeypatch.setattr(PackedLayers, "into", forgetting)
    with pytest.raises(UnsupportedError, match="index keys are off by"):
        run(sparse(dtype))


def test_index_keys_of_prompts_that_part_within_a_page(tmp_path: Path) -> None:
    """A loaded page joins what two prompts have stored of it; keys in it stand before scales."""
    pool = sparse(torch.bfloat16)
    sizes = {"device_gb": 0.0, "host_gb": 0.0, "min_free_gb": 0.0}
    config = ImpressConfig(ssd_dir=str(tmp_path), **sizes)
    model_runner, layers = runner(Layers(), pool), PoolLayers(pool)
    model_runner.model_config.dtype = pool.dtype
    shape = layers.add(kv_shape(model_runner, make_policy(config), config), [])
    pool.index_k_with_scale_buffer[1].random_(256)
    one, other, into = (64 + torch.arange(64) + 64 * page for page in range(3))
    tokens = np.arange(64, dtype=np.int32)
    for part in pool.index_k_with_scale_buffer[1].split([64 * 128, 64 * 4], 1):
        in_pages = part.view(len(part), 64, -1)
        in_pages[2, :30] = in_pages[1, :30]
    store = PrefixStore(config, "sparse", shape, torch.device("cpu"))
    with closing(store):
        for slots, prompt in ((one, tokens), (other, np.where(tokens < 30, tokens, tokens + 100))):
            spans = self_test._stored(store, prompt, layers.read, slots, None)
        assert [len(span) for span in spans] == [30, 34]
        source = store.readers.open(spans, exact=True)
        for layer in range(shape.num_layers):
            with layers.into(layer, into) as rows:
                fill(layer, source, source.read(layer), rows, None)
        store.close_source(source)
    assert torch.equal(*pool.index_k_with_scale_buffer[1][[2, 3]])


def windows(dtype: torch.dtype = torch.float32, **how: Any) -> SWAKVPool:
    """The second layer has windows; its rows are fewer than slots."""
    pool = SWAKVPool(300, 250, 1, dtype, 2, 16, [1], [0], "cpu", enable_memory_saver=False, **how)
    SWATokenToKVPoolAllocator(300, 250, 1, dtype, "cpu", pool, False)
    return pool


@pytest.mark.parametrize("dtype", [*DTYPES, *EIGHT_BITS])
def test_pools_with_windows(dtype: torch.dtype) -> None:
    pool = windows(dtype)
    # In few bits as well, if others are.
    run(pool, raw=False)
    run(windows(dtype, swa_head_num=3, swa_head_dim=20, swa_v_head_dim=20))
    assert not pool.full_to_swa_index_mapping[:-1].any(), "nobody has a row"


def test_windows_that_nobody_knows() -> None:
    for name, value in (("swa_req_ring_size", 64), ("swa_uses_full_indices", True)):
        pool = windows()
        setattr(pool, name, value)
        with pytest.raises(UnsupportedError, match="how SWAKVPool keeps layers with sliding"):
            run(pool)


def test_pools_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with states, whose parts differ in shape and dtype, beside two with KVs."""
    shape = SimpleNamespace(conv=[(24, 3)], temporal=(2, 5, 7))
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    params: Any = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    states = MambaPool(
        size=4, spec_state_size=0, cache_params=params, mamba_layer_ids=[2, 3], device="cpu"
    )
    size: dict[str, Any] = {"size": 300, "page_size": 1, "head_num": 2, "head_dim": 16}
    size |= {"dtype": torch.float32, "full_attention_layer_ids": [0, 1], "device": "cpu"}
    pool = memory_pool.HybridLinearKVPool(**size, mamba_pool=states)
    run(pool, "as", states=states)
    assert not states.mamba_cache.temporal.any() and not states.mamba_cache.conv[0].any()
    monkeypatch.setattr(PackedLayers, "into", forgetting)
    with pytest.raises(UnsupportedError, match="states are off by"):
        run(pool, "as", states=states)
    states.replayssm_write_pos = torch.zeros(4)
    with pytest.raises(UnsupportedError, match="kept with replayssm_write_pos"):
        run(pool, "as", states=states)


@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (1, 24), (3, 40)])
def test_pools_of_drafts(heads: int, dim: int) -> None:
    """As they are whatever their shape, also beside layers in few bits."""
    for policy in ("as", "impress"):
        for dtype in (torch.bfloat16, torch.float8_e5m2):
            run(plain(), policy, plain(dtype, heads=heads, dim=dim))


class Scaled(MHATokenToKVPool):
    """Keeps keys in other units than those of attention."""

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any, *args: Any, **kw: Any) -> None:
        super().set_kv_buffer(layer, loc, k / 2, v, *args, **kw)


class Shifted(MHATokenToKVPool):
    """Counts slots from another one."""

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any, *args: Any, **kw: Any) -> None:
        super().set_kv_buffer(layer, (loc + 1) % self.size, k, v, *args, **kw)


class Copied(MHATokenToKVPool):
    """Gives copies of what it keeps, so that nothing can be put into it."""

    def _get_value_buffer(self, layer_id: int) -> Any:
        return super()._get_value_buffer(layer_id).clone()


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Scaled, "keys of layer"), (Shifted, "of layer"), (Copied, "values of layer")],
)
def test_pools_that_keep_kvs_otherwise(kind: type[MHATokenToKVPool], words: str) -> None:
    """All layers, those with windows, and those of drafts."""
    for pool, policy, draft, layer in (
        (plain(kind=kind), "impress", None, 0),
        (windows(swa_kv_pool_class=kind), "as", None, 1),
        (plain(), "as", plain(kind=kind), 0),
    ):
        with pytest.raises(UnsupportedError, match=f"do not come back .*{words} {layer}"):
            run(pool, policy, draft)


@pytest.mark.parametrize(
    ("module", "name", "broken", "words"),
    [
        (slots, "restore", lambda *_: None, "keys of layer 0 are off by"),
        (slots, "restore", lambda *_: 1 / 0, "ZeroDivisionError"),
        (self_test.PoolLayerReader, "_read", lambda *_: 1 / 0, "only 0 of 72 tokens were stored"),
    ],
)
def test_code_that_is_broken(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], words: str
) -> None:
    """In a build for another machine, say."""
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(UnsupportedError, match=words):
        run(plain())
