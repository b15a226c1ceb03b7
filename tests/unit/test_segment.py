"""The segment file: where its parts stand, a header not to be misread, all written or nothing."""

from __future__ import annotations

import dataclasses
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage import segment
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape, SegmentLayout
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import FORMAT_VERSION, SegmentHeader, SegmentInfo, read_header
from impress_sglang.transfer.wanted import pages_per_chunk
from tests.unit.kv_factory import make_info, make_shape, random_kvs, random_mapping, write_kvs

FILES = FileSystem()
BLOCK = 4096
SMALL = make_info(make_shape(), range(20))
KINDS = {
    "in order": SMALL,
    "no probe heads, reordered": make_info(make_shape(probe=()), range(20), generation=3),
}


def some_header(info: SegmentInfo) -> SegmentHeader:
    """Checksums and, where there are some, mapping lists by chance."""
    generator = np.random.default_rng(1)
    checksums = generator.integers(0, 2**63, info.layout().num_blocks, np.uint64)
    mapping = random_mapping(info, 2) if info.reordered else None
    sinks = generator.integers(0, 256, info.arrays()["sinks"][1], np.uint8)
    return SegmentHeader(info, checksums, sinks, mapping)


def header_file(directory: Path, info: SegmentInfo) -> Path:
    path = directory / f"{info.segment_id}.kv"
    path.write_bytes(segment.encode_header(some_header(info)))
    return path


def check_same(left: SegmentHeader | SegmentInfo, right: SegmentHeader | SegmentInfo) -> None:
    """Field by field, with the dtypes of arrays."""
    np.testing.assert_equal(dataclasses.asdict(left), dataclasses.asdict(right))
    for field in dataclasses.fields(left):
        values = getattr(left, field.name), getattr(right, field.name)
        assert len({getattr(value, "dtype", None) for value in values}) == 1


@st.composite
def shapes(draw: st.DrawFn) -> KVShape:
    kv_heads = draw(st.integers(1, 8))
    probe = draw(st.sets(st.integers(0, kv_heads - 1)))
    key_dim = draw(st.sampled_from([1, 8, 64, 96, 128]))
    value_dim = draw(st.sampled_from([1, 8, 64, 128]))
    layers = draw(st.integers(1, 4))
    return KVShape(
        num_layers=layers,
        num_query_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        probe_kv_heads=tuple(sorted(probe)),
        code_bits=(
            bits := draw(st.sampled_from([0.0, 5.0, 6.0])) if key_dim > 1 and value_dim > 1 else 0.0
        ),
        exact=not bits or bool(probe) or draw(st.booleans()),
        raw_layers=0 if probe else draw(st.integers(0, layers - 1)),
    )


@given(shape=shapes(), data=st.data())
def test_header_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, shape: KVShape, data: st.DataObject
) -> None:
    info = make_info(
        shape,
        data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)),
        chunk_tokens=data.draw(st.sampled_from([8, 64])),
        quality=data.draw(
            st.sampled_from([EXACT, Quality(1, 4.0), Quality(3, 5.3), Quality(1, 6.0, 0.15)])
        ),
        namespace=data.draw(st.text(max_size=50)),
        prefix_len=data.draw(st.integers(0, 10**6)),
        prefix_digest=data.draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        generation=data.draw(st.sampled_from([0, 0, 1, 1000] if shape.exact else [0])),
    )

    found = read_header(header_file(tmp_path_factory.getbasetemp(), info), FILES)

    check_same(found, some_header(info))


@pytest.mark.parametrize("info", KINDS.values(), ids=KINDS)
def test_a_flipped_byte_anywhere_in_the_header_is_unreadable(
    tmp_path: Path, info: SegmentInfo
) -> None:
    """The preamble, text, tokens, mapping lists, tables, checksums; and some of the padding."""
    path = header_file(tmp_path, info)
    good = path.read_bytes()
    content = len(good.rstrip(b"\0"))
    assert 200 < content < 2000
    for position in [*range(content), *range(content, len(good), 50), len(good) - 1]:
        bad = bytearray(good)
        bad[position] ^= 0xFF
        path.write_bytes(bad)
        with pytest.raises(SegmentUnreadable) as caught:
            read_header(path, FILES)
        assert caught.value.segment_id == "ab12"


class Counting(FileSystem):
    asked = 0

    def read(self, descriptor: int, offset: int, target: memoryview) -> None:
        self.asked += len(target)
        super().read(descriptor, offset, target)


