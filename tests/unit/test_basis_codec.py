"""A basis: fitted, saved, and what is coded with it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.codes.rows.coder import encode_layer, kvs_of, misfit_of
from impress_sglang.codes.rows.fit import SINK_TOKENS, Moments
from impress_sglang.codes.rows.row import GAINS, LEVELS
from impress_sglang.errors import BasisUnreadable, NotCodable
from tests.unit.codes_factory import fit, unpacked

LAYERS, HEADS, DIM = 3, 2, 6
FEATURES = HEADS * DIM
Prompt = list[list[Tensor]]


def prompt(tokens: int, seed: int) -> Prompt:
    """Keys and values that are partly linear maps of the layer below, far from 0; [t, G, D]."""
    fixed, varying = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    layers: Prompt = []
    for layer in range(LAYERS):
        layers.append([])
        for stream in range(2):
            mix = torch.randn(FEATURES, FEATURES, generator=fixed) / 3
            mean = 50 * torch.randn(FEATURES, generator=fixed)
            x = torch.randn(tokens, FEATURES, generator=varying) @ mix
            if layer:
                x = 0.3 * x + layers[layer - 1][stream].flatten(1) @ mix.roll(1, 0)
            layers[layer].append((x + mean).unflatten(1, (HEADS, DIM)))
    return layers


def metric() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    roots = torch.randn(LAYERS, 2, HEADS, DIM, DIM, generator=generator)
    return [list(layer @ layer.mT) for layer in roots]


def moments(count: int = 3) -> Moments:
    found = Moments()
    for seed in range(count):
        found.add(prompt(150, seed))
    return found


@pytest.fixture(scope="module")
def basis() -> Basis:
    notes = {"kl": {"6": {"prose": 0.5}}}
    return fit(moments(), metric(), 4.0, fewer={5.0: 3.0}, model="m", notes=notes)


def coded(basis: Basis, layers: Prompt) -> tuple[list[Tensor], Prompt]:
    below, rows, found = None, [], []
    for layer, kvs in enumerate(layers):
        coded_rows, below = encode_layer(basis, layer, below, kvs)
        rows.append(coded_rows)
        found.append(list(kvs_of(basis, layer, below)))
    return rows, found


def error(basis: Basis, layers: Prompt, weights: list[list[Tensor]]) -> float:
    total = 0.0
    for restored, exact, metrics in zip(coded(basis, layers)[1], layers, weights, strict=True):
        for x, y, m in zip(restored, exact, metrics, strict=True):
            e = x - y
            total += float(torch.einsum("tgd,gde,tge->", e, m, e))
    return total / len(layers[0][0])


def joined(layer: list[Tensor]) -> Tensor:
    """Features [t, X] of keys and values [t, G, D]."""
    return torch.cat([part.flatten(1) for part in layer], 1)


def test_moments_are_those_of_all_tokens_but_the_first() -> None:
    found, prompts = moments(2), [prompt(150, seed) for seed in range(2)]
    for layer in range(LAYERS):
        x, y = (
            torch.cat([joined(layers[at])[SINK_TOKENS:] for layers in prompts]).double()
            for at in (layer, layer - 1)
        )
        torch.testing.assert_close(found.mean(layer), x.mean(0), rtol=1e-6, atol=1e-5)
        cov = found.covariance(layer)
        torch.testing.assert_close(cov, x.T.cov(correction=0), rtol=1e-4, atol=1e-4)
        if layer:
            want = (y - y.mean(0)).T @ (x - x.mean(0)) / len(x)
            torch.testing.assert_close(found.with_below(layer), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [None, metric()], ids=["rel", "metric"])
def test_error_falls_by_four_with_each_bit(weights: list[list[Tensor]] | None) -> None:
    judged = [[torch.eye(DIM).expand(HEADS, -1, -1)] * 2] * LAYERS if weights is None else weights
    errors = [error(fit(moments(), weights, rate), prompt(60, 9), judged) for rate in (2, 3, 4, 5)]
    for high, low in itertools.pairwise(errors):
        assert 2.7 < high / low < 5.5


@pytest.mark.parametrize("rate", [4.0, 6.0, 8.0])
@pytest.mark.parametrize("weights", [None, metric()], ids=["rel", "metric"])
def test_what_never_varies_gets_no_bits(weights: list[list[Tensor]] | None, rate: float) -> None:
    """Such as a channel that the model does not use."""

    def still(seed: int) -> Prompt:
        layers = prompt(150, seed)
        for keys, values in layers:
            keys[:, 0, :3], values[:, 1] = 0.0, 7.0
        return layers

    found = Moments()
    for seed in range(3):
        found.add(still(seed))
    basis = fit(found, weights, rate)
    assert all(0 < len(layer.bits) <= FEATURES * 2 - 9 for layer in basis.layers)
    assert all(
        bool(array.isfinite().all()) for layer in basis.layers for array in layer.arrays().values()
    )
    rows, restored = coded(basis, still(8))
    assert all(misfit_of(basis, layer, coded_rows) < 1.5 for layer, coded_rows in enumerate(rows))
    for found, exact in zip(restored, still(8), strict=True):
        assert (joined(found) - joined(exact))[:, :3].abs().max() < 0.1


def test_the_rate_is_met(basis: Basis) -> None:
    for rate in (1.0, 3.0, 4.0, 7.0):
        assert fit(moments(1), metric(), rate).rate == pytest.approx(rate, abs=0.02)
    assert basis.token_bytes == sum(layout.row_bytes for layout in basis.layouts)


def test_codes_are_the_nearest_levels_and_restore_the_token(basis: Basis) -> None:
    """Component by component, with levels and gains as the format has them."""
    layers = prompt(20, 6)
    rows, restored = coded(basis, layers)
    codes, gains = unpacked(basis.layouts[0], rows[0])
    base, count = basis.layers[0], len(basis.layers[0].bits)
    z, x = (joined(layers[0]) - base.mean) @ base.forward, base.mean
    for i, bits in enumerate(base.bits):
        levels, gain = torch.from_numpy(LEVELS[bits]), gains[:, i * GAINS // count, None].float()
        values = 2 ** ((gain - 12) / 4) * levels
        chosen = values.gather(1, codes[:, i : i + 1])
        far = (z[:, i : i + 1] - values).abs().amin(1, keepdim=True)
        assert ((z[:, i : i + 1] - chosen).abs() <= far + 1e-5 * values.max()).all()
        x = x + chosen * base.inverse[i].float()
    torch.testing.assert_close(joined(restored[0]), x, rtol=1e-2, atol=2e-2)


def test_fit_tells_what_is_unlike_the_calibration(basis: Basis) -> None:
    for factor, low, high in ((1.0, 0.7, 1.3), (10.0, 30.0, 300.0)):
        strange = [[kvs.mean(0) + factor * (kvs - kvs.mean(0)) for kvs in prompt(80, 5)[0]]]
        found = misfit_of(basis, 0, encode_layer(basis, 0, None, strange[0])[0])
        assert low < found < high


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(basis: Basis, bad: float) -> None:
    layers = prompt(5, 1)
    layers[0][1][3, 1, 2] = bad
    with pytest.raises(NotCodable, match="layer 0"):
        encode_layer(basis, 0, None, layers[0])


def test_a_file_restores_all_of_a_basis(basis: Basis, tmp_path: Path) -> None:
    path = tmp_path / "own.basis"
    path.write_text("older")
    basis.save(path)
    found = Basis.load(path)
    assert (found.digest, found.model, found.shapes) == (basis.digest, "m", basis.shapes)
    assert found.notes == basis.notes and found.layouts == basis.layouts
    one, other = coded(basis, prompt(9, 4)), coded(found, prompt(9, 4))
    assert all(map(torch.equal, one[0], other[0]))
    assert [path.name for path in tmp_path.iterdir()] == ["own.basis"]


def test_a_lower_rate_is_what_would_be_fitted_for_it(basis: Basis, tmp_path: Path) -> None:
    path = tmp_path / "own.basis"
    basis.save(path)
    fewer, wanted = Basis.load(path).keeping(5.0), fit(moments(), metric(), 3.0, model="m")
    assert fewer.digest == wanted.digest == basis.keeping(5.0).digest != basis.digest
    assert replace(wanted, model="n").digest != wanted.digest
    assert fewer.keeps == 5.0 and basis.keeping(6.0) is basis
    found, right = (coded(each, prompt(60, 9))[0] for each in (fewer, wanted))
    assert all(map(torch.equal, found, right))
    with pytest.raises(KeyError):
        basis.keeping(7.0)


def test_ranks_have_what_would_be_fitted_to_their_heads(tmp_path: Path) -> None:
    path, whole = tmp_path / "own.basis", moments()
    for rank in range(HEADS):
        heads, alone = slice(rank, rank + 1), Moments()
        for seed in range(3):
            alone.add([[part[:, heads] for part in layer] for layer in prompt(150, seed)])
        costs = [[part[heads] for part in layer] for layer in metric()]
        wanted = fit(alone, costs, 4.0, part=(rank, HEADS))
        found = fit(whole.of_heads(heads), costs, 4.0, part=(rank, HEADS))
        assert found.shapes == wanted.shapes == ((1, DIM), (1, DIM))
        assert found.digest == wanted.digest
        found.save(path)
        assert Basis.load(path, (rank, HEADS)).digest == found.digest
    one, other = sorted(tmp_path.iterdir())
    one.replace(other)
    for part in ((0, 2), (1, 2), (0, 1)):
        with pytest.raises(BasisUnreadable, match="impress calibrate"):
            Basis.load(path, part)


def test_a_damaged_file_is_never_used(basis: Basis, tmp_path: Path) -> None:
    path = tmp_path / "own.basis"
    basis.save(path)
    sound = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, len(sound), (60,), generator=generator).tolist()
    for place in [*range(0, 400, 23), *places]:
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            # Names of arrays that nobody asks for may change.
            assert Basis.load(path).digest == basis.digest
        except BasisUnreadable as error:
            assert "impress calibrate" in str(error)
    for content in (b"", sound[:100], sound[:-1], b"{}" * 50):
        path.write_bytes(content)
        with pytest.raises(BasisUnreadable):
            Basis.load(path)
    with pytest.raises(BasisUnreadable):
        Basis.load(tmp_path / "none")
