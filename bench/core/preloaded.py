"""What each forked server would do alike: SGLang and the store are imported, and waits are short.

Only for the process that forks servers (`core/zygote.py`), which imports it first of all.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

_IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.llama",
    "sglang.srt.models.registry",
    "impress_sglang.paper.plugin.part_cache",
    "impress_sglang.plugin.entry",
)


def _warm_up_soon() -> None:
    """SGLang sleeps for a second before it looks whether a server can be warmed up, and so on."""
    from sglang.srt.entrypoints import http_server

    soon = itertools.repeat(0.1, 10)

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, next(soon, seconds)))

    http_server.time = SimpleNamespace(**{**vars(time), "sleep": sleep})


def _end_when_told() -> None:
    """SGLang looks every five seconds whether it was told to end, and its scheduler rests once more
    before it does; here both end at once."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    note = SignalHandler.sigterm_handler

    def note_and_look(self: Any, *received: Any) -> None:
        note(self, *received)
        looking = asyncio.get_running_loop().create_task(self.tokenizer_manager.sigterm_watchdog())
        self.tokenizer_manager.asyncio_tasks.add(looking)

    shut_down = Scheduler.handle_shutdown

    def stay_awake(self: Any, *received: Any) -> Any:
        self.idle_sleeper = None
        return shut_down(self, *received)

    SignalHandler.sigterm_handler = note_and_look
    Scheduler.handle_shutdown = stay_awake


# Nothing of what modules say is of use, and each server has a log of its own.
for _output in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), _output)
# As a server does after its warm-up: garbage collections pass over all that was imported.
gc.disable()
for _name in _IMPORTED:
    importlib.import_module(_name)
_warm_up_soon()
_end_when_told()
gc.freeze()
gc.enable()
