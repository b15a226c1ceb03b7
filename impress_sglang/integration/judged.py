"""What is known of each field of a request of SGLang 0.5.23, as data.

A stored KV is looked up by token ids, namespace (`extra_key` and `cache_salt`) and the model
identity. Each field is judged by one question: can it make KVs depend on anything else, or cause a
row to be read in another way? A test takes SGLang's fields from its own classes and fails for a
field that is in no table (`tests/integration/test_judged_fields.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """A condition on a field; if it does not hold, the request does without the store.

    `stores` and `serves` say what is allowed even if the condition does not hold.
    """

    holds: Callable[[Any], bool]
    why: str
    stores: bool = False
    serves: bool = False


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _is_none(value: Any) -> bool:
    return value is None


def _is_false(value: Any) -> bool:
    return value is False


def _is_empty(value: Any) -> bool:
    return not value


def _is_no_stream(session: Any) -> bool:
    return session is None or getattr(session, "streaming", None) is False


def _is_one(width: Any) -> bool:
    return width is None or width == 1


# Part of the key under which KVs are stored.
REQUEST_NAMESPACE = _words("origin_input_ids extra_key cache_salt")

REQUEST_GUARDS: dict[str, Guard] = {
    "positional_embed_overrides": Guard(_is_none, "embeddings replace those of its tokens"),
    "input_embeds": Guard(_is_none, "embeddings stand for its tokens"),
    "multimodal_inputs": Guard(_is_none, "media stand for some of its tokens"),
    "token_type_ids": Guard(_is_none, "token types are added to its embeddings"),
    "lora_id": Guard(_is_none, "an adapter changes its weights"),
    "multi_item_delimiter_indices": Guard(_is_none, "a mask hides items from each other"),
    "dllm_config": Guard(_is_none, "diffusion attends to later tokens"),
    "beam_group": Guard(_is_none, "rows of a beam group share slots"),
    "session": Guard(_is_no_stream, "a streaming session keeps its row"),
    "session_generation": Guard(_is_none, "a session has a tree of its own"),
    # Outputs that are read at positions of the prompt are missing for tokens not computed.
    "token_indices_to_pool": Guard(_is_none, "the prompt is read out at positions"),
    "decision_layout": Guard(_is_none, "the prompt is read out at positions"),
    "dimensions": Guard(_is_none, "an embedding is asked for"),
    "return_pooled_hidden_states": Guard(_is_false, "an embedding is asked for"),
    "return_routed_experts": Guard(_is_false, "experts are looked up by slot", stores=True),
    "return_indexer_topk": Guard(_is_false, "indices are looked up by slot", stores=True),
    # KVs that come from elsewhere, in part, or later.
    "bootstrap_host": Guard(_is_none, "another server computes its KVs"),
    "bootstrap_room": Guard(_is_none, "another server computes its KVs"),
    "disagg_kv_sender": Guard(_is_none, "another server computes its KVs"),
    "pending_bootstrap": Guard(_is_false, "another server computes its KVs"),
    "pd_rebootstrap_forced_output_id": Guard(_is_none, "another server computes its KVs"),
    "staged_prefetch_plan": Guard(_is_none, "another cache loads its KVs"),
    "hisparse_staging": Guard(_is_false, "another cache loads its KVs"),
    "kv_rotation_base": Guard(_is_none, "its KVs are spread over ranks"),
    "discard_output_reason": Guard(_is_none, "its pass ran on KVs that never came"),
    "weight_version_events": Guard(_is_empty, "weights changed while it ran"),
    # Last, because the guards above give a better reason.
    "skip_radix_cache_insert": Guard(_is_false, "SGLang keeps its KVs out of every tree"),
}

# Cannot change a KV: how tokens are chosen, what is returned, who asks and when.
REQUEST_HARMLESS = _words("""
    rid http_worker_ipc stream priority routing_key routed_dp_rank kv_hints session_id
    bootstrap_port disagg_prefill_dp_rank
    sampling_params custom_logit_processor eos_token_ids vocab_size tokenizer
    require_reasoning reasoning_tokens _is_reasoning_over
    _think_end_matcher _think_end_match_len _think_start_match_len
    grammar grammar_key grammar_wait_ct
    return_logprob logprob_start_len logprob temp_scaled_logprobs top_p_normalized_logprobs
    return_sampling_mask sampling_mask_rows sampling_logprobs_mode return_flat_raw_top_logprobs
    return_hidden_states return_hidden_states_mode routed_experts_start_len
    origin_input_ids_unpadded
