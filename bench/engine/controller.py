"""CacheBlend's loading controller at the sizes of real models: shares of auto, and TTFT.

Documents of random KVs are stored, and a prompt has them in another order. The product plans,
reads from a drive of the paper's speed, restores, turns keys, and reads ahead. Computing is a wait:
a layer takes what CacheBlend 5.1 says, times the share of the tokens that it computes. So no model
is needed, and a GPU neither; heads, and the drive with them, are scaled down to what these cores
restore in less than a layer takes.

The paper loads 4k tokens of a layer in 16 ms (Llama-7B) and 4 ms (70B), in 16 bits, and computes
15% of them in 3 and 7 ms: its controller takes as much for the one as hides, and 15% for the other.

TTFT        of a request whose question is a token, the median
loading     what the product had to wait for in it, and took to restore
auto        the share that `--impress-blend auto` chooses
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.core.emulation import SlowFileSystem
from bench.core.options import SEED, Option, one_of
from bench.core.report import Result, Row, Table, plain
from bench.core.session import BenchFailed, step, work_folder
from bench.engine.stored import IDENTITY, NAMESPACE, save
from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.config import ImpressConfig
from impress_sglang.management.policies import LoadOptions
from impress_sglang.options import AUTO, BITS
from impress_sglang.serving.estimate import pairs_of
from impress_sglang.serving.paper.blend_plan import CHECKED_LAYERS, BlendNotes, Kind, share_of_layer
from impress_sglang.serving.paper.blended_loading import BlendedLoading
from impress_sglang.serving.paper.blending import Blending
from impress_sglang.serving.paper.runtime import ServingRuntime
from impress_sglang.storage.files import install
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import NO_TIMELINE
from impress_sglang.transfer.coded_slots import code_writer_for
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.slots import LayerSlots


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A model, and milliseconds that a layer takes for 4k tokens; see the module."""

    layers: int
    kv_heads: int
    load_ms: float
    compute_ms: float


PAPER_TOKENS = 4096
MODELS = {"llama-7b": Timed(32, 32, 16.0, 3.0 / 0.15), "llama-70b": Timed(80, 8, 4.0, 7.0 / 0.15)}
HEAD_DIM = 128
OPTIONS = (
    Option("models", tuple(MODELS), f"of {', '.join(MODELS)}", parse=one_of(tuple(MODELS))),
    Option("documents", 8, "of a prompt", quick=3),
    Option("tokens", 512, "of a document", quick=128),
    Option("shares", (0.0, 0.05, 0.15, 0.3, 0.5), "of their tokens to compute again"),
    Option("drives", (1.0, 0.25), "how many times as fast as the paper's"),
    Option("kv-heads", 1, "of each model, instead of its own"),
    Option("requests", 5, "with each share", quick=1),
    SEED,
)


def run(args: argparse.Namespace) -> Result:
    """Serve requests with each model, drive and share."""
    rows: list[Row] = []
    with work_folder(None) as folder:
        for name in args.models:
            with contextlib.closing(Cell(args, name, folder / name)) as cell:
                for drive in args.drives:
                    with step(f"{name}, drive x {drive:g}"):
                        rows += cell.rows(drive)
    keys = ("model", "drive", "share", "auto", "TTFT", "loading", "computing", "speed-up")
    return Result({"rows": rows}, [Table(plain(*keys), rows)])


