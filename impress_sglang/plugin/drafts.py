"""The draft models of speculative decoding, whose KVs are stored with those of the model.

A draft's pool has the same slots. Without its KVs answers are right, but nearly no draft is
accepted behind a prefix that was loaded, which takes longer than not to speculate.
"""

from __future__ import annotations

from typing import Any

_WORKER = "impress_draft_worker"


def note_drafts(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """After SGLang's scheduler has made its draft worker: keep it where a tree cache is built."""
    setattr(scheduler.tp_worker, _WORKER, scheduler.draft_worker)
    return result


def draft_runners(tp_worker: Any) -> tuple[Any, ...]:
    """SGLang's `ModelRunner` of each draft model that has KVs of its own."""
    worker = getattr(tp_worker, _WORKER)
    return () if worker is None else tuple(worker._draft_model_runners())
