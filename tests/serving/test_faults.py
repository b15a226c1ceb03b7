"""What a disk does to a real server: answers stay stock's, it lives, says so, and recovers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.core.servers import BAD_WORDS
from tests import damage
from tests.fault_control import FaultControl
from tests.faults import Rule, read_only
from tests.serving.compare import assert_same, report
from tests.serving.conftest import CRAMPED, Serve
from tests.serving.damage import flip_value
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

PATIENCE_S = 2.0
RECOVERY_S = 120.0
# Reads are the last to stop; what is written first must be there again before the next test.
TOKENS = 500


@dataclasses.dataclass
class Bench:
    """A server whose disk fails when it is told to, and the one to compare with."""

    stock: Server
    server: Server
    control: FaultControl
    store: Path
    answers: dict[tuple[int, ...], dict[str, Any]] = dataclasses.field(default_factory=dict)

    def new_prompt(self, length: int = TOKENS) -> list[int]:
        prompt = random_tokens(length, seed=7000 + len(self.answers))
        self.answers[tuple(prompt)] = self.stock.generate(prompt, 4, return_logprob=True)
        return prompt

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """The prompt once more, after SGLang has forgotten it; it is stock's answer."""
        self.server.flush()
        answer = self.server.generate(prompt, 4, return_logprob=True)
        assert_same([self.answers[tuple(prompt)]], [answer])
        return report(answer)

    def totals(self) -> dict[str, Any]:
        store: dict[str, Any] = self.server.stats()["store"]
        return store

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for the statistics, which the scheduler's thread looks up, to say so."""
        wait_until(lambda: condition(self.totals()), RECOVERY_S)

    def recover(self) -> None:
        self.control.set()
        self.until(
            lambda s: (
                s["health"]["state"] == "ok"
                and not s["segments_suspect"]
                and not s["writes_pending"]
            )
        )


@pytest.fixture(scope="module")
def bench(workdir: Path, stock: Server, serve: Serve) -> Iterator[Bench]:
    """Whatever is read comes from SSD, and is checked there; the pool and its chunks are small."""
    control = FaultControl(workdir / "faults.json", seed=3)
    flags = ("--impress-bits=exact", "--impress-device-gb=0", "--impress-host-gb=0", *CRAMPED)
    patience = f"--impress-io-timeout={PATIENCE_S}"
    with serve("faults", *flags, patience, faults=control, quiet=False) as server:
        yield Bench(stock, server, control, workdir / "store-faults")
        assert server.process.is_alive()


@pytest.fixture(autouse=True)
def _stays_whole(bench: Bench) -> Iterator[None]:
    yield
    bench.recover()
    bench.server.flush()
    stats = bench.server.stats()
    assert stats["integrity"] == "ok" and stats["requests_live"] == 0
    pool = stats["device_pool"]
    assert not any(pool[kind] for kind in pool if kind != "tokens"), pool
    bench.server.check_log(words=BAD_WORDS)


# One of each way in which a request hears of it; `tests/unit/test_store_faults.py` has more.
READS = {
    "EIO of blocks": Rule("EIO", "block"),
    "open hangs": Rule("hang", "open", "*.kv"),
    "the reading thread dies": Rule("raise", "finish", count=1),
}


@pytest.mark.parametrize("rule", READS.values(), ids=READS)
def test_a_prefix_that_cannot_be_read_now_is_computed(bench: Bench, rule: Rule) -> None:
    prompt = bench.new_prompt()
    bench.server.generate(prompt, 1)
    assert bench.ask(prompt)["path"] == "ssd"
    before, since = bench.totals(), len(bench.server.log_text())
    bench.control.set(rule)

    said = bench.ask(prompt)

    assert bench.control.hits()[rule.name], "nothing failed"
    assert said["path"] == "computed" and said["why"]["reason"] == "not_opened"
    now = bench.totals()
    assert now["health"]["failures"] > before["health"]["failures"]
    assert "the SSD store is degraded" in bench.server.log_text()[since:]
    bench.recover()
    assert bench.totals()["health"]["recoveries"] > before["health"]["recoveries"]
    assert "the SSD store answers again" in bench.server.log_text()[since:]
    assert bench.ask(prompt)["path"] == "ssd"
    after = bench.totals()
    assert after["segments_quarantined"] == before["segments_quarantined"]
    assert after["segments_gone"] == before["segments_gone"]


