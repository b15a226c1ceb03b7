"""A server's tree cache with what may be taken from it, and with orders that come by SGLang's way.

Handlers of messages and hooks are SGLang's. Its workers, the memory saver and the forward passes
are stand-ins; whoever touches what is released, fails.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.plugin.admin import MESSAGE, around_message
from impress_sglang.plugin.weights import around_handler
from impress_sglang.storage.quality import EXACT
from impress_sglang.store.prefix_hashes import namespace_text
from tests.integration import tiny_model, tree_world
from tests.integration.tree_world import TreeWorld
from tests.unit.kv_factory import make_shape
from tests.unit.store_checks import check_store
from tests.unit.waiting import wait_until

SHAPE = make_shape(layers=3, probe=())
OLD, NEW = tree_world.IDENTITY, "1" * 32
TOKENS = 64
# What `store_prompt` stores, and another prompt.
STORED, OTHER = [*range(1000, 1000 + TOKENS)], [*range(3000, 3000 + TOKENS)]


@dataclasses.dataclass
class Saver:
    """Stands in for SGLang's memory saver."""

    pool: tiny_model.Pool
    paused: set[str] = dataclasses.field(default_factory=set)

    def pause(self, tag: str) -> None:
        self.paused.add(tag)
        self.pool.paused = "kv_cache" in self.paused

    def resume(self, tag: str) -> None:
        self.paused.remove(tag)
        self.pool.paused = "kv_cache" in self.paused


class World(TreeWorld):
    """A tree cache with a store of exact KVs, and SGLang's updater of weights that flushes it."""

    shape = SHAPE

    def __init__(self, root: Path, **options: Any) -> None:
        self.weights, self.asked = OLD, 0
        super().__init__(root, **({"bits": "exact", "load": "faster"} | options))
        self._connect_updater()

    def make_pool(self, size: int, page_size: int) -> None:
        super().make_pool(size, page_size)
        self.saver = Saver(self.pool)

    def _connect_updater(self) -> None:
        updater: Any = object.__new__(SchedulerWeightUpdaterManager)
        runner = SimpleNamespace(
            weight_updater=SimpleNamespace(
                update_weights_from_disk=self.load_weights,
                begin_weight_update=lambda: None,
                end_weight_update=lambda run_post_load: None,
            ),
            check_weights=lambda **_: None,
            model=torch.nn.Linear(1, 1),
        )
        updater.tp_worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)], model_runner=runner
        )
        updater.scheduler = self.scheduler
        self.scheduler.tree_cache, self.scheduler.weight_updater = self.cache, updater
        self.scheduler._engine_paused = False
        self.scheduler.record_weight_version_change = lambda new_version: None
        updater.draft_worker = updater.metrics_collector = updater._session = None
        updater.memory_saver_adapter = self.saver
        updater.flush_cache = self.flush
        updater.is_fully_idle = lambda ignore_waiting=False: True
        updater.offload_tags = set()
        updater.tp_cpu_group = None

    def read_identity(self) -> str:
        self.asked += 1
        assert "weights" not in self.saver.paused, "weights are read while they are released"
        if self.weights == "unreadable":
            raise RuntimeError("no weights")
        return self.weights

    def load_weights(self, model_path: str, *_: Any, **__: Any) -> tuple[bool, str]:
        assert not self.service.in_use
        if model_path == "missing":
            return False, "no such model"
        self.weights = model_path
        return True, ""

    def call(self, handler: str, **fields: Any) -> Any:
        """Send a message of SGLang."""
        unset = "tags load_format recapture_cuda_graph weight_version torch_empty_cache"
        usual = dict.fromkeys([*unset.split(), "allow_quant_error", "skip_tensor_list"])
        usual |= {"selector": "all", "flush_cache": True, "model_path": NEW}
        message: Any = SimpleNamespace(**(usual | fields))
        original = getattr(self.scheduler.weight_updater, handler)
        return around_handler(original, self.scheduler, self.cache.weights, message)

    def told(self, verb: str, input_ids: list[int] | None = None, **fields: Any) -> Any:
        """The answer to an admin request that came by SGLang's way."""
        text = json.dumps({"verb": verb, "input_ids": input_ids} | fields)
        message = SetInternalStateReq(server_args=dict(MESSAGE), rid=text)
        sent: list[Any] = []
        self.scheduler.send_control_output = lambda answer, _: sent.append(answer)
        assert not around_message(lambda *_: pytest.fail("ours"), self.scheduler, message)
        (answer,) = sent
        assert answer.updated
        return json.loads(answer.rid)

    def stored_after(
        self,
        rid: str,
        question: int,
        *,
        prompt: Sequence[int] = STORED,
        answer: Sequence[int] = (),
        **how: Any,
    ) -> int:
        """How many tokens are stored after a request for a prompt and a question of its own."""
        self.prefill(rid, [*prompt, *range(question, question + TOKENS)], answer, **how)
        self.service.store.writes.drain()
        self.cache.evict(EvictParams(num_tokens=self.allocator.size))
        return sum(segment.info.num_tokens for segment in self.service.store.tree.segments())

    def prefill(
        self, rid: str, tokens: Sequence[int], answer: Sequence[int] = (), **how: Any
    ) -> Any:
        """A prompt is computed and resident; its write may still go on. Returns its request."""
        req = self.request(rid, tokens, **how)
        self.serve(req, answer)
        self.rest()
        return req

    def store_prompt(self) -> None:
        """A prompt is in the store, and nothing is resident."""
        self.run("stored", STORED)
        self.flush()
        assert self.stored(STORED) == TOKENS and self.files() == 1

    def make_resident(self, tokens: Sequence[int], namespace: str | None = None) -> None:
        """A prefix is in SGLang's tree, and not stored."""
        self.prefill("resident", tokens, namespace=namespace, store=False)

    def stored(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt the tree cache would find in the store."""
        found = np.array(tokens, dtype=np.int32)
        return self.cache.planner.match(namespace_text(None, None), found, EXACT).num_tokens

    def used(self) -> bool:
        """Whether the store is used, once it is open: that is done in the background."""

        def is_over() -> bool:
            self.poll()
            return self.service.suspended != "opening"

        wait_until(is_over)
        return self.service.suspended is None

    def files(self) -> int:
        return len(list(Path(self.config.ssd_path).glob("*/segments/*/*")))

    def close(self) -> None:
        # Otherwise a write would wait for its layers for ever.
        self.pool.go_on.set()
        if self.service.opened is not None:
            check_store(self.service.store)
        super().close()


def install_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server; what needs several processes or an accelerator is left out."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    monkeypatch.setattr(torch.distributed, "barrier", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: 1)
    # SGLang asks for the module of the build's accelerator, which a CPU machine lacks.
    monkeypatch.setattr(torch, "get_device_module", lambda device="cpu": torch.cpu)
    monkeypatch.setattr(
        SchedulerWeightUpdaterManager, "_assert_weight_cache_inactive", lambda *_: None
    )
