"""Why a request got its prefix from where it did, or did not get it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.plugin import request_tracker
from impress_sglang.serving.why import Reason
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.stored import SegmentState, StoredSegment
from tests.integration.tree_world import told_of
from tests.integration.worlds import STORED, TOKENS, World


@pytest.fixture
def options() -> dict[str, Any]:
    return {"load": "always"}


@pytest.fixture
def stored(world: World) -> StoredSegment:
    """What is stored, and nothing is resident."""
    world.store_prompt()
    return the_segment(world)


def admitted(
    world: World,
    tokens: list[int] = STORED,
    *,
    new: int = 8,
    namespace: str | None = None,
    **wanted: Any,
) -> dict[str, Any]:
    """What the report of a request says when it has been admitted; nothing of it is computed."""
    asked = [*tokens, *range(7000, 7000 + new)]
    req = world.request("asks", asked, namespace=namespace, **wanted)
    world.settle(req)
    world.admit(req)
    why: dict[str, Any] = told_of(req)["why"]
    req.finished_reason = FINISH_LENGTH(1)
    world.release(req)
    assert why["reason"] in Reason and why["text"].endswith(".")
    return why


@pytest.mark.usefixtures("stored")
def test_a_hit_and_what_it_lacks(world: World) -> None:
    why = admitted(world, [*STORED, *range(3000, 3064)], new=1)
    assert (why["reason"], why["rest"]) == (Reason.LOADED, Reason.NEVER_STORED)
    assert why["text"].endswith(
        "Of its other 64 tokens: Nothing that begins like it is stored, or was recently."
    )


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("options", [{"load": "always", "page_size": 32}])
def test_what_is_stored_of_a_page_is_not_used(world: World) -> None:
    why = admitted(world, STORED[:52], new=40)
    assert (why["reason"], why["rest"]) == (Reason.LOADED, Reason.NEVER_STORED)


def test_what_is_resident(world: World) -> None:
    world.make_resident(STORED)
    assert admitted(world)["reason"] == Reason.RESIDENT
    # A word that others begin with, too, is no prefix.
    begins_alike = [STORED[0], *range(5000, 5000 + TOKENS)]
    assert admitted(world, begins_alike)["reason"] == Reason.NEVER_STORED


def test_what_another_tenant_has_stored_nobody_has(world: World, stored: StoredSegment) -> None:
    """Neither while it is there, nor when it is gone."""
    stranger = admitted(world, namespace="another")
    assert stranger["reason"] == Reason.NEVER_STORED
    world.service.store.writes.discard([stored], MissCause.EVICTED)
    assert admitted(world, namespace="another") == stranger
    assert admitted(world)["reason"] == Reason.EVICTED


@pytest.mark.parametrize("cause", MissCause)
def test_what_has_left_the_store(world: World, stored: StoredSegment, cause: MissCause) -> None:
    world.service.store.writes.lose(stored, cause)
    why = admitted(world)
    assert why["reason"] == Reason(cause.name.lower())
    assert re.search(rf": {TOKENS} tokens, \d+ s ago\.$", why["text"])
    assert admitted(world, STORED[:15], new=1)["reason"] == Reason.TOO_SHORT


def test_what_was_not_taken_for_want_of_room(world: World) -> None:
    world.service.store.quota.reserved_bytes = 10**12
    assert world.stored_after("r", 2000) == 0
    assert admitted(world)["reason"] == Reason.NO_ROOM
    world.service.store.quota.reserved_bytes = 0


@pytest.mark.parametrize("options", [{"write_after": 2}])
def test_what_was_seen_too_seldom(world: World) -> None:
    why = admitted(world)
    assert why["reason"] == Reason.SEEN_TOO_SELDOM and why["text"].endswith(": 2 times.")
    assert admitted(world)["reason"] == Reason.NEVER_STORED


def the_segment(world: World) -> StoredSegment:
    (segment,) = world.service.store.tree.segments()
    return segment


def unreadable(*_: Any, **__: Any) -> None:
    raise PrefixUnreadable("a test")


# What is set on what of a world, and the reason and words that follow from it.
SET: tuple[tuple[Callable[[World], object], str, object, Reason, str], ...] = (
    (the_segment, "state", SegmentState.PENDING, Reason.BEING_WRITTEN, ""),
    (the_segment, "state", SegmentState.SUSPECT, Reason.DAMAGED, ""),
    (lambda world: world.service.store._memory.buffers, "limit_bytes", 1, Reason.NO_BUFFERS, ""),
    (lambda world: world.service.store.readers, "open", unreadable, Reason.NOT_OPENED, ""),
    (lambda world: world.jobs._pool, "take", lambda job: False, Reason.NOT_OPENED, ""),
    (lambda world: world.service, "suspended_by", "a test", Reason.OTHER_WEIGHTS, ": a test."),
    (
        lambda _: request_tracker,
        "serve_refusal",
        lambda _: "lora_id",
        Reason.NOT_SERVED,
        ": lora_id.",
    ),
)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(("where", "name", "value", "reason", "end"), SET)
def test_what_stands_against_it(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[[World], object],
    name: str,
    value: object,
    reason: Reason,
    end: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where(world), name, value)
        why = admitted(world)
    assert why["reason"] == reason and why["text"].endswith(end)


def test_what_is_not_exact_enough(world: World, stored: StoredSegment) -> None:
    quality = stored.info.quality.after(4.0)
    object.__setattr__(stored.info, "quality", quality)
    assert admitted(world)["reason"] == Reason.QUALITY


@pytest.mark.usefixtures("stored")
def test_a_disk_that_does_not_answer(world: World) -> None:
    world.service.store.health.report_failure("a test", OSError("no"), reading=True)
    assert admitted(world)["reason"] == Reason.DEGRADED


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("options", [{"load": "faster"}])
@pytest.mark.parametrize(
    ("tokens", "reason"), [(1000, Reason.COMPUTED_FASTER), (9, Reason.COMPUTED_TO_LEARN)]
)
def test_what_is_computed_faster(
    world: World, monkeypatch: pytest.MonkeyPatch, tokens: int, reason: Reason
) -> None:
    world.service.estimator.computing.observe(tokens, tokens * 10, 1e-9)
    monkeypatch.setattr(type(world.service.store.readers), "seconds_to_read", lambda *_: 9.0)
    assert admitted(world)["reason"] == reason


@pytest.mark.parametrize("options", [{"policy": "recompute"}])
def test_a_policy_without_a_store(world: World) -> None:
    why = admitted(world)
    assert why["reason"] == Reason.NO_STORE and why["text"].endswith(": recompute.")
