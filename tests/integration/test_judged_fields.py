"""Every field of SGLang that could matter is judged, and nothing that is judged is gone.

The fields come from SGLang's own classes, so that a field of another version fails here until
somebody has judged it. Real `Req` objects tell which requests may be stored and served, by each
field that is guarded.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import sglang.srt.models
import torch
from sglang.srt import environ
from sglang.srt.configs import model_config as sglang_model_config
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers import io_struct, scheduler
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from impress_sglang.errors import UnsupportedError
from impress_sglang.integration import guards, judged, judged_arguments, judged_models
from impress_sglang.integration.eligibility import serve_refusal, store_refusal
from impress_sglang.integration.paper.judged_backends import BACKENDS

# Environment variables that may have to do with how KVs are made or lie.
TELLING = re.compile(
    "KVCACHE|KV_CACHE|ROPE|ATTN|ATTENTION|EXTERNAL_MODEL|RUST_SERVER|TF32|DETERMIN|BATCH_INV|"
    "BREAKABLE|GLUE|POST_CAPTURE"
)
PLAIN_LAYER = {"num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "quant_config"}


def struct_fields(cls: type) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls)}
    return {field.name for field in msgspec.structs.fields(cls)}


def own_attributes(cls: type) -> set[str]:
    """What the methods of a class and of its bases set on `self`, and what a class declares."""
    found = set()
    for base in cls.__mro__:
        if base.__module__.startswith("sglang"):
            found |= attributes_set(textwrap.dedent(inspect.getsource(base)))
            found |= set(vars(base).get("__annotations__", ()))
    return found


def attributes_set(source: str) -> set[str]:
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def dispatched() -> set[str]:
    """The messages in the table of the scheduler's dispatcher."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(scheduler.Scheduler)))
    tables = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TypeBasedDispatcher"
    ]
    assert len(tables) == 1 and isinstance(tables[0], ast.List)
    rows = tables[0].elts
    return {row.elts[0].id for row in rows}  # type: ignore[attr-defined]


def assert_judged(fields: Iterable[str], known: Iterable[str]) -> None:
    fields, known = set(fields), set(known)
    assert not fields - known, f"nobody has judged {sorted(fields - known)}"
    assert not known - fields, f"judged, but gone: {sorted(known - fields)}"


def assert_disjoint(*tables: Iterable[str]) -> None:
    for one, other in itertools.combinations(map(set, tables), 2):
        assert not one & other


def test_request() -> None:
    assert_judged(own_attributes(Req), judged.REQUEST_FIELDS)
    assert_disjoint(
        judged.REQUEST_NAMESPACE,
        judged.REQUEST_GUARDS,
        judged.REQUEST_HARMLESS,
        judged.REQUEST_BOOKKEEPING,
    )


def test_request_parameters() -> None:
    """What a request is made of becomes a field that is judged."""
    becomes = {
        "top_logprobs_num": "logprob",
        "token_ids_logprob": "logprob",
        "disagg_mode": "time_stats",
    }
    parameters = inspect.signature(Req.__init__).parameters.keys() - {"self", "origin_input_text"}
    assert {becomes.get(name, name) for name in parameters} <= judged.REQUEST_FIELDS


def test_sampling_params() -> None:
    known = judged.SAMPLING_HARMLESS | judged.SAMPLING_GUARDS.keys()
    assert_judged(struct_fields(SamplingParams), known)
    assert_disjoint(judged.SAMPLING_HARMLESS, judged.SAMPLING_GUARDS)


def test_messages_of_requests() -> None:
    fields = struct_fields(io_struct.TokenizedGenerateReqInput)
    fields |= struct_fields(io_struct.TokenizedEmbeddingReqInput)
    assert_judged(fields, judged.MESSAGE_BECOMES.keys() | judged.MESSAGE_HARMLESS)
    assert_disjoint(judged.MESSAGE_BECOMES, judged.MESSAGE_HARMLESS)
    assert set(judged.MESSAGE_BECOMES.values()) <= judged.REQUEST_FIELDS
    assert_judged(struct_fields(io_struct.SessionParams), judged.SESSION_HARMLESS)


