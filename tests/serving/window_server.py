"""A server of models with sliding windows on a CPU.

In SGLang's pools for these, torch_native writes to the rows of layers with windows, and reads from
those of other layers. Here it reads where it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


def _translated(attend: Callable[..., Any]) -> Callable[..., Any]:
    def translate(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **named: Any
    ) -> Any:
        pool, table = backend.token_to_kv_pool, backend.req_to_token_pool
        if not getattr(pool, "layers_mapping", {layer.layer_id: (0, False)})[layer.layer_id][1]:
            return attend(backend, q, k, v, layer, *rest, **named)
        rows = pool.full_to_swa_index_mapping[table.req_to_token.long()]
        backend.req_to_token_pool = SimpleNamespace(req_to_token=rows)
        try:
            return attend(backend, q, k, v, layer, *rest, **named)
        finally:
            backend.req_to_token_pool = table

    return translate


for _name in ("forward_extend", "forward_decode"):
    setattr(TorchNativeAttnBackend, _name, _translated(getattr(TorchNativeAttnBackend, _name)))
