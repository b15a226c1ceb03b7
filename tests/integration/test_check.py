"""The integrity check: by command only, for it takes the longer the more there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from impress_sglang.integration.reporting import CHECK_ORDER, REPORT_KEY, add_totals, take_order
from tests.integration.worlds import World


def polled(world: World) -> str:
    """As `/get_internal_state` and `GET /impress/stats` are."""
    state = SimpleNamespace(internal_state={})
    add_totals(state, world.updater.scheduler)
    integrity: str = state.internal_state[REPORT_KEY]["integrity"]
    return integrity


def check(world: World) -> None:
    order = SimpleNamespace(server_args={CHECK_ORDER: 1})
    assert take_order(lambda *_: None, world.updater.scheduler, order).updated


@pytest.mark.parametrize("error", [AssertionError, KeyError])
def test_polls_tell_what_the_last_check_found(
    world: World,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks: list[None] = []
    check_integrity = world.cache.check_integrity

    def count() -> None:
        checks.append(None)
        check_integrity()

    monkeypatch.setattr(world.cache, "check_integrity", count)
    assert [polled(world) for _ in range(3)] == ["unchecked"] * 3 and not checks

    check(world)
    assert [polled(world) for _ in range(3)] == ["ok"] * 3 and len(checks) == 1

    def fail() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(world.cache, "check_integrity", fail)
        check(world)
    assert polled(world) == "failed" and "the integrity check of IMPRESS failed" in caplog.text
