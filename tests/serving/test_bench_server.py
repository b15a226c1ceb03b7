"""`python -m bench.core.server`: it starts, is slowed down, and refuses nonsense."""

from __future__ import annotations

import time
from pathlib import Path

from tests.serving.compare import report
from tests.serving.conftest import impress_flags
from tests.serving.harness import running
from tests.serving.tiny_models import random_tokens


def test_the_command_starts_a_server_that_obeys(workdir: Path, tiny_llama: Path) -> None:
    flags = impress_flags(
        workdir / "store-bench-server",
        "--impress-min-prefix-tokens=64",
        "--impress-retention=0.25",
        "--impress-device-gb=0",
        "--impress-host-gb=0",
        "--max-total-tokens=3000",
    )
    prefix, questions = random_tokens(600, seed=1), (random_tokens(9, seed=s) for s in range(2))
    seconds = []
    log = workdir / "bench-server.log"
    with running(tiny_llama, log, *flags, zygote=None, bench=True) as server:
        server.generate(prefix, 1)
        server.flush()
        for mbps, question in zip((0, 0.1), questions, strict=True):
            assert server.post("/bench/ssd_mbps", mbps=mbps).ok
            began = time.monotonic()
            said = report(server.generate([*prefix, *question], 1))
            seconds.append(time.monotonic() - began)
            assert said["path"] == "ssd"
            server.flush()
        assert server.post("/bench/ssd_mbps", mbps=-1).status_code == 400
        server.assert_quiet()
    assert seconds[1] > said["ssd_bytes"] / 0.1e6 > 2 * seconds[0]
