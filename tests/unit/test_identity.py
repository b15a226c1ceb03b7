"""What a stored KV belongs to: any change of the model gives another name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impress_sglang.store import identity
from impress_sglang.store.identity import model_identity, weights_digest
from tests.unit.kv_factory import make_shape

Named = dict[str, Tensor]


def weights(dtype: torch.dtype = torch.bfloat16) -> Named:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed.weight": torch.randn(11, 6, generator=generator).to(dtype),
        "layers.0.norm": torch.randn(7, generator=generator).to(dtype),
        "scale": torch.tensor(2.0, dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
    }


def digest(named: Named) -> str:
    return weights_digest(named.items())


@pytest.fixture(params=["cpu", "accelerator"])
def fingerprint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to reduce a tensor; the one for accelerators also runs on a CPU."""

    def on_device(tensor: Tensor) -> object:
        return identity._device_fingerprint(tensor.detach().contiguous().view(-1).view(torch.uint8))

    if request.param == "accelerator":
        monkeypatch.setattr(identity, "_fingerprint", on_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digest_is_stable(fingerprint: None, dtype: torch.dtype) -> None:
    """The same weights, in another order, in other memory, as a view, as slices of others."""
    named = weights(dtype)
    copies = {name: tensor.clone() for name, tensor in reversed(named.items())}
    views = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in named.items()}

    assert len(digest(named)) == 32
    assert digest(copies) == digest(named)
    assert digest(views) == digest(named)
    # Fused weights: a slice of 16-bit elements may begin at an odd place of its storage.
    flat = torch.arange(32, dtype=dtype)
    assert digest({"w": flat[1:9]}) == digest({"w": flat[1:9].clone()})


CHANGES: dict[str, Callable[[Named], Named]] = {
    "shape": lambda w: {**w, "embed.weight": w["embed.weight"].view(6, 11)},
    "dtype": lambda w: {**w, "embed.weight": w["embed.weight"].view(torch.float16)},
    "order": lambda w: {**w, "embed.weight": w["embed.weight"].flip(0)},
    "transposed": lambda w: {**w, "embed.weight": w["embed.weight"].t()},
    "name": lambda w: {n.replace("embed", "embeds"): t for n, t in w.items()},
    "missing": lambda w: {n: t for n, t in w.items() if n != "empty"},
    "added": lambda w: {**w, "more": torch.zeros(1)},
    "rank": lambda w: {**w, "scale": w["scale"].view(1)},
    "zero added": lambda w: {**w, "scale": torch.stack([w["scale"], torch.zeros_like(w["scale"])])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_digest_changes_with(fingerprint: None, change: str) -> None:
    assert digest(CHANGES[change](weights())) != digest(weights())


def test_digest_on_an_accelerator_spans_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than one block: every block counts, and so does their order."""
    monkeypatch.setattr(identity, "_BLOCK_ELEMENTS", 4)
    raw = torch.randint(0, 2**31 - 1, (13,), dtype=torch.int32)
    prints = {identity._device_fingerprint(raw.view(torch.uint8))}
    for position in range(13):
        changed = raw.clone()
        changed[position] ^= 1
        prints.add(identity._device_fingerprint(changed.view(torch.uint8)))
    swapped = torch.cat([raw[4:8], raw[:4], raw[8:]])
    prints.add(identity._device_fingerprint(swapped.view(torch.uint8)))

    assert len(prints) == 15


BASE = {
    "weights": "w" * 32,
    "architecture": {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": 64},
    "shape": make_shape(),
    "tp_rank": 0,
    "tp_size": 1,
}


def test_identity_is_a_stable_file_name() -> None:
    turned = dict(reversed(BASE["architecture"].items()))
    name = model_identity(**{**BASE, "architecture": turned})
    assert name == model_identity(**BASE) and re.fullmatch("[0-9a-f]{32}", name)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "v" * 32},
        {"architecture": {**BASE["architecture"], "rope_theta": 500000.0}},
        {"architecture": {**BASE["architecture"], "rope_scaling": {"factor": 2.0}}},
        {"architecture": {**BASE["architecture"], "norm_eps": 1e-5}},
        {"architecture": {"rope_theta": 10000.0, "head_dim": 64}},
        {"architecture": {**BASE["architecture"], "head_dim": "64"}},
        {"shape": dataclasses.replace(make_shape(), num_layers=3)},
        {"shape": dataclasses.replace(make_shape(), dtype=torch.bfloat16)},
        {"shape": dataclasses.replace(make_shape(), probe_kv_heads=(1,))},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
    ],
    ids=str,
)
def test_identity_changes_with(change: dict[str, object]) -> None:
    assert model_identity(**{**BASE, **change}) != model_identity(**BASE)
