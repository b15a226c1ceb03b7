"""Blends from their plan to what is stored of them: who waits, who sees them, what is held."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.blend.job import BlendJob
from impress_sglang.blend.plugin import blends
from impress_sglang.blend.plugin.steps import BlendSteps
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store import prefix_hashes
from impress_sglang.store.prefix_hashes import namespace_text
from impress_sglang.transfer.sources import WholeSource
from tests.integration import tiny_model
from tests.integration.tiny_model import draw
from tests.integration.tree_world import TreeWorld, new_request, told_of
from tests.unit.kv_factory import as_tokens
from tests.unit.waiting import wait_until

DOCUMENT = 300
ASKED: dict[str, Any] = {"bits": 6.0, "blend": 0.25}


def document(number: int) -> list[int]:
    return draw(number, DOCUMENT)


def shuffled(*order: int) -> list[int]:
    return [token for number in order for token in document(number)]


QUESTION = document(90)[:20]
PROMPT = [*shuffled(3, 1, 2), *QUESTION]


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, options: dict[str, Any]
) -> Iterator[TreeWorld]:
    """Documents 1, 2 and 3 are stored, in this order, and nothing is resident."""
    # The model turns keys as it does.
    monkeypatch.setattr(blends, "rotation_of", lambda model, option: tiny_model.ROTATION)
    # Which windows of a text are counted hangs on a random key: with few, it may be too few.
    monkeypatch.setattr(prefix_hashes.secrets, "token_bytes", bytes)
    world = TreeWorld(tmp_path, page_size, blend=0.25, blend_min_tokens=100, **options)
    for rid in "xy"[: world.config.write_after]:
        world.run(rid, [*shuffled(1, 2, 3), *range(12)], blend="off")
    world.flush()
    yield world
    assert not world.jobs.computing
    world.close()


one_page_size = pytest.mark.parametrize("page_size", [1])


def blending(world: TreeWorld, req: Any) -> BlendJob:
    """The job that a request waits for."""
    job = world.cache._tracked[req.rid].job
    assert isinstance(job, BlendJob)
    return job


def read(world: TreeWorld, req: Any, monkeypatch: pytest.MonkeyPatch) -> BlendJob:
    """The job of a request, of which all is read and nothing computed."""
    job = blending(world, req)
    with monkeypatch.context() as still:
        still.setattr(world.cache.loads, "step", lambda: False)
        wait_until(lambda: world.poll() or world.jobs.computing)
    return job


def test_a_block_is_computed_between_two_passes(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are admitted meanwhile; then the request has an ordinary hit."""
    world.service.estimator.computing.observe(100, 5050.0, 0.01)
    req = world.request("r", PROMPT, **ASKED)
    job = read(world, req, monkeypatch)
    _, reused, _ = job.tokens_by_origin(job.stop)
    assert len(job) >= 880 and reused == len(job) - 16
    steps, positions = 0, [job.position]
    while world.waits(req):
        other = world.request(f"other-{steps}", document(50 + steps)[:40], blend="off")
        assert not world.waits(other)
        world.abort(other)
        before = sum(not layer for layer, _ in world.model.computed)
        world.poll()
        assert sum(not layer for layer, _ in world.model.computed) == before + 1, "a block"
        steps += 1
        positions.append(job.position)
        assert world.cache.has_pending_cache_operations() == world.waits(req)
    assert steps > 3 and positions == sorted(positions)
    length = world.admit(req)
    assert length == job.stop == job.start + len(job)
    told = told_of(req)
    assert told["why"]["reason"] == "blended" and told["blended_tokens"] == reused
    assert told["path"] == "ssd" and told["approximate"] and told["bits"] == 6.0
    tokens = {source: count for source, count in told["tokens"].items() if count}
    assert tokens == {"blended": reused, "computed": len(PROMPT) - reused}
    world.compute(req)
    world.end(req)
    assert world.service.estimator.blending.observations == 1


