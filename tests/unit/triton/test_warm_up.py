"""What is compiled when a server starts is all that its requests launch.

Launches are noted, and told apart as Triton tells compiled variants on a GPU: by constants, types,
alignment, and by which numbers are 1 or multiples of 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from impress_sglang.codes.coding import Rows
from impress_sglang.errors import UnsupportedError
from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer.basis_codec import BasisCodec, shape_by
from impress_sglang.transfer.codecs import launch_all, plain_codec
from impress_sglang.transfer.sources import Piece
from impress_sglang.triton import groups as group_kernels
from impress_sglang.triton import pages as page_kernels
from impress_sglang.triton import rows as row_kernels
from tests.unit.codes_factory import codec_for, random_rows
from tests.unit.kv_factory import make_shape
from tests.unit.reading import Pools
from tests.unit.source_factory import CodedCase, Part
from tests.unit.triton.conftest import Launch, noting_launches, use_kernels

CPU = torch.device("cpu")

KERNELS = (group_kernels, page_kernels, row_kernels)

# Kernel, options of its launch, and kinds of its arguments.
Variant = tuple[str, str, str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What a GPU would do with kernels is to be done with them."""
    use_kernels(monkeypatch)
    with noting_launches(*KERNELS) as noted:
        yield noted


def take(launches: list[Launch]) -> set[Variant]:
    """Variants that were launched since the last look."""
    seen = set()
    for noted in launches:
        arguments, kinds, launch = noted.bound()
        named = dict(zip(arguments, kinds, strict=True))
        seen.add((noted.name, str(sorted(launch.items())), str(named)))
    launches.clear()
    return seen


CODED = make_shape(query_heads=6, key_dim=16, value_dim=32, probe=(), coded=True)
# One that needs one tile or block, several segments, and one that is long.
SHORT, LONG = Part(77, 13), Part(2100)
SEVERAL = [Part(40, 0, 21), Part(33, 5), Part(64, 17, 18), Part(50, 47)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_requests_launch_nothing_new(
    dtype: torch.dtype, launches: list[Launch], tmp_path: Path, reader: BlockReader
) -> None:
    """And everything that was compiled is launched by some request."""
    shape = dataclasses.replace(CODED, dtype=dtype)
    launch_all(shape, CPU, plain_codec(shape, kernels=True))
    warm = take(launches)

    # For whole prefixes, which displace each other on the device.
    for number, parts in enumerate(([SHORT], [Part(64)], SEVERAL, [LONG], [SHORT, LONG])):
        (folder := tmp_path / str(number)).mkdir()
        case = CodedCase(folder, parts, reader, shape, device_pages=9, host_pages=13)
        for layer in range(shape.num_layers):
            case.load(layer, kernels=True)
        case.close()

    seen = take(launches)
    assert sorted(seen - warm) == []
    assert sorted(warm - seen) == []


def test_restoring_by_a_basis_launches_nothing_new(launches: list[Launch]) -> None:
    """Whatever the number of tokens; the first layer is restored otherwise than others."""
    fitted = codec_for(dataclasses.replace(CODED, num_layers=3))
    codec = BasisCodec(fitted.basis, fitted.rotation, kernels=True)
    shape = shape_by(codec.basis, dataclasses.replace(CODED, num_layers=3, dtype=torch.bfloat16))
    launch_all(shape, CPU, codec)
    warm = take(launches)

    for tokens in (1, 30, 700):
        pools, state = Pools(shape, tokens), None
        for layer in range(3):
            piece = Piece([random_rows(codec.basis, layer, tokens)], 0, 0, tokens)
            rows = Rows(*pools(layer), torch.arange(tokens))
            state = codec.restore(layer, [piece], rows, state)

    seen = take(launches)
    assert {variant[0] for variant in seen} == {"_unpack_kernel", "_restore_kernel"}
    assert len(seen) == 3 and sorted(seen - warm) == []


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        ("_copy_kernel", "--impress-policy recompute,"),
        ("_restore_kernel", "--impress-policy paper,"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    kernel: str, instead: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large:
        def __getitem__(self, _: Any) -> Any:
            raise OutOfResources(147456, 101376, "shared memory")

    (owner,) = (module for module in (group_kernels, page_kernels) if hasattr(module, kernel))
    with monkeypatch.context() as patch, pytest.raises(UnsupportedError) as refusal:
        patch.setattr(owner, kernel, Large())
        launch_all(CODED, CPU, plain_codec(CODED, kernels=True))

    text = str(refusal.value)
    assert text.partition("; use ")[2].startswith(instead)
    assert "3 query heads per KV head and 16 elements per key (torch.float32)" in text
    assert "147456 of shared memory" in text and "101376" in text
