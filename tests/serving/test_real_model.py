"""SmolLM2, and the bytes that really leave the SSD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.core.servers import store_flags
from demo.model import model_path
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import SegmentHeader, read_header
from tests.serving.compare import report
from tests.serving.harness import Server, running

TOKENS = 800


@pytest.fixture(scope="module")
def server(workdir: Path) -> Iterator[Server]:
    """Started by the command that users type."""
    sizes = ("--dtype=float32", "--max-total-tokens=12000")
    flags = (*store_flags(workdir / "store-smollm"), "--impress-host-gb=0.5")
    log = workdir / "smollm.log"
    with running(model_path(), log, *sizes, *flags, zygote=None) as server:
        yield server
        server.assert_quiet()


def _header_of(store: Path, prefix: list[int]) -> SegmentHeader:
    """Of a prefix that was stored, as no other begins like it."""
    paths = store.glob("*/segments/*/*.kv")
    headers = [read_header(path, FileSystem()) for path in paths]
    (header,) = (header for header in headers if header.info.tokens.tolist() == prefix)
    return header


def test_bytes_of_a_prefix_in_few_bits(server: Server, workdir: Path) -> None:
    """A first read, as a share of 16-bit KVs, and what the kernel counted."""
    params = {"custom_params": {"impress_bits": 6}}

    def ask(prefix: list[int]) -> dict[str, Any]:
        return report(server.generate([*prefix, *range(1000, 1064)], 1, sampling_params=params))

    prefix = [4 + (i * 7907) % 40000 for i in range(TOKENS)]
    other = list(range(5000, 5200))
    for stored in (other, prefix):
        server.generate(stored, 1)
        server.flush()
    # The first such request also reads pages of the code that serves it.
    ask(other)
    server.flush()
    before = _bytes_read_by(server)
    said = ask(prefix)
    from_device = _bytes_read_by(server) - before
    assert said["loaded_tokens"] == said["used_tokens"] == TOKENS
    header = _header_of(workdir / "store-smollm", prefix)
    assert said["bits_mean"] == 6.0
    half_precision = TOKENS * 30 * 3 * 2 * 64 * 2
    with_header = said["ssd_bytes"] + header.info.layout().header_bytes
    # Beside the bits there are ranges, checksums and the ends of blocks.
    assert with_header <= 0.45 * half_precision
    if server.stats()["store"]["direct_io"]:
        assert with_header <= from_device <= 1.02 * with_header


def _bytes_read_by(server: Server) -> int:
    """Bytes that the processes of a server read from block devices."""
    first = psutil.Process(server.pid)
    processes = first, *first.children(recursive=True)
    return sum(process.io_counters().read_bytes for process in processes)
