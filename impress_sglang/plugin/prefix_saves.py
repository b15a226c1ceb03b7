"""Offers computed KVs to the store after a pass, from slots of SGLang's tree.

The slots are locked in the tree while a write reads them, layer by layer, but count as evictable:
if SGLang needs them, writes are given up first. Reallocating a slot before it was read would yield
a file with wrong KVs and right checksums. So a save is abandoned before its lock is released, and a
write is published only if its save was not abandoned before the last layer was read.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.session.streaming_session import is_virtual_node
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from impress_sglang.codes.groups.energy import MEASURED_QUERIES
from impress_sglang.config import OFF
from impress_sglang.plugin.eligibility import store_refusal
from impress_sglang.plugin.pools import append_state_tokens
from impress_sglang.plugin.request_tracker import RequestTracker, TrackedRequest, as_tokens
from impress_sglang.plugin.tree_nodes import last_state, lock_states, lock_windows
from impress_sglang.serving.custom_params import PRIORITY_KEY, STORE_KEY, TTL_KEY, params_of
from impress_sglang.serving.pool_reader import PoolLayerReader
from impress_sglang.serving.prefix_frequency import PrefixFrequencySketch
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, Tokens
from impress_sglang.storage.writer import LayerReader
from impress_sglang.store.content import meets
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.writing import Offer, StoreOutcome


@dataclasses.dataclass(eq=False, slots=True)
class _Save:
    """A write of slots that are locked in the tree until it is over or abandoned.

    A rank that writes nothing holds the same locks, as other ranks may write.
    """

    slots: Tensor  # int64 [n]
    last_node: Any  # node of SGLang's tree at their end
    state: Tensor | None  # slot of the state at their end
    num_locked: int  # number of locked slots
    locks: list[Any] = dataclasses.field(default_factory=list)
    windows_from: int = 0  # first token whose SWA KVs are locked
    reading: int = 0  # number of writes that read them
    ended: bool = False  # this rank has stopped reading them
    abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set before its slots may be reallocated and hold other KVs."""


