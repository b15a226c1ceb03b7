"""Starts servers by forking a process that has imported SGLang once.

Importing SGLang takes 20 seconds of CPU in each of a server's three processes, which would be most
of the time of a session with many servers. The servers are forked instead, and fork their
children; after that they run as `python -m sglang.launch_server` does. The command itself, and
options that SGLang reads while it is imported, need a real start. What else each server would do
alike is done once as well: the store's modules are imported, and SGLang's hooks find what they
replace in a table.

Protocol: one JSON object a line on standard input {"argv", "log", "preload", "environment"}, where
`preload` names a module to import before SGLang's plugins or is null, and `environment` has
variables for what is read after SGLang was imported; the answer is one line with the process id of
the server, which leads its own process group. Servers that are left when standard input ends, also
because its other end was killed, are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from bench.core.session import ROOT

TELL_WHERE = signal.SIGUSR1
"""A server's processes write to its log what each of their threads does."""


IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.llama",
    "sglang.srt.models.registry",
    "impress_sglang.paper.plugin.part_cache",
    "impress_sglang.plugin.entry",
)


class ForkedProcess:
    """A child of the zygote, which reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def alive(self) -> bool:
        """Whether it runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


class Zygote:
    """The process that forks servers; it imports SGLang while the caller goes on."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.core.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=dict(environment),
            # Ctrl-C does not reach it: servers are ended in order.
            start_new_session=True,
        )
        self._ready = False

    def fork(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        preload: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Start a server with these arguments of `sglang.launch_server`; its output goes to `log`.

        `preload` is a module that it imports first, with more variables in the environment.

        Raises:
            RuntimeError: the zygote has ended.
        """
        if not self._ready:
            assert self._answer() == "ready"
            self._ready = True
        order = {"argv": [*argv], "log": str(log), "preload": preload}
        order["environment"] = dict(environment or {})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._answer()))

    def close(self) -> None:
        """End it, and the servers that are left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._ready:
            # It may be importing for a while yet, and has no servers.
            self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the process that forks servers has ended")
        return line


def main() -> None:
    """Import, then serve orders until standard input ends."""
    # As a server does after its warm-up: garbage collections pass over all that was imported.
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    _warm_up_soon()
    _end_when_told()
    hook_registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    hook_registry._propagate_patch = BoundNames().replace
    gc.freeze()
    gc.enable()
    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_server(order)
        children.add(pid)
        print(pid, flush=True)
    for pid in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    # There is nothing to save, and tearing down all that was imported takes seconds.
    os._exit(0)


def _reap(children: set[int]) -> None:
    """Take in ended children at once, so that their process ids disappear."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(pid)


def _become_server(order: dict[str, Any]) -> None:
    status = 1
    try:
        _prepare_process(order)
        if order["preload"]:
            importlib.import_module(order["preload"])
        launch(order["argv"])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


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


class BoundNames:
    """Which names of modules functions are bound to.

    SGLang walks through all names of all modules for each hook, which takes a server a second.
    """

    def __init__(self) -> None:
        self._bound: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        modules = [own for own in sys.modules.values() if isinstance(own, ModuleType)]
        for module in modules:
            for name, value in list(vars(module).items()):
                if callable(value):
                    self._bound[id(value)].append((module, name))
        self._known = {id(module) for module in modules}

    def replace(self, original: object, wrapped: object, source: object) -> int:
        """Bind all names of a function but the `source`'s own to another one; how many there were.

        Modules that were imported since then are looked through.
        """
        count = 0
        for module, name in [*self._bound.get(id(original), ()), *self._names_of_new_modules()]:
            if module is not source and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                count += 1
        return count

    def _names_of_new_modules(self) -> Iterator[tuple[ModuleType, str]]:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and id(module) not in self._known:
                yield from ((module, name) for name in list(vars(module)))


def _prepare_process(order: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(TELL_WHERE, file=2)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


def launch(argv: list[str]) -> None:
    """Be a server, as `python -m sglang.launch_server` is."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(argv))


if __name__ == "__main__":
    main()
