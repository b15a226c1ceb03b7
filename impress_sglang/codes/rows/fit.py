"""Fits a basis to KVs: moments are accumulated over prompts, then bases of all layers are solved.

The error that is kept small is the sum of e^T M e over heads, with a metric M of each head's keys
and of its values. Within it, components are uncorrelated, and bits go where they take most from the
error, in all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impress_sglang.codes.rows.basis import WHOLE, Basis, LayerBasis, Part
from impress_sglang.codes.rows.row import MAX_BITS

# The first tokens of a prompt are attention sinks (https://arxiv.org/abs/2309.17453): nearly every
# query attends to them, and their keys and values are unlike all others. They are never in codes,
# which halves the error of the whole. One is enough for the models that were measured.
SINK_TOKENS = 4
# Shares of what is on a diagonal that are added to it: of features that predict, and of a metric.
_RIDGE = 1e-3
_METRIC_FLOOR = 0.02
# Variances that are a smaller share of a layer's largest are rounding.
_LEAST_VARIANCE = 1e-12
# What the 1st, 2nd ... bit is worth to a component of variance 1. Of a normal law the first bits
# gain less than this; but in new text, small components are larger than in what was fitted.
_WORTH = 4.0 ** -torch.arange(1.0, MAX_BITS + 1, dtype=torch.float64)

# Of each layer the metrics of keys' heads and of values' heads: float [G, Dk, Dk], [G, Dv, Dv].
Metric = Sequence[Sequence[Tensor]]


class Moments:
    """Means and covariances of KVs: of each layer in itself and with the layer below."""

    def __init__(self) -> None:
        self.count = 0
        self.shapes: tuple[tuple[int, int], ...] = ()
        # Products of what is far from zero would round their differences away. Of each layer, what
        # is taken off [X], and float64 [B + X + 1, X]: sums of products with the features of the
        # layer below, with its own, and with 1. There are B below, and in layer 0 none.
        self.origins: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Count the KVs of a prompt, but for its first tokens.

        Args:
            layers: of each layer keys [t, G, Dk], turned back to position 0, and values [t, G, Dv].
        """
        flat = [
            torch.cat([kvs[SINK_TOKENS:].flatten(1).float() for kvs in layer], 1)
            for layer in layers
        ]
        if not self._sums:
            self.shapes = tuple((kvs.shape[1], kvs.shape[2]) for kvs in layers[0])
            self.origins = [rows.mean(0) for rows in flat]
        self.count += len(flat[0])
        under = flat[0][:, :0]
        for layer, (origin, rows) in enumerate(zip(self.origins, flat, strict=True)):
            here = rows - origin
            sums = torch.cat([(torch.cat([under, here], 1).T @ here).double(), here.sum(0)[None]])
            if layer == len(self._sums):
                self._sums.append(sums)
            else:
                self._sums[layer] += sums
            under = here

    def of_heads(self, heads: slice) -> Moments:
        """Those of some heads alone."""
        moments, places, begin = Moments(), [], 0
        for count, dim in self.shapes:
            features = torch.arange(begin, begin + count * dim).view(count, dim)[heads]
            places.append(features.flatten())
            moments.shapes += ((len(features), dim),)
            begin += count * dim
        at = torch.cat(places).to(self.origins[0].device)
        moments.count, moments.origins = self.count, [origin[at] for origin in self.origins]
        for sums in self._sums:
            squares = [square[at][:, at] for square in sums[:-1].split(begin)]
            moments._sums.append(torch.cat([*squares, sums[-1:, at]]))
        return moments

    def mean(self, layer: int) -> Tensor:
        """Float64 [X]."""
        return self.origins[layer] + self._sums[layer][-1] / self.count

    def covariance(self, layer: int) -> Tensor:
        """Float64 [X, X]."""
        size = len(self.origins[layer])
        return self._covariance(self._sums[layer][-1 - size : -1], layer, layer)

    def with_below(self, layer: int) -> Tensor:
        """The covariance with the layer below, which there must be: float64 [X, X]."""
        return self._covariance(self._sums[layer][: len(self.origins[layer])], layer - 1, layer)

    def _covariance(self, products: Tensor, one: int, other: int) -> Tensor:
        left, right = (self._sums[side][-1] / self.count for side in (one, other))
        return products / self.count - left[:, None] * right