class PrefixSaves:
    """The saves of one tree cache. Thread: scheduler."""

    def __init__(self, requests: RequestTracker, model: Any) -> None:
        self._cache, self._service = requests.cache, requests.service
        self._planner, self._provenance = requests.planner, requests.provenance
        self._layers, self._window = requests.layers, requests.allocation.window
        self._protected_rows = requests.allocation.protected_aux
        self._forward_stream, self._ranks = requests.forward_stream, requests.ranks
        self._sampler = QuerySampler(model, requests.layers.number)
        self._reading = threading.Lock()
        self._saves: dict[_Save, None] = {}
        config = self._service.config
        self._min_tokens, repeated = config.min_prefix_tokens, config.write_after > 1
        self._sketch = None
        if repeated or config.blend != OFF:
            self._sketch = PrefixFrequencySketch(max(config.write_after, 2), self._service.counts)
        self.frequency = self._sketch if repeated else None
        """Counts requests for prompts; None unless that decides which are stored."""
        self.writing_tokens = 0

    def count_prompt(self, tracked: TrackedRequest) -> bool:
        """Count a request that may be stored, at its first match.

        Returns whether to compute it exactly, because its text will be reused at other positions.
        """
        req = tracked.req
        if tracked.storable_tokens is not None or not self._service.in_use:
            return False
        tokens = req.origin_input_ids
        if self.frequency is None or params_of(req.sampling_params).get(STORE_KEY):
            tracked.storable_tokens = len(tokens)
        if self._sketch is None or len(tokens) < self._min_tokens:
            return False
        # With several samples, SGLang first computes the prompt alone, without new tokens.
        count = req.sampling_params.n == 1 or req.sampling_params.max_new_tokens == 0
        namespace, text = tracked.namespace, as_tokens(tokens)
        seen = self._sketch.count_prefix(namespace, text, count=count)
        elsewhere = self._reusable_tokens(self._sketch, namespace, text, seen, count=count)
        tracked.frequent_tokens = max(seen, elsewhere)
        tracked.storable_tokens = max(tracked.frequent_tokens, tracked.storable_tokens or 0)
        return elsewhere > seen

    def _reusable_tokens(
        self,
        sketch: PrefixFrequencySketch,
        namespace: str,
        tokens: Tokens,
        num_seen: int,
        *,
        count: bool,
    ) -> int:
        """Count the leading tokens of a prompt that are worth storing because their text is reused.

        Nonzero if most of the text after the first `num_seen` tokens was requested often enough at
        any position, is not stored, and is long enough to be blended.
        """
        store = self._service.store
        content = store.tree.content
        if content is None:
            return 0
        starts, often = sketch.count_text(namespace, tokens, count=count)
        often &= starts >= num_seen
        half = np.count_nonzero(starts >= num_seen) // 2
        if (
            not store.writes.accepts
            or len(tokens) - num_seen < self._service.config.blend_min_tokens
        ):
            # It could not be stored, so computing it exactly would be wasted.
            return 0
        if np.count_nonzero(often) > half:
            runs = content.find(store.namespace(namespace), tokens, num_seen, only_ready=False)
            often &= ~meets(runs, starts, BLOCK_TOKENS)
        fresh = starts[often]
        return int(fresh[-1]) + BLOCK_TOKENS if len(fresh) > half else 0

    def expect(self, tracked: TrackedRequest) -> None:
        """Sample queries of an admitted request, if it will be stored and its prompt is
        selected."""
        fits = self._fits(tracked, len(tracked.req.origin_input_ids))
        if (
            fits
            and self._service.shape.coded
            and self._service.store.writes.should_sample_queries()
        ):
            self._sampler.sample_next_prompt(tracked.req.rid)

    def offer(self, tracked: TrackedRequest, up_to: int) -> None:
        """Offer the first `up_to` tokens of a request, which are computed and in the tree."""
        req = tracked.req
        if up_to < len(req.origin_input_ids) or is_virtual_node(req.last_node):
            return
        count = self._max_writable_tokens(tracked, up_to - self._planner.draft_offset)
        if not self._can_lock(count):
            return
        last, state = req.last_node, None
        if self._layers.states is not None:
            last, count, state = last_state(self._cache, last, count)
            if not self._can_lock(count):
                return
        slots = self._cache.path_device_indices(last)[:count].to(torch.int64)
        save = _Save(slots, last, state, len(slots))
        self._lock(save)
        self._saves[save] = None
        self.writing_tokens += len(slots)
        if not self._offer(tracked, save):
            self._end(save)

    def _max_writable_tokens(self, tracked: TrackedRequest, up_to: int) -> int:
        """Count the leading tokens of a request that any rank may write.

        Ranks may differ in what their stores hold and have counted, but must not differ in locks.
        """
        if self._ranks.alone:
            return self._storable_tokens(tracked, up_to) if self._may_store(tracked) else 0
        stored = self._service.policy.stores and store_refusal(tracked.req) is None
        return self._planner.whole_pages(up_to) if stored else 0

    def end(self, tracked: TrackedRequest) -> None:
        """Count the answer of a request that has ended: the next prompt may contain it."""
        req = tracked.req
        self._sampler.take(req.rid)
        if self._sketch is not None and tracked.storable_tokens is not None and req.output_ids:
            tokens = as_tokens([*req.origin_input_ids, *req.output_ids])
            self._sketch.count_prefix(tracked.namespace, tokens, len(req.origin_input_ids))

    def locked_tokens(self) -> tuple[int, int]:
        """Count the slots and rows of SGLang's tree that only saves have locked.

        If these did not count as room, SGLang would make requests wait for the disk.
        """
        if not self._saves:
            return 0, 0
        slots, rows = self._cache.tree_core.protected_size(), self._protected_rows()
        for save in self._saves:
            self._unlock(save)
        slots -= self._cache.tree_core.protected_size()
        rows -= self._protected_rows()
        for save in self._saves:
            # With new locks, as nodes may have been split.
            self._lock(save)
        return int(slots), rows

    def _lock(self, save: _Save) -> None:
        save.locks = [self._cache.lock(save.last_node)]
        if self._window:
            others, save.windows_from = lock_windows(self._cache, save.last_node, save.windows_from)
            save.locks += others
        elif self._layers.states is not None and not self._ranks.alone:
            # Each rank stores the last state that it considers worth storing.
            save.locks += lock_states(self._cache, save.last_node)

    def _unlock(self, save: _Save) -> None:
        for lock in save.locks:
            self._cache.unlock(lock)

    def give_up(self, missing: Callable[[], int]) -> None:
        """Give up saves, the latest first, until nothing is `missing` beyond the evictable
        tokens."""
        for save in reversed(list(self._saves)):
            if missing() <= 0:
                return
            save.abandoned.set()
            self.release([save])

    def give_all_up(self) -> None:
        self.give_up(lambda: 1)

    def __bool__(self) -> bool:
        return bool(self._saves)

    def ended(self) -> list[_Save]:
        """Return the saves that are over on this rank, up to the first one that is not."""
        return list(itertools.takewhile(lambda save: save.ended, self._saves))

    def release(self, saves: Iterable[_Save]) -> None:
        """Release the slots of saves that are over on all ranks; repeated calls do nothing."""
        for save in saves:
            if save in self._saves:
                del self._saves[save]
                self.writing_tokens -= save.num_locked
                self._unlock(save)

    def finish(self) -> None:
        """Let accepted writes end, before the slots that they read are reallocated."""
        store = self._service.opened
        if store is not None:
            store.writes.drain()
            # Other weights, and so another store, may follow.
            self._service.publish_metrics(now=True)
        self.give_all_up()

    def abandon(self) -> None:
        """Stop all reads from the pool, and give up all saves."""
        self.give_all_up()
        with self._reading:
            # Wait for the layer that is being read.
            pass
        store = self._service.opened
        if store is not None:
            store.writes.abandon()

    def _may_store(self, tracked: TrackedRequest) -> bool:
        in_use = self._service.in_use and not tracked.save_refused
        return self._ranks.writes and in_use and store_refusal(tracked.req) is None

    def _fits(self, tracked: TrackedRequest, num_tokens: int) -> bool:
        storable = self._storable_tokens(tracked, num_tokens)
        return self._may_store(tracked) and storable >= self._min_tokens

    def _can_lock(self, num_tokens: int) -> bool:
        """Whether the pool can spare slots: at most half of them, or those of a single prefix."""
        if num_tokens < self._min_tokens:
            return False
        spare = self._cache.token_to_kv_pool_allocator.size_full // 2 - self.writing_tokens
        return not self._saves or num_tokens <= spare

    def _storable_tokens(self, tracked: TrackedRequest, num_tokens: int) -> int:
        """Count the leading slots of a request that are worth storing, in whole pages."""
        if self.frequency is not None:
            storable = (tracked.storable_tokens or 0) - self._planner.draft_offset
            num_tokens = min(num_tokens, storable)
        return self._planner.whole_pages(num_tokens)

    def _quality_of(self, tracked: TrackedRequest, slots: Tensor) -> tuple[Quality | None, int]:
        """Return the quality of KVs in slots, and how many of the leading ones came from a
        store."""
        provenance, kv_class = self._provenance, tracked.kv_class
        # The exact class has no KVs that rest on codes, and its slots are not marked.
        depth = 0 if kv_class.exact else provenance.depth(slots)
        if not depth:
            return EXACT, 0
        if depth > self._service.config.approximation_depth:
            return None, 0
        ratio = kv_class.recompute_ratio if provenance.blended(slots) else 1.0
        return Quality(depth, kv_class.bits, ratio), provenance.loaded_before(slots)

    def _offer(self, tracked: TrackedRequest, save: _Save) -> bool:
        """Offer the slots of a save to the store; returns whether it will read them."""
        if not self._fits(tracked, len(save.slots)):
            return False
        req, store = tracked.req, self._service.store
        save.slots = save.slots[: self._storable_tokens(tracked, len(save.slots))]
        queries = self._sampler.take(req.rid)
        quality, first = self._quality_of(tracked, save.slots)
        if quality is None or first >= len(save.slots):
            return False
        if save.state is not None and len(save.slots) < save.num_locked:
            _, count, save.state = last_state(self._cache, save.last_node, len(save.slots))
            if count < self._min_tokens:
                return False
            save.slots = save.slots[:count]
        if save.windows_from and len(save.slots) - save.windows_from < self._window:
            # Not loadable: too few tokens are left in layers with windows.
            return False
        layers, beyond = self._layers, self._planner.draft_offset
        # Each slot is stored as the last token that it depends on; the first ones may be any.
        rows = torch.cat([save.slots[:beyond], save.slots])
        tokens = as_tokens(req.full_untruncated_fill_ids[: len(rows)])
        asked = params_of(req.sampling_params)

        def reader(read: Any, slots: Tensor) -> LayerReader:
            return PoolLayerReader(read, slots, self._forward_stream, save.abandoned, self._reading)

        offer = Offer(
            tokens,
            lambda start: reader(layers.read, rows[start:]),
            on_done=lambda: self._end(save, 1),
            abandon=save.abandoned.set,
            quality=quality,
            available_from=first and first + beyond,
            min_tokens=self._service.config.chunk_tokens,
            queries=lambda layer: queries.pop(layer).cpu() if layer in queries else None,
            ttl=float(asked.get(TTL_KEY, 0.0)),
            priority=Priority[asked.get(PRIORITY_KEY, "normal").upper()],
            windows_from=save.windows_from,
        )
        outcome = store.writes.offer(tracked.namespace, offer)
        save.reading += outcome is StoreOutcome.ACCEPTED
        if save.state is not None and self._layers.states is not None:
            state, states = save.state, self._layers.states
            end_state = dataclasses.replace(
                offer,
                tokens=append_state_tokens(tokens, states),
                read_layers=lambda start: reader(states.read, state),
                min_tokens=states.tokens,
                available_from=len(tokens),
            )
            stored = store.writes.offer(tracked.namespace, end_state)
            save.reading += stored is StoreOutcome.ACCEPTED
        tracked.save_refused = outcome in (StoreOutcome.NO_SPACE, StoreOutcome.OVER_BUDGET)
        return save.reading > 0

    def _end(self, save: _Save, writes: int = 0) -> None:
        """Count `writes` ended writes of a save; after the last one, this rank stops reading it."""
        save.reading -= writes
        if save.reading:
            return
        save.ended = True
        if self._ranks.alone:
            self.release([save])


