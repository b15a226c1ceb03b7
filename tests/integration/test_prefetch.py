"""What a request that waits is matched with, and what is read for it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.integration import radix_cache
from impress_sglang.integration.passes import KnownRequest
from impress_sglang.integration.reports import report_of
from impress_sglang.management.policies import LoadOptions
from impress_sglang.options import AUTO, AUTO_BITS, BITS, EXACT_BITS
from impress_sglang.precision.codec import NUM_PLANES, planes_of
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.quality import EXACT
from impress_sglang.transfer.resident import PartUse
from tests.integration.worlds import SHAPE, STORED, TOKENS, World
from tests.unit.waiting import wait_until


@pytest.fixture
def options() -> dict[str, float]:
    return {"readahead": 0.2, "retention": 1.0}


@pytest.fixture
def world(world: World) -> World:
    """A store with a prompt, of which nothing is resident."""
    world.store_prompt(1000)
    return world


@pytest.mark.parametrize(("start", "is_read"), [(-1, True), (TOKENS, True), (0, False)])
def test_only_what_can_be_matched_is_read(world: World, start: int, is_read: bool) -> None:
    """Tokens whose log-probabilities are asked for are computed, wherever they are stored."""
    req = world.request("r", [*STORED, *range(8)])
    req.return_logprob, req.logprob_start_len = True, start
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) is is_read


@pytest.mark.parametrize("refusal", [None, "a reason"])
def test_what_is_against_a_request_is_asked_once(
    world: World, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(req: Any) -> str | None:
        asked.append(req.rid)
        return refusal

    monkeypatch.setattr(radix_cache, "serve_refusal", refuse)
    req = world.request("r", STORED)

    assert (world.match(req).host_hit_length > 0) == (refusal is None)
    report = report_of(req)
    assert report is not None and report["not_served"] == refusal
    assert asked == ["r"]
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) == (refusal is None)


def planned(world: World, rid: str) -> AdmissionPlan:
    """How a request that leaves its bits to the server would use what is stored."""
    req = world.request(rid, [*STORED, *range(5000, 5008)], bits=AUTO)
    _, plan = world.cache._plan(RadixKey(array("q", STORED), None), 0, KnownRequest(req))
    assert plan is not None and plan.stop == TOKENS
    return plan


@pytest.fixture
def slow_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets reading take a second per byte, and computing so many seconds."""
    runtime = world.runtime
    runtime.admission._config = dataclasses.replace(runtime.config, load="always")
    monkeypatch.setattr(runtime.store.forecast, "seconds_to_read", lambda count: count)
    computing = runtime.estimator.computing

    def compute_for(seconds: float) -> None:
        for name in ("seconds", "least"):
            monkeypatch.setattr(computing, name, lambda new, pairs: seconds)

    return compute_for


def read_layers(world: World, rid: str, layers: int) -> None:
    """Of what a request waits for these are read, and no more."""
    world.runtime.prefetches.begin(rid, planned(world, rid))
    source = world.runtime.prefetches._waiting[rid].source
    source.lead = layers
    world.runtime.store.ahead.top_up()
    wait_until(lambda: not source.is_reading)
    assert source.next_ahead == layers and source.there == layers / SHAPE.num_layers


@pytest.mark.parametrize("bits", [bits for bits in BITS if bits >= AUTO_BITS])
@pytest.mark.parametrize("longer", [1.0, 1.05], ids=["they hide", "they nearly do"])
def test_auto_gives_the_bits_that_take_hardly_longer(
    world: World, bits: float, longer: float, slow_reads: Callable[[float], None]
) -> None:
    """Computing takes as long as reading these bits, or hardly less."""
    stored = world.runtime.store.forecast.coded_bytes(planned(world, "r").spans)
    slow_reads(stored.expected(planes_of(bits)) / longer)

    plan = planned(world, "r")

    assert (plan.estimate.bits, plan.planes) == (bits, planes_of(bits))
    assert plan.estimate.io == pytest.approx(stored.expected(planes_of(bits)))


def test_auto_gives_its_fewest_bits_where_nothing_hides(
    world: World, slow_reads: Callable[[float], None]
) -> None:
    slow_reads(0.0)
    assert planned(world, "r").estimate.bits == AUTO_BITS


@pytest.mark.parametrize("layers", [1, 2])
def test_auto_counts_what_was_read_meanwhile(
    world: World, layers: int, slow_reads: Callable[[float], None]
) -> None:
    """Planes that come with the base are as good as there, whatever they were read for."""
    spans = planned(world, "r").spans
    stored = world.runtime.store.forecast.coded_bytes(spans)
    slow_reads(stored.expected(NUM_PLANES))
    read_layers(world, "r", layers)
    slow_reads(0.0)
    for rid in ("r", "another"):
        estimate = planned(world, rid).estimate
        assert estimate.bits == BITS[-1]
        # Who orders the queue takes off by itself what was read.
        assert estimate.io == pytest.approx(stored.expected(NUM_PLANES))