class Cell:
    """A model's documents in a store, and requests for them."""

    def __init__(self, args: argparse.Namespace, name: str, folder: Path) -> None:
        """Store the documents.

        Raises:
            BenchFailed: the store did not take them.
        """
        self._args, self._name, self._model = args, name, MODELS[name]
        self._rng = np.random.default_rng(args.seed)
        layers, heads = self._model.layers, args.kv_heads
        shape = KVShape(layers, heads, heads, HEAD_DIM, HEAD_DIM, torch.bfloat16, (), coded=True)
        config = ImpressConfig(
            ssd_dir=str(folder),
            min_free_gb=0.0,
            device_gb=0.0,
            host_gb=0.0,
            base_error=0.0,
            load="always",
            blend=AUTO,
            blend_seconds=60.0,
            blend_min_tokens=128,
        )
        self._files = SlowFileSystem()
        install(self._files)
        cpu = torch.device("cpu")
        hidden = heads * HEAD_DIM
        self._runtime = runtime = ServingRuntime(config, shape, IDENTITY, cpu, hidden)
        self._rotation = KeyRotation(_table, halves=True)
        parts = runtime.policy, runtime.served, runtime.estimator
        self._blending = Blending(config, shape, *parts, page_size=1, block_tokens=PAPER_TOKENS)
        count = args.documents * args.tokens
        self._documents = self._rng.integers(0, 1 << 30, (args.documents, args.tokens)).astype(
            np.int32
        )
        self._pools = [torch.zeros(count, heads, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
        self._store()
        # What it takes is proportional to the tokens, as the paper's figures have it.
        for tokens in np.linspace(count / 8, count, 8, dtype=int):
            seconds = tokens / PAPER_TOKENS * layers * self._model.compute_ms / 1e3
            self._runtime.estimator.note_forward(int(tokens), pairs_of(0, int(tokens)), seconds)

    def rows(self, drive: float) -> Iterator[Row]:
        """The figures of all shares with a drive that is so many times as fast as the paper's."""
        model, args = self._model, self._args
        layer_bytes = PAPER_TOKENS * 2 * args.kv_heads * HEAD_DIM * 2
        self._files.set_rate(drive * layer_bytes / model.load_ms * 1e3 / 1e6)
        count = self._documents.size
        computed = count / PAPER_TOKENS * model.layers * model.compute_ms
        for share in (*args.shares, AUTO):
            # The first is only to learn.
            served = [self._serve(share) for _ in range(args.requests + 1)][1:]
            took, waited = (statistics.median(own[at] for own in served) for at in (0, 1))
            yield {
                "model": self._name,
                "drive": drive,
                "share": share,
                "auto": served[-1][2] if share == AUTO else None,
                "TTFT": round(took, 1),
                "loading": round(waited, 1),
                "computing": round(took - waited, 1),
                "speed-up": round(computed / took, 2),
            }

    def close(self) -> None:
        """Close the store."""
        self._runtime.close()

    def _store(self) -> None:
        tokens = self._documents.reshape(-1)
        heads = self._args.kv_heads

        def read(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            made = self._rng.standard_normal((2, len(tokens), heads, HEAD_DIM), dtype=np.float32)
            keys, values = torch.from_numpy(made).bfloat16()
            return keys, values

        save(self._runtime.store, tokens, read)

    def _serve(self, share: float | str) -> tuple[float, float, float]:
        """Milliseconds of a request, those of them that loading took, and its share."""
        order = self._rng.permutation(len(self._documents))
        while order[0] == 0:
            order = self._rng.permutation(len(self._documents))
        tokens = self._documents[order].reshape(-1)
        runtime, began = self._runtime, time.perf_counter()
        wanted = LoadOptions(bits=BITS[0], blend=share)
        plan = self._blending.plan(NAMESPACE, tokens, 0, None, wanted, BlendNotes())
        if plan is None:
            raise BenchFailed("a request was not blended")
        writer = code_writer_for(torch.device("cpu"))
        loading = BlendedLoading(writer, runtime.store, plan, self._rotation, NO_TIMELINE)
        stats, waited = LoadStats(), 0.0
        for number, block in enumerate(plan.blocks):
            loading.begin_block(number)
            slots = torch.arange(block.start, block.stop)
            new = float(np.count_nonzero(plan.kinds == Kind.COMPUTED))
            for layer in range(self._model.layers):
                asked = time.perf_counter()
                pools = LayerSlots.of(self._pools[0], self._pools[1])
                loading.restore(number, layer, pools, slots, stats)
                waited += time.perf_counter() - asked
                again = _computed(plan.share, layer, self._model.layers) * plan.reused
                time.sleep((new + again) / PAPER_TOKENS * self._model.compute_ms / 1e3)
            loading.end_block(number)
        loading.blended = True
        took = time.perf_counter() - began
        loading.close()
        runtime.served.poll()
        return took * 1e3, waited * 1e3, plan.share


def _computed(share: float, layer: int, num_layers: int) -> float:
    """Of the reused tokens those that a layer computes."""
    if not share:
        return 0.0
    return 1.0 if layer < CHECKED_LAYERS else share_of_layer(share, layer, num_layers)


def _table(rows: int) -> torch.Tensor:
    """Cosines and sines of rotary embeddings, [rows, HEAD_DIM]."""
    frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)