class Fit:
    """Bases of all layers, solved; what is left to be chosen is which bits they have.

    `metric` is what errors cost; None: keys and values of each layer count by their own variance.
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
        """What each bit takes from the error at least; `rates` are bits per feature.

        By what codes of that rate keep. Those of all heads make bases of a part of them as good, in
        more bits.
        """
        return {keeps: _threshold(self._variances, rate) for keeps, rate in rates.items()}

    def basis(self, floors: Mapping[float, float], *, model: str = "", part: Part = WHOLE) -> Basis:
        """Return the basis at these `thresholds`; the same for the same numbers."""
        bits = {
            keeps: tuple(_share_bits(self._variances, threshold))
            for keeps, threshold in floors.items()
        }
        keeps = max(bits)
        given = bits.pop(keeps)
        layers = tuple(layer.basis(some) for layer, some in zip(self._layers, given, strict=True))
        return Basis(model, self._shapes, layers, part, keeps, bits)


@dataclasses.dataclass(frozen=True, slots=True)
class _Solved:
    """A layer before bits are known: variances of all X components, descending, and matrices."""

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
        under, cross = moments.covariance(layer - 1), moments.with_below(layer)
        ridge = torch.diag(under.diagonal() * _RIDGE + torch.finfo(torch.float64).tiny)
        predict = torch.linalg.solve(under + ridge, cross).bfloat16()
        # What is left after the prediction as it is stored.
        used = predict.double()
        both = used.T @ cross
        residual = residual - both - both.T + used.T @ under @ used
    if metric is None:
        metric = _by_variance(moments, layer)
    roots = [_roots(matrix.double()) for matrix in metric]
    root, inverse_root = (torch.block_diag(*blocks) for blocks in zip(*roots, strict=True))
    variances, vectors = torch.linalg.eigh(root @ residual @ root)
    variances, vectors = variances.flip(0), vectors.flip(1)
    # What never varies has no scale, and gets no bits.
    variances = variances.where(variances > _LEAST_VARIANCE * variances[0], 0.0)
    # An eigenvector may have either sign.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
    mean = moments.mean(layer)
    return _Solved(variances, mean, predict, root @ vectors, vectors.T @ inverse_root)


def _by_variance(moments: Moments, layer: int) -> list[Tensor]:
    """A metric by which keys, and values, cost as much as they vary: float64 [G, D, D] of each."""
    metrics, begin = [], 0
    variances = moments.covariance(layer).diagonal()
    for heads, dim in moments.shapes:
        size = variances[begin : begin + heads * dim].mean()
        eye = torch.eye(dim, dtype=torch.float64, device=variances.device)
        metrics.append((eye / size).expand(heads, -1, -1))
        begin += heads * dim
    return metrics


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Square roots of the metrics of all heads, and their inverses: float64 [X, X]."""
    size = metric.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(metric.shape[1], dtype=torch.float64, device=metric.device)
    values, vectors = torch.linalg.eigh(
        (metric + metric.mT) / 2 + _METRIC_FLOOR * size[:, None, None] * eye
    )
    roots = [(vectors * power[:, None]) @ vectors.mT for power in (values.sqrt(), values.rsqrt())]
    return torch.block_diag(*roots[0]), torch.block_diag(*roots[1])


def _threshold(variances: list[Tensor], rate: float) -> float:
    """What the last bit takes from the error, if all layers share so many per feature."""
    worth = torch.cat(variances)[:, None].cpu() * _WORTH
    wanted = int(rate * len(worth))
    assert 0 < wanted <= MAX_BITS * len(worth)
    threshold = float(worth.flatten().sort(descending=True).values[wanted - 1])
    return max(threshold, torch.finfo(torch.float64).tiny)


def _share_bits(variances: list[Tensor], threshold: float) -> list[tuple[int, ...]]:
    """Bits of the components of all layers; those without bits are left out."""
    layer_bits = []
    for variance in variances:
        bits = (variance[:, None].cpu() * _WORTH >= threshold).sum(1)
        layer_bits.append(tuple(int(width) for width in bits if width))
    return layer_bits
