"""The SGLang versions and names that the integration relies on, checked at start.

SGLang swallows exceptions of a plugin, so a name that moved would go unnoticed until a request
gives a wrong answer. `check_sglang` names what is missing before anything is served; `hooks.py`
checks what is hooked.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil

from impress_sglang.errors import UnsupportedError

SUPPORTED_SGLANG = ("0.5.23",)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# Handlers of messages that can change weights, or release and restore them or the pool.
WEIGHT_HANDLERS = (
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.begin_weight_update",
    f"{_UPDATER}.end_weight_update",
    f"{_UPDATER}.release_memory_occupation",
    f"{_UPDATER}.resume_memory_occupation",
    f"{_UPDATER}.check_weights",
    f"{_SCHEDULER}.load_lora_adapter",
    f"{_SCHEDULER}.load_lora_adapter_from_tensors",
    f"{_SCHEDULER}.unload_lora_adapter",
    f"{_SCHEDULER}.handle_scale_elastic_ep",
    f"{_SCHEDULER}.handle_pd_role_switch",
    f"{_SCHEDULER}.handle_rpc_request",
)

RELIED_ON = (
    "sglang.srt.arg_groups.overrides.declare_resolution",
    "sglang.srt.arg_groups.overrides.get_default_attn_backend",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
    "sglang.srt.layers.rotary_embedding.base._is_cpu",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
    "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    "sglang.srt.mem_cache.radix_cache.RadixCache._delete_leaf",
    "sglang.srt.mem_cache.radix_cache.RadixCache._insert_cache",
    "sglang.srt.mem_cache.radix_cache.RadixCache.path_device_indices",
    "sglang.srt.mem_cache.registry.register_radix_cache_backend",
)


def sglang_version() -> str:
    """Version of the installed SGLang."""
    return importlib.metadata.version("sglang")


def check_sglang() -> None:
    """Refuse a SGLang that this package was not tested with.

    Raises:
        UnsupportedError: the version is not supported, or a name is missing.
    """
    version = sglang_version()
    if version not in SUPPORTED_SGLANG:
        raise UnsupportedError(
            f"impress-sglang supports SGLang {', '.join(SUPPORTED_SGLANG)}, but {version} is "
            f"installed; run: pip install sglang=={SUPPORTED_SGLANG[-1]}"
        )
    missing = [name for name in RELIED_ON if not _exists(name)]
    if missing:
        raise UnsupportedError(f"this build of SGLang {version} lacks {', '.join(missing)}")


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(pkgutil.resolve_name(module), attribute)
    except (ImportError, AttributeError):
        return False
