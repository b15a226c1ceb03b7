"""Background threads: nobody waits for them, and they leave the model its processors."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.paper.store import PartStore
from impress_sglang.threads import BackgroundThread
from tests.unit.kv_factory import IDENTITY, make_shape
from tests.unit.store_factory import DEFAULTS


def test_the_threads_of_a_store_compute_alone(tmp_path: Path) -> None:
    config = ImpressConfig(ssd_dir=str(tmp_path), **DEFAULTS)
    store = PartStore(config, IDENTITY, make_shape())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert store.worker.submit(torch.get_num_threads).result() == 1
        assert store._rewriter.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        store.close()


def test_functions_run_in_order_on_one_thread_also_if_it_is_closed() -> None:
    """No exception ends it."""
    thread = BackgroundThread("a-test")
    ran: list[tuple[int, str]] = []
    errors = [OSError(5, "gone"), RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(1)]

    def run(number: int) -> int:
        ran.append((number, threading.current_thread().name))
        if number < len(errors):
            raise errors[number]
        return 2 * number

    futures = [thread.submit(run, number) for number in range(100)]

    assert thread.close(10)
    assert [future.exception(0) for future in futures[: len(errors)]] == errors
    assert [future.result(0) for future in futures[len(errors) :]] == [*range(8, 200, 2)]
    assert ran == [(number, "a-test") for number in range(100)]
    assert thread.close(10), "twice is as good as once"


def test_nobody_waits_longer_than_asked_for_a_thread_that_hangs() -> None:
    hangs = threading.Event()
    thread = BackgroundThread("hangs")
    late = thread.submit(hangs.wait, 30)
    behind = thread.submit(pow, 2, 2)
    began = time.monotonic()

    assert not thread.close(0.2)

    assert 0.2 <= time.monotonic() - began < 25
    assert not late.done() and not behind.done()
    hangs.set()
    assert behind.result(10) == 4, "it goes on where it was"


def test_the_end_of_a_process_does_not_wait_for_a_thread_that_hangs() -> None:
    script = """
import threading
from impress_sglang.threads import BackgroundThread

thread = BackgroundThread("hangs")
thread.submit(threading.Event().wait)
print("ends", flush=True)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, b"ends\n")
