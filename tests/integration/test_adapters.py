"""What keeps prefixes apart beside the model: an adapter's weights, and those of draft models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impress_sglang.plugin import factory
from impress_sglang.plugin.entry import _after_draft_worker
from impress_sglang.plugin.factory import draft_runners
from impress_sglang.plugin.known import namespace_of_request
from impress_sglang.store.prefix_hashes import namespace_text
from tests.unit.kv_factory import make_shape


def adapter(seed: int, scaling: float = 2.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weights = {"k_proj.lora_A.weight": torch.randn(4, 8, generator=generator)}
    own = {"layers": [SimpleNamespace(weights=weights)], "scaling": scaling}
    return SimpleNamespace(**own, embedding_layers={}, added_tokens_embeddings={})


def test_namespaces_of_adapters() -> None:
    """The same weights under any id, with what the request itself keeps apart."""
    loras = {"id": adapter(1), "same": adapter(1), "other": adapter(2), "scaled": adapter(1, 1.0)}
    manager = SimpleNamespace(loras=loras)

    def namespace(lora_id: str | None, extra_key: str | None, salt: str | None = None) -> str:
        key = extra_key if lora_id is None else (extra_key or "") + lora_id
        req = SimpleNamespace(lora_id=lora_id, extra_key=key, cache_salt=salt)
        return namespace_of_request(req, manager)

    assert namespace("id", None) == namespace("same", None)
    assert namespace("id", "alice", "salt") == namespace("same", "alice", "salt")
    own = (*loras, None)
    asked = [(name, key, salt) for name in own for key in (None, "alice") for salt in (None, "s")]
    assert len({namespace(*one) for one in asked}) == len(asked) - 4
    assert namespace(None, "alice") == namespace_text("alice", None)
    loras["id"] = adapter(3)
    assert namespace("id", None) != namespace("same", None), "it was replaced"


def test_other_pools_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of drafts that have KVs, and of layers with windows."""
    monkeypatch.setattr(factory, "resolved_view", lambda options: options)
    monkeypatch.setattr(factory, "identity_of_options", lambda _: {})

    def runner(seed: int, **config: int) -> Any:
        torch.manual_seed(seed)
        text = SimpleNamespace(to_dict=lambda: config)
        return SimpleNamespace(
            model=torch.nn.Linear(4, 4),
            model_config=SimpleNamespace(hf_text_config=text, dtype=torch.float32),
            token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
            req_to_token_pool=None,
        )

    worker = SimpleNamespace(model_runner=runner(1))
    context = SimpleNamespace(tp_worker=worker, server_args=None, tp_rank=0, tp_size=1)
    stages = [SimpleNamespace(pp_size=1, pp_rank=0)]
    stages += [SimpleNamespace(pp_size=2, pp_rank=rank) for rank in (1, 0)]
    found = []
    for context.params in reversed(stages):
        # Also if all layers were alike.
        found.insert(0, factory.identity_of(context, make_shape()))
    for own in (runner(2), runner(3), runner(3, rope_theta=1)):
        drafting = SimpleNamespace(_draft_model_runners=lambda own=own: [own])
        _after_draft_worker(None, SimpleNamespace(tp_worker=worker, draft_worker=drafting))
        assert draft_runners(worker) == (own,)
        found.append(factory.identity_of(context, make_shape(), draft_runners(worker)))
    assert len(set(found)) == len(found)
    _after_draft_worker(None, SimpleNamespace(tp_worker=worker, draft_worker=None))
    assert factory.identity_of(context, make_shape(), draft_runners(worker)) == found[0]
    # With --disable-hybrid-swa-memory the same layers are stored in another order, and the first
    # tokens have all of them.
    monkeypatch.setattr(factory, "window_pool", lambda pool: pool)
    worker.model_runner.token_to_kv_pool.layers_mapping = {0: (0, True), 1: (0, False)}
    assert factory.identity_of(context, make_shape()) not in found