def test_scheduler_messages() -> None:
    tables = (judged.MESSAGES_OF_REQUESTS, judged.MESSAGES_OF_WEIGHTS, judged.MESSAGES_HARMLESS)
    assert_judged(dispatched(), frozenset().union(*tables))
    assert_disjoint(*tables)


def test_server_arguments() -> None:
    assert_judged(struct_fields(ServerArgs), judged_arguments.ARGUMENTS)
    assert_disjoint(
        judged_arguments.RESTRICTED,
        judged_arguments.OFF,
        judged_arguments.AT_DEFAULT,
        judged_arguments.IDENTITY,
        judged_arguments.HARMLESS,
        judged_arguments.INERT,
    )


def test_attention_layers() -> None:
    parameters = inspect.signature(RadixAttention.__init__).parameters.keys() - {"self"}
    becomes = {judged_models.LAYER_PARAMETERS.get(name, name) for name in parameters}
    assert becomes <= judged_models.LAYER_ATTRIBUTES
    assert_judged(own_attributes(RadixAttention), judged_models.LAYER_ATTRIBUTES)


def test_environment() -> None:
    telling = {name for name in vars(environ.Envs) if TELLING.search(name)}
    known = (
        judged_models.ENVIRONMENT.keys()
        | judged_models.ENVIRONMENT_IDENTITY
        | judged_models.ENVIRONMENT_HARMLESS
    )
    assert_judged(telling, known)
    guards.check_environment()


def test_model_config() -> None:
    """The attributes of SGLang's model configuration that have to be unset do exist."""
    assert own_attributes(sglang_model_config.ModelConfig) >= judged_models.MODEL_UNSET


@pytest.mark.parametrize("file", judged_models.ARCHITECTURES_BY_FILE)
def test_architecture(file: str) -> None:
    """Each known class makes plain attention layers and calls them with nothing but q, k and v."""
    source = (Path(sglang.srt.models.__path__[0]) / f"{file}.py").read_text()
    tree = ast.parse(source)
    entry = [
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
    ]
    assert set(re.findall(r"\w+", entry[0])) >= judged_models.ARCHITECTURES_BY_FILE[file]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        names = {keyword.arg for keyword in call.keywords}
        if ast.unparse(call.func) == "RadixAttention":
            assert names <= PLAIN_LAYER | {"prefix"}
        if ast.unparse(call.func) == "self.attn" and len(call.args) > 1:
            assert names <= {"forward_batch", "save_kv_cache"}
    for word in ("alibi", "sinks", "k_rope", "cross_attn"):
        assert word not in source, word


def returns_no_keys(function: ast.FunctionDef) -> bool:
    """Whether it returns queries, and None with them."""
    return any(
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and ast.unparse(node.value.elts[0]) == "q"
        and any(ast.unparse(own) == "None" for own in node.value.elts)
        for node in ast.walk(function)
    )


@pytest.mark.parametrize("file", judged_models.ARCHITECTURES_BY_FILE)
def test_models_have_keys_for_attention_of_prefill(file: str) -> None:
    """Else a damaged prefix could not be computed again, nor text be blended."""
    tree = ast.parse((Path(sglang.srt.models.__path__[0]) / f"{file}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    without = {function.name for function in functions if returns_no_keys(function)}
    unset = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and {ast.unparse(own) for own in node.targets} & {"k", "v"}
    ]
    assert not unset
    if file != "qwen3":
        assert not without
        return
    # On ROCm, and while decoding only.
    assert without == {"forward_prepare_aiter_fused"}
    assigned = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    assert " and forward_batch.forward_mode.is_decode()" in assigned["can_try_aiter_fused"]
    (guarded,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "self.forward_prepare_aiter_fused(" in "\n".join(map(ast.unparse, node.body))
    )
    assert ast.unparse(guarded.test) == "use_aiter_fused"
    tried = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "can_try_aiter_fused"
    ]
    assert any("use_aiter_fused =" in "\n".join(map(ast.unparse, node.body)) for node in tried)