@pytest.mark.parametrize("offset", [8, 16], ids=["header", "description"])
@pytest.mark.parametrize("bit", range(1, 64, 6))
def test_a_flipped_bit_in_a_size_costs_no_memory(tmp_path: Path, offset: int, bit: int) -> None:
    """Of a long file, for what it asks for could be there."""
    path, files = header_file(tmp_path, SMALL), Counting()
    content = bytearray(path.read_bytes())
    content[offset + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    os.truncate(path, 1 << 40)

    with pytest.raises(SegmentUnreadable):
        read_header(path, files)

    assert files.asked < 1 << 17


@pytest.mark.parametrize("other", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_version_is_unreadable_and_says_so(tmp_path: Path, other: int) -> None:
    path = header_file(tmp_path, SMALL)
    header = path.read_bytes()
    before, after = f'"version": {FORMAT_VERSION}', f'"version": {other}'
    body = header[32:].replace(before.encode(), after.encode())
    assert body != header[32:]
    magic, *sizes, _ = struct.unpack_from("<8sQQQ", header)
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", *sizes) + body)
    path.write_bytes(struct.pack("<8sQQQ", magic, *sizes, digest) + body)

    with pytest.raises(SegmentUnreadable, match=f"version {other}"):
        read_header(path, FILES)


@pytest.mark.parametrize("kind", ["directory", "symbolic link"])
def test_what_is_no_file_of_ours_is_not_condemned(tmp_path: Path, kind: str) -> None:
    """The file system refuses, which says nothing about what is stored."""
    path = tmp_path / "ab12.kv"
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(header_file(tmp_path, SMALL).rename(tmp_path / "elsewhere.kv"))

    with pytest.raises(StoreUnavailable) as caught:
        read_header(path, FILES)

    assert caught.value.segment_id == "ab12"


@pytest.mark.parametrize("probe", [(0,), ()])
@pytest.mark.parametrize("generation", [0, 1])
def test_every_block_of_a_written_file_has_its_checksum(
    tmp_path: Path, generation: int, probe: tuple[int, ...]
) -> None:
    shape = make_shape(key_dim=128, value_dim=160, probe=probe)
    info = make_info(shape, range(20), generation=generation)
    mapping = random_mapping(info, 4) if generation else None

    path = write_kvs(tmp_path, info, *random_kvs(shape, 20, seed=2), mapping=mapping)

    body = path.read_bytes()[info.layout().header_bytes :]
    expected = [xxhash.xxh3_64_intdigest(body[at : at + 4096]) for at in range(0, len(body), 4096)]
    assert len(set(expected)) > 20, "blocks differ"
    assert read_header(path, FILES).checksums.tolist() == expected


def test_read_and_write_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the system reads and writes only a part at a time, as it may."""
    read, write = os.preadv, os.pwritev
    pick = random.Random(1)
    monkeypatch.setattr(
        "os.preadv", lambda fd, views, at: read(fd, [views[0][: pick.randint(1, 9)]], at)
    )
    monkeypatch.setattr(
        "os.pwritev", lambda fd, views, at: write(fd, [views[0][: pick.randint(1, 9)]], at)
    )
    data = bytes(range(200))
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    try:
        FILES.write(descriptor, 50, memoryview(data))
        target = bytearray(200)
        FILES.read(descriptor, 50, memoryview(target))
        assert target == data
        with pytest.raises(EOFError):
            FILES.read(descriptor, 51, memoryview(target))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("before", "length", "count"), [(0, 20, 4), (0, 3, 3), (3, 20, 1), (4, 20, 0), (900, 20, 0)]
)
def test_sinks_are_the_first_tokens_of_a_prompt(
    tmp_path: Path, before: int, length: int, count: int
) -> None:
    """Whatever bits are asked for, they are there as they were computed."""
    shape = make_shape(key_dim=64, value_dim=32, probe=(), coded=True)
    info = make_info(shape, range(length), prefix_len=before)
    keys, values = random_kvs(shape, length, seed=3)
    header = read_header(write_kvs(tmp_path, info, keys, values), FILES)
    assert header.sinks.shape[1] == count
    if count:
        found = shape.kvs_of(torch.from_numpy(header.sinks))
        assert torch.equal(found[0], keys[:, :count]) and torch.equal(found[1], values[:, :count])


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    return SegmentLayout(
        shape=draw(shapes()),
        chunk_tokens=8 * draw(st.integers(1, 32)),
        num_tokens=draw(st.integers(1, 1000)),
        header_bytes=BLOCK * draw(st.integers(1, 5)),
    )


@given(layouts())
def test_raw_layers_are_the_same_beside_codes(layout: SegmentLayout) -> None:
    """All keys and values of a token are one row; chunks are counted through all layers."""
    shape = layout.shape
    for codes in (False, True)[: 1 + shape.coded]:
        *numbers, total = layout.first_chunks[codes]
        parts = [layout.parts(layer, codes=codes) for layer in range(shape.num_layers)]
        counts = [sum(part.num_pages for part in both) for both in parts]
        assert numbers == [sum(counts[:layer]) for layer in range(shape.num_layers)]
        assert len(pages_per_chunk(layout, codes=codes)) == sum(counts) == total
        sizes = [sum(part.num_bytes for part in both) for both in parts]
        assert layout.num_bytes(codes=codes) == sum(sizes)
        assert layout.max_bytes(codes=codes) == max(sizes)
        for layer in range(shape.first_raw, shape.num_layers):
            (rows,) = parts[layer]
            assert rows.group_bytes == shape.num_kv_heads * shape.dtype.itemsize * (
                shape.key_dim + shape.value_dim
            )
            assert (rows.num_tokens, rows.page_tokens) == (layout.num_tokens, layout.chunk_tokens)
            place = layout.layer_offset(layer), layout.layer_bytes(layer)
            assert layout.place(layer, codes=codes) == place


def test_sizes_of_a_known_model_with_codes() -> None:
    shape = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), 6.0)
    layout = SegmentLayout(shape, chunk_tokens=64, num_tokens=1000, header_bytes=BLOCK)
    (codes, *_) = layout.codes

    # Two halves for each channel of keys and for each value, and a byte for each channel of keys;
    # then 6 bits of each element.
    assert codes.group_bytes == 2 * 2 * 8 * (128 + 64) + 8 * 128 + 64 * 8 * 256 * 6 // 8
    # 16 groups of 105,472 bytes; a page has 4 of them, which are 103 blocks.
    assert (codes.num_groups, codes.page_groups, codes.page_bytes) == (16, 4, 103 * BLOCK)
    assert codes.num_bytes == 4 * 103 * BLOCK
    assert layout.columns.num_bytes == 1008 * BLOCK
    assert layout.place(1, codes=True)[0] == BLOCK * (1 + 2 * 1008 + 412)
    assert layout.num_blocks == 32 * (1008 + 412)