class QuerySampler:
    """Samples the last queries of prompts that will be stored, by request and layer.

    The codec gives more bits to the channels that these queries weight. While a prompt is to be
    sampled, a torch hook on the attention modules sees its queries, where SGLang runs them in
    Python. It does not run in a replayed graph; the codec then uses earlier measurements. Sampling
    is best effort.
    """

    def __init__(self, model: Any, number: Callable[[int], int]) -> None:
        """`number` maps a layer of the model to a layer of the store."""
        self._modules = [module for module in model.modules() if isinstance(module, RadixAttention)]
        self._number = number
        self._hooks: list[RemovableHandle] = []
        self._to_sample: set[str] = set()
        self._sampled: dict[str, dict[int, Tensor]] = {}

    def sample_next_prompt(self, rid: str) -> None:
        self._to_sample.add(rid)
        if not self._hooks:
            self._hooks = [
                module.register_forward_pre_hook(self._sample, with_kwargs=True)
                for module in self._modules
            ]

    def take(self, rid: str) -> dict[int, Tensor]:
        """Return the samples of a request, by layer, and forget them."""
        self._to_sample.discard(rid)
        if not self._to_sample:
            # A hook costs time in each layer of each pass.
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        return self._sampled.pop(rid, {})

    def _sample(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            if rid not in self._to_sample:
                continue
            first = stop - min(MEASURED_QUERIES, int(count))
            shape = stop - first, module.tp_q_head_num, module.qk_head_dim
            layers = self._sampled.setdefault(rid, {})
            layers[self._number(module.layer_id)] = queries[first:stop].view(shape).clone()
