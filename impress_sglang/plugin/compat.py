"""The SGLang releases and names that the integration relies on, checked at start.

SGLang swallows exceptions of a plugin, so a name that moved would go unnoticed until a request
gives a wrong answer. `check_sglang` names what is missing before anything is served; `hooks.py`
checks what is hooked.
"""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil

from packaging.version import Version

from impress_sglang.errors import UnsupportedError

logger = logging.getLogger(__name__)

OLDEST, NEWEST = "0.5.22", "0.5.23"
"""The releases that were tested; a newer one starts if it passes the checks of the start."""

RELIED_ON = (
    "sglang.srt.arg_groups.overrides.declare_resolution",
    "sglang.srt.arg_groups.overrides.get_default_attn_backend",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
    "sglang.srt.layers.rotary_embedding.base._is_cpu",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
    "sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
    "sglang.srt.mem_cache.radix_cache.RadixCache._delete_leaf",
    "sglang.srt.mem_cache.radix_cache.RadixCache._insert_cache",
    "sglang.srt.mem_cache.radix_cache.RadixCache.path_device_indices",
    "sglang.srt.mem_cache.registry.register_radix_cache_backend",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices",
    "sglang.utils.TypeBasedDispatcher",
)


def sglang_version() -> str:
    """Version of the installed SGLang."""
    return importlib.metadata.version("sglang")


def check_sglang() -> None:
    """Refuse a SGLang that is too old, or lacks what this package needs.

    Raises:
        UnsupportedError: with one sentence.
    """
    version = sglang_version()
    if _release(version) < _release(OLDEST):
        raise UnsupportedError(
            f"impress-sglang supports SGLang {OLDEST} and later, but {version} is installed; run: "
            f"pip install sglang=={NEWEST}"
        )
    missing = [name for name in RELIED_ON if not _exists(name)]
    if missing:
        raise UnsupportedError(f"this build of SGLang {version} lacks {', '.join(missing)}")


def warn_if_untested() -> None:
    """Warn of a release that is newer than those that were tested."""
    version = sglang_version()
    if _release(version) > _release(NEWEST):
        logger.warning(
            "SGLang %s is newer than the releases that IMPRESS was tested with (%s to %s); it "
            "passed the checks of the start",
            version,
            OLDEST,
            NEWEST,
        )


def _release(version: str) -> tuple[int, ...]:
    return Version(version).release


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(pkgutil.resolve_name(module), attribute)
    except (ImportError, AttributeError):
        return False
