"""Which requests may be stored and served: real `Req` objects, and each field that is guarded."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.integration import judged
from impress_sglang.integration.eligibility import serve_refusal, store_refusal

OVERRIDES = PositionalEmbeds(embeds=[torch.ones(4)], positions=[1])
# What SGLang gives a request at its making, and the field that stands against the store.
MADE_SO: dict[str, tuple[dict[str, Any], str]] = {
    "overrides": ({"positional_embed_overrides": OVERRIDES}, "positional_embed_overrides"),
    "embeds": ({"input_embeds": [[1.0]]}, "input_embeds"),
    "types": ({"token_type_ids": [0, 1]}, "token_type_ids"),
    "lora": ({"lora_id": "a"}, "lora_id"),
    "items": ({"multi_item_delimiter_indices": [2]}, "multi_item_delimiter_indices"),
    "pool": ({"token_indices_to_pool": [2]}, "token_indices_to_pool"),
    "layout": ({"decision_layout": [1]}, "decision_layout"),
    "matryoshka": ({"dimensions": 8}, "dimensions"),
    "pooled": ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
    "host": ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    "room": ({"bootstrap_room": 3}, "bootstrap_room"),
    "stream": ({"session": SimpleNamespace(streaming=True)}, "session"),
}
# What the scheduler sets later.
SET_LATER: dict[str, Any] = {
    "skip_radix_cache_insert": True,
    "positional_embed_overrides": OVERRIDES,
    "multimodal_inputs": object(),
    "dllm_config": object(),
    "beam_group": object(),
    "session_generation": 0,
    "disagg_kv_sender": object(),
    "pending_bootstrap": True,
    "pd_rebootstrap_forced_output_id": 0,
    "staged_prefetch_plan": object(),
    "hisparse_staging": True,
    "kv_rotation_base": 0,
    "discard_output_reason": object(),
    "weight_version_events": [object()],
}
HARMLESS: tuple[dict[str, Any], ...] = (
    {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5]},
    {"return_hidden_states": True},
    {"custom_logit_processor": "{}"},
    {"require_reasoning": True, "priority": 3, "routing_key": "a", "stream": True},
    {"extra_key": "alice", "cache_salt": "pepper", "session_id": "nobody"},
    {"session": SimpleNamespace(streaming=False), "eos_token_ids": {2}, "vocab_size": 10},
    {"bootstrap_port": 8998, "routed_dp_rank": 0, "return_sampling_mask": True},
)


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Req:
    return Req("r", "", array("q", [1, 2, 3]), SamplingParams(**(sampling or {})), **fields)


def refusals(req: Req) -> tuple[str | None, str | None]:
    return serve_refusal(req), store_refusal(req)


def test_plain_request() -> None:
    assert refusals(request()) == (None, None)


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: "-".join(fields))
def test_harmless(fields: dict[str, Any]) -> None:
    assert refusals(request(**fields)) == (None, None)


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 4, "temperature": 0.0, "top_k": 1, "sampling_seed": 3},
        {"regex": "a*", "stop": ["b"], "stop_token_ids": [7], "logit_bias": {"3": 1.0}},
        {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"custom_params": {"impress_bits": "exact"}, "max_new_tokens": 0, "beam_width": 1},
    ],
)
def test_harmless_sampling(sampling: dict[str, Any]) -> None:
    assert refusals(request(sampling)) == (None, None)


@pytest.mark.parametrize(("fields", "reason"), MADE_SO.values(), ids=MADE_SO)
def test_requests_that_are_made_so(fields: dict[str, Any], reason: str) -> None:
    assert refusals(request(**fields)) == (reason, reason)


@pytest.mark.parametrize("field", SET_LATER)
def test_fields_that_are_set_later(field: str) -> None:
    req = request()
    setattr(req, field, SET_LATER[field])
    assert refusals(req) == (field, field)


@pytest.mark.parametrize("field", ["return_routed_experts", "return_indexer_topk"])
def test_stored_but_not_served(field: str) -> None:
    """What is looked up by slot is not there for slot 0; the KVs are those of any request."""
    assert refusals(request(**{field: True})) == (field, None)


def test_beam_width() -> None:
    assert refusals(request({"beam_width": 4})) == ("beam_width", "beam_width")


def test_every_guard_is_tested() -> None:
    tested = {reason for _, reason in MADE_SO.values()} | SET_LATER.keys()
    assert tested | {"return_routed_experts", "return_indexer_topk"} == judged.REQUEST_GUARDS.keys()


def test_what_nobody_has_judged_is_refused() -> None:
    req = request()
    req.teleported = False
    assert refusals(req) == ("unjudged:teleported", "unjudged:teleported")


@pytest.mark.parametrize("field", judged.REQUEST_GUARDS)
def test_a_guarded_field_that_is_gone(field: str) -> None:
    req = request()
    delattr(req, field)
    assert field in refusals(req)


@pytest.mark.parametrize("field", judged.REQUEST_GUARDS)
def test_a_value_that_nobody_has_judged(field: str) -> None:
    """A field may hold just what its guard names, whatever else it is."""
    req = request()
    setattr(req, field, "surprise")
    assert serve_refusal(req) == field
