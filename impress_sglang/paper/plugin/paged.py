"""IMPRESS on SGLang's triton and flashinfer backends.

Both ask SGLang's index translator once per batch which slots each request's row has, and keep
nothing else of a row. So it is enough to prepare them with lengths that count from the rows'
starts, and to let the translator begin there. Positions, and the lengths that the model and the
scheduler see, still count from the beginning of the prompt.

The same holds for a captured decode step: SGLang prepares its metadata outside the graph before
each replay, and the starts are gathered on the device then. Neither has run on a GPU yet. In
Triton's interpreter the triton backend serves a model on a CPU, and its captured metadata is
compared with rows; for flashinfer, the plans are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from impress_sglang.paper.plugin.attention import PrefixAttention
from impress_sglang.paper.plugin.row_starts import RowStarts

# Attribute of SGLang's plan of a batch, which also reaches the replay of a captured decode step.
_HOST_ROWS = "_impress_host_rows"


class PagedPrefixAttention(PrefixAttention):
    """Offset rows for backends that ask SGLang's index translator for the slots of a batch."""

    kv_index_translator: Any
    keeps_host_rows = True
    """Whether this backend uses what `keep_host_rows` keeps."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a decode step before it is captured and before each replay."""
        self._starts.void_reallocated()
        with self._from_starts(forward_batch) as from_starts:
            super().init_forward_metadata_out_graph(from_starts, in_capture)

    def _plan(self, forward_batch: Any) -> None:
        with self._from_starts(forward_batch) as from_starts:
            super()._plan(from_starts)

    @contextmanager
    def _from_starts(self, forward_batch: Any) -> Iterator[Any]:
        """The batch as its preparation should see it; meanwhile the translator begins at starts."""
        if not self._starts:
            yield forward_batch
            return
        starts = self._starts.on_device[forward_batch.req_pool_indices]
        translator = self.kv_index_translator
        assert not isinstance(translator, _OffsetReads), "a start would be counted twice"
        reads = _OffsetReads(translator, starts)
        # SGLang checks that a backend keeps the runner's translator, so it is put back.
        self.kv_index_translator = reads
        try:
            yield batch_from_starts(
                forward_batch, starts, self._starts, on_host=self.needs_cpu_seq_lens
            )
        finally:
            self.kv_index_translator = translator
        assert reads.asked, "rows were read without their starts"


class ImpressTritonBackend(PagedPrefixAttention, TritonAttnBackend):
    """SGLang's triton backend with row starts and prefix loading."""


class ImpressFlashInferBackend(PagedPrefixAttention, FlashInferAttnBackend):
    """SGLang's flashinfer backend with row starts and prefix loading.

    It plans on the host, so lengths on the host must count from the starts as well.
    """


class _OffsetReads:
    """Stands in for SGLang's `KVIndexTranslator` while one batch is prepared.

    It has only what is known to be right with an offset, so that any other way of reading rows
    fails instead of reading from the beginning of the rows.
    """

    def __init__(self, translator: Any, starts: Tensor) -> None:
        self.asked = False
        self._translator = translator
        self._starts = starts

    @property
    def reads_are_translated(self) -> bool:
        """See SGLang's translator."""
        translated: bool = self._translator.reads_are_translated
        return translated

    def pack_read_stream(self, plan: Any, *, seq_lens: Tensor, **keywords: Any) -> Any:
        """Gather the batch's slots like SGLang, `seq_lens` entries of each row from its start."""
        assert keywords.get("kv_start_idx") is None, "a window starts rows by itself"
        self.asked = True
        keywords["kv_start_idx"] = self._starts[: seq_lens.numel()]
        return self._translator.pack_read_stream(plan, seq_lens=seq_lens, **keywords)


def batch_from_starts(
    forward_batch: Any, starts: Tensor, row_starts: RowStarts, *, on_host: bool
) -> Any:
    """Copy a batch (or a replay's view of it), with lengths that count from the starts.

    Args:
        forward_batch: SGLang's, which is left unchanged.
        starts: int64 [b], of the batch's rows, on the device.
        row_starts: the starts of all rows.
        on_host: whether lengths on the host are needed. If the host does not know the rows of the
            batch, they are then copied from the device, which waits for it; else left out.
    """
    batch = copy.copy(forward_batch)
    batch.seq_lens = _less(forward_batch.seq_lens, starts)
    if getattr(forward_batch, "extend_prefix_lens", None) is not None:
        batch.extend_prefix_lens = _less(forward_batch.extend_prefix_lens, starts)
    host_rows = _host_rows(forward_batch, on_host)
    if host_rows is None:
        # The sum of the full lengths stays: it is a bound, and is only used as one then.
        batch.seq_lens_cpu = None
        batch.extend_prefix_lens_cpu = None
        return batch
    # A captured batch is padded with row 0.
    padded = torch.zeros(len(starts), dtype=torch.int64)
    padded[: len(host_rows)] = row_starts.on_host[host_rows]
    if forward_batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = _less(forward_batch.seq_lens_cpu, padded)
    if forward_batch.seq_lens_sum is not None:
        batch.seq_lens_sum = forward_batch.seq_lens_sum - int(padded.sum())
    if getattr(forward_batch, "extend_prefix_lens_cpu", None) is not None:
        pairs = zip(forward_batch.extend_prefix_lens_cpu, padded.tolist(), strict=True)
        batch.extend_prefix_lens_cpu = [length - start for length, start in pairs]
    return batch


def keep_host_rows(forward_batch: Any, schedule_batch: Any) -> None:
    """Keep the rows of a batch, which the scheduler knows on the host, with the batch.

    SGLang passes them to the backend for prefill only. For decode they save a planner on the host
    from waiting for the device; without them results are the same.
    """
    rows = getattr(schedule_batch, "req_pool_indices_cpu", None)
    if rows is not None:
        setattr(forward_batch.kv_loc_plan, _HOST_ROWS, rows)


def _host_rows(forward_batch: Any, on_host: bool) -> Tensor | None:
    """The rows of the batch on the host, int64 [b], or fewer if the batch is padded."""
    rows: Tensor | None = getattr(forward_batch, "req_pool_indices_cpu", None)
    if rows is None:
        rows = getattr(forward_batch.kv_loc_plan, _HOST_ROWS, None)
    if rows is None and on_host:
        rows = forward_batch.req_pool_indices.cpu()
    return rows


def _less(lengths: Tensor, starts: Tensor) -> Tensor:
    """Lengths counted from the starts, in their own dtype."""
    return lengths - starts.to(lengths.dtype)
