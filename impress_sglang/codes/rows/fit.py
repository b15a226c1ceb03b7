"""Fits a basis to KVs: accumulates moments over prompts, then solves for the bases of all layers.

It minimises the sum of the errors e^T M e over heads, with a metric M of each head's keys and one
of its values. Under this metric components are uncorrelated, and bits go to the components where
they reduce the error most, across all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impress_sglang.codes.rows.basis import WHOLE, Basis, LayerBasis, Part
from impress_sglang.codes.rows.row import MAX_BITS

# The first tokens of a prompt are attention sinks (https://arxiv.org/abs/2309.17453): nearly every
# query attends to them, and their keys and values differ from all others. They are never coded,
# which halves the total error. One would be enough for the models that were measured.
SINK_TOKENS = 4
# Shares of a diagonal that are added to it: of the covariance of predictors, and of a metric.
_RIDGE = 1e-3
_METRIC_FLOOR = 0.02
# Smaller variances, relative to a layer's largest, are rounding errors.
_MIN_VARIANCE = 1e-12
# Value of the 1st, 2nd ... bit of a component of variance 1. For a normal distribution the first
# bits gain less, but in new text small components are larger than in the text of the fit.
_BIT_VALUES = 4.0 ** -torch.arange(1.0, MAX_BITS + 1, dtype=torch.float64)

# Metrics of each layer's heads of keys and of values: float [G, Dk, Dk], [G, Dv, Dv].
Metric = Sequence[Sequence[Tensor]]


class Moments:
    """Means and covariances of KVs, within each layer and with the layer below."""

    def __init__(self) -> None:
        self.count = 0
        self.shapes: tuple[tuple[int, int], ...] = ()
        # Products of numbers far from zero would lose their differences to rounding. By layer: the
        # origin that is subtracted, [X], and float64 [B + X + 1, X], the sums of products with the
        # B features of the layer below (none in layer 0), with those of the layer, and with 1.
        self.origins: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Add the KVs of a prompt, without its sinks.

        Args:
            layers: each layer's keys [t, G, Dk], rotated back to position 0, and values [t, G, Dv].
        """
        flat = [
            torch.cat([kvs[SINK_TOKENS:].flatten(1).float() for kvs in layer], 1)
            for layer in layers
        ]
        if not self._sums:
            self.shapes = tuple((kvs.shape[1], kvs.shape[2]) for kvs in layers[0])
            self.origins = [rows.mean(0) for rows in flat]
        self.count += len(flat[0])
        below = flat[0][:, :0]
        for layer, (origin, rows) in enumerate(zip(self.origins, flat, strict=True)):
            rows = rows - origin
            sums = torch.cat([(torch.cat([below, rows], 1).T @ rows).double(), rows.sum(0)[None]])
            if layer == len(self._sums):
                self._sums.append(sums)
            else:
                self._sums[layer] += sums
            below = rows

    def of_heads(self, heads: slice) -> Moments:
        moments, features_of, begin = Moments(), [], 0
        for count, dim in self.shapes:
            features = torch.arange(begin, begin + count * dim).view(count, dim)[heads]
            features_of.append(features.flatten())
            moments.shapes += ((len(features), dim),)
            begin += count * dim
        indices = torch.cat(features_of).to(self.origins[0].device)
        moments.count, moments.origins = self.count, [origin[indices] for origin in self.origins]
        for sums in self._sums:
            squares = [square[indices][:, indices] for square in sums[:-1].split(begin)]
            moments._sums.append(torch.cat([*squares, sums[-1:, indices]]))
        return moments

    def mean(self, layer: int) -> Tensor:
        """Return the mean of a layer, float64 [X]."""
        return self.origins[layer] + self._sums[layer][-1] / self.count

    def covariance(self, layer: int) -> Tensor:
        """Return the covariance within a layer, float64 [X, X]."""
        size = len(self.origins[layer])
        return self._covariance(self._sums[layer][-1 - size : -1], layer, layer)

    def with_below(self, layer: int) -> Tensor:
        """Return the covariance of the layer below, which must exist, with a layer.

        Float64 [X, X].
        """
        return self._covariance(self._sums[layer][: len(self.origins[layer])], layer - 1, layer)

    def _covariance(self, products: Tensor, layer: int, other_layer: int) -> Tensor:
        left, right = (self._sums[side][-1] / self.count for side in (layer, other_layer))
        return products / self.count - left[:, None] * right


