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
    "experts": ({"return_routed_experts": True}, "return_routed_experts"),
    "indices": ({"return_indexer_topk": True}, "return_indexer_topk"),
}
# What is looked up by slot is not there for slot 0; the KVs are those of any request.
STORED_ONLY = {"return_routed_experts", "return_indexer_topk"}
SET_LATER = {
    *("skip_radix_cache_insert", "multimodal_inputs", "dllm_config", "beam_group"),
    *("session_generation", "disagg_kv_sender", "pending_bootstrap", "staged_prefetch_plan"),
    *("pd_rebootstrap_forced_output_id", "hisparse_staging", "kv_rotation_base"),
    *("discard_output_reason", "weight_version_events"),
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
    stored = reason in STORED_ONLY
    assert refusals(request(**fields)) == (reason, None if stored else reason)


def test_beam_width() -> None:
    assert refusals(request({"beam_width": 4})) == ("beam_width", "beam_width")


def test_every_guard_is_tested() -> None:
    made_so = {reason for _, reason in MADE_SO.values()}
    assert made_so | SET_LATER == judged.REQUEST_GUARDS.keys()


def test_what_nobody_has_judged_is_refused() -> None:
    req = request()
    req.teleported = False
    assert refusals(req) == ("unjudged:teleported", "unjudged:teleported")


@pytest.mark.parametrize("field", judged.REQUEST_GUARDS)
def test_a_guarded_field_that_is_gone(field: str) -> None:
    req = request()
    delattr(req, field)
    assert field in refusals(req)


@pytest.mark.parametrize("value", ["surprise", True, 0])
@pytest.mark.parametrize("field", judged.REQUEST_GUARDS)
def test_a_value_that_nobody_has_judged(field: str, value: object) -> None:
    """A field may hold just what its guard names, whatever else it is."""
    req = request()
    # A list that is empty as long as nothing changes.
    setattr(req, field, [value] if field == "weight_version_events" else value)
    assert refusals(req) == (field, None if field in STORED_ONLY else field)
