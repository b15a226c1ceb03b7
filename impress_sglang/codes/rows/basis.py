"""The basis of a model's KVs: means, predictions and transforms of all layers; and its file.

The file is a safetensors file. Its metadata hold everything but arrays, with a digest of their own.
It has two rates with the same arrays: components without bits at the lower rate are the last ones.
Ranks with different heads have a basis each, in separate files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from impress_sglang.codes.rows.row import RowLayout
from impress_sglang.errors import BasisUnreadable

_KIND = "impress-sglang basis 2"
# Mean bits per feature, by the bits at which codes without a basis are no more accurate
# (docs/results.md, "By a basis").
RATES = {5.0: 3.0, 6.0: 4.0}
# Index and number of equal parts of the model's KV heads.
Part = tuple[int, int]
WHOLE: Part = (0, 1)
_ARRAYS = ("mean", "predict", "forward", "inverse")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBasis:
    """Basis of one layer, with X features and C components.

    Features x of a token are its keys of all heads, rotated back to position 0, then its values.
    They are predicted as p = mean + y @ predict, where y is the restored layer below, minus its
    mean. Components are (x - p) @ forward, sorted by their variance before it was scaled to 1; x is
    restored as p + components @ inverse.

    Attributes:
        bits: of each component, 1 to 8, descending.
        mean: float32 [X].
        predict: bfloat16 [X, X]; None in layer 0.
        forward: float32 [X, C]; with rounding, large components would leak into small ones.
        inverse: bfloat16 [C, X].
    """

    bits: tuple[int, ...]
    mean: Tensor
    predict: Tensor | None
    forward: Tensor
    inverse: Tensor

    def __post_init__(self) -> None:
        components, features = len(self.bits), len(self.mean)
        assert self.mean.dtype == self.forward.dtype == torch.float32
        assert self.forward.shape == (features, components)
        assert self.inverse.shape == (components, features)
        assert self.predict is None or self.predict.shape[1] == features

    def cut(self, bits: tuple[int, ...]) -> LayerBasis:
        """Return the layer with fewer bits per component, without its last components."""
        kept = len(bits)
        return dataclasses.replace(
            self,
            bits=bits,
            forward=self.forward[:, :kept].contiguous(),
            inverse=self.inverse[:kept].contiguous(),
        )

    def arrays(self) -> dict[str, Tensor]:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in arrays.items() if array is not None}


@dataclasses.dataclass(frozen=True)
class Basis:
    """How KVs of a model are coded; all arrays are on the CPU.

    Attributes:
        model: the model that it was fitted to.
        shapes: heads and dimensions of a head, (G, D), of keys and of values.
        layers: bases of all layers.
        part: part of the model's KV heads that it codes; `shapes` are those of this part.
        keeps: its codes are at least as accurate as codes of this many bits without a basis.
        fewer: bits of each layer's components at lower rates, by their `keeps`; not in the digest.
        notes: further information, as JSON; not in the digest.
    """

    model: str
    shapes: tuple[tuple[int, int], ...]
    layers: tuple[LayerBasis, ...]
    part: Part = WHOLE
    keeps: float = max(RATES)
    fewer: Mapping[float, tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @functools.cached_property
    def layouts(self) -> tuple[RowLayout, ...]:
        return tuple(RowLayout(layer.bits) for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's rows in all layers."""
        return sum(layout.row_bytes for layout in self.layouts)

    @property
    def rate(self) -> float:
        """Mean bits of codes per feature."""
        features = self.num_layers * sum(heads * dim for heads, dim in self.shapes)
        return sum(sum(layer.bits) for layer in self.layers) / features

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits; changes with everything that affects codes or restored KVs."""
        state = hashlib.sha256(json.dumps([self.model, self.shapes]).encode())
        for name, array in self._arrays().items():
            state.update(f"{name} {tuple(array.shape)} {array.dtype}".encode())
            state.update(array.contiguous().view(torch.uint8).numpy().tobytes())
        for layer in self.layers:
            state.update(json.dumps(layer.bits).encode())
        return state.hexdigest()[:16]

    def keeping(self, bits: float) -> Basis:
        """Return the basis at the rate that is as accurate as `bits` without a basis."""
        if bits == self.keeps:
            return self
        cut = tuple(
            layer.cut(bits) for layer, bits in zip(self.layers, self.fewer[bits], strict=True)
        )
        return dataclasses.replace(self, layers=cut, keeps=bits, fewer={})

    def save(self, path: Path) -> None:
        """Write the file `file_of_part` in one step, replacing an older one."""
        path = file_of_part(path, self.part)
        fields = {
            "digest": self.digest,
            "model": self.model,
            "shapes": self.shapes,
            "part": self.part,
            "keeps": self.keeps,
            "bits": [layer.bits for layer in self.layers],
            "fewer": list(self.fewer.items()),
            "notes": self.notes,
        }
        text = json.dumps(fields)
        metadata = {"kind": _KIND, "fields": text, "check": _check(text)}
        arrays = {name: array.contiguous() for name, array in self._arrays().items()}
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            save_file(arrays, temporary, metadata)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    @classmethod
    def load(cls, path: Path, part: Part = WHOLE) -> Basis:
        """Read a file that `save` has written.

        Raises:
            BasisUnreadable: it is missing, damaged, or of another version or part.
        """
        path, parts = file_of_part(path, part), part[1]
        try:
            basis = cls._read(path)
            if basis.part != part:
                raise ValueError(f"it is for part {basis.part[0] + 1} of {basis.part[1]}")
        except Exception as error:  # damaged files raise many types
            ranks = f" --tp-size {parts}" if parts > 1 else ""
            raise BasisUnreadable(
                f"{path} is no basis of this version, or is damaged; "
                f"make it anew with `impress calibrate{ranks}`: {error!r}"
            ) from error
        return basis

    @classmethod
    def _read(cls, path: Path) -> Basis:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata["kind"] != _KIND:
                raise ValueError(f"its kind is {metadata['kind']!r}")
            if metadata["check"] != _check(metadata["fields"]):
                raise ValueError("its metadata do not match their digest")
            fields = json.loads(metadata["fields"])
            # Copies, because the tensors are mapped and would change with an overwritten file.
            arrays = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

        def layer(number: int, bits: list[int]) -> LayerBasis:
            layer_arrays = {array: arrays.get(f"{number}.{array}") for array in _ARRAYS}
            return LayerBasis(tuple(bits), **layer_arrays)

        layers = tuple(layer(i, bits) for i, bits in enumerate(fields["bits"]))
        shapes = tuple((heads, dim) for heads, dim in fields["shapes"])
        fewer = {keeps: tuple(map(tuple, bits)) for keeps, bits in fields["fewer"]}
        further = fields["keeps"], fewer, fields["notes"]
        basis = cls(fields["model"], shapes, layers, tuple(fields["part"]), *further)
        if basis.digest != fields["digest"]:
            raise ValueError("its arrays do not match their digest")
        return basis

    def _arrays(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": array
            for i, layer in enumerate(self.layers)
            for name, array in layer.arrays().items()
        }


def file_of_part(path: Path, part: Part) -> Path:
    """Return the file of a part of the heads, beside the file of all heads."""
    number, parts = part
    return path if parts == 1 else path.with_name(f"{path.name}.{number + 1}of{parts}")


def _check(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
