"""Starts servers by forking a process that has imported SGLang once.

Importing SGLang takes 20 seconds of CPU in each of a server's three processes, which would be most
of the time of a session with many servers. They are forked instead, by the fork server of
multiprocessing, which has done once what each would do alike (`core/preloaded.py`), and fork their
children; after that they run as `python -m sglang.launch_server` does. The command itself, and
options that SGLang reads while it is imported, need a real start.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

TELL_WHERE = signal.SIGUSR1
"""A server's processes write to its log what each of their threads does."""


class Zygote:
    """The process that forks servers; there is one at a time, which ends with its user."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """It imports SGLang, with this environment, while the caller goes on."""
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            forkserver.set_forkserver_preload(["bench.core.preloaded"])
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def fork(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        preload: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ForkServerProcess:
        """Start a server with these arguments of `sglang.launch_server`; its output goes to `log`.

        `preload` are modules that it imports before SGLang's plugins; `environment` has variables
        for what is read after SGLang was imported. It leads a process group of its own, and is
        killed when the caller ends.
        """
        order = [*argv], str(log), preload, dict(environment or {})
        process = multiprocessing.get_context("forkserver").Process(target=_serve, args=order)
        process.start()
        return process


def _serve(argv: list[str], log: str, preload: str | None, environment: dict[str, str]) -> None:
    """Be a server, and end without tearing down all that was imported, which takes seconds."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    for output in (1, 2):
        os.dup2(descriptor, output)
    faulthandler.register(TELL_WHERE, file=2)
    # SGLang asks for "spawn", with which each process would import everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    status = 1
    try:
        for module in filter(None, (preload or "").split(",")):
            importlib.import_module(module)
        load_plugins()
        launch_server(prepare_server_args(argv))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    """Kill this process group once the process that asked for it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
