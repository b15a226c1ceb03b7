"""Prefixes that are pinned, and prefixes that are purged."""

from __future__ import annotations

from typing import Any

import pytest

from impress_sglang.storage.directory import PINS
from impress_sglang.store import pins as pins_module
from impress_sglang.store.losses import Cause
from impress_sglang.store.purges import Purge, Purged
from impress_sglang.store.store import PrefixStore
from tests.unit.kv_factory import as_tokens
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, gb, length, lose, name_of, prompt
from tests.unit.waiting import wait_until


def pin(store: PrefixStore, tokens: Any, namespace: str = "") -> str | None:
    return store.pins.pin(store.namespace(namespace), as_tokens(tokens))


def unpin(store: PrefixStore, tokens: Any, namespace: str = "") -> int:
    return store.pins.unpin(store.namespace(namespace), as_tokens(tokens))


def purge_of(
    store: PrefixStore,
    tokens: Any = None,
    namespace: str | None = "",
    older_than: float | None = None,
) -> Purge:
    name = None if namespace is None else store.namespace(namespace)
    return Purge(name, None if tokens is None else as_tokens(tokens), older_than)


def steps_of(purge: Purge, store: PrefixStore, most: int = 64) -> list[Purged]:
    steps = []
    while purge.left:
        steps.append(purge.step(store, most))
        check_store(store)
    return steps


def forget(store: PrefixStore, *args: Any, **fields: Any) -> Purged:
    """What is so little that one step is enough."""
    (step,) = steps_of(purge_of(store, *args, **fields), store)
    return step


def test_the_state_behind_a_pinned_prefix_stays(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "_LOOK_SECONDS", -1.0)
    store = bench.open(ssd_gb=gb(6 * bench.one))
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    bench.put(store, (*prompt(1), -1, -1))
    bench.put_all(store, *range(50, 58))
    assert length(store, (*prompt(1), -1, -1)) == 10
    assert forget(store, prompt(1)).tokens == 8


def test_all_that_a_pinned_prefix_builds_on_stays_after_a_restart_as_well(bench: Workbench) -> None:
    store = bench.open()
    for count in (8, 16):
        bench.put(store, prompt(1, count), namespace="salt")
    for _ in range(2):
        assert pin(store, prompt(1, 16), "salt") is None
    store = bench.reopen(store, ssd_gb=gb(8 * bench.one))
    bench.put_all(store, *range(50, 62))
    check_rows(store, prompt(1, 16), namespace="salt")
    assert unpin(store, prompt(1, 16), "salt") == 1
    assert not len(bench.reopen(store).pins)


def test_only_what_is_stored_can_be_pinned(bench: Workbench, store: PrefixStore) -> None:
    bench.put(store, prompt(1))
    refusal = pin(store, prompt(1, 16))
    assert refusal == "8 of its 16 tokens are stored: warm it first"
    assert pin(store, prompt(1), "another tenant") == (
        "0 of its 8 tokens are stored: warm it first"
    )
    assert pin(store, []) is not None
    assert not len(store.pins)


def test_what_is_stored_anew_of_a_pinned_prefix_is_pinned(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "_LOOK_SECONDS", 0.0)
    store = bench.open(ssd_gb=gb(4 * bench.one))
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    assert store.pins.summary() == {"prefixes": 1, "bytes": bench.one}
    lose(bench, store, name_of(store, prompt(1)))
    assert store.pins.summary() == {"prefixes": 1, "bytes": 0}
    bench.put(store, prompt(1))
    bench.put_all(store, *range(50, 58))
    check_rows(store, prompt(1))


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"[1]", b'[{"namespace": "a"}]', b"\xff"])
def test_damaged_pins_are_none(bench: Workbench, store: PrefixStore, content: bytes) -> None:
    bench.put(store, prompt(1))
    assert pin(store, prompt(1)) is None
    bench.close(store)
    (path,) = bench.root.glob(f"*/{PINS}")
    path.write_bytes(content)
    store = bench.open()
    assert not len(store.pins)
    assert pin(store, prompt(1)) is None
    assert len(bench.reopen(store).pins) == 1


def test_a_purge_takes_what_begins_with_a_prefix_and_nothing_else(bench: Workbench) -> None:
    store = bench.open()
    for number, count in ((1, 8), (1, 16), (1, 40), (2, 8)):
        bench.put(store, prompt(number, count))
    bench.put(store, prompt(1, 16), namespace="salt")
    before = len(bench.files())

    purged = forget(store, prompt(1, 16))

    assert (purged.tokens, len(purged.segment_ids)) == (32, 2)
    assert purged.bytes >= 2 * bench.one
    assert length(store, prompt(1, 40)) == 8 and length(store, prompt(2)) == 8
    check_rows(store, prompt(1, 16), namespace="salt")
    wait_until(lambda: len(bench.files()) == before - 2)
    found = store.losses.find(store.namespace(""), as_tokens(prompt(1, 40)), 0)
    assert found is None or found.cause is Cause.PURGED
    store = bench.reopen(store)
    assert length(store, prompt(1, 40)) == 8
    assert forget(store, prompt(1, 40)).segment_ids == ()
    assert forget(store, prompt(9)).segment_ids == ()
    assert forget(store, prompt(1), "nobody").segment_ids == ()


@pytest.mark.parametrize("namespace", ["salt", None])
def test_a_purge_of_a_namespace_and_of_all(bench: Workbench, namespace: str | None) -> None:
    store = bench.open()
    bench.put_all(store, *range(5), namespace="salt")
    bench.put(store, prompt(1))
    assert pin(store, prompt(3), "salt") is None and pin(store, prompt(1)) is None
    steps = steps_of(purge_of(store, None, namespace), store, most=2)
    gone = 5 if namespace else 6
    assert [len(step.segment_ids) for step in steps] == [2, 2, gone - 4]
    assert sum(step.bytes for step in steps) == gone * bench.one
    assert len(store.tree) == 6 - gone == len(store.pins)
    wait_until(lambda: len(bench.files()) == 6 - gone)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("clock", [0, -3600])
def test_what_is_being_written_is_purged_as_well(bench: Workbench, late: bool, clock: int) -> None:
    """Also where its last layer was read before anybody said so, or the clock was set back."""
    store = bench.open()
    gate = bench.begin(store, prompt(1))
    for own in store.writes:
        own.written -= clock
    if late:
        gate.opened.set()
        wait_until(lambda: len(list(bench.root.glob("*/segments/*/*.kv"))) == 1)
    purged = forget(store, prompt(1))
    assert purged.writes + len(purged.segment_ids) == 1
    gate.opened.set()
    store.writes.drain()
    check_store(store)
    assert not len(store.tree)
    wait_until(lambda: not bench.files())
    assert bench.done == [prompt(1)]
