"""Why a request got its prefix from where it did, or did not get it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.integration.passes import REPORT_KEY
from impress_sglang.management.losses import Cause
from impress_sglang.management.stored import SegmentState
from impress_sglang.serving.report import RequestTotals, new_report
from impress_sglang.serving.why import MEANINGS, Reason
from tests.integration import test_weights
from tests.integration.test_shared_slots import SHAPE, CodedWorld
from tests.integration.test_weights import TOKENS
from tests.integration.test_write_after import ask as compute

STORED = [*range(1000, 1000 + TOKENS)]


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> Iterator[CodedWorld]:
    test_weights.install_hooks(monkeypatch)
    monkeypatch.setattr(test_weights, "SHAPE", SHAPE)
    world = CodedWorld(tmp_path, **({"load": "always"} | options))
    yield world
    for rid in list(world.runtime.live):
        world.end(world.runtime.live[rid])
    world.runtime.close()


def admitted(
    world: CodedWorld,
    tokens: list[int] = STORED,
    *,
    bits: object = 5.0,
    namespace: str | None = None,
    new: int = 8,
) -> dict[str, Any]:
    """What the report of a request says when it has been admitted."""
    prompt = array("q", [*tokens, *range(7000, 7000 + new)])
    sampling = SamplingParams(custom_params={"impress_bits": bits, "impress_retention": 1.0})
    req = Req("asks", "", prompt, sampling, extra_key=namespace)
    req.full_untruncated_fill_ids = prompt
    key = RadixKey(prompt, namespace, limit=len(prompt) - 1)
    match = world.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    req.last_node, req.host_hit_length = match.last_device_node, match.host_hit_length
    req.prefix_len = match.device_prefix_len
    if req.host_hit_length:
        world.admit(req)
    assert not world.cache.passes.begin_saves([req.rid], [1])
    why: dict[str, Any] = req.customized_info[REPORT_KEY][0]["why"]
    if req.rid in world.runtime.live:
        world.end(world.runtime.live[req.rid])
    world.cache._forget(req.rid)
    world.cache._saves.drop(req.rid)
    assert why["reason"] in MEANINGS and why["text"].endswith(".")
    return why


def test_a_hit(world: CodedWorld) -> None:
    world.store_prompt(1000)
    why = admitted(world)
    assert why["reason"] == Reason.LOADED and why["rest"] is None
    assert why["text"] == f"Its stored prefix was loaded: {TOKENS} tokens in 5 bits."
    world.idle_part()
    assert admitted(world)["reason"] == Reason.SHARED


def test_a_hit_and_what_it_lacks(world: CodedWorld) -> None:
    world.store_prompt(1000)
    why = admitted(world, [*STORED, *range(3000, 3064)], new=1)
    assert (why["reason"], why["rest"]) == (Reason.LOADED, Reason.NEVER_STORED)
    assert why["text"].endswith(
        "Of its other 64 tokens: Nothing that begins like it is stored, or was until lately."
    )


def test_what_is_resident(world: CodedWorld) -> None:
    slots = world.allocator.alloc(TOKENS)
    world.cache.insert(InsertParams(key=RadixKey(array("q", STORED)), value=slots))
    assert admitted(world)["reason"] == Reason.RESIDENT
    # A word that others begin with, too, is no prefix.
    begins_alike = [STORED[0], *range(5000, 5000 + TOKENS)]
    assert admitted(world, begins_alike)["reason"] == Reason.NEVER_STORED


def test_what_another_tenant_has_stored_nobody_has(world: CodedWorld) -> None:
    """Neither while it is there, nor when it is gone."""
    world.store_prompt(1000)
    stranger = admitted(world, namespace="another")
    assert stranger["reason"] == Reason.NEVER_STORED
    (segment,) = world.runtime.store.tree.segments()
    world.runtime.store._evict([segment])
    assert admitted(world, namespace="another") == stranger
    assert admitted(world)["reason"] == Reason.EVICTED


@pytest.mark.parametrize("cause", Cause)
def test_what_has_left_the_store(world: CodedWorld, cause: Cause) -> None:
    world.store_prompt(1000)
    (segment,) = world.runtime.store.tree.segments()
    world.runtime.store._lose(segment, cause)
    why = admitted(world)
    assert why["reason"] == Reason(cause.name.lower())
    assert why["text"].endswith(f": {TOKENS} tokens, 0 s ago.")
    assert admitted(world, STORED[:15], new=1)["reason"] == Reason.TOO_SHORT


def test_what_was_not_taken_for_want_of_room(world: CodedWorld) -> None:
    world.runtime.store._quota.used_bytes = 10**12
    assert compute(world, "r", 2000, prompt=STORED) == 0
    assert admitted(world)["reason"] == Reason.NO_ROOM
    world.runtime.store._quota.used_bytes = 0


@pytest.mark.parametrize("options", [{"write_after": 2}])
def test_what_was_seen_too_seldom(world: CodedWorld) -> None:
    why = admitted(world)
    assert why["reason"] == Reason.SEEN_TOO_SELDOM and why["text"].endswith(": 2 times.")
    assert admitted(world)["reason"] == Reason.NEVER_STORED


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (SegmentState.PENDING, Reason.BEING_WRITTEN),
        (SegmentState.SUSPECT, Reason.DAMAGED),
    ],
)
def test_what_cannot_be_read_now(world: CodedWorld, state: SegmentState, reason: Reason) -> None:
    world.store_prompt(1000)
    (segment,) = world.runtime.store.tree.segments()
    segment.state = state
    assert admitted(world)["reason"] == reason
    segment.state = SegmentState.READY


def test_what_is_not_exact_enough(world: CodedWorld) -> None:
    world.store_prompt(1000)
    (segment,) = world.runtime.store.tree.segments()
    quality = segment.info.quality.after(1.0, 5.0)
    object.__setattr__(segment.info, "quality", quality)
    assert admitted(world, bits="exact")["reason"] == Reason.QUALITY
    assert admitted(world, bits=6)["reason"] == Reason.QUALITY


def test_a_disk_that_does_not_answer(world: CodedWorld) -> None:
    world.store_prompt(1000)
    world.runtime.store.health.failed("a test", OSError("no"), reading=True)
    assert admitted(world)["reason"] == Reason.DEGRADED


def test_weights_that_change(world: CodedWorld) -> None:
    world.runtime.served.aside = "somebody changes them"
    why = admitted(world)
    assert why["reason"] == Reason.OTHER_WEIGHTS
    assert why["text"].endswith(": somebody changes them.")


def test_what_no_buffer_holds(world: CodedWorld) -> None:
    world.store_prompt(1000)
    pool = world.runtime.store._memory.pool
    limit, pool.limit_bytes = pool.limit_bytes, 1
    assert admitted(world)["reason"] == Reason.NO_BUFFERS
    pool.limit_bytes = limit


def test_what_could_not_be_opened(world: CodedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store_prompt(1000)
    known = world.cache._known.note

    def declined(req: Any) -> Any:
        request = known(req)
        request.declined = True
        return request

    monkeypatch.setattr(world.cache._known, "note", declined)
    assert admitted(world)["reason"] == Reason.NOT_OPENED


@pytest.mark.parametrize("options", [{"load": "faster"}])
def test_what_is_computed_faster(world: CodedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store_prompt(1000)
    world.runtime.estimator.note_forward(1000, 1e6, 1e-9)
    monkeypatch.setattr(type(world.runtime.store.forecast), "seconds_to_read", lambda *_: 9.0)
    assert admitted(world)["reason"] == Reason.COMPUTED_FASTER


@pytest.mark.parametrize("options", [{"policy": "recompute"}])
def test_a_policy_without_a_store(world: CodedWorld) -> None:
    why = admitted(world)
    assert why["reason"] == Reason.NO_STORE and why["text"].endswith(": recompute.")


def test_features_that_the_store_is_not_for(
    world: CodedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "impress_sglang.integration.radix_cache.serve_refusal"
    monkeypatch.setattr(refusal, lambda req: "lora_id")
    why = admitted(world)
    assert why["reason"] == Reason.NOT_SERVED and why["text"].endswith(": lora_id.")


def test_what_turned_out_to_be_damaged(world: CodedWorld) -> None:
    world.store_prompt(1000)
    request = world.admit(world.ask("reads"))
    assert request is not None
    request.report["why"] = {"reason": Reason.LOADED}
    segment = request.uses[0].part.segment_id
    world.runtime.give_up_reading(request, SegmentUnreadable(segment, "a test"))
    world.end(request)
    assert request.report["why"]["reason"] == Reason.DAMAGED  # type: ignore[index]


def test_reasons_are_counted_and_known_before_anybody_asks() -> None:
    totals = RequestTotals()
    assert totals.requests_why == dict.fromkeys(Reason, 0) and set(MEANINGS) == set(Reason)
    report = new_report("impress", 0)
    totals.add(report)
    report["why"] = {"reason": Reason.EVICTED}
    totals.add(report)
    assert totals.requests_why[Reason.EVICTED] == sum(totals.requests_why.values()) == 1
