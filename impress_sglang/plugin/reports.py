"""Carries each request's report from the scheduler's process to `meta_info["impress"]`.

SGLang cuts what a request has in `customized_info` by output tokens, so that an answer without any
would have no report. Its output streamer takes one more value for each answer that it sends, and
reports travel there. A request that ends outside that stream ends with a message that holds
nothing but text.

A tree cache uses `attach` and `report_of` only; `report_hooks.py` calls the rest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from impress_sglang.serving.report import unused_report
from impress_sglang.serving.truncation import truncated_tokens_of

# Key of `meta_info`.
REPORT_KEY = "impress"
# Attributes of ours: of SGLang's `Req` (known to `request_fields.py`), of what its tokenizer
# manager knows of a request, and of the input that requests are made of.
_OF_REQUEST = "impress_report"
_OF_STATE = "_impress_report"
_OF_INPUT = "_impress_prompt_report"
_MARK = "impress:"

Report: TypeAlias = dict[str, Any]
_policy: str | None = None


@dataclasses.dataclass(slots=True)
class _Carried:
    report: Report
    before: Report | None = None
    """That of its last admission, if it was put back and matched again."""
    sent: bool = False

    @property
    def used(self) -> Report | None:
        """The report of its last admission: `why` is explained when its first pass begins."""
        return self.before if self.report["why"] is None else self.report


def attach(req: Any, report: Report) -> None:
    """Give a request of SGLang's the report of its match, in place of that of an earlier match.

    It may be changed until the answer is sent. Its `why` is None until the request is in a pass.
    """
    carried = _carried(req)
    if carried is None:
        setattr(req, _OF_REQUEST, _Carried(report))
    else:
        carried.before, carried.report = carried.used, report


def report_of(req: Any) -> Report | None:
    """The report that a request was given last; None if it was never matched."""
    carried = _carried(req)
    return None if carried is None else carried.report


def opt_in(policy: str) -> None:
    """Let SGLang's output streamer ask for reports, in this process; `policy`: its name."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    global _policy
    _policy = policy
    SchedulerOutputStreamer.has_additional_customized_info = True


def opted_in() -> str | None:
    """The name of the policy of this process's reports; None if there are none."""
    return _policy


def reports_to_send(reqs: Iterable[Any], policy: str) -> list[Report | None]:
    """The report for each answer that is being sent, whole or in part.

    A streaming answer has it in its first part, and complete in its last.
    """
    return [_to_send(req, policy) for req in reqs]


def pack(message: Any, req: Any, policy: str) -> None:
    """Put the report of a request into the `AbortReq` that ends it, beside its own text."""
    packed = [_told(req, policy), message.abort_message]
    # Whatever a report may hold, it must not end the scheduler.
    message.abort_message = _MARK + json.dumps(packed, default=repr)


def take_abort(original: Callable[..., None], manager: Any, message: Any) -> None:
    """Around `TokenizerManager._handle_abort_req`: add the report that `pack` put there."""
    packed = message.abort_message
    if packed is None or not packed.startswith(_MARK):
        original(manager, message)
        return
    report, message.abort_message = json.loads(packed.removeprefix(_MARK))
    state = manager.rid_to_state.get(message.rid)
    original(manager, message)
    if state is not None and state.out_list:
        state.out_list[-1]["meta_info"][REPORT_KEY] = report


def keep(meta_info: dict[str, Any], state: Any, report: Report | None) -> None:
    """Put the report into `meta_info` of each part of an answer; None if it came before.

    For several samples (n > 1), SGLang first asks for the prompt alone. Each sample that finds the
    prompt where that request left it is told what that request did.
    """
    report = report or getattr(state, _OF_STATE, None)
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
    """Let the requests that are copied from an input know what the first of them reports."""
    setattr(obj, _OF_INPUT, [])


def _carried(req: Any) -> _Carried | None:
    carried: _Carried | None = getattr(req, _OF_REQUEST, None)
    return carried


def _told(req: Any, policy: str) -> Report:
    """What the answer of a request says."""
    carried = _carried(req)
    used = None if carried is None else carried.used
    return used or unused_report(policy, truncated_tokens_of(req.sampling_params))


def _to_send(req: Any, policy: str) -> Report | None:
    if req.finished():
        return _told(req, policy)
    carried = _carried(req)
    if carried is None or carried.sent or not req.stream:
        return None
    carried.sent = True
    return carried.used
