"""Offers what requests computed to the store, and keeps the slots that writes still read.

Slots that are being written belong to SGLang's tree, locked (an exact prompt), or to the save alone
(`held_tokens`: what was computed after an approximation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache

from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.paper.saving import GatedLayerReader, Save
from impress_sglang.plugin.eligibility import store_refusal
from impress_sglang.plugin.keys import as_tokens, namespace_of
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.serving.custom_params import priority_of, store_wish_of, ttl_of
from impress_sglang.serving.pool_reader import PoolAccess, PoolLayerReader
from impress_sglang.serving.sights import Sights
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.writer import LayerReader
from impress_sglang.store.losses import Cause
from impress_sglang.store.writing import Offer, StoreOutcome

_REFUSALS = {
    StoreOutcome.NO_SPACE: Cause.NO_ROOM,
    StoreOutcome.SPENT: Cause.WRITE_BUDGET,
    StoreOutcome.UNAVAILABLE: Cause.READ_ONLY,
}


class PromptSaves:
    """The saves of one tree cache; the scheduler's thread owns them."""

    def __init__(self, cache: RadixCache, runtime: ServingRuntime, forward_stream: Any) -> None:
        """`forward_stream` is SGLang's, on which passes run."""
        self._cache = cache
        self._runtime = runtime
        self._forward_stream = forward_stream
        self._pool_access = PoolAccess()
        # By request: the saves of prompts that a pass is computing.
        self._begun: dict[str, Save] = {}
        self._locking: set[Save] = set()
        self._refused: set[str] = set()
        least = runtime.config.write_after
        self.sights = Sights(least) if least > 1 else None
        """Counts how often prompts are asked for; None unless that decides what is stored."""
        # By request: how many of its first tokens are worth storing.
        self._worth: dict[str, int] = {}
        self.held_tokens = 0
        self.writing_tokens = 0

    def sight(self, req: Any) -> None:
        """Count a request that may be stored when it is matched; again has no effect."""
        tokens = req.origin_input_ids
        if (
            self.sights is not None
            and req.rid not in self._worth
            and self._runtime.admission.looks_for(len(tokens))
        ):
            # For several samples SGLang first computes the prompt alone, without new tokens.
            sampling = req.sampling_params
            count = sampling.n == 1 or sampling.max_new_tokens == 0
            worth = self.sights.note(namespace_of(req), as_tokens(tokens), count=count)
            at_once = store_wish_of(req.sampling_params) is True
            self._worth[req.rid] = len(tokens) if at_once else worth

    def seen(self, rid: str) -> int | None:
        """How many first tokens of a request were asked for often enough; None if not counted."""
        return None if self.sights is None else self._worth.get(rid, 0)

    def end(self, req: Any) -> None:
        """Count the answer of a request that is over for good: the next prompt may contain it."""
        if self._worth.pop(req.rid, None) is not None and req.output_ids:
            assert self.sights is not None
            tokens = as_tokens([*req.origin_input_ids, *req.output_ids])
            self.sights.note(namespace_of(req), tokens, len(req.origin_input_ids))

    def drop(self, rid: str) -> None:
        """Forget a request that is gone without having been admitted."""
        self._worth.pop(rid, None)

    def begin(self, req: Any, length: int) -> Save | None:
        """Offer a prompt of `length` tokens, whose last pass begins now, to be saved behind it."""
        length = self._worth_of(req, length)
        if req.rid in self._begun or not self._may_store(req, length):
            return None
        if not self._fits(length):
            self._note_refusal(req, length, Cause.BUSY)
            return None
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        save = Save(row[:length].to(torch.int64, copy=True))
        if not self._offer(req, save, 0, EXACT):
            return None
        self._begun[req.rid] = save
        return save

    def settle(self, req: Any) -> None:
        """Lock a computed prompt's slots in the tree; abandon if it had the KVs in other slots."""
        save = self._begun.pop(req.rid, None)
        if save is None:
            return
        owned = self._cache.path_device_indices(req.last_node)[: len(save.slots)]
        if len(owned) < len(save.slots) or not torch.equal(owned, save.slots):
            save.abandon()
        elif not save.finished:
            self._lock_for(save, req.last_node)

    def offer_exact(self, req: Any, up_to: int) -> None:
        """Offer a computed prefix; its slots are resident, and locked while a write reads them."""
        slots = self._cache.path_device_indices(req.last_node)
        slots = slots[: self._worth_of(req, len(slots))]
        if up_to < len(req.origin_input_ids) or not self._wants(req, len(slots)):
            return
        save = Save(slots, self._runtime.shape.num_layers)
        if self._offer(req, save, 0, EXACT):
            self._lock_for(save, req.last_node)

    def offer_approximate(self, req: Any, request: StoredRequest, up_to: int) -> None:
        """Offer what was computed after an approximate prefix, holding its slots for the write."""
        first, quality = request.prefix_len, request.quality
        up_to = self._worth_of(req, up_to)
        too_deep = quality.depth > self._runtime.config.depth(quality.retention)
        if too_deep or up_to <= first or not self._wants(req, up_to):
            return
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        save = Save(row[first:up_to].to(torch.int64, copy=True), self._runtime.shape.num_layers)
        if self._offer(req, save, first, quality):
            # SGLang frees [cache_protected_len, up_to) next; these slots are ours now.
            req.kv.cache_protected_len = max(req.kv.cache_protected_len, up_to)
            save.held = save.slots
            self.held_tokens += len(save.held)

    def abandon(self, rid: str) -> None:
        """Abandon the save of a prompt that is not computed, or whose slots are given away."""
        if (save := self._begun.pop(rid, None)) is not None:
            save.abandon()

    def abandon_all(self) -> None:
        """Abandon the saves of all prompts that are being computed."""
        for save in self._begun.values():
            save.abandon()

    def revoke(self) -> None:
        """Stop reading anything from the pool."""
        self.abandon_all()
        self._pool_access.revoke()

    def forget(self, rid: str) -> None:
        """Forget a request that is over: the next one with its id may be offered again."""
        self._refused.discard(rid)

    def forget_all(self) -> None:
        """Forget all requests: the tree is empty."""
        self._refused.clear()

    def locked_tokens(self) -> int:
        """Tokens of SGLang's tree that only writes have locked.

        If these did not count as room, SGLang would make requests wait for the disk.
        """
        return sum(len(node.key) for node in self._nodes())

    def which_free(self) -> Callable[[object], bool]:
        """A test for whether giving up a save frees slots: those a request also uses stay."""
        nodes = self._nodes()

        def frees(save: object) -> bool:
            assert isinstance(save, Save)
            if len(save.held):
                return True
            return save.node is not None and not nodes.isdisjoint(self._path(save.node))

        return frees

    def _nodes(self) -> set[Any]:
        """Nodes of SGLang's tree that only writes have locked."""
        locks = Counter(node for save in self._locking for node in self._path(save.node))
        return {node for node, count in locks.items() if node.lock_ref == count}

    def _path(self, node: Any) -> Iterator[Any]:
        """A node of SGLang's tree and those above it, without the root."""
        while node is not self._cache.root_node:
            yield node
            node = node.parent

    def _lock_for(self, save: Save, node: Any) -> None:
        save.node = node
        self._cache.inc_lock_ref(node)
        self._locking.add(save)

    def _wants(self, req: Any, num_tokens: int) -> bool:
        """Whether a request may be stored, is long enough, and the pool can spare its slots."""
        return self._may_store(req, num_tokens) and self._fits(num_tokens)

    def _may_store(self, req: Any, num_tokens: int) -> bool:
        """Whether a request may be stored, and is long enough.

        One that was refused because space or write budget ran out is not offered again.
        """
        runtime = self._runtime
        if not runtime.served.in_use or store_refusal(req) is not None:
            return False
        if num_tokens < runtime.config.min_prefix_tokens:
            return False
        return req.rid not in self._refused

    def _fits(self, num_tokens: int) -> bool:
        """Whether writes would hold at most half of the pool, or a single long prefix."""
        spare = self._cache.token_to_kv_pool_allocator.size // 2 - self.writing_tokens
        return self.writing_tokens == 0 or num_tokens <= spare

    def _note_refusal(self, req: Any, num_tokens: int, cause: Cause) -> None:
        """Note why the first tokens of a request are not stored."""
        store, tokens = self._runtime.store, as_tokens(req.full_untruncated_fill_ids[:num_tokens])
        store.losses.note_tokens(store.namespace(namespace_of(req)), tokens, cause)

    def _worth_of(self, req: Any, num_tokens: int) -> int:
        """How many of the first tokens of a request are worth storing."""
        return num_tokens if self.sights is None else min(num_tokens, self._worth.get(req.rid, 0))

    def _offer(self, req: Any, save: Save, first: int, quality: Quality) -> bool:
        """Offer a request's tokens, with KVs from token `first` on in `save`; returns success."""
        layers = PoolLayers(self._cache.token_to_kv_pool_allocator.get_kvcache())
        tokens = as_tokens(req.full_untruncated_fill_ids[: first + len(save.slots)])

        def read_layers(start: int) -> LayerReader:
            part = save.slots[start - first :]
            reader = PoolLayerReader(layers.read, part, self._forward_stream, self._pool_access)
            return GatedLayerReader(save, reader)

        offer = Offer(
            tokens,
            read_layers,
            on_done=lambda: self._finish(save),
            abandon=save.abandon,
            quality=quality,
            available_from=first,
            min_tokens=self._runtime.config.chunk_tokens,
            holder=save,
            queries=save.queries,
            ttl=ttl_of(req.sampling_params),
            priority=priority_of(req.sampling_params),
        )
        outcome = self._runtime.store.writes.offer(namespace_of(req), offer)
        if (cause := _REFUSALS.get(outcome)) is not None:
            self._note_refusal(req, len(tokens), cause)
            if outcome is not StoreOutcome.UNAVAILABLE:
                # The disk may answer again before the request ends.
                self._refused.add(req.rid)
        if outcome is StoreOutcome.ACCEPTED:
            self.writing_tokens += len(save.slots)
        return outcome is StoreOutcome.ACCEPTED

    def _finish(self, save: Save) -> None:
        """Release the slots of a save, which are not read any more or were given up."""
        save.finished = True
        self.writing_tokens -= len(save.slots)
        if save.node is not None:
            self._locking.remove(save)
            self._cache.dec_lock_ref(save.node)
        self.held_tokens -= len(save.held)
        self._cache.token_to_kv_pool_allocator.free(save.held)