def test_auto_raises_what_is_in_slots_only_if_that_takes_hardly_longer(
    world: World, slow_reads: Callable[[float], None]
) -> None:
    stored = world.runtime.store.forecast.coded_bytes(planned(world, "r").spans)
    slow_reads(stored.expected(planes_of(6)))
    req = world.request("six", [*STORED, *range(5000, 5008)], bits=AUTO)
    world.match(req)
    request = world.admit(req)
    assert request is not None and request.bits == 6.0
    world.load(request)
    missing = stored.expected(NUM_PLANES) - stored.expected(planes_of(6))
    slow_reads(missing)
    estimate = planned(world, "r").estimate
    assert (estimate.io, estimate.bits) == (pytest.approx(missing), BITS[-1])
    slow_reads(missing / 10)
    estimate = planned(world, "r").estimate
    assert (estimate.io, estimate.bits) == (0.0, 6.0)


@pytest.mark.parametrize(
    ("there", "wanted"), [(BITS[0], 6.0), (BITS[0], 8.0), (6.0, 8.0), (8.0, 6.0)]
)
def test_a_request_reads_what_a_part_in_slots_lacks(
    world: World, slow_reads: Callable[[float], None], there: float, wanted: float
) -> None:
    """As many blocks as the estimate says."""
    slow_reads(1.0)
    world.end(world.loaded("first", bits=there))
    (part,) = world.cache._residents
    plan = world.runtime.admission.plan(
        planned(world, "r").match,
        np.array([*STORED, *range(5000, 5007)]),
        0,
        LoadOptions(bits=wanted),
    )
    planes = max(planes_of(wanted) - planes_of(there), 0)
    assert plan is not None and plan.loads_nothing == (not planes)
    units = SHAPE.num_layers * SHAPE.num_kv_heads * len(PartUse(part, part.start, part.stop).units)
    assert plan.estimate.io == planes * units * BLOCK_BYTES
    request = world.loaded("second", bits=wanted)
    world.end(request)
    assert request.reads.ssd_needed_bytes == plan.estimate.io


@pytest.mark.parametrize("hides", [True, False])
def test_auto_gives_up_tokens_only_if_the_fewest_bits_do_not_hide(
    world: World, hides: bool, slow_reads: Callable[[float], None]
) -> None:
    stored = world.runtime.store.forecast.coded_bytes(planned(world, "r").spans)
    least = stored.expected(planes_of(AUTO_BITS))
    slow_reads(least if hides else 0.99 * least)
    admission = world.runtime.admission
    admission._config = dataclasses.replace(admission._config, retention=AUTO)
    match, tokens = planned(world, "r").match, np.array([*STORED, *range(5000, 5007)])
    wanted = LoadOptions(retention=0.25, bits=AUTO_BITS, auto_bits=True)

    plan = admission.plan(match, tokens, 0, wanted)

    assert plan is not None and plan.estimate.bits == AUTO_BITS
    assert plan.estimate.retention == (1.0 if hides else 0.25)


@pytest.mark.parametrize("layers", [0, 1])
def test_auto_is_exact_where_that_hides(
    world: World, layers: int, slow_reads: Callable[[float], None]
) -> None:
    """Bytes that are read already need not."""
    forecast, spans = world.runtime.store.forecast, planned(world, "r").spans
    num_bytes = forecast.stored_bytes(spans).expected(1.0)
    slow_reads(num_bytes)
    if layers:
        read_layers(world, "r", layers)
        slow_reads(num_bytes * (1 - layers / SHAPE.num_layers))
    plan = planned(world, "r")
    assert plan.estimate.bits == EXACT_BITS and plan.quality == EXACT and not plan.covers
    assert plan.estimate.io == pytest.approx(num_bytes)
    slow_reads(num_bytes * (1 - layers / SHAPE.num_layers) / 1.2)
    assert planned(world, "r").estimate.bits == 8.0