@one_page_size
def test_a_blend_gives_way_if_computing_the_rest_of_it_is_slower(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than computing all of its prompt."""
    world.service.estimator.computing.observe(100, 5050.0, 0.01)
    req = world.request("r", PROMPT, **ASKED)
    job = read(world, req, monkeypatch)
    world.service.config = dataclasses.replace(world.config, load="faster")
    world.poll()
    assert not job.revoked and world.waits(req), "it takes as long as was estimated"
    job.estimate = dataclasses.replace(job.estimate, compute=1e3)
    world.poll()
    assert job.revoked
    told = world.serve(req)
    assert told["why"]["reason"] == "blend_slower" and told["path"] == "computed"


def test_the_second_request_hits_what_the_first_one_blended(world: TreeWorld) -> None:
    """In its class; no other sees it."""
    whole = len(PROMPT) // world.cache.page_size * world.cache.page_size
    assert world.run("r", PROMPT, **ASKED)["why"]["reason"] == "blended"
    others = {"bits": "exact"}, ASKED | {"blend": "off"}, ASKED | {"blend": 0.5}
    for number, wanted in enumerate((ASKED, *others)):
        req = new_request(f"r{number}", [*PROMPT, 5], **wanted)
        assert (world.match(req) == whole) if wanted is ASKED else (world.match(req) < 32), wanted
        world.cache.release_aborted_request(req.cache_request_handle)


@one_page_size
def test_those_who_ask_at_once_share_a_blend(world: TreeWorld) -> None:
    waiting = [world.request(f"r{number}", PROMPT, store=False, **ASKED) for number in range(3)]
    world.poll()
    assert len(list(world.jobs.loading)) == 1
    told = [world.serve(req) for req in waiting]
    assert [report["why"]["reason"] for report in told] == ["blended", "shared", "shared"]
    assert [report["loaded_tokens"] > 0 for report in told] == [True, False, False]
    assert sum(report["ssd_bytes"] > 0 for report in told) == 1


@one_page_size
def test_who_needs_a_part_of_a_blend_is_told_of_that_part(world: TreeWorld) -> None:
    """Also if the one that asked for all of it has gone away."""
    first = world.request("first", PROMPT, store=False, **ASKED)
    short = world.request("short", [*PROMPT[:400], 1, 2], store=False, **ASKED)
    world.abort(first)
    told = world.serve(short)
    assert told["blended_tokens"] == told["tokens"]["blended"] == 384
    assert told["tokens"]["computed"] == 16 + 2


def test_what_was_blended_is_stored_with_a_mark(world: TreeWorld) -> None:
    whole = len(PROMPT) // world.cache.page_size * world.cache.page_size
    world.run("r", PROMPT, **ASKED)
    world.flush()

    def stored(least: Quality) -> int:
        tokens, store = as_tokens([*PROMPT, 5]), world.service.store
        return int(store.match(namespace_text(None, None), tokens, min_quality=least).num_tokens)

    assert stored(Quality(1, 6.0, 0.25)) == whole
    better = EXACT, Quality(1, 6.0), Quality(1, 6.0, 0.5), Quality(1, 8.0, 0.25)
    assert max(map(stored, better)) < 32
    again = world.run("again", [*PROMPT, 5], **ASKED)
    assert again["why"]["reason"] == "loaded" and again["prefix_tokens"] == whole
    assert not again["blended_tokens"]


@pytest.mark.parametrize("phase", ["waiting", "reading", "read", "computing"])
@one_page_size
def test_who_goes_away_leaves_nothing(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    free = world.allocator.available_size() + world.cache.evictable_size()
    req = world.request("r", PROMPT, **ASKED)
    job = blending(world, req)
    if phase == "reading":
        world.poll()
    elif phase != "waiting":
        read(world, req, monkeypatch)
        if phase == "computing":
            world.poll()
            assert world.jobs.computing and job.position > job.start
    world.abort(req)
    if phase != "waiting":
        assert job.revoked and job.owned_slots is None
        while world.jobs.jobs:
            assert not world.cache.has_pending_cache_operations(), "its slots are free"
            world.poll()
    assert world.allocator.available_size() + world.cache.evictable_size() == free
    world.flush()
    assert world.run("s", PROMPT, **ASKED)["why"]["reason"] == "blended"


@pytest.mark.parametrize("error", [SegmentUnreadable, StoreUnavailable])
@one_page_size
def test_where_nothing_can_be_read_all_is_computed(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    original = WholeSource.read

    def read(source: WholeSource, layer: int) -> Any:
        if layer == 1:
            raise error(source.segment_ids[0], "a test")
        return original(source, layer)

    monkeypatch.setattr(WholeSource, "read", read)
    told = world.run("r", PROMPT, store=False, **ASKED)
    assert told["path"] == "computed" and told["prefix_tokens"] == 0
    assert not told["blended_tokens"]


@one_page_size
def test_a_blend_that_takes_too_long_is_given_up(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(world.config, "blend_seconds", 1e-9)
    monkeypatch.setattr(world.cache.loads.planner, "_too_slow", lambda *_: None)
    told = world.run("r", PROMPT, store=False, **ASKED)
    assert told["why"]["reason"] == "blend_too_long" and told["path"] == "computed"


@one_page_size
def test_a_model_that_fails_is_not_asked_again(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as failing, caplog.at_level(logging.ERROR):
        failing.setattr(BlendSteps, "_run", fail)
        told = world.run("r", PROMPT, store=False, **ASKED)
    assert told["why"]["reason"] == "blend_unsupported" and "no such kernel" in told["why"]["text"]
    world.flush()
    again = world.run("s", [*PROMPT, 3], store=False, **ASKED)
    assert again["why"]["reason"] == "blend_unsupported"


@one_page_size
@pytest.mark.parametrize("options", [{"write_after": 2}])
def test_new_documents_of_a_blend_are_donors_once_they_are_asked_for_again(
    world: TreeWorld,
) -> None:
    def exact_tokens() -> int:
        stored = world.service.store.tree.segments()
        return sum(segment.info.num_tokens for segment in stored if segment.info.quality == EXACT)

    before = exact_tokens()
    world.run("r", [*shuffled(4, 3, 5, 6), *QUESTION], **ASKED)
    assert exact_tokens() == before
    world.flush()
    told = world.run("other", shuffled(6, 3, 5, 4), **ASKED)
    assert not told["blended_tokens"], "it blends nothing, to be computed exactly"
    assert exact_tokens() >= before + 1000
    world.flush()
    assert world.run("s", shuffled(7, 5, 6), **ASKED)["blended_tokens"] > 500
