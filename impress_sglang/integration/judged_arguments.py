"""What is known of each server argument of SGLang 0.5.23, as data.

An argument is harmless (it changes neither what a stored KV is nor how rows are read), part of the
identity under which KVs are stored, restricted to values that are known to be right, or inert: it
says how a feature works that a restricted argument keeps off. One that is in no table must have
SGLang's default (`guards.py`); a test fails as long as there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Restriction:
    """The values that are known to be right, and what to tell the user about others."""

    allows: Callable[[Any], bool]
    sentence: str


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPPORTED_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def is_off(value: Any) -> bool:
    """Whether a value of an argument keeps a feature off."""
    return value in (None, False, 0, "", "none", "null", "off")


def _one(value: Any) -> bool:
    return value in (None, 1)


# In the order in which they are checked: only the first refusal is shown.
RESTRICTED: dict[str, Restriction] = {
    "disable_radix_cache": Restriction(
        is_off, "IMPRESS finds prefixes through the radix cache: drop --disable-radix-cache"
    ),
    "enable_hierarchical_cache": Restriction(
        is_off, "IMPRESS has its own tiers: drop --enable-hierarchical-cache"
    ),
    "enable_lmcache": Restriction(is_off, "IMPRESS has its own tiers: drop --enable-lmcache"),
    "enable_flexkv": Restriction(is_off, "IMPRESS has its own tiers: drop --enable-flexkv"),
    "enable_unified_cache_external_linker": Restriction(
        is_off, "IMPRESS has its own tiers: drop --enable-unified-cache-external-linker"
    ),
    "radix_cache_backend": Restriction(
        _one_of(None, "impress"),
        "IMPRESS is a radix cache backend itself: drop --radix-cache-backend",
    ),
    "speculative_algorithm": Restriction(
        is_off, "IMPRESS does not support speculative decoding: drop --speculative-algorithm"
    ),
    "pp_size": Restriction(_one, "IMPRESS does not support pipeline parallelism: use --pp-size 1"),
    "tp_size": Restriction(
        _one,
        "IMPRESS does not support tensor parallelism yet, because ranks would have to agree on "
        "every stored prefix: use --tp-size 1",
    ),
    "enable_dp_attention": Restriction(
        is_off, "IMPRESS does not support DP attention: drop --enable-dp-attention"
    ),
    "attn_dp_size": Restriction(_one, "IMPRESS does not support DP attention: drop --attn-dp-size"),
    "dp_size": Restriction(
        _one,
        "IMPRESS does not support data parallelism, whose replicas would share one store: run one "
        "server per replica, each with its own --impress-ssd-dir",
    ),
    "dcp_size": Restriction(
        _one, "IMPRESS does not support decode context parallelism: use --dcp-size 1"
    ),
    "attn_cp_size": Restriction(
        _one, "IMPRESS does not support context parallelism: use --attn-cp-size 1"
    ),
    "enable_two_batch_overlap": Restriction(
        is_off, "IMPRESS does not support two-batch overlap: drop --enable-two-batch-overlap"
    ),
    "enable_pdmux": Restriction(
        is_off, "IMPRESS does not support PD multiplexing: drop --enable-pdmux"
    ),
    "enable_unified_memory": Restriction(
        is_off, "IMPRESS writes KVs to slots that do not move: drop --enable-unified-memory"
    ),
    "disaggregation_mode": Restriction(
        is_off,
        "IMPRESS does not support prefill/decode disaggregation: drop --disaggregation-mode",
    ),
    "enable_lora": Restriction(
        is_off, "IMPRESS does not support LoRA yet: drop --enable-lora and --lora-paths"
    ),
    "lora_paths": Restriction(
        lambda paths: not paths,
        "IMPRESS does not support LoRA yet: drop --enable-lora and --lora-paths",
    ),
    "kv_cache_dtype": Restriction(
        _one_of(*SUPPORTED_KV_DTYPES),
        "IMPRESS stores KVs in the model's dtype: use --kv-cache-dtype auto",
    ),
    "tokenizer_worker_num": Restriction(
        _one, "IMPRESS reports through a single tokenizer process: use --tokenizer-worker-num 1"
    ),
    "device": Restriction(
        _one_of("cpu", "cuda"), "IMPRESS runs on CPUs and CUDA: use --device cpu or cuda"
    ),
    "model_impl": Restriction(
        _one_of("auto", "sglang"),
        "IMPRESS knows the attention of SGLang's own models only: drop --model-impl",
    ),
    "enable_deterministic_inference": Restriction(
        is_off,
        "IMPRESS does not promise the same bits however a prefix comes back: drop "
        "--enable-deterministic-inference",
    ),
    "rl_on_policy_target": Restriction(
        is_off,
        "IMPRESS does not promise the same bits however a prefix comes back: drop "
        "--rl-on-policy-target",
    ),
    "enable_mis": Restriction(
        is_off, "IMPRESS loads prefixes for causal attention, not for masks: drop --enable-mis"
    ),
    "enable_return_routed_experts": Restriction(
        is_off,
        "IMPRESS keeps KVs and not which experts made them: drop --enable-return-routed-experts",
    ),
    "forward_hooks": Restriction(
        lambda hooks: not hooks,
        "IMPRESS cannot know what hooks do to KVs: drop --forward-hooks",
    ),
}

# Switches that were not judged together with IMPRESS; must be off or at SGLang's default.
OFF = _words("""
    is_embedding enable_multimodal encoder_only language_only language_model_only
    quantization_param_path modelopt_quant quantize_and_serve rl_quant_profile
    prefill_only_disable_kv_cache enable_page_major_kv_layout enable_kv_cache_sharding
    enable_dsa_cache_layer_split enable_hisparse enable_streaming_session
    enable_session_radix_cache enable_return_indexer_topk dllm_algorithm
    enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
    enable_prefill_cp enable_cp_decode_attn_tp enable_single_batch_overlap enable_eplb
    enable_elastic_expert_backup elastic_ep_backend enable_pd_role_switch
    disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
    cpu_offload_gb kt_weight_path ple_offload_embedding enable_paged_experts
    checkpoint_engine_wait_weights_before_ready kv_canary debug_tensor_dump_input_file
    enable_nvidia_megakernel enable_amd_monokernel enable_torch_compile enable_lean_attention
    grpc_mode smg_grpc_mode use_ray enable_http2 sidecar
    uno_lora_path hicache_storage_backend