@pytest.mark.parametrize(
    ("load", "waits", "loads"),
    [("faster", False, False), ("faster", True, True), ("always", False, True)],
)
def test_who_has_waited_for_reads_loads(
    world: World, load: str, waits: bool, loads: bool, slow_reads: Callable[[float], None]
) -> None:
    """Reading all of it would take longer than computing it, and what is left does not."""
    runtime = world.runtime
    runtime.admission._config = dataclasses.replace(runtime.config, load=load)
    req = world.request("r", [*STORED, *range(5000, 5008)], bits="exact")
    slow_reads(1e12)
    if waits:
        world.cache.prefetch(req)
        wait_until(lambda: runtime.prefetches.unread("r") == 0)
        assert runtime.prefetches.unread("r", planned(world, "r")) == 1, "for a shorter question"
    slow_reads(runtime.store.forecast.stored_bytes(planned(world, "r").spans).expected(1.0) * 0.9)

    assert world.match(req).host_hit_length == loads * TOKENS
    assert ("r" in runtime.prefetches) == waits
    report = report_of(req)
    assert report is not None
    assert report["decision"] == ("load" if loads else "recompute")
    assert report["estimated_load_ms"] > report["estimated_recompute_ms"]


def test_auto_is_in_codes_where_these_are_in_slots(
    world: World, slow_reads: Callable[[float], None]
) -> None:
    slow_reads(1e12)
    assert planned(world, "r").estimate.bits == EXACT_BITS
    world.idle_part()
    assert planned(world, "r").estimate.bits == 8.0


def test_auto_is_in_codes_where_a_layer_of_exact_kvs_fits_no_buffer(
    world: World, slow_reads: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reads(1e12)
    forecast, spans = world.runtime.store.forecast, planned(world, "r").spans
    # It gives memory in grains, of which one has all of so small a model.
    monkeypatch.setattr(forecast._memory.pool, "size_of", lambda num_bytes: num_bytes)
    sizes = [forecast._layer_bytes(spans, in_codes=own) for own in (True, False)]
    assert sizes[0] < sizes[1]
    monkeypatch.setattr(forecast._memory.pool, "limit_bytes", sizes[0])
    assert planned(world, "r").estimate.bits == 8.0


def asking(world: World, rid: str, tokens: Sequence[int]) -> Any:
    req = world.request(rid, [*tokens, *range(5000, 5008)], bits="exact")
    world.cache.prefetch(req)
    world.match(req)
    return req


def test_an_exact_prefix_is_brought_once(world: World) -> None:
    """Others wait for the pass of the first, and read nothing for that."""
    first = world.admit(asking(world, "first", STORED))
    assert first is not None
    second, coded = asking(world, "second", STORED), world.ask("coded")
    assert world.admit(second) is None and "second" not in world.runtime.prefetches
    assert world.admit(coded) is not None, "codes are never in the tree"
    first.fail()
    world.match(second)
    assert world.admit(second) is not None, "nobody brings it any more"


def test_of_those_who_wait_for_an_exact_prefix_one_reads_it(world: World) -> None:
    for rid in ("first", "second"):
        world.cache.prefetch(world.request(rid, [*STORED, 7], bits="exact"))
    assert "first" in world.runtime.prefetches and "second" not in world.runtime.prefetches


def documents(shared: int) -> list[list[int]]:
    """Prompts that begin with as many tokens of the stored one, and go on in their own way."""
    return [[*STORED[:shared], *range(own, own + TOKENS - shared)] for own in (20000, 21000)]


def test_nobody_waits_for_the_little_that_it_shares(world: World) -> None:
    """A system prompt before other documents: reading it again is less than a pass."""
    for own in documents(16):
        world.store(own)
    first, second = documents(16)
    assert world.admit(asking(world, "first", first)) is not None
    assert world.admit(asking(world, "second", second)) is not None
    # The system prompt is a part of the segment that was stored first.
    assert world.admit(asking(world, "third", STORED)) is not None


def test_who_shares_little_is_read_ahead(world: World) -> None:
    for own in documents(16):
        world.store(own)
    for rid, own in zip(("first", "second"), documents(16), strict=True):
        world.cache.prefetch(world.request(rid, [*own, 7], bits="exact"))
    assert "first" in world.runtime.prefetches and "second" in world.runtime.prefetches


def test_who_is_placed_before_others_goes_on_with_what_was_read_for_these(world: World) -> None:
    for rid in ("first", "second"):
        world.cache.prefetch(world.request(rid, [*STORED, 7], bits="exact"))
    source = world.runtime.prefetches._waiting["first"].source
    second = world.request("second", [*STORED, 7, 8], bits="exact")
    world.match(second)
    request = world.admit(second)
    assert request is not None and request.loading._source is source
    assert "first" not in world.runtime.prefetches


@pytest.mark.parametrize("page_size", [16])
def test_nobody_waits_for_a_page_that_is_not_shared(world: World) -> None:
    """No page of the tree belongs to two segments; without it less than half is shared."""
    for own in documents(40):
        world.store(own)
    world.make_resident(STORED[:16])
    first, second = documents(40)
    assert world.admit(asking(world, "first", first)) is not None
    waits = asking(world, "second", second)
    assert waits.host_hit_length == 48
    assert world.admit(waits) is not None