def test_unjudged_fields_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a field that is added, or taken away, fails each kind of enumeration."""
    source = inspect.getsource(Req)
    added = source.replace("self.rid = rid", "self.rid = rid\n        self.teleport = True")
    with pytest.raises(AssertionError, match="teleport"):
        assert_judged(attributes_set(added), judged.REQUEST_FIELDS)

    with pytest.raises(AssertionError, match=r"gone.*teleport"):
        assert_judged(struct_fields(SamplingParams), {*struct_fields(SamplingParams), "teleport"})
    monkeypatch.setattr(io_struct, "TokenizedEmbeddingReqInput", SamplingParams)
    with pytest.raises(AssertionError, match="nobody has judged"):
        test_messages_of_requests()


def test_unjudged_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, too: an option that no table knows must have its default."""
    defaults = guards.option_defaults()
    view = SimpleNamespace(**{**defaults, "device": "cpu"})
    guards.check_options(view)
    monkeypatch.setattr(guards, "HARMLESS", judged_arguments.HARMLESS - {"stream_interval"})
    guards.check_options(view)
    view.stream_interval = 7
    with pytest.raises(UnsupportedError, match="--stream-interval 7"):
        guards.check_options(view)


@pytest.mark.parametrize("name", sorted(judged_arguments.AT_DEFAULT | judged_arguments.OFF))
def test_switches_of_what_is_unknown(name: str) -> None:
    view = SimpleNamespace(**{**guards.option_defaults(), "device": "cpu", name: "on"})
    with pytest.raises(UnsupportedError, match=name.replace("_", "-")):
        guards.check_options(view)


def test_options_that_change_kvs_are_part_of_the_identity() -> None:
    defaults = guards.option_defaults()
    plain = guards.identity_of_options(SimpleNamespace(**defaults))
    for name in judged_arguments.IDENTITY:
        other = guards.identity_of_options(SimpleNamespace(**{**defaults, name: "other"}))
        assert other != plain


def test_overrides_of_the_model_are_part_of_the_identity(tmp_path: Path) -> None:
    """--json-model-override-args changes RoPE, say, and is in no weight."""
    from sglang.srt.configs.model_config import ModelConfig

    from impress_sglang.integration.factory import _architecture
    from tests.integration.tiny_model import LLAMA, write_config

    path = str(write_config(tmp_path, LLAMA))
    plain = _architecture(ModelConfig(path).hf_text_config)
    changed = ModelConfig(path, model_override_args='{"rope_theta": 5e5, "rms_norm_eps": 0.1}')
    assert _architecture(changed.hf_text_config) != plain


def test_backends_are_those_of_sglang() -> None:
    for name, backend in BACKENDS.items():
        module, _, kind = backend.kind.rpartition(".")
        source = inspect.getsource(ATTENTION_BACKENDS[name])
        assert f"sglang.srt.layers.attention.{module} import" in source and kind in source, name


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
    {},
    {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5]},
    {"return_hidden_states": True},
    {"custom_logit_processor": "{}"},
    {"require_reasoning": True, "priority": 3, "routing_key": "a", "stream": True},
    {"extra_key": "alice", "cache_salt": "pepper", "session_id": "nobody"},
    {"session": SimpleNamespace(streaming=False), "eos_token_ids": {2}, "vocab_size": 10},
    {"bootstrap_port": 8998, "routed_dp_rank": 0, "return_sampling_mask": True},
    *(
        {"sampling": own}
        for own in (
            {"n": 4, "temperature": 0.0, "top_k": 1, "sampling_seed": 3},
            {"regex": "a*", "stop": ["b"], "stop_token_ids": [7], "logit_bias": {"3": 1.0}},
            {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
            {"custom_params": {"impress_bits": "exact"}, "max_new_tokens": 0, "beam_width": 1},
        )
    ),
)


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> Req:
    return Req("r", "", array("q", [1, 2, 3]), SamplingParams(**(sampling or {})), **fields)


def refusals(req: Req) -> tuple[str | None, str | None]:
    return serve_refusal(req), store_refusal(req)


@pytest.mark.parametrize("fields", HARMLESS, ids="-".join)
def test_harmless(fields: dict[str, Any]) -> None:
    assert refusals(request(**fields)) == (None, None)


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