""")

# Where the scheduler stands with a request, and what it returns.
REQUEST_BOOKKEEPING = _words("""
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
""")

REQUEST_FIELDS = REQUEST_NAMESPACE | REQUEST_GUARDS.keys() | REQUEST_HARMLESS | REQUEST_BOOKKEEPING
# What this package keeps in a request (`reports.py`).
REQUEST_OURS = _words("impress_report")

SAMPLING_GUARDS: dict[str, Guard] = {
    "beam_width": Guard(_is_one, "rows of a beam group share slots"),
}
# How a token is chosen and when to stop: the token itself is in the key. `n` is expanded before.
SAMPLING_HARMLESS = _words("""
    max_new_tokens min_new_tokens n stop stop_token_ids stop_regex stop_strs stop_regex_strs
    stop_str_max_len stop_regex_max_len ignore_eos no_stop_trim
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    logit_bias sampling_seed watermark json_schema regex ebnf ebnf_full_assistant structural_tag
    custom_params skip_special_tokens spaces_between_special_tokens stream_interval is_normalized
""")

# From fields of a message to the fields of `Req` that they become, or may not become.
MESSAGE_BECOMES: dict[str, str] = {
    "input_ids": "origin_input_ids",
    "extra_key": "extra_key",
    "cache_salt": "cache_salt",
    "input_embeds": "input_embeds",
    "mm_inputs": "multimodal_inputs",
    "token_type_ids": "token_type_ids",
    "lora_id": "lora_id",
    "positional_embed_overrides": "positional_embed_overrides",
    "multi_item_delimiter_indices": "multi_item_delimiter_indices",
    "token_indices_to_pool": "token_indices_to_pool",
    "decision_layout": "decision_layout",
    "dimensions": "dimensions",
    "return_pooled_hidden_states": "return_pooled_hidden_states",
    "return_routed_experts": "return_routed_experts",
    "return_indexer_topk": "return_indexer_topk",
    "bootstrap_host": "bootstrap_host",
    "bootstrap_room": "bootstrap_room",
    # A session makes the whole prompt out of earlier turns; the ids are those of the prompt.
    "session_params": "session",
    "sampling_params": "sampling_params",
}
# Cannot change a KV, or only concern parts of SGLang that are refused at start.
MESSAGE_HARMLESS = _words("""
    rid http_worker_ipc input_text stream return_logprob logprob_start_len top_logprobs_num
    token_ids_logprob return_sampling_mask return_flat_raw_top_logprobs sampling_logprobs_mode
    return_hidden_states routed_experts_start_len session_id custom_logit_processor
    require_reasoning priority routing_key no_logs return_bytes return_entropy time_stats kv_hints
    bootstrap_port bootstrap_pair_key decode_tp_size routed_dp_rank disagg_prefill_dp_rank
    need_wait_for_mm_inputs num_items_assigned encoder_urls pp_prefetch_ticketed lora_name
""")
SESSION_HARMLESS = _words("id rid offset replace drop_previous_output")

# Messages that SGLang's scheduler takes, by the table of its dispatcher.
MESSAGES_OF_REQUESTS = _words("""
    TokenizedGenerateReqInput TokenizedEmbeddingReqInput BatchTokenizedGenerateReqInput
    BatchTokenizedEmbeddingReqInput AbortReq OpenSessionReqInput CloseSessionReqInput
    PauseGenerationReqInput ContinueGenerationReqInput
""")
# After these, the model identity or the memory that holds KVs may have changed.
MESSAGES_OF_WEIGHTS = _words("""
    UpdateWeightFromDiskReqInput UpdateWeightsFromDistributedReqInput
    UpdateWeightsFromTensorReqInput UpdateWeightsFromIPCReqInput UpdateWeightVersionReqInput
    BeginWeightUpdateReqInput EndWeightUpdateReqInput CheckWeightsReqInput
    LoadLoRAAdapterReqInput LoadLoRAAdapterFromTensorsReqInput UnloadLoRAAdapterReqInput
    ReleaseMemoryOccupationReqInput ResumeMemoryOccupationReqInput ScaleElasticEPReqInput
    PdRoleSwitchReqInput RpcReqInput
""")
# Concern groups, profiles, logs, corpora and other caches; none writes a weight or a KV of ours.
MESSAGES_HARMLESS = _words("""
    FlushCacheReqInput ClearHiCacheReqInput AttachHiCacheStorageReqInput
    DetachHiCacheStorageReqInput GetHiCacheL3LayoutReq
    InitWeightsUpdateGroupReqInput DestroyWeightsUpdateGroupReqInput
    InitWeightsSendGroupForRemoteInstanceReqInput SendWeightsToRemoteInstanceReqInput
    GetWeightsByNameReqInput SlowDownReqInput ProfileReq FreezeGCReq ShutdownReq
    GetInternalStateReq SetInternalStateReq ExpertDistributionReq ConfigureLoggingReq
    DumperControlReqInput AddExternalCorpusReqInput RemoveExternalCorpusReqInput
    ListExternalCorporaReqInput
""")
