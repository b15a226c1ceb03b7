"""A server that prefills for others, and whose KVs reach nobody."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.utils import TransferBackend, get_kv_class
from sglang.srt.managers import disagg_service


def _of_nobody(_: TransferBackend, kind: Any) -> Any:
    return get_kv_class(TransferBackend.FAKE, kind)


prefill.get_kv_class = _of_nobody
disagg_service.get_kv_class = lambda *_: lambda **_: None
