"""The hooks by which reports travel (`reports.py`), for `plugin.py`; they import when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.plugin.flags import config_of
from impress_sglang.plugin.hooks import Hook

_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_SENDER = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def _policy_of(tree_cache: Any) -> str | None:
    """The name of the policy of a tree cache of ours; None if it is another one."""
    from impress_sglang.plugin.served_cache import served_cache_of

    cache = served_cache_of(tree_cache)
    return None if cache is None else cache.served.policy


def _after_built(result: Any, streamer: Any, reqs: Any, *_: Any, **__: Any) -> Any:
    from impress_sglang.plugin.reports import REPORT_KEY, reports_to_send

    policy = _policy_of(streamer.tree_cache)
    return result if policy is None else {**result, REPORT_KEY: reports_to_send(reqs, policy)}


def _before_output(sender: Any, message: Any, req: Any = None, *_: Any, **__: Any) -> None:
    """Of all that the scheduler sends, look for what ends a request outside the output stream."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req

    from impress_sglang.plugin.reports import opted_in, pack

    if isinstance(message, AbortReq) and isinstance(req, Req) and (policy := opted_in()):
        pack(message, req, policy)


def _around_meta_info(
    original: Callable[..., None], meta_info: dict[str, Any], state: Any, key: str, values: Any
) -> None:
    from impress_sglang.plugin.reports import REPORT_KEY, keep

    if key == REPORT_KEY:
        keep(meta_info, state, values)
    else:
        original(meta_info, state, key, values)


def _around_abort(original: Callable[..., None], *arguments: Any) -> None:
    from impress_sglang.plugin.reports import take_abort

    take_abort(original, *arguments)


def _before_tokenized(manager: Any, obj: Any, *_: Any, **__: Any) -> None:
    if config_of(manager.server_args) is not None:
        from impress_sglang.plugin.reports import share

        share(obj)


HOOKS = (
    Hook(f"{_STREAMER}.build_additional_customized_info", _after_built, "after"),
    Hook(f"{_SENDER}.send_output", _before_output, "before"),
    Hook(f"{_MANAGER}._accumulate_request_meta_info", _around_meta_info, "around"),
    Hook(f"{_MANAGER}._handle_abort_req", _around_abort, "around"),
    Hook(f"{_MANAGER}._create_tokenized_object", _before_tokenized, "before"),
)