""")
# The same for numbers and names, whose only judged value is SGLang's default.
AT_DEFAULT = _words("""
    nnodes node_rank ep_size moe_dp_size dwdp_size moe_a2a_backend offload_group_size
    detokenizer_worker_num startup_weight_load_mode weight_cache_mode decoupled_spec_role
    ep_num_redundant_experts init_expert_location
""")

# Schedule policies whose order `--impress-schedule` may change.
SCHEDULED = ("fcfs", "lpm", "dfs-weight", "hrrn")

# Change KVs beyond rounding, and are in neither the weights nor the model's configuration. Dtypes
# and shapes are in the shape of KVs, RoPE and --json-model-override-args in the configuration.
IDENTITY = _words("""
    quantization enable_tf32_matmul fp8_gemm_runner_backend fp4_gemm_runner_backend
    bf16_gemm_backend moe_runner_backend flashinfer_mxfp4_moe_precision
""")

HARMLESS = _words("""
    model_path tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init load_format
    model_loader_extra_config trust_remote_code context_length revision model_config_parser
    json_model_override_args dtype enable_fp32_lm_head modelopt_checkpoint_restore_path
    modelopt_checkpoint_save_path modelopt_export_path download_dir model_checksum
    delete_ckpt_after_loading decrypted_config_file custom_weight_loader
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
    remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
    remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
    modelexpress_config

    enable_memory_saver
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens
    chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
    enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value
    abort_on_priority_when_disabled schedule_low_priority_values_first
    priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
    radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set
    disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
    enable_mixed_chunk enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
    prefill_delayer_max_delay_ms min_free_slots_delay allow_auto_truncate stream_interval
    batch_notify_size incremental_streaming_output strip_thinking_cache enable_strict_thinking

    nccl_port dist_timeout dist_init_addr gated_launch_port base_gpu_id gpu_id_step random_seed
    watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node
    gc_threshold host port fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile
    ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
    weight_version enable_http_worker_reuseport enable_p2p_check

    chat_template trust_request_chat_template hf_chat_template_name completion_template
    file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser
    default_chat_template_kwargs tool_call_parser tool_server sampling_defaults
    preferred_sampling_params stream_response_default_include_usage enable_response_store
    sampling_backend grammar_backend constrained_json_whitespace_pattern
    constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    disable_outlines_disk_cache enable_custom_logit_processor enable_return_hidden_states
    return_hidden_states_mode sampling_mask_max_tokens enable_watermark watermark_config
    watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
    watermark_max_probability watermark_default_enabled watermark_enforce_all
    enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
    disable_tokenizer_batch_decode

    log_level log_level_http log_requests log_requests_level log_requests_format
    log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
    enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
    load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
    bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging kv_events_config load_publish_endpoint
    enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
    enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
    export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder
    debug_tensor_dump_layers msprobe_dump_config enable_layerwise_nvtx_marker

    attention_backend decode_attention_backend prefill_attention_backend page_size cuda_graph_config
    cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill
    cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph
    disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
    enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph disable_flashinfer_autotune
    flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
    triton_attention_split_tile_size enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce
    disable_shared_experts_fusion enforce_shared_experts_fusion
    disable_flashinfer_cutlass_moe_fp4_allgather
