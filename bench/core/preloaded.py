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


def _hook_soon() -> None:
    """SGLang looks in all of 9,000 modules for what a hook replaces; no module has methods."""
    from sglang.srt.plugins import hook_registry

    look = hook_registry._propagate_patch
    hook_registry._propagate_patch = lambda original, wrapped, owner: (
        0 if isinstance(owner, type) else look(original, wrapped, owner)
    )


def _warm_up_soon() -> None:
    """SGLang sleeps for a second before it looks whether a server can be warmed up, and so on."""
    from sglang.srt.entrypoints import http_server

    soon = itertools.repeat(0.1, 10)

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, next(soon, seconds)))

    http_server.time = SimpleNamespace(**{**vars(time), "sleep": sleep})


def _end_when_told() -> None:
    """SGLang looks every five seconds whether it was told to end; here it looks at once."""
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    note = SignalHandler.sigterm_handler

    def note_and_look(self: Any, *received: Any) -> None:
        note(self, *received)
        looking = asyncio.get_running_loop().create_task(self.tokenizer_manager.sigterm_watchdog())
        self.tokenizer_manager.asyncio_tasks.add(looking)

    SignalHandler.sigterm_handler = note_and_look


# Nothing of what modules say is of use, and each server has a log of its own.
for _output in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), _output)
# As a server does after its warm-up: garbage collections pass over all that was imported.
gc.disable()
for _name in _IMPORTED:
    importlib.import_module(_name)
_hook_soon()
_warm_up_soon()
_end_when_told()
gc.freeze()
gc.enable()
