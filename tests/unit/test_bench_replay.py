"""Replay: counts what a store with the same requests counts; recordings survive packing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.policies.recording import RecordedSelection, Recording, load_recording, pack_recording
from bench.policies.replay import (
    CHUNK_TOKENS,
    RECORDINGS,
    RETENTION,
    Replay,
    Request,
    draw_requests,
    shape_of,
)
from impress_sglang.config import ImpressConfig
from impress_sglang.importance.identify import Evidence
from impress_sglang.management.policies import Wish, make_policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import Offer
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.planner import ReadStats
from tests.unit.kv_factory import as_tokens, lanes_of, make_shape, random_kvs
from tests.unit.reading import load_layer
from tests.unit.store_factory import open_source, prompt

SHAPE = make_shape(layers=3, query_heads=8, kv_heads=4, key_dim=32, value_dim=32, probe=(0,))
LANES = dataclasses.replace(SHAPE, probe_kv_heads=())
LENGTHS = (300, 256, 333, 64)
DEVICE_SHARE, HOST_SHARE = 0.2, 0.3


def make_recording(shape: KVShape = SHAPE, questions: int = 4) -> Recording:
    """Selections of a quarter of the tokens, alike within a prefix; some layers read all keys."""
    generator = np.random.default_rng(3)
    prefixes = []
    for number, length in enumerate(LENGTHS):
        usual = generator.random((shape.num_layers, lanes_of(shape), length))
        own = []
        for _ in range(questions):
            noisy = usual + 0.3 * generator.random(usual.shape)
            selected = noisy > np.quantile(noisy, 0.75, axis=2, keepdims=True)
            # Without probe heads there is nothing else to choose by.
            share = 0.3 if shape.probe_kv_heads else 1.0
            own.append(RecordedSelection(str(number), selected, generator.random(3) < share))
        prefixes.append(own)
    order = [(prefix, question) for question in range(questions) for prefix in range(len(LENGTHS))]
    # In order at first, so that chunks are known by the same numbers everywhere; not in turn later.
    rest = [order[i] for i in generator.permutation(np.arange(len(LENGTHS), len(order)))]
    return Recording(prefixes, [*order[: len(LENGTHS)], *rest])


class RecordedRule:
    """Selects what was recorded, after a look at what the recording says."""

    evidence = "probe"

    def __init__(self, question: RecordedSelection) -> None:
        self._question = question

    def select(self, evidence: Evidence, k: int) -> torch.Tensor:
        if self._question.all_keys[evidence.layer]:
            evidence.exact_scores()
        else:
            evidence.probe_scores()
        lanes = self._question.selected[evidence.layer]
        return torch.from_numpy(np.stack([np.flatnonzero(lane) for lane in lanes]))


class RealStore:
    """The same requests through a store with files and caches."""

    def __init__(self, shape: KVShape, policy: str, directory: Path, kv_bytes: int) -> None:
        self._shape = shape
        config = ImpressConfig(
            ssd_dir=str(directory),
            policy=policy,
            min_free_gb=0.0,
            chunk_tokens=CHUNK_TOKENS,
            device_gb=DEVICE_SHARE * kv_bytes / 1e9,
            host_gb=HOST_SHARE * kv_bytes / 1e9,
            reorder_interval=0.0,
            readahead=0.0,
            retention=RETENTION,
        )
        whole = make_policy(config).exact(Wish(RETENTION))
        self._rule = "whole" if whole else "recorded"
        self.store = PrefixStore(config, "0" * 32, shape)
        self._tokens = [as_tokens(prompt(n + 1, length)) for n, length in enumerate(LENGTHS)]
        for number, tokens in enumerate(self._tokens):
            keys, values = random_kvs(shape, len(tokens), seed=number)
            self.store.writes.offer(
                "",
                Offer(
                    tokens,
                    lambda start, k=keys, v=values: (
                        lambda layer: (k[layer, start:], v[layer, start:])
                    ),
                    lambda: None,
                    lambda: None,
                    min_tokens=1,
                ),
            )
        self.store.writes.drain()

    def run(self, recording: Recording, requests: Sequence[tuple[int, int]]) -> ReadStats:
        total = ReadStats()
        for prefix, question in requests:
            total.add(self._serve(prefix, recording.questions[prefix][question]))
        return total

    def _serve(self, prefix: int, question: RecordedSelection) -> ReadStats:
        tokens = self._tokens[prefix]
        match = self.store.match("", tokens)
        source = open_source(self.store, match)
        stats = LoadStats()
        for layer in range(self._shape.num_layers):
            rule = RecordedRule(question)
            whole = self._rule == "whole"
            k = len(tokens) if whole else int(question.selected[layer, 0].sum())
            load_layer(PrefixLoader(self._shape, rule), layer, source, self._inputs(), k, stats)
        self.store.close_source(source)
        return dataclasses.replace(source.stats, wait_ms=0.0)

    def _inputs(self) -> LayerInputs:
        shape = self._shape
        queries = torch.ones(1, shape.num_query_heads, shape.key_dim)
        new_keys = torch.ones(1, shape.num_kv_heads, shape.key_dim)
        return LayerInputs(queries, new_keys, new_keys[:0], 1.0)

    def reorder(self) -> None:
        self.store.reorders.enqueue(force=True)
        while self.store.reorders.summary()["pending"]:
            self.store.poll()
            # Or the thread that rewrites hardly gets to run.
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        *((name, LANES) for name in ("as", "as+h2o+lru", "as+h2o+lfu")),
        *((name, SHAPE) for name in ("as+h2o+lfu", "paper+itf", "paper")),
    ],
)
def test_replay_counts_what_a_store_counts(
    policy: str, shape: KVShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte and chunk for chunk, before and after reordering, as the loader reads."""
    monkeypatch.setattr(ReadCost, "gap_bytes", 8192)
    recording = make_recording(shape)
    replay = Replay(
        make_policy(ImpressConfig(policy=policy)),
        shape,
        recording,
        len(LENGTHS),
        device_share=DEVICE_SHARE,
        host_share=HOST_SHARE,
        gap_bytes=8192,
    )
    real = RealStore(shape, policy, tmp_path, replay.kv_bytes)
    requests = [Request(*place) for place in recording.order]

    assert replay.run(requests) == real.run(recording, recording.order)
    replay.reorder()
    real.reorder()
    after = replay.run(requests)

    assert after == real.run(recording, recording.order)
    assert after.device_chunks > 0 and after.host_chunks > 0 and after.ssd_chunks > 0
    replay.placement.check_integrity()
    real.store.check_integrity()
    real.store.close()


