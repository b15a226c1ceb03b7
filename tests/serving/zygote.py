"""Starts servers by forking a process that has imported SGLang once.

Importing SGLang takes 20 seconds of CPU in each of a server's three processes, which would be most
of the time of a test session with many servers. The servers are forked instead, and fork their
children; after that they run as `python -m sglang.launch_server` does. Tests of the command itself,
and of options that SGLang reads while it is imported, start it for real (`harness.launch`).

Protocol: one JSON object a line on standard input {"argv", "log", "stock"}; the answer is one
line with the process id of the server, which leads its own process group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Import, then serve orders until standard input ends."""
    _import_sglang()
    # Children that end are reaped at once, so that their process ids disappear.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_server(order)
        print(pid, flush=True)


def _import_sglang() -> None:
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama
    import sglang.srt.models.registry  # noqa: F401


def _become_server(order: dict[str, Any]) -> None:
    status = 1
    try:
        _prepare_process(order)
        _serve(order)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _prepare_process(order: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


def _serve(order: dict[str, Any]) -> None:
    if order["stock"]:
        import tests.serving.stock_server  # noqa: F401
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(order["argv"]))


if __name__ == "__main__":
    main()
