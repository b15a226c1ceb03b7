"""Carries each request's report from the scheduler's process to `meta_info["impress"]`.

SGLang cuts a request's `customized_info` by output tokens, so an answer without any would have no
report. Its output streamer accepts one more value per answer, which carries the report. A request
that ends outside that stream ends with a message that holds only text. A tree cache uses `attach`
only; the other functions are hooks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from impress_sglang.serving.custom_params import TRUNCATED_KEY, params_of
from impress_sglang.serving.report import unused_report

# Key of `meta_info`.
REPORT_KEY = "impress"
# Attributes of ours, beside those on SGLang's `Req` (listed in `eligibility.py`): on the tokenizer
# manager's state of a request, and on the input that requests are made of.
_OF_STATE = "_impress_report"
_OF_INPUT = "_impress_prompt_report"
_MARK = "impress:"

Report: TypeAlias = dict[str, Any]
_policy: str | None = None


def attach(req: Any, report: Report) -> None:
    """Attach a report to a request of SGLang's; it may be changed until the answer is sent.

    Its `why` is None until the request is in a pass.
    """
    req.impress_report, req.impress_sent = report, False


def opt_in(policy: str) -> None:
    """Let SGLang's output streamer collect reports in this process; `policy`: its name."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    global _policy
    _policy = policy
    SchedulerOutputStreamer.has_additional_customized_info = True


def after_built(result: Any, streamer: Any, reqs: Iterable[Any], *_: Any, **__: Any) -> Any:
    """After `SchedulerOutputStreamer.build_additional_customized_info`: add reports to it.

    There is one for each answer that is being sent, whole or in part. A streaming answer has it in
    its first part, and complete in its last.
    """
    if _policy is None:
        return result
    return {**result, REPORT_KEY: [_to_send(req) for req in reqs]}


def before_output(sender: Any, message: Any, req: Any = None, *_: Any, **__: Any) -> None:
    """Before `SenderWrapper.send_output`: put the report of a request into the message that ends it
    outside the output stream, beside its own text."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req

    if _policy is not None and isinstance(message, AbortReq) and isinstance(req, Req):
        packed = [_report_of(req), message.abort_message]
        # Whatever a report holds, it must not crash the scheduler.
        message.abort_message = _MARK + json.dumps(packed, default=repr)


def around_abort(original: Callable[..., None], manager: Any, message: Any) -> None:
    """Around `TokenizerManager._handle_abort_req`: add the report that came with its message."""
    packed, report = message.abort_message, None
    if packed is not None and packed.startswith(_MARK):
        report, message.abort_message = json.loads(packed.removeprefix(_MARK))
    state = manager.rid_to_state.get(message.rid)
    original(manager, message)
    if report is not None and state is not None and state.out_list:
        state.out_list[-1]["meta_info"][REPORT_KEY] = report


def around_meta_info(
    original: Callable[..., None], meta_info: dict[str, Any], state: Any, key: str, values: Any
) -> None:
    """Around `TokenizerManager._accumulate_request_meta_info`: keep the report in each part.

    It is None if it came before. For several samples (n > 1), SGLang first requests the prompt
    alone. Each sample that finds its prompt resident afterwards gets the report of that request.
    """
    if key != REPORT_KEY:
        original(meta_info, state, key, values)
        return
    report = values or getattr(state, _OF_STATE, None)
    if report is None:
        return
    setattr(state, _OF_STATE, report)
    alone = getattr(state.obj, _OF_INPUT, [])
    end = meta_info["finish_reason"]
    if alone and report["path"] == "device":
        report = alone[0]
    elif end and end["type"] != "abort" and not meta_info["completion_tokens"]:
        alone.append(report)
    meta_info[REPORT_KEY] = report


def share(obj: Any) -> None:
    """Let the requests that are copied from an input share the report of the first of them."""
    setattr(obj, _OF_INPUT, [])


def _report_of(req: Any) -> Report:
    report: Report | None = getattr(req, "impress_report", None)
    if report is None or report["why"] is None:
        truncated = params_of(req.sampling_params).get(TRUNCATED_KEY, 0)
        return unused_report(_policy or "", truncated)
    return report


def _to_send(req: Any) -> Report | None:
    if req.finished():
        return _report_of(req)
    report: Report | None = getattr(req, "impress_report", None)
    if report is None or req.impress_sent or not req.stream:
        return None
    req.impress_sent = True
    return None if report["why"] is None else report