@pytest.mark.parametrize("shape", [SHAPE, LANES], ids=["one lane", "lanes"])
def test_a_packed_recording_is_the_recording(tmp_path: Path, shape: KVShape) -> None:
    recording = make_recording(shape, questions=2)
    directory = tmp_path / "recorded"
    directory.mkdir()
    for number, (prefix, question) in enumerate(recording.order):
        recording.questions[prefix][question].save(directory / f"{number:08d}.npz")

    pack_recording(load_recording(directory), tmp_path / "packed.npz")
    found = load_recording(tmp_path / "packed.npz")

    assert found.order == recording.order
    for own, expected in zip(found.questions, recording.questions, strict=True):
        for selection, original in zip(own, expected, strict=True):
            assert np.array_equal(selection.selected, original.selected)
            assert np.array_equal(selection.all_keys, original.all_keys)


def test_a_packed_recording_without_lanes_has_one(tmp_path: Path) -> None:
    """As files were before there were lanes."""
    recording = make_recording(questions=2)
    arrays: dict[str, np.ndarray] = {"order": np.array(recording.order)}
    for number, own in enumerate(recording.questions):
        selected = np.stack([selection.selected[:, 0] for selection in own])
        arrays[f"{number}.tokens"] = np.array(selected.shape[2])
        arrays[f"{number}.selected"] = np.packbits(selected, axis=2)
        arrays[f"{number}.all_keys"] = np.stack([selection.all_keys for selection in own])
    np.savez_compressed(tmp_path / "old.npz", **arrays)

    found = load_recording(tmp_path / "old.npz")

    assert found.order == recording.order
    for own, expected in zip(found.questions, recording.questions, strict=True):
        for selection, original in zip(own, expected, strict=True):
            assert np.array_equal(selection.selected, original.selected)


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.npz")), ids=lambda path: path.stem)
def test_kept_recordings_can_be_replayed(path: Path) -> None:
    recording = load_recording(path)

    for own in recording.questions:
        for selection in own:
            layers, lanes, _ = selection.selected.shape
            assert lanes == 1
            assert selection.all_keys.shape == (layers,)
            assert selection.selected.any(2).all(), "each layer uses something"


@pytest.mark.parametrize("name", ["paper", "as+h2o+lfu"])
def test_a_recording_of_another_model_is_replayed_by_turns(name: str) -> None:
    """Fewer layers and lanes were recorded than the shape has."""
    policy = make_policy(ImpressConfig(policy=name))
    shape = shape_of("smollm2-135m", policy)
    recording = make_recording(questions=1)
    replay = Replay(
        policy,
        shape,
        recording,
        6,
        device_share=0.1,
        host_share=0.1,
        gap_bytes=0,
    )

    stats = replay.run([Request(5, 0)])

    selected = recording.questions[5 % 4][0].selected
    times = shape.num_layers // len(selected)
    # Keys and values of 64 numbers of 3 heads.
    assert stats.important_bytes == times * selected.sum() * 2 * 3 * 64 * 4


def test_requests_are_drawn_by_popularity_and_the_same_each_time() -> None:
    recording = make_recording(questions=2)

    drawn = draw_requests(recording, 100, 4000, 0.1, 5)
    shifted = [r.prefix for r in draw_requests(recording, 100, 4000, 0.1, 5, shift=True)]

    assert drawn == draw_requests(recording, 100, 4000, 0.1, 5)
    prefixes = np.array([request.prefix for request in drawn])
    assert abs(prefixes.mean() - 50) < 1 and 8 < prefixes.std() < 12
    assert {request.question for request in drawn} == {0, 1}
    assert np.mean(shifted[:2000]) > 70 and np.mean(shifted[2000:]) < 30
