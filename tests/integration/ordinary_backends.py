"""Loading of prefixes in front of backends whose rows are ordinary, on a CPU.

`tests/serving/test_triton_backend.py` runs this file in a process of its own, for fa3's kernels are
stand-ins there; the backends are SGLang's.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_flex_backend import TorchFlexAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.paper import attention
from impress_sglang.integration.paper.attention import ADOPTED, PrefixAttention, adopt_backend
from impress_sglang.integration.paper.judged_backends import BACKENDS
from tests.integration import backend_world as backends

configured = backends.configured


def attend_by_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    **_: Any,
) -> Tensor:
    """What fa3's kernel computes of what it is given."""
    output = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        new = slice(*cu_seqlens_q[row : row + 2].tolist())
        pages = page_table[row, : -(-length // k_cache.shape[1])].long()
        output[new] = rectangular_attention(
            q[new],
            k_cache[pages].flatten(0, 1)[:length],
            v_cache[pages].flatten(0, 1)[:length],
            scaling=softmax_scale,
            causal=True,
        )
    return output


def _stand_in() -> None:
    """SGLang's kernels can only be imported where there is a GPU."""
    package, kernels = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.__path__ = []
    package.merge_state_v2 = None  # type: ignore[attr-defined]
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(kernels, name, None)
    sys.modules.update({"sgl_kernel": package, "sgl_kernel.flash_attn": kernels})


_stand_in()
from sglang.srt.layers.attention import flashattention_backend  # noqa: E402


class Elsewhere(TorchNativeAttnBackend):
    """A backend that nobody has judged, until a test does."""


def hybrid(runner: Any, prefill: type[Any], decode: type[Any]) -> HybridAttnBackend:
    return HybridAttnBackend(runner, prefill(runner), decode(runner))


def flash(runner: Any) -> Any:
    return flashattention_backend.FlashAttentionBackend(runner)


KINDS = {
    "elsewhere": Elsewhere,
    "flex": TorchFlexAttnBackend,
    "fa3": flash,
    "prefill": lambda runner: hybrid(runner, TorchNativeAttnBackend, TritonAttnBackend),
    "decode": lambda runner: hybrid(runner, TritonAttnBackend, TorchNativeAttnBackend),
}


@pytest.fixture(params=[1, 16], ids="pages-of-{}".format)
def world(request: pytest.FixtureRequest, configured: tuple[Any, Any]) -> backends.World:
    return backends.World(*configured, page_size=request.param)


@pytest.fixture(params=KINDS)
def backend(
    request: pytest.FixtureRequest, world: backends.World, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    name = f"{Elsewhere.__module__}.{Elsewhere.__qualname__}"
    monkeypatch.setitem(ADOPTED, name, None)
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", attend_by_pages)
    monkeypatch.setattr(flashattention_backend, "get_device_capability", lambda: (9, 0))
    yield world.adopted(KINDS[request.param](world.runner))


def test_prefixes_are_loaded_before_attention(world: backends.World, backend: Any) -> None:
    """A row with a stored prefix beside others, in prefill and in the decode steps after it."""
    assert not backend.offset_rows
    stored = world.row(32, prefix=(48, 48))
    rows = [(stored, 16), (world.row(16), 16), (world.row(0), 32)]
    backends.extend(backend, world, *rows)
    assert world.store.loaded == [(stored.rid, layer) for layer in range(backends.LAYERS)]
    inputs = world.store.inputs[stored.rid]
    assert inputs.queries.shape == (16, backends.QUERY_HEADS, backends.DIM)
    assert inputs.new_keys.shape == (16, backends.KV_HEADS, backends.DIM)
    assert [new for new, _ in world.store.passes] == [64]
    # The next chunk finds the prefix in its slots, and so does decoding.
    backends.extend(backend, world, (stored, 16))
    backends.decode(backend, world, [row for row, _ in rows])
    assert len(world.store.loaded) == backends.LAYERS


@pytest.mark.parametrize("backend", ["elsewhere", "fa3", "prefill", "decode"], indirect=True)
def test_keys_that_were_written_with_their_rotation(world: backends.World, backend: Any) -> None:
    stored = world.row(0, prefix=(32, 32))
    batch = backends.prepare(backend, world, (stored, 16))
    pool = world.runner.token_to_kv_pool
    for layer in backends.layers():
        keys, values = (torch.randn(16, backends.KV_HEADS, backends.DIM) for _ in range(2))
        pool.k_buffer[layer.layer_id][batch.out_cache_loc] = keys
        pool.v_buffer[layer.layer_id][batch.out_cache_loc] = values
        q = torch.randn(16, backends.QUERY_HEADS * backends.DIM)
        output = backend.forward(q, None, None, layer, batch, save_kv_cache=False)
        assert torch.equal(world.store.inputs[stored.rid].new_keys, keys)
        shape = 16, backends.QUERY_HEADS, backends.DIM
        backends.check(world, layer, stored, q.view(shape), output.view(shape))


def test_a_part_of_a_prefix_never_gets_here(world: backends.World) -> None:
    backend = world.adopted(hybrid(world.runner, TorchNativeAttnBackend, TritonAttnBackend))
    with pytest.raises(AssertionError, match="begins at an offset"):
        backend.init_forward_metadata(world.extend([(world.row(0, prefix=(16, 48)), 4)]))


@pytest.mark.parametrize("name", BACKENDS)
def test_objects_can_change_their_class(name: str) -> None:
    """Python refuses a class with another layout, and a method that moved would not be found."""
    judged = BACKENDS[name]
    stock = pkgutil.resolve_name(f"sglang.srt.layers.attention.{judged.kind}")
    backend = object.__new__(stock)
    pool = SimpleNamespace(
        req_to_token=torch.zeros(2, 2), req_generation=torch.zeros(2, dtype=torch.int64)
    )
    adopt_backend(backend, SimpleNamespace(req_to_token_pool=pool))
    assert isinstance(backend, stock) and isinstance(backend, PrefixAttention)
    assert backend.offset_rows is (judged.offset_rows is not None)
    # What loads comes first, and goes on where SGLang would.
    assert type(backend).forward is PrefixAttention.forward
    assert "forward" not in vars(stock) and "forward" in vars(AttentionBackend)
    for method in ("init_forward_metadata", "forward_extend", "forward_decode"):
        assert method in vars(stock), method


@pytest.mark.parametrize("part", ["prefill_backend", "decode_backend"])
def test_a_hybrid_of_what_nobody_has_judged_is_refused(configured: Any, part: str) -> None:
    runner = backends.World(*configured).runner
    backend = hybrid(runner, TorchNativeAttnBackend, TorchNativeAttnBackend)
    setattr(backend, part, Elsewhere(runner))
    with pytest.raises(UnsupportedError, match="how Elsewhere attends"):
        adopt_backend(backend, runner)
    assert type(backend) is HybridAttnBackend


def test_classes_are_made_once() -> None:
    made = attention._with_ordinary_rows(TorchFlexAttnBackend)
    assert made is attention._with_ordinary_rows(TorchFlexAttnBackend)
    assert made.__name__ == "ImpressTorchFlexAttnBackend"
