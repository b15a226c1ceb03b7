"""SmolLM2, and the bytes that really leave the SSD."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.core.servers import store_flags
from demo.model import model_path
from impress_sglang.paper.scores import retained_tokens
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import SegmentHeader, read_header
from tests.serving.compare import report
from tests.serving.harness import Server, Zygote, running

TOKENS = 800


@pytest.fixture(scope="module")
def smollm() -> Path:
    return model_path()


def smollm_flags(store: Path) -> tuple[str, ...]:
    sizes = ("--dtype=float32", "--max-total-tokens=12000")
    return (*sizes, *store_flags(store), "--impress-host-gb=0.5", "--impress-device-gb=0.5")


@pytest.fixture(scope="module", autouse=True)
def starting(smollm: Path, workdir: Path) -> Iterator[Server]:
    """Started by the command that users type, which takes as long as the first tests."""
    flags = smollm_flags(workdir / "store-smollm")
    with running(smollm, workdir / "smollm.log", *flags, zygote=None, waits=False) as server:
        yield server


@pytest.fixture(scope="module")
def server(starting: Server) -> Iterator[Server]:
    """The same, ready."""
    starting.wait_ready()
    yield starting
    starting.assert_quiet()


@pytest.fixture(scope="module")
def parts(smollm: Path, workdir: Path, zygote: Zygote) -> Iterator[Server]:
    """Uses a quarter of each stored prefix, which loads within the pass."""
    flags = (
        *smollm_flags(workdir / "store-smollm-parts"),
        "--impress-policy=paper",
        "--impress-retention=0.25",
    )
    with running(smollm, workdir / "smollm-parts.log", *flags, zygote=zygote) as running_server:
        yield running_server
        running_server.assert_quiet()


def test_bytes_of_a_part_of_a_prefix(parts: Server) -> None:
    """By our count and by the kernel's: less than all, of caches that are empty and have room.

    The next question finds most of it there.
    """
    prefix = [3 + (i * 7919) % 40000 for i in range(TOKENS)]
    other = list(range(6000, 6200))
    for stored in (other, prefix):
        parts.generate(stored, 1)
        parts.flush()
    # The first such request also reads pages of the code that serves it.
    parts.generate([*other, *range(1000, 1064)], 1)
    parts.flush()
    before = _bytes_read_by(parts)
    said = report(parts.generate([*prefix, *range(1000, 1064)], 1))
    from_device = _bytes_read_by(parts) - before
    assert said["loaded_tokens"] == retained_tokens(TOKENS, 0.25) == 200, said
    assert said["layers_by_probe"] + said["layers_by_fallback"] == 30
    whole = TOKENS * 30 * 3 * 2 * 64 * 4
    assert 0.25 * whole < said["ssd_needed_bytes"] <= said["ssd_bytes"] < whole
    assert said["ahead_bytes"] - said["ahead_used_bytes"] <= 0.25 * said["ssd_bytes"]
    if parts.stats()["store"]["direct_io"]:
        # The processes may also read pages of their code, and read the header.
        assert said["ssd_bytes"] <= from_device <= 1.05 * said["ssd_bytes"]
    again = report(parts.generate([*prefix, *range(2000, 2064)], 1))
    assert again["device_chunks"] > 0.5 * again["chunks_accessed"]
    assert again["ssd_bytes"] < said["ssd_bytes"] / 2


def _header_of(store: Path, prefix: list[int]) -> SegmentHeader:
    """Of a prefix that was stored, as no other begins like it."""
    paths = store.glob("*/segments/*/*.kv")
    headers = [read_header(path, FileSystem()) for path in paths]
    (header,) = (own for own in headers if own.info.tokens.tolist() == prefix)
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
    pids = subprocess.run(
        ["ps", "-o", "pid=", "-g", str(server.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    total = 0
    for pid in pids:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        total += int(fields["read_bytes"])
    return total
