"""What a GPU uses instead of torch code gives the same: gathering, scoring and choosing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from impress_sglang.cost import ReadCost
from impress_sglang.importance.selectors import H2OSelector, PaperSelector
from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer import gather as gather_module
from impress_sglang.transfer.gather import KernelGatherer
from impress_sglang.transfer.loader import LoadStats, PrefixLoader
from impress_sglang.transfer.scoring import kernel_scorer
from impress_sglang.triton import chunk_rows
from impress_sglang.triton import gather as gather_kernels
from impress_sglang.triton import pages as page_kernels
from impress_sglang.triton import scores as score_module
from tests.unit.reading import LoadedLayer, layer_inputs, load_layer
from tests.unit.source_factory import Case, check_everything, opened
from tests.unit.triton.conftest import use_kernels

# Kernels are interpreted only in modules that were imported before.
KERNELS = (chunk_rows, gather_kernels, page_kernels, score_module)

CASES = [
    "several-segments, tiny, reordered: cut-rows-float32",
    "several-segments, tiny score, logical: tiny-float16",
    "several-segments, room on both, logical: mha-bfloat16",
    "several-segments, tiny score, reordered: no-probe-cut-rows",
    # All tokens are found in chunks by the kernel; of the values in several pages of a chunk.
    "tail-of-a-segment, tiny score, logical: no-probe-cut-rows",
    "two-segments, tiny device, logical: cut-rows-float32",
    "two-segments, tiny host, logical: mqa-no-other-keys",
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gathers_what_indexing_does(
    name: str, tmp_path: Path, reader: BlockReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, all tokens and some, from SSD first and then from the caches, several times."""
    monkeypatch.setattr(gather_module, "LAUNCH_TOKENS", 1)
    case = opened(name, tmp_path, reader)
    for _ in range(3):
        case.request()
        assert isinstance(case.segment_source._gatherer, KernelGatherer)
        check_everything(case)
    case.close()


def loaded_layers(case: Case, loader: PrefixLoader) -> list[LoadedLayer]:
    shape, layers = case.shape, []
    case.request()
    for layer in range(shape.num_layers):
        given = layer_inputs(shape, layer)
        layers.append(load_layer(loader, layer, case.source, given, 20, LoadStats()))
    return layers


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("one-segment, tiny score, reordered: no-probe-float32", H2OSelector()),
        ("several-segments, tiny score, reordered: no-probe-float32", H2OSelector()),
        ("several-segments, tiny score, reordered: cut-rows-float32", PaperSelector(0.6)),
        ("one-segment, tiny score, logical: cut-rows-float32", PaperSelector(9.0)),
    ],
)
def test_a_layer_is_loaded_alike(
    name: str,
    rule: PaperSelector | H2OSelector,
    tmp_path: Path,
    reader: BlockReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probing, choosing and loading; what is cached meanwhile is the same."""
    # What is read through is measured, and differs from run to run.
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)
    folders = [tmp_path / "torch", tmp_path / "kernels"]
    for folder in folders:
        folder.mkdir()
    reference = opened(name, folders[0], reader)
    expected = [loaded_layers(reference, PrefixLoader(reference.shape, rule)) for _ in range(2)]
    use_kernels(monkeypatch)
    case = opened(name, folders[1], reader)
    loader = PrefixLoader(case.shape, rule, kernel_scorer())
    found = [loaded_layers(case, loader) for _ in range(2)]

    for own, other in zip(found, expected, strict=True):
        for layer, reference_layer in zip(own, other, strict=True):
            assert torch.equal(layer.selected, reference_layer.selected)
            assert torch.equal(layer.keys, reference_layer.keys)
            assert torch.equal(layer.values, reference_layer.values)
    assert case.stats == reference.stats
    case.close()
    reference.close()
