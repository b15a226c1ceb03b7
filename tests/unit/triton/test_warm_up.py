"""What is compiled when a server starts is all that its requests launch.

Kernels are interpreted, and each launch is noted as Triton would tell compiled variants apart on a
GPU: by constants, types, alignment, and by which numbers are 1 or multiples of 16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import create_function_from_signature

from impress_sglang.errors import UnsupportedError
from impress_sglang.paper.loader import LayerInputs, LoadStats, PartLoader
from impress_sglang.paper.warm_up import score_and_choose
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer.kv_codec import KernelRestorer, shape_by
from impress_sglang.transfer.warm_up import run_stages
from impress_sglang.triton import codes as code_kernels
from impress_sglang.triton import pages as page_kernels
from impress_sglang.triton import rows as row_kernels
from impress_sglang.triton import score_kernels
from impress_sglang.triton import scores as score_module
from impress_sglang.triton import selection as selection_kernels
from tests.unit.basis_factory import codec_for
from tests.unit.coded_factory import CodedCase, CodedPart
from tests.unit.kv_factory import make_shape
from tests.unit.reading import load_layer
from tests.unit.row_factory import random_rows
from tests.unit.source_factory import SEVERAL, CacheKind, Part, open_case

CPU = torch.device("cpu")
CHUNK = 8

# As they were decorated, before the interpreter takes their place.
COMPILED = {
    (value.fn.__module__, name): value
    for module in (
        code_kernels,
        page_kernels,
        row_kernels,
        score_kernels,
        selection_kernels,
    )
    for name, value in vars(module).items()
    if isinstance(value, triton.JITFunction)
}
BACKEND = make_backend(GPUTarget("cuda", 90, 32))

# Kernel, options of its launch, and kinds of its arguments.
Variant = tuple[str, str, str]


class Launches:
    """Variants that were launched since the last look.

    They are carried out only with `everything`, for the interpreter is slow. Else what the host
    looks at is made up: which tokens are chosen, others by each head.
    """

    def __init__(self) -> None:
        self.everything = False
        self._seen: set[Variant] = set()
        self._binders = {
            name: create_function_from_signature(kernel.signature, kernel.params, BACKEND)
            for name, kernel in COMPILED.items()
        }

    def note(self, function: Any, positional: Sequence[Any], options: dict[str, Any]) -> bool:
        """Note a launch; returns whether it is to be carried out."""
        name = function.__name__
        arguments, kinds, launch = self._binders[function.__module__, name](*positional, **options)
        named = dict(zip(arguments, kinds, strict=True))
        self._seen.add((name, str(sorted(launch.items())), str(named)))
        if self.everything:
            return True
        if name == "top_kernel":
            rows = len(arguments["out"])
            arguments["out"][:] = torch.arange(arguments["k"]) + torch.arange(rows)[:, None]
        elif name == "weight_sums":
            arguments["sums"].zero_()
        return False

    def take(self) -> set[Variant]:
        seen, self._seen = self._seen, set()
        return seen


@pytest.fixture
def launches(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What a GPU would do with kernels is done with them."""
    launches, run = Launches(), InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if launches.note(self.fn, args, options):
            run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return launches


HEAD_GROUPS = make_shape(query_heads=6, key_dim=16, value_dim=32, probe=())
MHA = make_shape(query_heads=5, kv_heads=5, key_dim=32, value_dim=32, probe=(0, 1, 2))
GQA = make_shape(query_heads=8, kv_heads=4, key_dim=16, value_dim=16, probe=(0,))
MQA = make_shape(query_heads=4, kv_heads=1, key_dim=32, value_dim=32, probe=(0,))
CODED = dataclasses.replace(HEAD_GROUPS, code_bits=6.0)


SERVERS = {
    "paper-mha-bfloat16": dataclasses.replace(MHA, dtype=torch.bfloat16),
    "paper-gqa-float16": dataclasses.replace(GQA, dtype=torch.float16),
    "paper-mqa-bfloat16": dataclasses.replace(MQA, dtype=torch.bfloat16),
    "h2o-float32": HEAD_GROUPS,
    "coded-bfloat16": dataclasses.replace(CODED, dtype=torch.bfloat16),
}


