"""Fields of SGLang's requests and messages that cannot make KVs depend on more than they are found
by: token ids, namespace (`extra_key` and `cache_salt`) and the model identity.

All others are found at run time (`eligibility.py`, `weights.py`): a field that is not here must
have the value of a plain request. `tests/integration/test_request_fields.py` knows why each field
of a release that is not here must stay out, and fails for one that it does not know.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of `Req`, in this order: what KVs are found by; how tokens are chosen, what is returned, who asks
# and when; where the scheduler stands with it, and what it returns.
REQUEST = _words("""
    origin_input_ids extra_key cache_salt lora_id

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

    impress_report
""")

# Of `SamplingParams`: how a token is chosen and when to stop. `n` is expanded before.
SAMPLING = _words("""
    max_new_tokens min_new_tokens n stop stop_token_ids stop_regex stop_strs stop_regex_strs
    stop_str_max_len stop_regex_max_len ignore_eos no_stop_trim
    temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    logit_bias sampling_seed watermark json_schema regex ebnf ebnf_full_assistant structural_tag
    custom_params skip_special_tokens spaces_between_special_tokens stream_interval is_normalized
""")

# Messages to the scheduler after which weights are the same, and what the pool holds: of requests;
# and those that concern groups, profiles, logs, corpora and other caches. Adapters are in
# namespaces of their weights.
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
