"""A prefix whose KVs are in host memory: what a loader is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impress_sglang.storage.layout import PROBE, KVShape
from impress_sglang.transfer.loader import rows_of_head_groups
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import Slots


class MemorySource:
    """Keys [m, G, Dk] and values [m, G, Dv] of each layer; see `transfer.source.PrefixSource`."""

    def __init__(self, shape: KVShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._keys, self._values, self._shape = keys, values, shape
        self.num_tokens = len(keys[0])
        self.stats = ReadStats()

    def read_probe(self, layer: int) -> Tensor:
        return self._keys[layer][:, list(self._shape.heads(PROBE))]

    def read(
        self,
        layer: int,
        tokens: Tensor | None,
        *,
        keys: Slots | None = None,
        values: Slots | None = None,
    ) -> None:
        for slots, whole, heads in (
            (keys, self._keys[layer], list(self._shape.other_kv_heads)),
            (values, self._values[layer], list(range(self._shape.num_kv_heads))),
        ):
            if slots is not None:
                rows = whole if tokens is None else rows_of_head_groups(whole, tokens)
                slots.put(rows[:, heads])

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None: ...

    def note_whole(self, layer: int) -> None: ...