def start(shape: KVShape) -> None:
    """Compile what a server with KVs of this shape does."""
    run_stages(dataclasses.replace(shape, probe_kv_heads=()), CHUNK, CPU)
    if shape.probe_kv_heads:
        score_and_choose(shape, CPU)


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A stored prefix; of how many of its tokens requests use, and their numbers of new tokens."""

    parts: list[Part]
    used: tuple[int, ...]
    new: tuple[int, ...]
    reordered: bool = True


# Lengths with and without a factor of 16, that need one tile or block and several.
NEW, RESIDENT = (1, 2, 12, 16, 40, 150), (0, 1, 6, 0, 16, 3)
SHORT, LONG = Part(77, CHUNK, 13, 77), Part(2100, CHUNK, 0, 2100)
PREFIXES = {
    "short": Prefix([SHORT], (64, 20, 16, 1), NEW),
    "as it was": Prefix([SHORT], (64, 20), NEW[:2], reordered=False),
    "even": Prefix([Part(64, CHUNK, 0, 64)], (16,), (16, 5)),
    "several segments": Prefix(SEVERAL, (77, 20), NEW),
    "long": Prefix([LONG], (40,), NEW),
    "long after short": Prefix([SHORT, LONG], (40,), NEW),
}


def layer_inputs(shape: KVShape, new: int, resident: int) -> LayerInputs:
    """Of a request that is not the first of its batch; queries and keys are computed as one."""
    heads = shape.num_query_heads, shape.num_kv_heads
    widths = [own * shape.key_dim for own in (*heads, shape.num_kv_heads)]
    queries, keys, _ = torch.zeros(new + 7, sum(widths), dtype=shape.dtype).split(widths, dim=1)
    pool = torch.zeros(50, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    return LayerInputs(
        queries.view(-1, heads[0], shape.key_dim)[7:],
        keys.view(-1, heads[1], shape.key_dim)[7:],
        pool,
        torch.arange(resident),
        0.2,
    )


def make_requests(shape: KVShape, directory: Path, reader: BlockReader) -> None:
    """Of all lengths, for probe heads that agree and that do not, and for the whole prefix."""
    # On the device prefixes displace each other.
    cache = CacheKind(device=2, host=400, page_tokens=CHUNK).make(shape)
    for number, prefix in enumerate(PREFIXES.values()):
        folder = directory / str(number)
        folder.mkdir()
        case = open_case(
            folder, shape, prefix.parts, reader, cache=cache, reordered=prefix.reordered
        )
        for new, resident in zip(prefix.new, RESIDENT, strict=False):
            inputs = layer_inputs(shape, new, resident)
            for k in prefix.used:
                for alpha in (9.0, 0.001):
                    case.request()
                    loader = PartLoader(shape, alpha)
                    for layer in range(shape.num_layers):
                        load_layer(loader, layer, case.source, inputs, k, LoadStats())
        case.close()
        if shape.coded:
            make_coded_requests(shape, prefix, folder, reader)


def make_coded_requests(
    shape: KVShape, prefix: Prefix, directory: Path, reader: BlockReader
) -> None:
    """For whole prefixes."""
    parts = [CodedPart(part.num_tokens, part.start, part.stop) for part in prefix.parts]
    case = CodedCase(directory, parts, reader, shape=shape, device_pages=9, host_pages=13)
    for layer in range(shape.num_layers):
        case.load(layer, kernels=True)
    case.close()


@pytest.mark.parametrize("name", SERVERS)
def test_requests_launch_nothing_new(
    name: str, launches: Launches, tmp_path: Path, reader: BlockReader
) -> None:
    """And everything that was compiled is launched by some request."""
    shape = SERVERS[name]
    start(shape)
    warm = launches.take()

    make_requests(shape, tmp_path, reader)

    seen = launches.take()
    assert sorted(seen - warm) == []
    assert sorted(warm - seen) == []


def test_restoring_by_a_basis_launches_nothing_new(launches: Launches) -> None:
    """Whatever the number of tokens; the first layer is restored otherwise than others."""
    codec = codec_for(dataclasses.replace(CODED, num_layers=3))
    shape = shape_by(codec.basis, dataclasses.replace(CODED, num_layers=3, dtype=torch.bfloat16))
    run_stages(shape, CHUNK, CPU, codec=codec)
    warm = launches.take()

    restorer, heads = KernelRestorer(codec, CPU), shape.num_kv_heads
    for tokens in (1, 30, 700):
        places, below = torch.arange(tokens), None
        turns = codec.rotation.turns(torch.zeros_like(places), places)
        pools = [
            torch.zeros(tokens, heads, dim, dtype=shape.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        ]
        for layer in range(3):
            rows = random_rows(codec.basis, layer, tokens)
            below = restorer.put(layer, rows, below, turns, places, *pools)

    seen = launches.take()
    assert {variant[0] for variant in seen} == {"_unpack_kernel", "_restore_kernel"}
    assert len(seen) == 3 and sorted(seen - warm) == []


@pytest.mark.parametrize(
    ("kernel", "instead"),
    [
        ("row_sums", "--impress-policy as,"),
        ("weight_sums", "--impress-policy as,"),
        ("top_kernel", "--impress-policy as,"),
        ("_copy_kernel", "--impress-policy recompute,"),
        ("_restore_kernel", "--impress-policy paper,"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    kernel: str, instead: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = launches.note

    def compiled(function: Any, positional: Sequence[Any], options: dict[str, Any]) -> bool:
        carried_out = note(function, positional, options)
        if any(name == kernel for name, *_ in launches.take()):
            raise OutOfResources(147456, 101376, "shared memory")
        return carried_out

    monkeypatch.setattr(launches, "note", compiled)

    with pytest.raises(UnsupportedError) as refusal:
        score_and_choose(dataclasses.replace(CODED, probe_kv_heads=(0,)), CPU)
        run_stages(CODED, CHUNK, CPU)

    text = str(refusal.value)
    assert text.partition("; use ")[2].startswith(instead)
    assert "3 query heads per KV head and 16 elements per key (torch.float32)" in text
    assert "147456 of shared memory" in text and "101376" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU")
def test_on_a_gpu_lengths_compile_nothing_new() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = SERVERS["paper-gqa-float16"]

    def compiled() -> int:
        return sum(len(own.device_caches[device.index][0]) for own in COMPILED.values())

    before = compiled()
    score_and_choose(shape, device)
    warm = compiled()
    assert warm > before
    for new, tokens in ((1, 77), (33, 4096), (500, 50000)):
        queries, keys, prefix = (
            torch.zeros(rows, heads, 16, dtype=torch.float16, device=device)
            for rows, heads in ((new, 2), (new, 4), (tokens, 1))
        )
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        sums = score_module.column_sums(
            queries, prefix, keys, keys, 0.3, heads=(0,), resident_rows=nothing
        )
        assert selection_kernels.top_tokens(sums, tokens // 4).shape == (2, tokens // 4)
    assert compiled() == warm
