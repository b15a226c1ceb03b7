"""A file with prefixes of one namespace of one store, for other stores: see docs/format.md.

It is a safetensors file. The header is written last and holds the digests of all tensors; a reader
trusts nothing else before it has checked them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from impress_sglang.cli.outcome import Refused
from impress_sglang.codes.groups.energy import Coding, CodingRule
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layer_codec import decode_layer
from impress_sglang.storage.layout import KVShape, round_up
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import Priority, Tokens

KIND = "impress-sglang prefixes"
VERSION = 1
_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint8: "U8",
}
# The limit of safetensors readers.
_LONGEST_HEADER = 100_000_000
_NO_DIGEST = "0" * 16
# Exceptions that malformed fields of a file raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """One segment of a file: tokens of a prompt from `start` on, behind those of an earlier one.

    `above`: the number of the earlier one in the file, -1 if there is none; `start`: how many
    tokens are before these; `expires`, `priority`: as in a segment.
    """

    num_tokens: int
    start: int
    above: int
    quality: Quality
    expires: int
    priority: Priority = Priority.NORMAL

    def to_fields(self) -> dict[str, Any]:
        """The prefix as values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Prefix:
        """Make a prefix from the result of `to_fields`."""
        quality, priority = Quality(**fields["quality"]), Priority(fields["priority"])
        return cls(**{**fields, "quality": quality, "priority": priority})


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """What a file contains, apart from the tensors.

    `namespace`: a hash with `key`, by which someone who knows the namespace can recognise it.
    """

    identity: str
    shape: KVShape
    prefixes: tuple[Prefix, ...]
    key: str
    namespace: str

    @classmethod
    def of(
        cls, identity: str, shape: KVShape, prefixes: Iterable[Prefix], namespace: str
    ) -> Contents:
        """Make the contents of a new file; `namespace` is plain text."""
        key = secrets.token_hex(16)
        return cls(identity, shape, tuple(prefixes), key, _keyed(key, namespace))

    def is_of(self, namespace: str) -> bool:
        """Whether the prefixes belong to a namespace, which is given as plain text."""
        return self.namespace == _keyed(self.key, namespace)

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Types and shapes of all tensors, in the order of the file, which keeps them aligned."""
        shape = self.shape
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for number, own in enumerate(self.prefixes):
            found[f"{number}.tokens"] = torch.int32, (own.num_tokens,)
        for number, own in enumerate(self.prefixes):
            rows = shape.num_layers, own.num_tokens, shape.num_kv_heads
            found[f"{number}.keys"] = shape.dtype, (*rows, shape.key_dim)
            found[f"{number}.values"] = shape.dtype, (*rows, shape.value_dim)
        for number in range(len(self.prefixes) if shape.basis else 0):
            found[f"{number}.fits"] = torch.float32, (shape.num_layers,)
        for number, own in enumerate(self.prefixes if shape.basis else ()):
            for layer, row_bytes in enumerate(shape.row_bytes_of_layers):
                found[f"{number}.rows.{layer}"] = torch.uint8, (own.num_tokens, row_bytes)
        return found

    def to_json(self) -> str:
        """The contents as they are written in the file."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["shape"] = self.shape.to_fields()
        fields["prefixes"] = [own.to_fields() for own in self.prefixes]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Contents:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        fields["shape"] = KVShape.from_fields(fields["shape"])
        fields["prefixes"] = tuple(map(Prefix.from_fields, fields["prefixes"]))
        return cls(**fields)


def write_file(
    files: FileSystem, path: Path, contents: Contents, sources: Sequence[Callable[[], OpenSegment]]
) -> int:
    """Write a new file with the KVs of segments, one layer at a time; returns its size in bytes.

    `sources` open the segments of the prefixes, which are closed here.

    Raises:
        Refused: the file exists already, or would have too many prefixes.
        PrefixUnreadable: a segment cannot be read; nothing is left behind.
        OSError: the file cannot be written; nothing is left behind.
    """
    if os.path.lexists(path):
        raise Refused(f"{path} already exists")
    digests = dict.fromkeys(contents.tensors(), _NO_DIGEST)
    # All digests have the same length, so the header's length is known.
    offset = len(_header(contents, digests))
    if offset > _LONGEST_HEADER:
        raise Refused("these are too many for one file: choose some with --segment or --ids")
    temporary = path.with_name(path.name + ".tmp")
    descriptor = files.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        places = {}
        for name, (dtype, shape) in contents.tensors().items():
            places[name] = offset
            offset += dtype.itemsize * math.prod(shape)
        for number, source in enumerate(sources):
            with contextlib.closing(source()) as segment:
                own = {name: places[name] for name in places if name.startswith(f"{number}.")}
                digests |= _write_segment(files, descriptor, segment, own)
        files.write(descriptor, 0, memoryview(_header(contents, digests)))
        files.sync(descriptor)
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except BaseException:
        files.unlink(temporary)
        raise
    finally:
        files.close(descriptor)
    return offset


