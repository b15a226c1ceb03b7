"""Where a prefix's KVs come from: one contract for every source, then damage on the SSD.

Files are read with O_DIRECT where the file system has it, and through the page cache as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage import reader as reader_module
from impress_sglang.storage.direct_io import supports_direct_io
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.storage.reader import ChunkReader, OpenSegment
from impress_sglang.transfer.source import (
    MemorySource,
    PrefixSource,
    SegmentSource,
    SourceSpan,
    Staging,
    Want,
)
from tests.unit.kv_factory import (
    chunk_disk_bytes,
    flip_byte,
    heads_of,
    make_info,
    make_shape,
    random_kvs,
    rows_of,
    write_kvs,
)

# Tiny heads leave most of a chunk's stride to padding; the large ones fill it exactly.
SHAPES = {
    "gqa-float32": make_shape(query_heads=8, kv_heads=4, key_dim=16, value_dim=8, probe=(1, 2)),
    "mha-bfloat16": make_shape(
        query_heads=6, kv_heads=6, key_dim=16, value_dim=16, dtype=torch.bfloat16, probe=(0, 1, 2)
    ),
    "tiny-float16": make_shape(
        query_heads=4, kv_heads=2, key_dim=1, value_dim=3, dtype=torch.float16, probe=(1,)
    ),
    "full-stride-bfloat16": make_shape(
        query_heads=8, kv_heads=2, key_dim=256, value_dim=256, dtype=torch.bfloat16, probe=(0,)
    ),
    "mqa-no-other-keys": make_shape(query_heads=4, kv_heads=1, key_dim=32, probe=(0,)),
    "all-probed-float16": make_shape(kv_heads=2, dtype=torch.float16, probe=(0, 1)),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a segment of `num_tokens` tokens."""

    num_tokens: int
    chunk_tokens: int
    start: int
    stop: int


# Starts and stops inside chunks and at their edges, the last, short chunk, a single token, and
# segments of another chunk size.
LAYOUTS = {
    "one-segment": [Part(77, 8, 0, 77)],
    "one-short-segment": [Part(5, 8, 0, 5)],
    "tail-of-a-segment": [Part(77, 8, 13, 77)],
    "middle-of-a-segment": [Part(77, 8, 13, 30)],
    "several-segments": [
        Part(40, 8, 0, 21),
        Part(33, 8, 5, 33),
        Part(64, 16, 17, 18),
        Part(24, 24, 0, 24),
        Part(50, 8, 47, 50),
    ],
}


