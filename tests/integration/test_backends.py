"""How SGLang's attention backends become ours; `interpreted_backends.py` has what they compute."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

from impress_sglang.errors import SegmentUnreadable, UnsupportedError
from impress_sglang.paper.plugin.attention import ADOPTED, PrefixAttention, adopt_backend
from impress_sglang.serving.pool_reader import reading_stream
from tests.integration.backend_world import LAYERS, World, configured, extend

__all__ = ["configured"]


@pytest.mark.parametrize("stock", ADOPTED)
def test_objects_can_change_their_class(stock: type[Any]) -> None:
    """Python refuses a class with another layout, and a method that moved would not be found."""
    backend, anything = object.__new__(stock), Any
    adopt_backend(backend, anything, anything, anything)
    assert isinstance(backend, stock) and isinstance(backend, PrefixAttention)
    # What loads comes first, and goes on where SGLang would.
    assert type(backend).forward is PrefixAttention.forward
    assert "forward" not in vars(stock)
    for method in ("init_forward_metadata", "forward_extend", "forward_decode"):
        assert method in vars(stock), method
    assert "pack_read_stream" in vars(KVIndexTranslator)


def test_other_kinds_are_refused() -> None:
    """Also a subclass of a judged one, which may read rows in its own way."""
    kind, anything = type("Own", (TorchNativeAttnBackend,), {}), Any
    with pytest.raises(UnsupportedError, match=r"how Own attends; use .* torch_native, triton"):
        adopt_backend(object.__new__(kind), anything, anything, anything)


@pytest.fixture
def world(configured: tuple[Any, Any]) -> World:
    return World(*configured)


@pytest.mark.parametrize(
    "error", [SegmentUnreadable("ab12", "test"), MemoryError(), torch.OutOfMemoryError()]
)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_only_the_request_fails_and_brings_no_nan_into_the_pass(
    world: World, layer: int, error: Exception
) -> None:
    """Whose prefix cannot be loaded; it goes through the pass, and others are served."""
    broken, intact = (world.row(0, prefix=(40, 50)) for _ in range(2))
    world.store.fails[broken.rid] = layer, error
    request, other = (world.store.live[own.rid] for own in (broken, intact))
    extend(world.adopted(TorchNativeAttnBackend(world.runner)), world, (broken, 1), (intact, 1))
    assert request.failed and not request.loading and request.layers_loaded == LAYERS
    assert not other.failed and other.layers_loaded == LAYERS
    pool = world.runner.token_to_kv_pool
    slots = broken.slots[:40]
    for number in range(LAYERS):
        found = torch.cat([pool.k_buffer[number][slots], pool.v_buffer[number][slots]])
        assert bool(found.any()) == (number < layer)


def test_another_error_is_not_hidden(world: World) -> None:
    row = world.row(0, prefix=(4, 5))
    world.store.fails[row.rid] = 1, ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        extend(world.adopted(TorchNativeAttnBackend(world.runner)), world, (row, 1))


def test_pools_are_read_on_a_stream_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a process come round: a new one may be the model's."""
    numbers = itertools.chain([7, 3, 7, 5], itertools.repeat(9))

    def new_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=next(numbers))

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    reading_stream.cache_clear()
    model, scheduler = Handle(7), Handle(3)
    found = reading_stream(torch.device("cuda", 0), model, scheduler)
    assert found.cuda_stream == 5
    assert reading_stream(torch.device("cuda", 0), model, scheduler) is found, "one for all writes"
    reading_stream.cache_clear()


@dataclasses.dataclass(frozen=True)
class Handle:
    """A stream, as far as it is looked at."""

    cuda_stream: int
