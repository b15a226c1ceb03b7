"""Samples queries of few prompts: the codec gives bits to the channels that they look at.

While a prompt is wanted, a hook of torch on the attention modules sees them, where SGLang runs
these in Python. In a graph that is replayed it does not run; then what was measured before serves.
Nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from impress_sglang.codes.groups.energy import MEASURED_QUERIES


class QuerySampler:
    """The last queries of prompts that will be stored, by request and layer."""

    def __init__(self, model: Any, number: Callable[[int], int]) -> None:
        """`number`: of the layer of a store that a layer of the model is."""
        self._modules = [own for own in model.modules() if isinstance(own, RadixAttention)]
        self._number = number
        self._hooks: list[RemovableHandle] = []
        self._wanted: set[str] = set()
        self._sampled: dict[str, dict[int, Tensor]] = {}

    def want(self, rid: str) -> None:
        """Sample the prompt of the request with this id."""
        self._wanted.add(rid)
        if not self._hooks:
            self._hooks = [
                own.register_forward_pre_hook(self._look, with_kwargs=True) for own in self._modules
            ]

    def take(self, rid: str) -> dict[int, Tensor]:
        """What was sampled of a request, by layer, which is then forgotten."""
        self._wanted.discard(rid)
        if not self._wanted:
            # A module with a hook costs each pass its time, in each layer.
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        return self._sampled.pop(rid, {})

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = kwargs.get("forward_batch", args[3] if len(args) > 3 else None)
        if batch is None or not batch.forward_mode.is_extend_without_speculative():
            return
        queries: Tensor = kwargs.get("q", args[0] if args else None)
        if queries is None or batch.extend_seq_lens_cpu is None:
            return
        stop = 0
        # SGLang's warm-up batches have no requests.
        for rid, count in zip(batch.rids or (), batch.extend_seq_lens_cpu, strict=False):
            stop += int(count)
            if rid not in self._wanted:
                continue
            first = stop - min(MEASURED_QUERIES, int(count))
            own = queries[first:stop].view(stop - first, module.tp_q_head_num, module.qk_head_dim)
            layers = self._sampled.setdefault(rid, {})
            layers[self._number(module.layer_id)] = own.clone()