class PrefixFile:
    """A file that was read to its end and is intact."""

    def __init__(self, path: Path) -> None:
        """Read and check all of the file.

        Raises:
            Refused: it cannot be read, is not a file of prefixes, or is damaged.
        """
        try:
            self._file: Any = safe_open(str(path), framework="pt")
            self.contents = _contents_of(self._file)
            self._tokens = [self._read(f"{n}.tokens") for n in range(len(self.contents.prefixes))]
        except (*_DAMAGE, OSError, SafetensorError) as error:
            raise Refused(f"{path} is not a complete file of prefixes: {error}") from error

    def prompt(self, number: int) -> Tokens:
        """All tokens from the start of a prompt to the end of a prefix, int32 [n]."""
        stop, parts = None, []
        while number >= 0:
            own = self.contents.prefixes[number]
            parts.append(self._tokens[number].numpy()[:stop])
            if own.above >= 0:
                stop = own.start - self.contents.prefixes[own.above].start
            number = own.above
        return np.concatenate(parts[::-1])

    def layer(self, number: int, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Keys [t, G, Dk] and values [t, G, Dv] of the tokens of a prefix from `first` on."""
        keys, values = (self._file.get_slice(f"{number}.{own}") for own in ("keys", "values"))
        return keys[layer, first:], values[layer, first:]

    def coding(self, number: int, first: int) -> CodingRule | None:
        """How the layers of a prefix are coded from its token `first` on: as in the file.

        None: there is no basis, and what is coded is coded anew.
        """
        if not self.contents.shape.basis:
            return None
        fits: Tensor = self._read(f"{number}.fits")

        def rows(layer: int, keys: Tensor, values: Tensor) -> Coding:
            own = self._file.get_slice(f"{number}.rows.{layer}")[first : first + len(keys)]
            return Coding(rows=own, fit=float(fits[layer]))

        return rows

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


def _contents_of(file: Any) -> Contents:
    """The contents of a file, after checking that its tensors are those that were written."""
    told = file.metadata() or {}
    if told.get("kind") != KIND or told["version"] != str(VERSION):
        raise ValueError("it was written by something else")
    if told["digest"] != _digest(told["contents"], told["digests"]):
        raise ValueError("its header is damaged")
    contents, digests = Contents.from_json(told["contents"]), json.loads(told["digests"])
    for number, own in enumerate(contents.prefixes):
        above = contents.prefixes[own.above] if 0 <= own.above < number else None
        if not (
            own.start == 0 if above is None else 0 < own.start - above.start <= above.num_tokens
        ):
            raise ValueError("a prefix has no place in it")
    for name, (dtype, shape) in contents.tensors().items():
        piece = file.get_slice(name)
        if piece.get_dtype() != _NAMES[dtype] or tuple(piece.get_shape()) != shape:
            raise ValueError(f"{name} is of another kind")
        state = xxhash.xxh3_64()
        # One layer at a time.
        for part in (piece[own] for own in range(shape[0])) if len(shape) > 2 else (piece[:],):
            state.update(_bytes_of(part))
        if state.hexdigest() != digests[name]:
            raise ValueError(f"{name} is damaged")
    return contents


def _write_segment(
    files: FileSystem, descriptor: int, segment: OpenSegment, places: dict[str, int]
) -> dict[str, str]:
    """Write the tensors of a segment to their places; returns their digests."""
    states = {name: xxhash.xxh3_64() for name in places}

    def put(kind: str, tensor: Tensor) -> None:
        name, data = next(own for own in places if own.endswith(f".{kind}")), _bytes_of(tensor)
        files.write(descriptor, places[name], data)
        places[name] += len(data)
        states[name].update(data)

    put("tokens", torch.from_numpy(segment.info.tokens))
    for layer, (keys, values, rows) in enumerate(_layers(segment)):
        put("keys", keys)
        put("values", values)
        if rows is not None:
            put(f"rows.{layer}", rows)
    if segment.info.shape.basis:
        put("fits", torch.from_numpy(segment.fits))
    return {name: state.hexdigest() for name, state in states.items()}


def _layers(segment: OpenSegment) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys and values of each layer in logical order, and its rows if it has some; verified."""
    layout = segment.layout
    for layer in range(layout.shape.num_layers):
        pages = layout.codes[layer] if layout.shape.basis else None
        size = layout.columns_bytes if pages is None else layout.layer_bytes(layer)
        memory = AlignedMemory(size)
        segment.fill(memory, layout.layer_offset(layer))
        mapping = None if segment.mapping is None else segment.mapping[layer]
        rows = torch.frombuffer(memory.view, dtype=torch.uint8)[layout.columns_bytes :]
        keys, values = decode_layer(layout, memory.view, mapping)
        yield keys, values, None if pages is None else pages.groups_in(rows)[: pages.num_tokens]


def _header(contents: Contents, digests: Mapping[str, str]) -> bytes:
    told = {"contents": contents.to_json(), "digests": json.dumps(digests)}
    told |= {"kind": KIND, "version": str(VERSION), "digest": _digest(*told.values())}
    fields: dict[str, Any] = {"__metadata__": told}
    offset = 0
    for name, (dtype, shape) in contents.tensors().items():
        end = offset + dtype.itemsize * math.prod(shape)
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields).encode()
    text = text.ljust(round_up(len(text), 8))
    return struct.pack("<Q", len(text)) + text


def _digest(*texts: str) -> str:
    return xxhash.xxh3_64("\0".join(texts).encode()).hexdigest()


def _keyed(key: str, namespace: str) -> str:
    return hashlib.blake2b(namespace.encode(), key=key.encode(), digest_size=16).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).view(-1).numpy())
