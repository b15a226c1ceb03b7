"""Lives of a server in the randomised run: what is done to it meanwhile, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.core.servers import BAD_WORDS, TROUBLE
from bench.core.session import BenchFailed
from tests.damage import retract, take_away
from tests.fault_control import FAULTS, FaultControl
from tests.serving.clients import ENDED_IN_PASS, PART, Client
from tests.serving.harness import Zygote, metrics_of, running, schedulers_of, tail
from tests.serving.traffic import read_answer
from tests.serving.watch import Footprint, Watch, segment_sizes
from tests.serving.world import KILL, MIXED, World

CLIENTS = 8
# A slow machine takes longer for as much.
LEAST_ANSWERS = 60
MOST_SECONDS = 90
# Until an idle server has ended what it does.
LONGEST_SECONDS = 120
# Of a fault that has not struck.
MOST_FAULT_SECONDS = 5
LEAST_BLEND = "--impress-blend-min-tokens=128"

# Metrics, and what clients count of reports: both are totals of the same.
RECKONED = {
    **{f"requests_total {path}": f"path {path}" for path in ("ssd", "device", "computed")},
    "prefix_tokens_total": "prefix_tokens",
    "loaded_tokens_total": "loaded_tokens",
    "ssd_read_bytes_total": "ssd_bytes",
}
# Metrics over all values of their labels, and what is counted of the same without the server:
# answers by HTTP, tokens that were sent.
INDEPENDENT = {"requests_total": "answers", "prompt_tokens_total": "tokens sent"}
LARGEST_ERROR = 0.01

AWAY = "directory away"

PRIORITIES = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold=2")
# How SGLang chooses what is in a pass.
SCHEDULERS: tuple[tuple[str, ...], ...] = (
    (),
    ("--chunked-prefill-size=256",),
    ("--chunked-prefill-size=256", "--enable-mixed-chunk"),
    ("--prefill-max-requests=2",),
    ("--max-prefill-tokens=600", "--chunked-prefill-size=600"),
    PRIORITIES,
)


@dataclasses.dataclass
class Lives:
    """Servers on one store directory, one after another."""

    world: World
    watch: Watch
    models: dict[str, Path]
    store: Path
    flags: tuple[str, ...]
    control: FaultControl
    kinds: Sequence[str]
    with_faults: bool
    with_weights: bool
    seed: int
    ranks: int
    replicas: int


class Life:
    """One server, from its start to its end: of two one is killed, the other told to end after its
    accounts are seen. The other options are drawn."""

    def __init__(self, lives: Lives, number: int) -> None:
        self._lives, self._world, self._number = lives, lives.world, number
        self._chance = chance = random.Random(f"{lives.seed} life {number}")
        self._is_killed = number % 2 == 0
        self._raised_on_purpose = self._disk_lied = False
        # Several ranks neither blend nor load parts.
        whole_only = lives.ranks > 1
        self._quota_gb = chance.choice((0.01, 1.0))
        others = ("impress", "impress", "paper+itf", "as+h2o+lru")
        policy = chance.choice(others) if number and not whole_only else "impress"
        scheduler = chance.choice(SCHEDULERS)
        self._flags = [
            f"--max-total-tokens={chance.choice((7000, 9000, 14000))}",
            f"--impress-policy={policy}",
            f"--impress-chunk-tokens={chance.choice((16, 64))}",
            f"--impress-ssd-gb={self._quota_gb}",
            f"--impress-io-engine={chance.choice(('auto', 'threads'))}",
            f"--impress-reorder-interval={chance.choice((0, 3))}",
            *scheduler,
        ]
        if chance.random() < 0.3:
            self._flags.append("--disable-overlap-schedule")
        # Others load whole prefixes, beside the pass, and blend.
        parts = policy != "impress"
        self._usual = chance.choice(("whole", "whole", "part" if parts else "bits", "bits"))
        self._flags += {
            "whole": ["--impress-bits=exact"],
            "part": [f"--impress-retention={PART}"],
            "bits": chance.choice(([], ["--impress-bits=auto"], ["--impress-keep=auto"])),
        }[self._usual]
        # Of different priorities, one request may take another one's place.
        self._retracts = chance.random() < 0.5 or scheduler == PRIORITIES
        self._weights = chance.choice("ab")
        # What requests may not ask for.
        self._without = () if parts else ("part",)
        if parts or whole_only:
            self._without += ("blend",)
        else:
            self._flags += ["--impress-blend=0", LEAST_BLEND, "--impress-schedule=shortest"]

    def live(self, seconds: float, zygote: Zygote) -> None:
        """A start, traffic with events for so long, and an end."""
        lives, world = self._lives, self._world
        how = self._weights, self._usual, self._flags, self._retracts
        world.note(f"life {self._number}: {how}")
        with running(
            lives.models[self._weights],
            lives.store.with_name(f"life-{self._number}.log"),
            *lives.flags,
            f"--impress-ssd-dir={lives.store}",
            *self._flags,
            zygote=zygote,
            stops=True,
            faults=lives.control,
            retracts=self._retracts,
            ranks=lives.ranks,
            replicas=lives.replicas,
        ) as server:
            self._server = world.server = server
            world.retracts = self._retracts
            lives.watch.begin()
            try:
                self._run(seconds)
            finally:
                lives.control.set()
                world.server = None

    def _run(self, seconds: float) -> None:
        world, lives = self._world, self._lives
        world.must_have(self._weights)
        self._probe()
        schedulers = schedulers_of(self._server)
        before = [Footprint.of(process) for process in schedulers]
        seed = f"{lives.seed} {self._number} client"
        clients = [
            Client(world, f"c{i}", f"{seed} {i}", self._usual, lives.kinds, self._without)
            for i in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            self._disturb_for(seconds)
            if self._is_killed:
                self._kill(clients)
        finally:
            for client in clients:
                client.stopped.set()
            for client in clients:
                client.join()
        if not self._is_killed:
            self._check_accounts(schedulers, before)
        if not (self._is_killed and schedulers[1:]):
            self._check_log()

    # Events

    def _disturb_for(self, seconds: float) -> None:
        """Events for so long, and until enough is answered between them."""
        world, began = self._world, time.monotonic()
        before = world.counts["answers"]
        happens: dict[str, Callable[[], None]] = {
            "flush": self._flush,
            "reorder": self._reorder,
            "poll": lambda: self._require_sound(self._server.stats()),
            "reckon": self._reckon,
            "update": lambda: self._update(flush=True),
            # What is resident stays, of the old weights, until somebody flushes.
            "update without flush": lambda: self._update(flush=False),
            "fail": self._fail,
        }
        often = {"flush": 4, "reorder": 1, "poll": 2, "reckon": 2}
        often |= {"update": 2, "update without flush": 1} if self._lives.with_weights else {}
        often |= {"fail": 6} if self._lives.with_faults else {}
        # Each at least once, then as drawn.
        first = [*often]
        self._chance.shuffle(first)
        while not world.problems:
            passed = time.monotonic() - began
            enough = not first and world.counts["answers"] - before >= LEAST_ANSWERS
            if passed >= (seconds if enough else max(seconds, MOST_SECONDS)):
                break
            drawn = first or self._chance.choices([*often], [*often.values()])
            event = drawn.pop()
            time.sleep(self._chance.uniform(0.1, 1.0))
            world.note(f"event {event}")
            happens[event]()
            self._lives.watch.look(self._server.pid)

    def _flush(self) -> None:
        with self._world.pause():
            self._server.flush()
        self._world.count("flushed")

    def _reorder(self) -> None:
        said = self._server.post("/impress/reorder", force=True)
        self._require(said.ok or "no store is in use" in said.text, "reorder refused")

    def _reckon(self) -> None:
        """For a while nothing is asked but what reports: the metrics must say what reports do, and
        what clients have seen."""
        with self._world.pause():
            before, ended = self._reckoned(), self._world.counts[ENDED_IN_PASS]
            self._world.only_reported = True
        time.sleep(self._chance.uniform(1.0, 2.0))
        with self._world.pause():
            after = self._reckoned()
            self._world.only_reported = False
        if self._world.counts[ENDED_IN_PASS] > ended:
            # The server counts requests that it ends there, whose answers have no report.
            return
        for metric, (counted, measured) in after.items():
            counted -= before[metric][0]
            measured -= before[metric][1]
            self._world.count(f"reckoned {metric}", int(counted))
            off = abs(measured - counted)
            self._world.count(f"off {metric}", int(off))
            self._require(
                off <= LARGEST_ERROR * counted, f"{metric} says {measured:g}, others {counted:g}"
            )

    def _reckoned(self) -> dict[str, tuple[float, float]]:
        """By metric: what others have counted so far, and what it says, of an idle server."""
        # Also those have ended then that nobody waits for, some of which are on their way.
        time.sleep(1.0)
        self._idle()
        self._server.flush()
        found = metrics_of(self._server)
        summed = Counter[str]()
        for name, value in found.items():
            summed[name.split(" ")[0]] += value
        told = found | {metric: summed[metric] for metric in INDEPENDENT}
        counts = (RECKONED | INDEPENDENT).items()
        return {
            metric: (self._world.counts[count], told.get(metric, 0.0)) for metric, count in counts
        }

    def _idle(self) -> list[dict[str, Any]]:
        """What each replica says once no request is left."""
        self._server.flush()
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            stats = _replicas(self._server.stats())
            left = any(replica["requests_live"] for replica in stats)
            if not left or time.monotonic() > deadline:
                self._require(not left, "requests are left")
                return stats
            time.sleep(0.2)

    def _update(self, *, flush: bool) -> None:
        world, new = self._world, "b" if self._weights == "a" else "a"
        old = self._weights
        with contextlib.ExitStack() as stack:
            if not flush:
                stack.enter_context(world.disturbed(MIXED))
            began = world.may_have(new).began
            with world.outcome:
                response = self._server.post(
                    "/update_weights_from_disk",
                    model_path=str(self._lives.models[new]),
                    flush_cache=flush,
                )
                told = response.json()
                world.note(f"update to {new}, flush {flush}: {told}")
                if not told["success"] and flush:
                    # SGLang changes the weights, and does not flush while an aborted request goes.
                    stack.enter_context(world.disturbed(MIXED, began))
            changed = told["success"] or "were updated" in told["message"]
            world.count(f"update {'refused' if not changed else 'flush' if flush else 'no flush'}")
            if not flush:
                time.sleep(self._chance.uniform(0.5, 2.0))
            self._weights = new if changed else old
            with world.pause():
                self._server.flush()
                world.must_have(self._weights)
                self._probe()

    def _fail(self) -> None:
        name = self._chance.choice([*FAULTS, AWAY])
        self._world.note(f"fault {name}")
        seconds = self._chance.uniform(0.5, 2.0)
        if name == AWAY:
            take_away(self._lives.store)
            time.sleep(seconds)
            retract(self._lives.store)
            # Until the next start nobody knows the files that the server had given up.
            self._disk_lied = True
            self._world.count(f"fault {AWAY}")
            return
        rules = [dataclasses.replace(rule, name=f"{name}: {rule.name}") for rule in FAULTS[name]]
        self._raised_on_purpose |= any(rule.fault == "raise" for rule in rules)
        self._disk_lied |= any(rule.fault == "torn-silent" for rule in rules)
        control = self._lives.control
        before, end = control.hits(), time.monotonic() + MOST_FAULT_SECONDS
        control.set(*rules)
        time.sleep(seconds)
        while control.hits() == before and time.monotonic() < end:
            time.sleep(0.1)
        control.set()
        hits = control.hits() - before
        self._world.count(f"fault {name}", hits.total())

    def _probe(self) -> None:
        """The server has the weights that we think; by a prompt that is too short to be stored."""
        answers = self._world.catalogue.answers
        ask = next(
            ask
            for ask in self._world.catalogue.of_kind("plain")
            if len(ask.body["input_ids"]) < 64
            and answers[ask.name, "a"].difference(answers[ask.name, "b"])
        )
        answer = read_answer(ask, self._server.post(ask.route, **ask.body).json())
        if difference := answers[ask.name, self._weights].difference(answer):
            self._world.problem(f"the server does not have weights {self._weights}: {difference}")

    # Ends

    def _kill(self, clients: Sequence[Client]) -> None:
        """kill -9 in the middle of requests and writes, of several processes one before others."""
        with self._world.disturbed(KILL):
            if others := schedulers_of(self._server)[1:]:
                # Afterwards it says that a rank is gone.
                self._check_log()
                self._chance.choice(others).kill()
                time.sleep(self._chance.uniform(0, 2))
            for client in clients:
                client.stopped.set()
            self._server.kill()
            for client in clients:
                client.join()
        self._world.count("killed")

    def _check_accounts(
        self, schedulers: Sequence[psutil.Process], before: Sequence[Footprint]
    ) -> None:
        """Idle, the server holds nothing: no slots, no locks, no descriptors, little memory."""
        for replica in self._idle():
            self._require_sound(replica)
            pool = replica["device_pool"]
            left = {kind: pool[kind] for kind in pool.keys() - {"tokens"}}
            self._require(not any(left.values()), f"slots are left: {pool}")
        for scheduler, start in zip(schedulers, before, strict=True):
            after = Footprint.of(scheduler)
            self._world.note(f"before {start}, after {after}")
            if problem := after.beyond(start):
                self._world.problem(problem)
        self._check_disk()
        self._world.count("accounts checked")

    def _check_disk(self) -> None:
        """The server counts what the disk has, to the byte and within its quota, unless the disk
        has lied."""
        deadline, quota = time.monotonic() + LONGEST_SECONDS, self._quota_gb * 1e9
        while not self._disk_lied and (counted := self._stored_bytes()):
            if counted[0] == counted[1] <= quota:
                self._world.count("disk compared")
                return
            if time.monotonic() > deadline:
                self._world.problem(f"counted bytes, bytes of files, quota: {counted}, {quota}")
                return
            time.sleep(0.2)

    def _stored_bytes(self) -> tuple[int, int] | None:
        """As the server has it, and of the files; None while it has no store."""
        stores = [replica["store"] for replica in _replicas(self._server.stats())]
        if None in stores:
            return None
        sizes = [segment_sizes(Path(store["directory"])).values() for store in stores]
        return sum(store["used_bytes"] for store in stores), sum(map(sum, sizes))

    def _check_log(self) -> None:
        try:
            self._server.check_log(words=BAD_WORDS if self._raised_on_purpose else TROUBLE)
        except BenchFailed as error:
            self._world.problem(str(error))
        if not self._is_killed:
            dead = f"the server is dead:\n{tail(self._server.log_text())}"
            self._require(self._server.process.is_alive(), dead)

    def _require_sound(self, stats: dict[str, Any]) -> None:
        self._require(stats["integrity"] == "ok", f"integrity: {stats['integrity']}")

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self._world.problem(otherwise)


def _replicas(stats: dict[str, Any]) -> list[dict[str, Any]]:
    """What each replica says, also if there is only one."""
    return list(stats.get("replicas", [stats]))