def test_short_reads_and_slow_disks_cost_time_only(bench: Bench) -> None:
    prompt = bench.new_prompt()
    bench.server.store_prompts(prompt)
    for rule in (Rule("short", "block"), Rule("delay", "block", seconds=0.02)):
        bench.control.set(rule)
        assert bench.ask(prompt)["path"] == "ssd"
        assert bench.control.hits()[rule.name]


WRITES = {"read-only remount": read_only(), "writes hang": [Rule("hang", "write", "*.tmp")]}


@pytest.mark.parametrize("rules", WRITES.values(), ids=WRITES)
def test_a_prefix_that_cannot_be_written_is_not_stored(bench: Bench, rules: list[Rule]) -> None:
    old, new = bench.new_prompt(), bench.new_prompt()
    bench.server.generate(old, 1)
    assert bench.ask(old)["path"] == "ssd"
    before, since = bench.totals(), len(bench.server.log_text())
    bench.control.set(*rules)

    bench.server.generate(new, 1)
    assert bench.ask(new)["path"] == "computed"

    assert any(bench.control.hits()[rule.name] for rule in rules), "nothing failed"
    assert bench.ask(old)["path"] == "ssd", "what is stored is served"
    bench.recover()
    after = bench.totals()
    counters = ("segments_failed", "segments_abandoned", "offers_while_unavailable")
    assert sum(after[name] for name in counters) > sum(before[name] for name in counters)
    assert "could not be stored" in bench.server.log_text()[since:] or after["segments_abandoned"]
    bench.ask(new)
    assert bench.ask(new)["path"] == "ssd"


@pytest.mark.parametrize(("harm", "new"), [(flip_value, 20), (flip_value, 1029), (Path.unlink, 20)])
def test_a_damaged_file_is_set_aside(bench: Bench, harm: Callable[[Path], None], new: int) -> None:
    """The prompt is computed, in one chunk of prefill or several, and stored again."""
    prompt = bench.new_prompt(1500 + new)
    known = set(damage.segments(bench.store))
    bench.server.store_prompts(prompt[:1500])
    (path,) = set(damage.segments(bench.store)) - known
    before, since = bench.totals(), len(bench.server.log_text())
    harm(path)

    said = bench.ask(prompt)
    assert said["path"] == "computed" and said["why"]["reason"] == "damaged"
    assert said["tokens"]["computed"] == len(prompt)

    def decided(totals: dict[str, Any]) -> int:
        return int(totals["segments_quarantined"] + totals["segments_gone"])

    bench.until(lambda totals: decided(totals) == decided(before) + 1)
    assert "a second look will decide" in bench.server.log_text()[since:]
    bench.ask(prompt)
    assert bench.ask(prompt)["path"] == "ssd", "it was stored again"


def test_what_is_stored_before_the_damage_is_still_loaded(bench: Bench) -> None:
    """A chat of two segments, of which the second is damaged."""
    prompt = bench.new_prompt(1315)
    bench.server.store_prompts(prompt[:700])
    before = set(damage.segments(bench.store))
    bench.server.store_prompts(prompt[:1300])
    (new,) = set(damage.segments(bench.store)) - before
    damage.truncate(new, new.stat().st_size // 2)
    said = bench.ask(prompt)
    assert said["path"] == "ssd" and said["loaded_tokens"] == 700
    assert said["why"]["reason"] == "loaded" and said["why"]["rest"] == "damaged"
    assert said["tokens"]["computed"] == 615
