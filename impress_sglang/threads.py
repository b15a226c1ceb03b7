"""Background threads that neither take cores from the model nor delay the end of the process."""

from __future__ import annotations

import ctypes
import functools
import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

_T = TypeVar("_T")
_P = ParamSpec("_P")


def locked(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Let a method hold the `_lock` of its object, a `threading.RLock`."""

    @functools.wraps(method)
    def wrapper(self: Any, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        with self._lock:
            return method(self, *arguments, **keywords)

    return wrapper


def use_one_torch_thread() -> None:
    """Make torch use only the calling thread for its computations from now on.

    Otherwise OpenMP gives each computing thread a team of its own, with one thread per core. As
    soon as the teams together have more threads than cores, idle members sleep after each parallel
    loop instead of spinning, also in the model's team (libgomp's
    `GOMP_SPINCOUNT`): a forward pass on a CPU took a fifth longer, long after the work had ended.
    """
    # Torch sets a thread's number of threads at the first query; it must not do so later.
    torch.get_num_threads()
    runtime = _openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch has loaded, if any."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    library = re.search(r"\S*/lib(gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return None if library is None else ctypes.CDLL(library[0])


class BackgroundThread:
    """One thread that runs functions in order, for work that may never return.

    Unlike with `concurrent.futures`, the end of the process does not wait for it: a disk that hangs
    must not keep a server from ending. No exception ends it before `close`.
    """

    def __init__(self, name: str, initializer: Callable[[], None] | None = None) -> None:
        """`initializer` runs first, on the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._initializer = initializer
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run a function after all earlier ones."""
        future: Future[_T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def close(self, seconds: float) -> bool:
        """End the thread after all submitted work; returns False if that takes over `seconds`."""
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._initializer is not None:
            self._initializer()
        while (job := self._jobs.get()) is not None:
            job()
            # The job holds its arguments, which may be large.
            del job