class Case:
    """A source, the KVs that it must give, and what each read must cost."""

    def __init__(self, shape: KVShape, parts: list[Part], keys: Tensor, values: Tensor) -> None:
        self.shape, self.parts, self.keys, self.values = shape, parts, keys, values
        self.num_tokens = keys.shape[1]
        self.source: PrefixSource
        self.staging = Staging()
        self.paths: list[Path] = []

    @property
    def on_ssd(self) -> bool:
        return bool(self.paths)

    def expected(self, layer: int, stream: Stream, tokens: Tensor) -> Tensor:
        return rows_of(self.shape, self.keys, self.values, layer, stream, tokens)

    def cost(self, stream: Stream, tokens: Tensor) -> tuple[int, int]:
        """Bytes and chunks that a read of these tokens must take, from the definition."""
        touched, first = set(), 0
        for number, part in enumerate(self.parts):
            for token in tokens.tolist():
                if first <= token < first + part.stop - part.start:
                    touched.add((number, (token - first + part.start) // part.chunk_tokens))
            first += part.stop - part.start
        if not self.on_ssd or not heads_of(self.shape, stream):
            return 0, 0
        sizes = [
            chunk_disk_bytes(
                self.shape, stream, self.parts[n].chunk_tokens, self.parts[n].num_tokens, chunk
            )
            for n, chunk in touched
        ]
        return sum(sizes), len(sizes)


def open_case(
    directory: Path, shape: KVShape, parts: list[Part], reader: ChunkReader, *, direct: bool
) -> tuple[Case, list[OpenSegment]]:
    spans, keys, values, paths = [], [], [], []
    for number, part in enumerate(parts):
        info = make_info(
            shape,
            range(part.num_tokens),
            chunk_tokens=part.chunk_tokens,
            segment_id=f"segment{number}",
        )
        own_keys, own_values = random_kvs(shape, part.num_tokens, seed=number)
        paths.append(write_kvs(directory, info, own_keys, own_values, direct=direct))
        segment = OpenSegment(paths[-1], direct=direct)
        spans.append(SourceSpan(segment, part.start, part.stop))
        keys.append(own_keys[:, part.start : part.stop])
        values.append(own_values[:, part.start : part.stop])
    case = Case(shape, parts, torch.cat(keys, 1), torch.cat(values, 1))
    case.paths = paths
    case.source = SegmentSource(shape, spans, reader, case.staging)
    return case, [span.segment for span in spans]


@pytest.fixture(scope="module")
def reader() -> Iterator[ChunkReader]:
    reader = ChunkReader(3)
    yield reader
    reader.close()


ALL_SHAPES = [
    f"{name}: {shape}" for name in ("one-segment", "several-segments") for shape in SHAPES
]
OTHER_LAYOUTS = [f"{name}: gqa-float32" for name in LAYOUTS] + [
    "tail-of-a-segment: full-stride-bfloat16",
    "several-segments, O_DIRECT: gqa-float32",
    "several-segments, O_DIRECT: full-stride-bfloat16",
]


@pytest.fixture(
    scope="module",
    params=[
        *(f"memory: {shape}" for shape in SHAPES),
        *dict.fromkeys(ALL_SHAPES + OTHER_LAYOUTS),
    ],
)
def case(
    request: pytest.FixtureRequest, reader: ChunkReader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, shape_name = request.param.split(": ")
    shape = SHAPES[shape_name]
    if kind == "memory":
        keys, values = random_kvs(shape, 77, seed=9)
        case = Case(shape, [Part(77, 8, 0, 77)], keys, values)
        case.source = MemorySource(shape, keys, values)
        yield case
        return
    name, _, direct = kind.partition(", ")
    directory = tmp_path_factory.mktemp("segments")
    if direct and not supports_direct_io(directory):
        pytest.skip("this file system has no O_DIRECT")
    case, segments = open_case(directory, shape, LAYOUTS[name], reader, direct=bool(direct))
    yield case
    for segment in segments:
        segment.close()


def random_tokens(case: Case, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(case.num_tokens, generator=generator)[:count].sort().values


def chunks_read(case: Case, stream: Stream) -> int:
    return case.source.chunks_read[stream] if isinstance(case.source, SegmentSource) else 0


def poison(staging: Staging) -> None:
    """Fill the memory that reads land in with NaN of every floating-point type."""
    for stream in Stream:
        staging.view(stream, 1 << 20)[:] = b"\xff" * (1 << 20)


# ---- the contract of `PrefixSource`


def test_gives_all_tokens_of_every_stream(case: Case) -> None:
    everything = torch.arange(case.num_tokens)
    assert case.source.num_tokens == case.num_tokens
    for layer in range(case.shape.num_layers):
        found = case.source.read(layer, [Want(stream) for stream in Stream])

        for stream, rows in zip(Stream, found, strict=True):
            expected = case.expected(layer, stream, everything)
            assert rows.dtype == case.shape.dtype
            assert rows.device.type == "cpu"
            assert rows.shape == expected.shape
            assert torch.equal(rows, expected), stream


@pytest.mark.parametrize("stream", Stream)
def test_gives_each_stream_alone(case: Case, stream: Stream) -> None:
    (rows,) = case.source.read(1, [Want(stream)])

    assert torch.equal(rows, case.expected(1, stream, torch.arange(case.num_tokens)))


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_gives_random_tokens_of_every_stream(case: Case, share: float) -> None:
    for seed in range(2):
        wants = [
            Want(stream, random_tokens(case, max(1, int(share * case.num_tokens)), seed + stream))
            for stream in Stream
        ]

        found = case.source.read(seed % 2, wants)

        for want, rows in zip(wants, found, strict=True):
            assert want.tokens is not None
            assert torch.equal(rows, case.expected(seed % 2, want.stream, want.tokens))


def test_gives_any_single_token(case: Case) -> None:
    for token in range(0, case.num_tokens, 1 if case.on_ssd else 10):
        tokens = torch.tensor([token])
        stream = Stream(token % 3)

        (rows,) = case.source.read(token % 2, [Want(stream, tokens)])

        assert torch.equal(rows, case.expected(token % 2, stream, tokens))


def test_gives_unbroken_runs_of_tokens(case: Case) -> None:
    for first in range(0, case.num_tokens, 11):
        for stop in range(first + 1, case.num_tokens + 1, 13):
            tokens = torch.arange(first, stop)

            (rows,) = case.source.read(0, [Want(Stream.VALUES, tokens)])

            assert torch.equal(rows, case.expected(0, Stream.VALUES, tokens))


def test_costs_exactly_the_chunks_that_it_touches(case: Case) -> None:
    for seed, count in enumerate((1, 2, 5, case.num_tokens // 2, case.num_tokens)):
        for stream in Stream:
            tokens = random_tokens(case, max(1, count), seed)
            num_bytes, num_chunks = case.cost(stream, tokens)
            before = case.source.bytes_read
            chunks_before = chunks_read(case, stream)

            case.source.read(0, [Want(stream, tokens)])

            assert case.source.bytes_read - before == num_bytes
            assert chunks_read(case, stream) - chunks_before == num_chunks


def test_reads_each_byte_once_when_all_streams_are_read_whole(case: Case) -> None:
    everything = torch.arange(case.num_tokens)
    before = case.source.bytes_read

    case.source.read(0, [Want(stream) for stream in Stream])

    assert case.source.bytes_read - before == sum(
        case.cost(stream, everything)[0] for stream in Stream
    )


def test_old_bytes_of_the_staging_memory_do_not_leak(case: Case) -> None:
    for tokens in (None, random_tokens(case, 3, 1), torch.tensor([case.num_tokens - 1])):
        picked = torch.arange(case.num_tokens) if tokens is None else tokens
        poison(case.staging)

        found = case.source.read(1, [Want(stream, tokens) for stream in Stream])

        for stream, rows in zip(Stream, found, strict=True):
            assert torch.equal(rows, case.expected(1, stream, picked))


def test_rows_stay_valid_while_other_streams_are_read(case: Case) -> None:
    """Probing reads keys first; the rest of the layer follows while they are in use."""
    everything = torch.arange(case.num_tokens)

    (probe,) = case.source.read(0, [Want(Stream.PROBE_KEYS)])
    (other,) = case.source.read(0, [Want(Stream.OTHER_KEYS)])
    case.source.read(1, [Want(Stream.VALUES)])

    assert torch.equal(probe, case.expected(0, Stream.PROBE_KEYS, everything))
    assert torch.equal(other, case.expected(0, Stream.OTHER_KEYS, everything))


# ---- reads from segments


@pytest.fixture
def several(reader: ChunkReader, tmp_path: Path) -> Iterator[Case]:
    case, segments = open_case(
        tmp_path, SHAPES["gqa-float32"], LAYOUTS["several-segments"], reader, direct=False
    )
    yield case
    for segment in segments:
        segment.close()


@settings(max_examples=25)
@given(data=st.data())
def test_any_spans_and_tokens_are_read_right(
    tmp_path_factory: pytest.TempPathFactory, reader: ChunkReader, data: st.DataObject
) -> None:
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        num_tokens = data.draw(st.integers(1, 60))
        start = data.draw(st.integers(0, num_tokens - 1))
        stop = data.draw(st.integers(start + 1, num_tokens))
        parts.append(Part(num_tokens, 8 * data.draw(st.integers(1, 3)), start, stop))
    case, segments = open_case(tmp_path_factory.mktemp("any"), shape, parts, reader, direct=False)
    poison(case.staging)
    stream = data.draw(st.sampled_from(list(Stream)))
    chosen = data.draw(st.sets(st.integers(0, case.num_tokens - 1), min_size=1))
    tokens = torch.tensor(sorted(chosen))

    (rows,) = case.source.read(1, [Want(stream, tokens)])

    assert torch.equal(rows, case.expected(1, stream, tokens))
    assert case.source.bytes_read == case.cost(stream, tokens)[0]
    for segment in segments:
        segment.close()


@pytest.mark.parametrize("target", [1, 4096, 3 * 4096, 10 * 4096])
def test_size_of_single_reads_changes_nothing(
    several: Case, monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    """Runs are cut into many reads in parallel: same rows, same bytes."""
    monkeypatch.setattr(reader_module, "TARGET_READ_BYTES", target)
    poison(several.staging)

    test_gives_all_tokens_of_every_stream(several)
    test_costs_exactly_the_chunks_that_it_touches(several)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every single read from now on."""
    sizes: list[int] = []
    preadv = os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(len(views[0]))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr("os.preadv", count)
    return sizes


@pytest.mark.parametrize(("target", "largest"), [(1, 4096), (8191, 4096), (8192, 8192)])
def test_single_reads_are_no_larger_than_told(
    several: Case,
    reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
    target: int,
    largest: int,
) -> None:
    """But of one chunk at least."""
    monkeypatch.setattr(reader_module, "TARGET_READ_BYTES", target)

    several.source.read(0, [Want(Stream.VALUES, torch.arange(21))])

    assert max(reads) == largest
    assert sum(reads) == several.source.bytes_read


def test_neighbouring_chunks_are_one_read(several: Case, reads: list[int]) -> None:
    several.source.read(0, [Want(Stream.VALUES)])

    assert len(reads) == len(several.parts), "one unbroken run in each segment"
    assert sum(reads) == several.source.bytes_read


def test_source_names_its_segments_in_order(several: Case) -> None:
    assert isinstance(several.source, SegmentSource)
    assert several.source.segment_ids == [f"segment{n}" for n in range(5)]


# ---- damage on the SSD


def all_chunks(shape: KVShape, part: Part, path: Path) -> Iterator[tuple[int, Stream, int, int]]:
    """(layer, stream, chunk, offset) of every chunk, found from sizes alone."""
    count = -(-part.num_tokens // part.chunk_tokens)
    sizes = {
        (stream, chunk): chunk_disk_bytes(shape, stream, part.chunk_tokens, part.num_tokens, chunk)
        for stream in Stream
        for chunk in range(count)
    }
    offset = path.stat().st_size - shape.num_layers * sum(sizes.values())
    for layer in range(shape.num_layers):
        for (stream, chunk), size in sizes.items():
            if size:
                yield layer, stream, chunk, offset
            offset += size


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_flipped_byte_in_any_chunk_is_found_and_only_there(several: Case, place: str) -> None:
    """The first or the last byte of each chunk of a segment, one after the other."""
    part, path = several.parts[1], several.paths[1]
    tokens_of = [range(0), range(21, 49)]  # where this segment stands in the prefix
    for layer, stream, chunk, offset in list(all_chunks(several.shape, part, path)):
        low, high = chunk * part.chunk_tokens, (chunk + 1) * part.chunk_tokens
        rows = min(high, part.num_tokens) - low
        dim = several.shape.value_dim if stream is Stream.VALUES else several.shape.key_dim
        length = rows * len(heads_of(several.shape, stream)) * dim * 4
        bad = offset if place == "first" else offset + length - 1
        inside = [t for t in tokens_of[1] if low <= t - 21 + part.start < high]
        outside = torch.tensor([t for t in range(several.num_tokens) if t not in inside])

        flip_byte(path, bad)

        for tokens in (None, torch.tensor(inside[:1])):
            with pytest.raises(ChunkUnreadable) as caught:
                several.source.read(layer, [Want(stream, tokens)])
            assert caught.value.segment_id == "segment1"
            assert f"chunk {chunk}" in str(caught.value)
        for other in Stream:
            tokens = outside if other is stream else torch.arange(several.num_tokens)
            (found,) = several.source.read(layer, [Want(other, tokens)])
            assert torch.equal(found, several.expected(layer, other, tokens))
        several.source.read(1 - layer, [Want(s) for s in Stream])
        flip_byte(path, bad)
    test_gives_all_tokens_of_every_stream(several)


def test_damage_in_several_segments_names_one_of_them(several: Case) -> None:
    for number in (1, 3):
        for _, _, _, offset in all_chunks(
            several.shape, several.parts[number], several.paths[number]
        ):
            flip_byte(several.paths[number], offset)

    with pytest.raises(ChunkUnreadable) as caught:
        several.source.read(0, [Want(stream) for stream in Stream])

    assert caught.value.segment_id in ("segment1", "segment3")


def test_two_chunks_that_changed_places_are_found(several: Case) -> None:
    """Right bytes with a right checksum, but of another chunk of the same stream."""
    path = several.paths[1]
    places = {
        chunk: offset
        for layer, stream, chunk, offset in all_chunks(several.shape, several.parts[1], path)
        if layer == 0 and stream is Stream.VALUES
    }
    data = bytearray(path.read_bytes())
    first, second = (slice(places[c], places[c] + 4096) for c in (1, 2))
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)

    with pytest.raises(ChunkUnreadable, match="segment1"):
        several.source.read(0, [Want(Stream.VALUES)])


def open_and_read_everything(path: Path, shape: KVShape, direct: bool) -> None:
    reader = ChunkReader(2)
    try:
        segment = OpenSegment(path, direct=direct)
        try:
            span = SourceSpan(segment, 0, segment.info.num_tokens)
            source = SegmentSource(shape, [span], reader, Staging())
            for layer in range(shape.num_layers):
                source.read(layer, [Want(stream) for stream in Stream])
        finally:
            segment.close()
    finally:
        reader.close()


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "one byte short": cut(lambda size: size - 1),
    "one block short": cut(lambda size: size - 4096),
    "half": cut(lambda size: size // 2),
    "header only": cut(lambda size: 4096),
    "part of a header": cut(lambda size: 100),
    "empty": cut(lambda size: 0),
    "removed": Path.unlink,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direct", [False, True])
def test_a_short_or_missing_file_is_unreadable(tmp_path: Path, damage: str, direct: bool) -> None:
    if direct and not supports_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    shape = SHAPES["full-stride-bfloat16"]
    info = make_info(shape, range(32), segment_id="c0ffee")
    path = write_kvs(tmp_path, info, *random_kvs(shape, 32, seed=1))
    open_and_read_everything(path, shape, direct)

    DAMAGE[damage](path)

    with pytest.raises(ChunkUnreadable) as caught:
        open_and_read_everything(path, shape, direct)
    assert caught.value.segment_id == "c0ffee"


@pytest.mark.parametrize("size", [1, 4096, 4097, 20_000])
def test_a_file_that_shrinks_while_it_is_open_is_unreadable(several: Case, size: int) -> None:
    path = several.paths[3]
    os.truncate(path, path.stat().st_size - size)

    with pytest.raises(ChunkUnreadable) as caught:
        for layer in range(2):
            several.source.read(layer, [Want(stream) for stream in Stream])

    assert caught.value.segment_id == "segment3"


def test_a_file_that_is_removed_while_it_is_open_can_still_be_read(several: Case) -> None:
    """An eviction must not disturb a request that reads."""
    for path in several.paths:
        path.unlink()

    test_gives_all_tokens_of_every_stream(several)


def test_a_failed_read_is_unreadable(several: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)

    with pytest.raises(ChunkUnreadable, match="Input/output error"):
        several.source.read(0, [Want(Stream.VALUES)])


def test_source_works_again_after_an_unreadable_chunk(several: Case) -> None:
    offset = next(all_chunks(several.shape, several.parts[0], several.paths[0]))[3]
    flip_byte(several.paths[0], offset)
    with pytest.raises(ChunkUnreadable):
        several.source.read(0, [Want(stream) for stream in Stream])

    flip_byte(several.paths[0], offset)

    test_gives_all_tokens_of_every_stream(several)
