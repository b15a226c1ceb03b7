"""Requests that run with a stored prefix, for whoever serves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from impress_sglang.paper.runtime import StoredRequest
from impress_sglang.serving.report import new_report
from impress_sglang.transfer.sources import ReadStats


def stored_request(
    tokens: Tensor, resident: Tensor, slots: Tensor, rid: str = "r", **fields: Any
) -> StoredRequest:
    """Its prefix of these tokens is resident in some slots, and of the rest a part is loaded."""
    m = len(tokens) - len(resident)
    report = new_report("impress", len(resident), len(tokens))
    source = SimpleNamespace(
        rid=rid, num_layers=99, stats=ReadStats(), end_layer=lambda layer: None
    )
    store = SimpleNamespace(
        close_source=lambda source: None, ahead=SimpleNamespace(top_up=lambda: None)
    )
    own: dict[str, Any] = {"store": store, "source": source, "report": report}
    return StoredRequest(resident, slots, m, **(own | fields))
