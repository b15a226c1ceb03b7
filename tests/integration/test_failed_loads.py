"""A prefix that cannot be loaded in a pass: the request goes through it, and others are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.plugin.attention import PrefixAttention
from impress_sglang.paper.runtime import ServingRuntime, StoredRequest
from tests.integration.backend_world import stored_request
from tests.integration.paper_world import make_runtime
from tests.integration.tiny_model import Pool, layer_of
from tests.unit.kv_factory import make_shape

UNREADABLE = SegmentUnreadable("ab12", "test")


class Failing:
    """Loads ones, and fails in a layer of some requests."""

    def __init__(self) -> None:
        self.fails: dict[int, tuple[int, Exception]] = {}

    def load(
        self,
        layer: int,
        source: Any,
        inputs: Any,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        stats: Any,
    ) -> None:
        keys[rows] = values[rows] = 1.0
        number, error = self.fails.get(id(source), (None, UNREADABLE))
        if layer == number:
            raise error


class Stock(AttentionBackend):
    def forward_extend(self, q: Tensor, *_: Any, **__: Any) -> Tensor:
        return q


class Backend(PrefixAttention, Stock):
    """Of one pass over all layers."""

    def __init__(self, runtime: ServingRuntime, pool: Pool, failed: list[str]) -> None:
        self._runtime, self._pool, self._fail = runtime, pool, failed.append

    def extend(self, runtime: ServingRuntime, requests: list[StoredRequest]) -> None:
        """A pass of one new token per request."""
        shape = runtime.shape
        rids = {id(own): rid for rid, own in runtime.live.items()}
        self._loading = [(rids[id(own)], own, slice(i, i + 1)) for i, own in enumerate(requests)]
        new = torch.ones(len(requests), shape.num_query_heads * shape.key_dim)
        keys = torch.ones(len(requests), shape.num_kv_heads * shape.key_dim)
        batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
        for index in range(shape.num_layers):
            self.forward(new, keys, keys, layer_of(shape, index), batch)


@dataclasses.dataclass
class Serving:
    runtime: ServingRuntime
    pool: Pool
    backend: Backend
    failed: list[str]
    loader: Failing

    def request(self, rid: str, layer: int | None, error: Exception = UNREADABLE) -> StoredRequest:
        first = 100 * (1 + len(self.runtime.live))
        tokens, slots = torch.arange(40), torch.arange(first, first + 40)
        request = stored_request(tokens, tokens[:0], slots, rid)
        self.runtime.live[rid] = request
        if layer is not None:
            self.loader.fails[id(request.source)] = layer, error
        return request

    def layers(self, request: StoredRequest) -> list[float]:
        """What is in its slots, all the same in a layer."""
        found = []
        for layer in zip(self.pool.keys, self.pool.values, strict=True):
            values = torch.cat([own[request.slots].flatten() for own in layer]).unique()
            found.append(float(values.item()))
        return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    shape = make_shape(layers=3)
    runtime, pool = make_runtime(tmp_path, shape), Pool(shape, 512, 7.0)
    failed: list[str] = []
    loader = Failing()
    runtime.loader = loader  # type: ignore[assignment]
    yield Serving(runtime, pool, Backend(runtime, pool, failed), failed, loader)
    runtime.live.clear()
    runtime.close()


@pytest.mark.parametrize("error", [UNREADABLE, MemoryError(), torch.OutOfMemoryError()])
@pytest.mark.parametrize("layer", [0, 2])
def test_only_the_request_fails_and_brings_no_nan_into_the_pass(
    serving: Serving, layer: int, error: Exception
) -> None:
    broken, intact = serving.request("broken", layer, error), serving.request("intact", None)

    serving.backend.extend(serving.runtime, [broken, intact])

    assert serving.failed == ["broken"]
    assert broken.failed and not broken.loading and broken.layers_loaded == 3
    assert serving.layers(broken) == [1.0] * layer + [0.0] * (3 - layer)
    assert not intact.failed and serving.layers(intact) == [1.0] * 3


def test_another_error_is_not_hidden(serving: Serving) -> None:
    request = serving.request("r", 1, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        serving.backend.extend(serving.runtime, [request])
