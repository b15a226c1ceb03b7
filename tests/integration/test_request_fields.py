"""Which requests the store is for, and that somebody knows every field of SGLang's.

The fields come from SGLang's own classes, so that one of another release fails here until somebody
has said why it is harmless (`eligibility.py`) or stands against the store (below). Real `Req`
objects tell which requests may be stored and served.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin import eligibility
from impress_sglang.plugin.eligibility import REQUEST, SAMPLING, serve_refusal, store_refusal
from impress_sglang.plugin.request_tracker import as_tokens

OVERRIDES = PositionalEmbeds(embeds=[torch.ones(4)], positions=[1])
# What SGLang gives a request at its making, or later, that makes its KVs depend on more than they
# are found by.
AGAINST: dict[str, Any] = {
    "positional_embed_overrides": OVERRIDES,
    "input_embeds": [[1.0]],
    "multimodal_inputs": object(),
    "token_type_ids": [0, 1],
    "multi_item_delimiter_indices": [2],
    # It attends to later tokens.
    "dllm_config": object(),
    # Rows of a group share slots.
    "beam_group": object(),
    # A streaming session keeps its row, and has a tree of its own.
    "session": SimpleNamespace(streaming=True),
    "session_generation": 1,
    # What is read at positions of the prompt is missing for tokens that are not computed, and an
    # embedding is made of all of them.
    "token_indices_to_pool": [2],
    "decision_layout": [1],
    "dimensions": 8,
    "return_pooled_hidden_states": True,
    "return_routed_experts": True,
    "return_indexer_topk": True,
    # Its KVs come from elsewhere, in part, or later.
    "pd_rebootstrap_forced_output_id": 0,
    "staged_prefetch_plan": object(),
    "hisparse_staging": True,
    "kv_rotation_base": 0,
    "discard_output_reason": object(),
    "weight_version_events": ["weights changed while it ran"],
    "skip_radix_cache_insert": True,
}
# What is looked up by slot is not there for what was loaded; the KVs are those of any request.
STORED_ONLY = {"return_routed_experts", "return_indexer_topk"}
HARMLESS: tuple[dict[str, Any], ...] = (
    {},
    {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5]},
    {"return_hidden_states": True},
    {"custom_logit_processor": "{}"},
    {"require_reasoning": True, "priority": 3, "routing_key": "a", "stream": True},
    {"extra_key": "alice", "cache_salt": "pepper", "session_id": "nobody", "lora_id": "a"},
    {"session": SimpleNamespace(streaming=False), "eos_token_ids": {2}, "vocab_size": 10},
    {"routed_dp_rank": 0, "return_sampling_mask": True},
    # Where KVs are sent, which is nobody's affair but a prefilling server's.
    {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 0},
    *(
        {"sampling": sampling}
        for sampling in (
            {"n": 4, "temperature": 0.0, "top_k": 1, "sampling_seed": 3},
            {"regex": "a*", "stop": ["b"], "stop_token_ids": [7], "logit_bias": {"3": 1.0}},
            {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
            {"custom_params": {"impress_bits": "exact"}, "max_new_tokens": 0, "beam_width": 1},
        )
    ),
)


def own_attributes(cls: type) -> set[str]:
    """What the methods of a class and of its bases set on `self`."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("sglang")]
    return {
        node.attr
        for base in bases
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Req:
    return Req("r", "", array("q", [1, 2, 3]), SamplingParams(**(sampling or {})), **fields)


def refusals(req: Req) -> tuple[str | None, str | None]:
    return serve_refusal(req), store_refusal(req)


def test_somebody_knows_every_field() -> None:
    assert own_attributes(Req) <= REQUEST | AGAINST.keys()
    assert not REQUEST & AGAINST.keys()
    parameters = inspect.signature(Req.__init__).parameters.keys()
    becomes = {"self", "origin_input_text", "top_logprobs_num", "token_ids_logprob", "disagg_mode"}
    assert parameters <= REQUEST | AGAINST.keys() | becomes
    assert set(SamplingParams.__struct_fields__) == SAMPLING - {"watermark"} | {"beam_width"} | (
        {"watermark"} & set(SamplingParams.__struct_fields__)
    )


def test_somebody_knows_every_message() -> None:
    """And those that may change weights are found at run time (`test_weights.py`)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(scheduler.Scheduler)))
    (table,) = (
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TypeBasedDispatcher"
    )
    assert isinstance(table, ast.List)
    found = {row.elts[0].id for row in table.elts}  # type: ignore[attr-defined]
    assert found - eligibility.MESSAGES == {
        *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromDistributedReqInput"),
        *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromIPCReqInput"),
        *("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput", "CheckWeightsReqInput"),
        "ReleaseMemoryOccupationReqInput",
        *("ResumeMemoryOccupationReqInput", "ScaleElasticEPReqInput", "PdRoleSwitchReqInput"),
        "RpcReqInput",
    }


@pytest.mark.parametrize("fields", HARMLESS, ids="-".join)
def test_harmless(fields: dict[str, Any]) -> None:
    assert refusals(request(**fields)) == (None, None)


MADE = set(inspect.signature(Req.__init__).parameters) - {"dllm_config"}


@pytest.mark.parametrize("field", AGAINST)
def test_against_the_store(field: str) -> None:
    """Set later, and if SGLang makes a request with it; another value is, too, whatever it is."""
    req = request()
    setattr(req, field, AGAINST[field])
    for candidate in (req, *([request(**{field: AGAINST[field]})] if field in MADE else [])):
        assert serve_refusal(candidate) == field
    assert store_refusal(req) == (None if field in STORED_ONLY else field)
    for value in ("surprise", True, 0):
        setattr(req, field, value)
        assert field in refusals(req)


@pytest.mark.parametrize("token", [MM_PAD_SHIFT_VALUE, 2**40 + 7, -1])
def test_tokens_that_are_no_text(token: int) -> None:
    """SGLang has those of media, which a session may have forgotten; they are of no text here."""
    req = request()
    req.origin_input_ids = array("q", [1, token, 3])
    assert refusals(req) == ("origin_input_ids", "origin_input_ids")
    assert as_tokens(req.origin_input_ids)[1] == as_tokens([token])[0] in (token, 2**31 - 1)


def test_plain_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A release that gives each of them an object of its own keeps all from the store."""
    eligibility.check_plain()
    assert not caplog.records
    plain = Req.__init__

    def later(self: Any, *args: Any, **fields: Any) -> None:
        plain(self, *args, **fields)
        self.teleport = object()
        self.beamed = torch.ones(2)

    monkeypatch.setattr(Req, "__init__", later)
    eligibility.check_plain()
    assert "field beamed" in caplog.text
    monkeypatch.setattr(Req, "__init__", lambda self, rid: None)
    with pytest.raises(UnsupportedError, match="does not know requests"):
        eligibility.check_plain()
    monkeypatch.undo()
    eligibility.plain_fields.cache_clear()


def test_fields_of_later_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep only requests from the store that set them."""
    req = request()
    req.teleported = False
    assert refusals(req) == ("teleported", "teleported")
    monkeypatch.setitem(eligibility.plain_fields(), "teleported", False)
    assert refusals(req) == (None, None)
    req.teleported = True
    assert refusals(req) == ("teleported", "teleported")
    sampling = request({"min_p": 0.5})
    monkeypatch.setattr(eligibility, "_sampling_fields", lambda: ["min_p"])
    assert refusals(sampling) == ("min_p", "min_p")
    assert refusals(request()) == (None, None)
