"""What is known of SGLang's requests, from their first match to their end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.plugin.allocation import Allocation
from impress_sglang.plugin.eligibility import serve_refusal, store_refusal
from impress_sglang.plugin.keys import as_tokens, namespace_of_request
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.provenance import Provenance
from impress_sglang.plugin.report_transport import attach
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.job_queue import Waiter
from impress_sglang.serving.kv_class import KVClass, marked
from impress_sglang.serving.load_jobs import LoadJob
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.report import NO_ESTIMATE, new_report
from impress_sglang.serving.service import Service
from impress_sglang.serving.truncation import truncated_tokens_of
from impress_sglang.store.policies import LoadOptions


@dataclasses.dataclass(slots=True)
class Brought:
    """Tokens that jobs brought for a request, the last ones before `stop`.

    `loaded` by jobs of which it tells, `shared` by jobs of which others tell. Of the former,
    `blended` are stored behind other text, and `computed` were computed in between.
    """

    loaded: int = 0
    shared: int = 0
    blended: int = 0
    computed: int = 0
    stop: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Known:
    """A request of SGLang's.

    Attributes:
        extra_key: as it came.
        worth: how many of its first tokens are worth storing; None before it was counted.
        seen: how many of them were asked for often enough.
        refused: whether it was refused because space or write budget ran out.
        planned: whether what is to be loaded for it is known.
        leads: whether the job that it waits for was planned for it.
        admitted: whether it runs.
        declined: whether something that was to be loaded could not be read now.
        not_before: the poll before which it is not admitted again.
        raised: the class that it has else, while it uses more bits.
        stored: how many of its first tokens are stored, as far as it was planned.
        io: seconds that reading what is stored of it takes.
        early: the job whose last layers its pass waits for.
        gated: seconds for which its pass waited for these.
        disturbed: whether the time of its pass says nothing of what computing takes.
        blend: what is known of its blending (`blend.plan.BlendNotes`); None: nothing.
    """

    req: Any
    extra_key: str | None
    wanted: LoadOptions
    kv_class: KVClass
    report: dict[str, Any]
    namespace: str
    waiter: Waiter
    worth: int | None = None
    seen: int | None = None
    refused: bool = False
    planned: bool = False
    leads: bool = False
    admitted: bool = False
    declined: bool = False
    brought: Brought = dataclasses.field(default_factory=Brought)
    not_before: int = 0
    raised: KVClass | None = None
    stored: int = 0
    io: float = 0.0
    early: LoadJob | None = None
    gated: float = 0.0
    disturbed: bool = False
    blend: Any = None

    @property
    def space(self) -> tuple[str | None, str | None]:
        """What else than its class keeps its prompt apart."""
        return self.extra_key, self.req.cache_salt

    def offers(self, known: Known, count: int) -> bool:
        """Whether its class has more bits, and its first tokens are those of another request."""
        mine, own = self.kv_class, known.kv_class
        if mine.bits <= own.bits or not (mine.exact or mine.share == own.share):
            return False
        if self.space != known.space:
            return False
        tokens, others = self.req.full_untruncated_fill_ids, known.req.full_untruncated_fill_ids
        return bool(tokens[:count] == others[:count])

    def begins_like(self, job: LoadJob, page_size: int) -> bool:
        """Whether its prompt begins like the tokens of a job, and with some of them."""
        if self.kv_class != job.kv_class or self.space != job.space:
            return False
        count = job.start + page_size
        tokens = as_tokens(self.req.full_untruncated_fill_ids[:count])
        return np.array_equal(tokens, job.tokens[:count])


@dataclasses.dataclass(eq=False, slots=True)
class Shared:
    """What the parts of one tree cache have in common; the scheduler's thread owns it.

    Attributes:
        cache: a tree cache of ours.
        layers: of SGLang's pool.
        forward_stream: SGLang's, on which passes run.
        adapters: SGLang's `LoRAManager`, if it has one.
        known: the requests that are not over, by id.
    """

    cache: Any
    service: Service
    planner: LoadPlanner
    provenance: Provenance
    layers: PoolLayers
    forward_stream: Any
    allocation: Allocation
    ranks: Ranks = ALONE
    adapters: Any = None
    known: dict[str, Known] = dataclasses.field(default_factory=dict)


class KnownRequests:
    """Notes requests, and chooses and changes the classes of their KVs."""

    def __init__(self, shared: Shared, sight: Callable[[Known], bool]) -> None:
        """`sight` counts a request that may be stored; returns whether it is computed exactly."""
        self._cache, self._service, self._planner = shared.cache, shared.service, shared.planner
        self._alone, self._adapters = shared.ranks.alone, shared.adapters
        self._known, self._sight = shared.known, sight

    def note(self, req: Any) -> Known:
        """Note a request; at its first match it gets its class, and its key the mark of that."""
        known = self._known.get(req.rid)
        if known is not None and known.req is req:
            return known
        service, extra_key = self._service, req.extra_key
        wanted = load_options_of(req.sampling_params, service.config)
        report = new_report(service.policy.name, 0, len(req.origin_input_ids))
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=truncated_tokens_of(req.sampling_params),
        )
        # What cannot be served from the store shares nothing that may come from it.
        own = KVClass() if refusal is not None else service.class_of(wanted)
        namespace = namespace_of_request(req, self._adapters)
        known = Known(req, extra_key, wanted, own, report, namespace, Waiter(req.rid))
        if report["not_stored"] is None and self._sight(known):
            known.wanted, known.kv_class = LoadOptions(), KVClass()
        elif wanted.auto_bits and refusal is None and not own.exact:
            known.kv_class = self._choose(known)
        req.extra_key = marked(extra_key, known.kv_class, service.usual)
        attach(req, report)
        self._known[req.rid] = known
        return known

    def _choose(self, known: Known) -> KVClass:
        """The class of a request that leaves it to the server."""
        key = key_of(known.req)
        if not self._alone or not self._planner.looks_for(len(key)):
            # On several ranks what is stored is not known before the first match.
            return known.kv_class
        tokens = as_tokens(key.raw_token_ids())
        resident = {own: self._resident(known, own) for own in (KVClass(), known.kv_class)}
        return self._planner.choose(known.namespace, tokens, resident, known.kv_class)

    def raise_bits(self, known: Known, users: Sequence[Known]) -> bool:
        """Let a queued request use a class with more bits, in which all is resident that is stored
        of its prompt; returns whether there is one.

        Only classes in which `users` have such a prefix are looked at: what is looked at is evicted
        later.
        """
        least = self._service.config.min_prefix_tokens
        # In an order that is the same on all ranks, as that of a set is not.
        for own in dict.fromkeys(o.kv_class for o in users if o.offers(known, least)):
            resident = self._resident(known, own)
            if resident > known.stored - least:
                known.raised, known.waiter.found = known.kv_class, resident
                self._move(known, own)
                return True
        return False

    def lower_bits(self, known: Known) -> None:
        """Let a queued request use its own class again."""
        if known.raised is not None:
            self._move(known, known.raised)
            known.raised = None

    def _move(self, known: Known, own: KVClass) -> None:
        known.kv_class, known.brought = own, Brought()
        known.req.extra_key = marked(known.extra_key, own, self._service.usual)
        known.report.update(NO_ESTIMATE)

    def _resident(self, known: Known, own: KVClass) -> int:
        """How many tokens of a prompt are resident in a class."""
        key, extra_key = key_of(known.req), marked(known.extra_key, own, self._service.usual)
        own_key = RadixKey(key.token_ids, extra_key, limit=key.limit, cache_salt=key.cache_salt)
        return int(match_resident(self._cache, own_key).device_prefix_len)


def key_of(req: Any) -> RadixKey:
    """The key of a request's prompt, as far as a prefix may reach."""
    tokens = req.full_untruncated_fill_ids or req.origin_input_ids
    if req.positional_embed_overrides is not None:
        # SGLang matches none of it either: its KVs do not follow from its tokens.
        tokens = tokens[:0]
    limit = req._compute_max_prefix_len(len(tokens))
    return RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
