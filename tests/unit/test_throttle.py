"""The token bucket: no faster than told, over any number of threads, and hardly slower."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.storage.reader import BlockRuns, ChunkReader, OpenSegment
from impress_sglang.storage.throttle import TokenBucket
from tests.unit.kv_factory import VALUES, make_info, make_shape, random_kvs, write_kvs

# A busy machine delays the end of a wait, never its beginning.
SLACK_SECONDS = 0.5


def seconds_of(bucket: TokenBucket, sizes: list[int], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        began = time.monotonic()
        list(pool.map(bucket.take, sizes))
        return time.monotonic() - began


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_take_their_time_over_all_threads(threads: int) -> None:
    bucket = TokenBucket(1e6, burst_bytes=0)

    seconds = seconds_of(bucket, [10_000] * 30, threads)

    assert 0.3 <= seconds < 0.3 + SLACK_SECONDS


def test_one_request_may_be_larger_than_the_bucket() -> None:
    bucket = TokenBucket(1e6, burst_bytes=50_000)

    seconds = seconds_of(bucket, [250_000], 1)

    assert 0.2 <= seconds < 0.2 + SLACK_SECONDS


def test_a_burst_passes_at_once_and_what_follows_waits() -> None:
    bucket = TokenBucket(100_000, burst_bytes=200_000)

    assert seconds_of(bucket, [20_000] * 10, 2) < SLACK_SECONDS
    assert seconds_of(bucket, [30_000], 1) >= 0.3 - SLACK_SECONDS / 10


def test_an_idle_bucket_fills_to_its_burst_and_no_further() -> None:
    bucket = TokenBucket(1e6, burst_bytes=20_000)
    bucket.take(20_000)
    time.sleep(0.2)

    seconds = seconds_of(bucket, [10_000] * 22, 3)

    assert 0.2 <= seconds < 0.2 + SLACK_SECONDS


def test_an_idle_bucket_without_burst_saves_nothing() -> None:
    bucket = TokenBucket(1e6, burst_bytes=0)
    bucket.take(1)
    time.sleep(0.1)

    assert seconds_of(bucket, [100_000], 1) >= 0.1


def test_a_throttled_reader_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    shape = make_shape(layers=1, key_dim=128, value_dim=128)
    info = make_info(shape, range(64))
    path = write_kvs(tmp_path, info, *random_kvs(shape, 64, seed=1))
    size = info.layout().stream_bytes(VALUES)
    reader = ChunkReader(3, TokenBucket(2 * size, burst_bytes=0))
    untouched = ReadCost()
    segment = OpenSegment(path, direct=False)
    memory, starts = AlignedMemory(size), np.arange(0, size, 4096)
    runs = BlockRuns(segment, memory, info.layout().stream_offset(0, VALUES), starts, starts + 4096)

    began = time.monotonic()
    read = reader.read([runs])
    seconds = time.monotonic() - began

    assert read == size
    assert 0.5 <= seconds < 0.5 + SLACK_SECONDS
    assert reader.cost.bytes_per_second < untouched.bytes_per_second, "it learns that it is slow"
    segment.close()
    reader.close()
