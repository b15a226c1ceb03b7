"""Decides which requests may use the store: those whose KVs follow from their key.

A request is compared with a plain one made by SGLang. All fields must have the same values, except
those that cannot make KVs depend on more than their key (token ids, namespace and the model
identity). So a field that a later release adds excludes only requests that set it. Both predicates
return None for yes, otherwise the name of the field, which is counted and reported.
`tests/integration/test_request_fields.py` has the reason for each excluded field.
"""

from __future__ import annotations

import functools
import logging
from array import array
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.errors import UnsupportedError
from impress_sglang.serving.custom_params import STORE_KEY, params_of

logger = logging.getLogger(__name__)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Allowed fields of `Req`, in this order: the key of KVs; sampling, output, client and routing;
# scheduler state and results.
REQUEST = _words("""
    origin_input_ids extra_key cache_salt lora_id

    rid http_worker_ipc stream priority routing_key routed_dp_rank kv_hints session_id
    bootstrap_host bootstrap_port bootstrap_room pending_bootstrap
    disagg_prefill_dp_rank disagg_kv_sender
    sampling_params custom_logit_processor eos_token_ids vocab_size tokenizer
    require_reasoning reasoning_tokens _is_reasoning_over
    _think_end_matcher _think_end_match_len _think_start_match_len
    grammar grammar_key grammar_wait_ct
    return_logprob logprob_start_len logprob temp_scaled_logprobs top_p_normalized_logprobs
    return_sampling_mask sampling_mask_rows sampling_logprobs_mode return_flat_raw_top_logprobs
    return_hidden_states return_hidden_states_mode routed_experts_start_len
    origin_input_ids_unpadded

    output_ids full_untruncated_fill_ids extend_end prefix_len kv lock cache_request_handle
    last_node last_host_node best_match_node host_hit_length swa_host_hit_length
    mamba_host_hit_length mamba_branching_seqlen swa_branching_seqlen mamba_lazy_checkpoint
    num_matched_prefix_tokens storage_hit_length storage_hit_start host_loaded_length
    host_hit_is_storage storage_prefetch_retry_attempts storage_prefetch_last_match_len
    extend_batch_idx decode_batch_idx inflight_middle_chunks is_retracted retracted_stain
    retraction_count retraction_mb_id arrival_processed_tokens
    finished_reason finished_len finished_output to_finish
    surr_offset read_offset decoded_text surr_and_decode_ids cur_decode_ids_len
    send_token_offset send_decode_id_offset send_output_token_logprobs_offset
    input_logprob_sent input_token_logprobs
    temp_input_top_logprobs_val temp_input_top_logprobs_idx
    temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx
    hidden_states hidden_states_tensor output_topk_p output_topk_index output_dsa_topk_indices
    routed_experts indexer_topk customized_info embedding pooled_hidden_state
    cached_tokens already_computed cached_tokens_device cached_tokens_host cached_tokens_storage
    _cache_breakdown_computed metrics_collector time_stats has_log_time_stats
    spec_verify_ct spec_num_correct_drafts spec_num_block_accept_tokens spec_num_cap_tokens
    spec_correct_drafts_histogram spec_cap_lens_histogram
    mm_image_tokens mm_audio_tokens mm_video_tokens mm_token_counts_ready _session_mm_items
    start_send_idx disagg_decode_prefix_len tmp_end_idx early_send_prefix_end
    metadata_buffer_index expected_kv_checksum prefill_attempt_count
    dllm_initialized dllm_phase dllm_incomplete_ids dllm_algo_state dllm_block_offset
    dllm_has_literal_mask

    impress_report impress_sent
""")

# Allowed fields of `SamplingParams`: sampling and stopping. `n` is expanded before.
SAMPLING = _words("""
    max_new_tokens min_new_tokens n stop stop_token_ids stop_regex stop_strs stop_regex_strs
    stop_str_max_len stop_regex_max_len ignore_eos no_stop_trim
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    logit_bias sampling_seed watermark json_schema regex ebnf ebnf_full_assistant structural_tag
    custom_params skip_special_tokens spaces_between_special_tokens stream_interval is_normalized
""")

