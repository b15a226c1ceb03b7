"""Stock SGLang, on a CPU with the rectangular attention that all compared servers share.

Its radix cache, scheduler and models are SGLang's own, and so is any other attention backend than
torch_native; IMPRESS is installed but not enabled. The module level code runs in the main process
and again in each spawned child, before plugins are loaded there.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def _use_rectangular_attention(backend: Any, *_: Any) -> Any:
    from impress_sglang.plugin.rectangular import attend_rectangularly

    attend_rectangularly(backend)
    return backend


def _use_native_rope(runner: Any, *_: Any, **__: Any) -> None:
    if runner.device == "cpu":
        from sglang.srt.layers.rotary_embedding import base

        base._is_cpu = True


HookRegistry.register(
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    _use_rectangular_attention,
    HookType.AFTER,
)
HookRegistry.register(
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    _use_native_rope,
    HookType.BEFORE,
)
