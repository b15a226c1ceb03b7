"""What a GPU uses instead of torch code gives the same: taking blocks, scoring and choosing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from impress_sglang.cost import ReadCost
from impress_sglang.paper.loader import LoadStats, PartLoader
from impress_sglang.storage.reader import BlockReader
from impress_sglang.triton import pages as page_kernels
from impress_sglang.triton import scores as score_module
from tests.unit.reading import LoadedLayer, layer_inputs, load_layer
from tests.unit.source_factory import Case, opened
from tests.unit.triton.conftest import use_kernels

# Kernels are interpreted only in modules that were imported before.
KERNELS = (page_kernels, score_module)


def loaded_layers(case: Case, alpha: float) -> list[LoadedLayer]:
    shape, layers = case.shape, []
    loader = PartLoader(shape, alpha)
    case.request()
    for layer in range(shape.num_layers):
        given = layer_inputs(shape, layer)
        layers.append(load_layer(loader, layer, case.source, given, 20, LoadStats()))
    return layers


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        ("several-segments, tiny score, reordered: no-probe-float32", 0.6),
        ("several-segments, tiny score, reordered: cut-rows-float32", 0.01),
        ("one-segment, room on both, logical: cut-rows-float32", 9.0),
    ],
)
def test_a_layer_is_loaded_alike(
    name: str, alpha: float, tmp_path: Path, reader: BlockReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing, choosing and loading; what is cached meanwhile is the same."""
    # What is read through is measured, and differs from run to run.
    monkeypatch.setattr(ReadCost, "gap_bytes", 0)
    folders = [tmp_path / "torch", tmp_path / "kernels"]
    for folder in folders:
        folder.mkdir()
    reference = opened(name, folders[0], reader)
    expected = [loaded_layers(reference, alpha) for _ in range(2)]
    use_kernels(monkeypatch)
    case = opened(name, folders[1], reader)
    found = [loaded_layers(case, alpha) for _ in range(2)]

    for own, other in zip(found, expected, strict=True):
        for layer, reference_layer in zip(own, other, strict=True):
            assert torch.equal(layer.selected, reference_layer.selected)
            assert torch.equal(layer.keys, reference_layer.keys)
            assert torch.equal(layer.values, reference_layer.values)
    assert case.stats == reference.stats
    case.close()
    reference.close()