class Fit:
    """Solved bases of all layers, before their bits are chosen.

    `metric`: cost of errors. If None, the variances of each layer's keys and of its values are the
    unit of their errors.
    """

    def __init__(self, moments: Moments, metric: Metric | None) -> None:
        assert moments.count > 0, "nothing was added"
        self._shapes = moments.shapes
        self._layers = [
            _solve(moments, layer, None if metric is None else metric[layer])
            for layer in range(len(moments.origins))
        ]
        self._variances = [layer.variances for layer in self._layers]

    def thresholds(self, rates: Mapping[float, float]) -> dict[float, float]:
        """Return the error that each bit must save at least, by the keys of `rates`.

        `rates`: bits per feature, by `Basis.keeps`. The thresholds of all heads make bases of a
        part of the heads as accurate, in more bits.
        """
        return {keeps: _threshold(self._variances, rate) for keeps, rate in rates.items()}

    def basis(self, floors: Mapping[float, float], *, model: str = "", part: Part = WHOLE) -> Basis:
        """Return the basis at these `thresholds`; deterministic."""
        bits = {
            keeps: tuple(_share_bits(self._variances, threshold))
            for keeps, threshold in floors.items()
        }
        keeps = max(bits)
        layer_bits = zip(self._layers, bits.pop(keeps), strict=True)
        layers = tuple(layer.basis(widths) for layer, widths in layer_bits)
        return Basis(model, self._shapes, layers, part, keeps, bits)


@dataclasses.dataclass(frozen=True, slots=True)
class _Solved:
    """A layer before bits are chosen: variances of all X components, descending, and matrices."""

    variances: Tensor
    mean: Tensor
    predict: Tensor | None
    forward: Tensor
    inverse: Tensor

    def basis(self, bits: tuple[int, ...]) -> LayerBasis:
        kept = len(bits)
        scale = self.variances[:kept].sqrt()
        forward, inverse = self.forward[:, :kept] / scale, self.inverse[:kept] * scale[:, None]
        predict = None if self.predict is None else self.predict.cpu()
        exact = self.mean.float().cpu(), predict, forward.float().cpu()
        return LayerBasis(bits, *exact, inverse.bfloat16().cpu())


def _solve(moments: Moments, layer: int, metric: Sequence[Tensor] | None) -> _Solved:
    residual, predict = moments.covariance(layer), None
    if layer:
        below, cross = moments.covariance(layer - 1), moments.with_below(layer)
        ridge = torch.diag(below.diagonal() * _RIDGE + torch.finfo(torch.float64).tiny)
        predict = torch.linalg.solve(below + ridge, cross).bfloat16()
        # Covariance of the residual of the prediction, rounded as it is stored.
        weights = predict.double()
        explained = weights.T @ cross
        residual = residual - explained - explained.T + weights.T @ below @ weights
    if metric is None:
        metric = _by_variance(moments, layer)
    # No prediction may depend on a head. With the least number, its inverse would be infinite.
    sizes = torch.cat([matrix.diagonal(dim1=1, dim2=2).mean(1).double() for matrix in metric])
    least = float(sizes.max()) * _MIN_VARIANCE + torch.finfo(torch.float64).tiny
    roots = [_roots(matrix.double(), least) for matrix in metric]
    root, inverse_root = (torch.block_diag(*blocks) for blocks in zip(*roots, strict=True))
    variances, vectors = torch.linalg.eigh(root @ residual @ root)
    variances, vectors = variances.flip(0), vectors.flip(1)
    # Constant components have no scale, and get no bits.
    variances = variances.where(variances > _MIN_VARIANCE * variances[0], 0.0)
    # Make the sign of eigenvectors unique.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
    mean = moments.mean(layer)
    return _Solved(variances, mean, predict, root @ vectors, vectors.T @ inverse_root)


def _by_variance(moments: Moments, layer: int) -> list[Tensor]:
    """Return metrics in units of the variance of keys, and of values: float64 [G, D, D] each."""
    metrics, begin = [], 0
    variances = moments.covariance(layer).diagonal()
    for heads, dim in moments.shapes:
        size = variances[begin : begin + heads * dim].mean()
        eye = torch.eye(dim, dtype=torch.float64, device=variances.device)
        metrics.append((eye / size).expand(heads, -1, -1))
        begin += heads * dim
    return metrics


def _roots(metric: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return square roots of the metrics of all heads, and their inverses, float64 [X, X]."""
    size = metric.diagonal(dim1=1, dim2=2).mean(1).clamp_min(least)
    eye = torch.eye(metric.shape[1], dtype=torch.float64, device=metric.device)
    values, vectors = torch.linalg.eigh(
        (metric + metric.mT) / 2 + _METRIC_FLOOR * size[:, None, None] * eye
    )
    roots = [(vectors * power[:, None]) @ vectors.mT for power in (values.sqrt(), values.rsqrt())]
    return torch.block_diag(*roots[0]), torch.block_diag(*roots[1])


def _threshold(variances: list[Tensor], rate: float) -> float:
    """Return the error that the last bit saves, if all layers share `rate` bits per feature."""
    values = torch.cat(variances)[:, None].cpu() * _BIT_VALUES
    num_bits = int(rate * len(values))
    assert 0 < num_bits <= MAX_BITS * len(values)
    threshold = float(values.flatten().sort(descending=True).values[num_bits - 1])
    return max(threshold, torch.finfo(torch.float64).tiny)


def _share_bits(variances: list[Tensor], threshold: float) -> list[tuple[int, ...]]:
    """Return the bits of each layer's components, without components that get none."""
    layer_bits = []
    for variance in variances:
        bits = (variance[:, None].cpu() * _BIT_VALUES >= threshold).sum(1)
        layer_bits.append(tuple(int(width) for width in bits if width))
    return layer_bits