# Messages to the scheduler that change neither weights nor the pool: of requests; and those for
# groups, profiles, logs, corpora and other caches. Adapters are in namespaces of their weights.
MESSAGES = _words("""
    TokenizedGenerateReqInput TokenizedEmbeddingReqInput BatchTokenizedGenerateReqInput
    BatchTokenizedEmbeddingReqInput AbortReq OpenSessionReqInput CloseSessionReqInput
    PauseGenerationReqInput ContinueGenerationReqInput

    FlushCacheReqInput ClearHiCacheReqInput AttachHiCacheStorageReqInput
    DetachHiCacheStorageReqInput GetHiCacheL3LayoutReq
    InitWeightsUpdateGroupReqInput DestroyWeightsUpdateGroupReqInput
    InitWeightsSendGroupForRemoteInstanceReqInput SendWeightsToRemoteInstanceReqInput
    GetWeightsByNameReqInput UpdateWeightVersionReqInput SlowDownReqInput ProfileReq FreezeGCReq
    ShutdownReq GetInternalStateReq SetInternalStateReq ExpertDistributionReq ConfigureLoggingReq
    DumperControlReqInput AddExternalCorpusReqInput RemoveExternalCorpusReqInput
    ListExternalCorporaReqInput

    LoadLoRAAdapterReqInput LoadLoRAAdapterFromTensorsReqInput UnloadLoRAAdapterReqInput
""")
# Data by slot that loaded tokens lack; the KVs of these requests are normal.
_STORED_ONLY = frozenset({"return_routed_experts", "return_indexer_topk"})
# Reported last: it only says where KVs are kept.
_LAST = "skip_radix_cache_insert"
_MISSING = object()


def store_refusal(req: Any) -> str | None:
    """Return why the KVs of a request may not be stored, or None. `req` is SGLang's `Req`."""
    if params_of(req.sampling_params).get(STORE_KEY) is False:
        return STORE_KEY
    return serve_refusal(req, _STORED_ONLY)


def serve_refusal(req: Any, allowed: frozenset[str] = frozenset()) -> str | None:
    """Return why a request may not use the store, except for `allowed` fields, or None."""
    fields, plain = vars(req), plain_fields()
    # Nearly all remaining values are identical: None or False.
    refusing = [
        name
        for name in fields.keys() - REQUEST
        if fields[name] is not plain.get(name, _MISSING)
        and name not in allowed
        and not _is_plain(name, fields[name], plain.get(name, _MISSING))
    ]
    if refusing:
        return min(refusing, key=lambda name: (name == _LAST, name))
    # Such tokens stand for media, which a session may no longer have, or for states.
    tokens = np.asarray(req.origin_input_ids)
    if len(tokens) and (tokens.max() >= MM_PAD_SHIFT_VALUE or tokens.min() < 0):
        return "origin_input_ids"
    params, defaults = req.sampling_params, SamplingParams()
    for name in _sampling_fields():
        if not _is_plain(name, getattr(params, name), getattr(defaults, name)):
            return name
    return None


def _is_plain(name: str, value: Any, plain: Any) -> bool:
    try:
        if type(value) is type(plain) and bool(value == plain):
            return True
    except (RuntimeError, TypeError, ValueError):
        # For example tensors, whose comparison has several results.
        return False
    # A session without streaming only prepends earlier turns; a beam of one is no beam.
    if name == "session":
        return getattr(value, "streaming", None) is False
    return name == "beam_width" and type(value) is int and value == 1


def check_plain() -> None:
    """Warn if this release excludes plain requests from the store, by an unknown field.

    Raises `UnsupportedError` if it makes requests in another way.
    """
    try:
        plain_fields.cache_clear()
        refusal = serve_refusal(_plain())
    except Exception as error:
        raise UnsupportedError(
            f"IMPRESS does not know requests of this SGLang: {error!r}"
        ) from error
    if refusal is not None:
        logger.warning("requests run without the store: nobody knows their field %s", refusal)


def _plain() -> Any:
    return Req("", "", array("q", [0]), SamplingParams())


@functools.cache
def plain_fields() -> dict[str, Any]:
    """Return the fields of a plain request; not to be changed."""
    return vars(_plain())


@functools.cache
def _sampling_fields() -> list[str]:
    return sorted(frozenset(SamplingParams.__struct_fields__) - SAMPLING)