""")

# Configure something that is kept off, by a restriction above or by the models that are known.
INERT = _words("""
    speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path
    speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
    speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_use_rejection_sampling speculative_token_map speculative_attention_mode
    speculative_draft_attention_backend speculative_dsa_topk_backend
    speculative_draft_kv_cache_dtype speculative_draft_window_size speculative_moe_runner_backend
    speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
    speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set
    enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config
    decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
    spec_trace_dir speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
    speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
    speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
    speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
    speculative_boundary_reduction speculative_use_block_verification
    speculative_draft_sink_size decrypted_draft_config_file enable_draft_weights_cpu_backup

    pp_max_micro_batch_size pp_async_batch_depth load_balance_method dcp_comm_backend
    dcp_replicate_q_proj cp_strategy enable_cp_tp_group_sharing enable_linker_mla_dedup
    enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
    enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size
    enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp
    disable_attn_tp_gather enable_nccl_nvls enable_symm_mem disable_custom_all_reduce
    enable_mscclpp enable_torch_symm_mem pre_warm_nccl boundary_reduction
    enable_quant_communications enable_flashinfer_allreduce_fusion
    enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
    enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
    disable_aiter_allreduce_fusion_in_decode tbo_token_distribution_threshold
    enable_w4a4_mxfp4_megamoe deepep_v2_mode deepep_mode fuseep_mode
    deepep_dispatcher_output_dtype ep_dispatch_algorithm eplb_algorithm
    eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
    eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
    expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
    moe_dense_tp_size mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset
    elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout flashinfer_a2a_dispatch_type
    paged_experts_num_resident

    c128_page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
    disable_hybrid_swa_memory enable_encoder_swa_bounded_replay
    enable_decoder_swa_bounded_replay disable_chunked_prefix_cache flashinfer_mla_disable_ragged
    dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend
    dsa_topk_backend dsv4_attn_backend dsa_triton_union enable_dsa_fused_indexer
    qsa_indexer_dtype enable_deepseek_v4_fp4_indexer enable_scattered_sconv mamba_backend
    max_mamba_cache_size mamba_ssm_dtype mamba_max_states_per_path
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_full_memory_ratio
    mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
    enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
    linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec
    prefill_kv_cache_dequant_dtype mlx_enable_sampling

    hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size
    hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy
    hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
    hicache_storage_prefetch_retry_max_attempts unified_cache_external_linker_backend
    unified_cache_external_linker_config hisparse_config lmcache_config_file flexkv_config_file

    mm_attention_backend enable_precise_embedding_interpolation
    enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder
    mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
    media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
    limit_mm_data_per_request enable_mm_global_cache image_processor_backend
    mm_global_cache_backend disable_fast_image_processor mm_feature_transport
    asr_max_buffer_seconds asr_max_concurrent_sessions encoder_transfer_backend encoder_urls
    encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder

    enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras
    max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
    experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
    lora_drain_wait_threshold offload_num_in_group offload_prefetch_step offload_mode
    enable_torch_compile_debug_mode torch_compile_max_bs
    kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
    kt_max_deferred_experts_per_token dllm_algorithm_config dllm_fdfo ple_offload_backend
    ple_offload_dir weight_cache_socket weight_cache_timeout enable_weights_cpu_backup

    disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
    disaggregation_decode_retraction_backup num_reserved_decode_tokens
    disaggregation_decode_extra_slots disaggregation_decode_polling_interval
    disaggregation_enable_kv_checksum disaggregation_decode_host_receive_threshold
    disaggregation_decode_allocation_policy optimistic_prefill_attempts pdmux_config_path
    sm_group_num kv_canary_real_data kv_canary_sweep_interval grpc_port grpc_worker_threads
    grpc_response_timeout_secs sidecar_args smg_http_sidecar_port http2_max_concurrent_streams
    http2_initial_connection_window_size
""")

ARGUMENTS = frozenset(RESTRICTED) | OFF | AT_DEFAULT | IDENTITY | HARMLESS | INERT
