"""Runs one layer of one request through load -> score -> select -> copy.

A request that uses k of the m tokens of a prefix has k private slots. All tokens are loaded from
codes into scratch memory. Each KV head selects the k tokens that the new tokens attend to most, and
their rows are copied into the slots. Where k = m, they are loaded into the slots at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impress_sglang.importance.selection import own_tokens
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for, put_codes
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.memory import rows_of_head_groups
from impress_sglang.transfer.scoring import Scorer, scorer_for
from impress_sglang.transfer.slots import LayerSlots


class SelectiveLoader:
    """Loads from codes the tokens of a prefix that a layer uses, in the bits a request wants."""

    def __init__(
        self,
        shape: KVShape,
        scorer: Scorer | None = None,
        writer: CodeWriter | None = None,
    ) -> None:
        """`scorer`, `writer`: None for those that fit the device of the queries."""
        self._shape = shape
        self._scorer = scorer
        self._writer = writer
        self._requests = 0
        # One layer of the longest prefix so far; used by one request after the other.
        self._scratch: LayerSlots | None = None

    def begin(self) -> None:
        """Begin a request; `end` must follow."""
        self._requests += 1

    def end(self) -> None:
        """End a request that began; after the last one, free the scratch memory."""
        self._requests -= 1
        if not self._requests:
            self._scratch = None

    def load(
        self,
        layer: int,
        source: CodedSource,
        inputs: LayerInputs,
        slots: LayerSlots,
        stats: LoadStats,
    ) -> Tensor:
        """Fill slots with the tokens of the prefix that this layer uses, one for each slot.

        Row j of a head gets that head's own j-th token.

        Args:
            layer: from 0; ascending for each source.
            source: the source of the prefix, with as many planes as are wanted.
            inputs: what the layer knows of the request.
            slots: no more than the prefix has tokens.
            stats: is changed.

        Returns:
            int64 [G, k] on the CPU, ascending: the tokens that each KV head uses.

        Raises:
            PrefixUnreadable: a block could not be read; what is in the slots is undefined.
        """
        if len(slots) == source.num_tokens:
            stats.layers_whole += 1
            self._restore(layer, source, slots, stats)
            return torch.arange(len(slots)).expand(self._shape.num_kv_heads, -1)
        stats.layers_by_probe += 1
        scratch = self._scratch_for(source, slots)
        self._restore(layer, source, scratch, stats)
        with stats.timed("probe_ms"):
            scores = self._scores(inputs, scratch.keys.pool)
            selected = own_tokens(scores, self._shape.group_size, len(slots))
        with stats.timed("load_ms"):
            slots.keys.put(rows_of_head_groups(scratch.keys.pool, selected))
            slots.values.put(rows_of_head_groups(scratch.values.pool, selected))
        return selected

    def _restore(
        self, layer: int, source: CodedSource, slots: LayerSlots, stats: LoadStats
    ) -> None:
        """Load all tokens of a source."""
        keys, values, rows = slots.keys.pool, slots.values.pool, slots.keys.rows
        if rows is None:
            rows = torch.arange(len(slots), device=keys.device)
        writer = self._writer = self._writer or code_writer_for(keys.device)
        with stats.timed("load_ms"):
            found = source.read(layer)
            put_codes(writer, source, found, keys, values, rows)
        for span, codes in zip(source.spans, found, strict=True):
            stats.base_bytes += codes.groups.numel()
            stats.note_planes(span.levels(layer, source.planes), len(span.units))

    def _scratch_for(self, source: CodedSource, slots: LayerSlots) -> LayerSlots:
        """Scratch memory for one layer of all tokens of a source, in their order."""
        count, held = source.num_tokens, self._scratch
        if held is None or len(held.keys.pool) < count:
            self._scratch = held = None
            device = slots.keys.pool.device
            self._scratch = held = LayerSlots.fresh(count, self._shape, device)
        return LayerSlots.of(held.keys.pool[:count], held.values.pool[:count])

    def _scores(self, inputs: LayerInputs, keys: Tensor) -> Tensor:
        """The importance of all tokens for each query head [Hq, m]; all new tokens count alike."""
        scorer = self._scorer = self._scorer or scorer_for(inputs.queries.device)
        return scorer.column_sums(
            inputs.queries,
            keys,
            inputs.resident_keys,
            inputs.new_keys,
            tuple(range(self._shape.num_kv_heads)),
            inputs.scaling,
            resident_rows=inputs.resident_rows,
        )
