"""Background threads compute alone, so that the model keeps its processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.management.store import PrefixStore
from tests.unit.kv_factory import IDENTITY, make_shape
from tests.unit.store_factory import DEFAULTS

CORES = len(os.sched_getaffinity(0))
SCRIPT = r"""
import re, sys, threading
from pathlib import Path
import torch
from impress_sglang.threads import compute_alone

torch.set_num_threads(int(sys.argv[1]))
left, right = torch.randn(400, 500), torch.randn(500, 500)

def compute():
    for _ in range(400):
        left @ right

def background():
    if sys.argv[2] == "alone":
        compute_alone()
    torch.randn(2_000_000).mul_(2.0).amax()
    done.set()
    never.wait()

def switches():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.M)[1])

done, never = threading.Event(), threading.Event()
compute()
threading.Thread(target=background, daemon=True).start()
done.wait()
before = switches()
compute()
print(switches() - before, torch.get_num_threads())
"""


def sleeps(kind: str) -> int:
    """How often the thread that computes went to sleep, after another one has computed."""
    command = [sys.executable, "-c", SCRIPT, str(CORES), kind]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    count, threads = map(int, found.stdout.split())
    assert threads == CORES, "the others keep their number"
    return count


@pytest.mark.skipif(CORES == 1, reason="one core has no team")
def test_a_thread_that_computes_alone_does_not_slow_down_the_others() -> None:
    """If the second line fails, OpenMP has changed, and `compute_alone` may not be needed."""
    assert sleeps("alone") < 100
    assert sleeps("with a team") > 100


def test_the_threads_of_a_store_compute_alone(tmp_path: Path) -> None:
    config = ImpressConfig(ssd_dir=str(tmp_path), **DEFAULTS)
    store = PrefixStore(config, IDENTITY, make_shape())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert store._keeper._thread.submit(torch.get_num_threads).result() == 1
        rewriter = store._reorderer._rewriter
        assert rewriter._thread.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        store.close()
