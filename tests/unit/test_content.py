"""Stored tokens are found anywhere in a prompt, and which of its prefixes were seen before."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impress_sglang.serving import prefix_frequency
from impress_sglang.serving.prefix_frequency import PrefixFrequencySketch, memory_at, new_memory
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store import content
from impress_sglang.store.content import MAX_EQUAL_WINDOWS, WINDOW_TOKENS, ContentIndex, Run
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, PrefixHashes
from impress_sglang.store.stored import SegmentState, StoredSegment
from tests.unit.kv_factory import as_tokens, make_shape, stored_segment
from tests.unit.store_checks import check_content
from tests.unit.waiting import calls_of

SHAPE = make_shape()


def index_of(*segments: StoredSegment) -> ContentIndex:
    index = ContentIndex()
    for segment in segments:
        index.add(segment)
    check_content(index)
    return index


def text(seed: int, length: int, vocabulary: int = 1000) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


def find(index: ContentIndex, tokens: Tokens, start: int = 0) -> Sequence[Run]:
    return index.find("", tokens, start)


def places(runs: Sequence[Run]) -> list[tuple[int, int, str, int]]:
    """Of each run: where it begins and ends in the prompt, its segment, and where in that."""
    return [(r.start, r.stop, r.span.segment.segment_id, r.span.start) for r in runs]


def test_of_several_segments_the_longest_run_is_taken() -> None:
    document = text(1, 300)
    short = stored_segment("short", document[:200])
    long = stored_segment("long", document)
    index = index_of(short, long)
    assert places(find(index, as_tokens(document))) == [(0, 300, "long", 0)]
    index.discard(long)
    assert places(find(index, as_tokens(document))) == [(0, 200, "short", 0)]


@pytest.mark.parametrize(
    ("namespace", "quality", "state"),
    [
        ("other", EXACT, SegmentState.READY),
        ("", Quality(1, 5.0), SegmentState.READY),
        ("", Quality(1, 8.0, 0.99), SegmentState.READY),
        ("", EXACT, SegmentState.PENDING),
        ("", EXACT, SegmentState.SUSPECT),
    ],
)
def test_what_is_never_found(namespace: str, quality: Quality, state: SegmentState) -> None:
    document = text(1, 300)
    index = index_of(
        stored_segment("s", document, namespace=namespace, quality=quality, state=state)
    )
    assert find(index, as_tokens(document)) == ()


def test_equal_hashes_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All windows of all texts have one key: only tokens tell them apart."""
    for name in ("rolling_windows", "block_windows"):
        hashes = getattr(PrefixHashes, name)
        monkeypatch.setattr(PrefixHashes, name, lambda *how, hashes=hashes: 0 * hashes(*how))
    index = index_of(stored_segment("s", text(1, 200)))
    assert find(index, as_tokens(text(2, 300))) == ()
    run = [*text(3, 10), *text(1, 200)[64:192], 5000]
    assert places(find(index, as_tokens(run)))[0][:2] == (10, 138)


def test_nobody_can_foretell_where_windows_stand() -> None:
    one, other = (index_of(stored_segment("s", text(1, 640))) for _ in range(2))
    assert len(one) == len(other) == 10
    assert not one._first.keys() & other._first.keys()


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_everywhere_is_found_until_the_last_of_it_is_gone(order: int) -> None:
    boilerplate = text(1, 64)
    segments = [stored_segment(f"s{n}", [*boilerplate, *text(100 + n, 64)]) for n in range(50)]
    index = index_of(*segments)
    for segment in segments[::order]:
        assert find(index, as_tokens(boilerplate))
        index.discard(segment)
        check_content(index)
    assert len(index) == 0 and not find(index, as_tokens(boilerplate))


def test_tables_fit_what_is_there_and_change_in_small_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it grows to many windows, and when few of them are left."""
    counted = calls_of(monkeypatch, content._Counts, "count")
    index, windows = ContentIndex(), 20
    segments = [stored_segment(f"s{n}", text(n, 64 * windows)) for n in range(2000)]

    def add(segment: StoredSegment) -> int:
        """Returns the places of all tables; few windows are counted at once."""
        counted.clear()
        index.add(segment)
        assert sum(len(keys) for (_, keys, _), _ in counted) <= 5 * windows
        assert len(index._tables) <= 2 and len(index._tables[-1]) >= 16 * len(index)
        return sum(len(table) for table in index._tables)

    for number, segment in enumerate(segments):
        assert add(segment) <= max(100 * len(index), 3 << 12)
        if number % 100 == 0:
            check_content(index)
    for segment in segments[10:]:
        index.discard(segment)
    check_content(index)
    for segment in segments[10:20]:
        num_places = add(segment)
    check_content(index)
    assert num_places <= 3 << 13
    for number, segment in enumerate(segments):
        names = [place[2] for place in places(find(index, segment.info.tokens))]
        assert names == [segment.segment_id] * (number < 20)


class Asked(dict[int, int]):
    """Counts the keys that were looked up."""

    count = 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)


@pytest.mark.parametrize("windows", [10_000, 300_000])
def test_few_windows_of_an_unknown_prompt_are_looked_up(windows: int) -> None:
    index, chance = ContentIndex(), np.random.default_rng(0)
    while len(index._first) < windows:
        tokens = chance.integers(0, 32_000, 64 * 1000, np.int32)
        index.add(stored_segment("s", tokens, shape=SHAPE))
    index._first = asked = Asked(index._first)
    assert find(index, chance.integers(0, 32_000, 20_000, np.int32)) == ()
    assert asked.count < 20_000 // 10


@pytest.mark.parametrize("state", [SegmentState.READY, SegmentState.PENDING])
@pytest.mark.parametrize("length", [64, 100, 20_000])
def test_what_a_search_does_is_linear(
    monkeypatch: pytest.MonkeyPatch, length: int, state: SegmentState
) -> None:
    """Also of text that is known at each of its places, in pieces, or where nobody may read."""
    compared = calls_of(monkeypatch, content, "_equal")
    looked = calls_of(monkeypatch, ContentIndex, "_longest")
    index = index_of(*(stored_segment(f"s{n}", [3] * length, state=state) for n in range(6)))
    found = find(index, as_tokens([3] * 20_000))
    assert bool(found) == (state is SegmentState.READY)
    assert sum(call.result + 1 for call in compared) <= 2 * MAX_EQUAL_WINDOWS * 20_000
    assert len(looked) <= 20_000 // WINDOW_TOKENS + WINDOW_TOKENS + 1


def test_a_segment_that_is_rewritten_stays() -> None:
    document = text(1, 300)
    segment = stored_segment("s", document)
    index = index_of(segment)
    segment.info = stored_segment("t", document).info
    check_content(index)
    assert places(find(index, as_tokens(document))) == [(0, 300, "t", 0)]
    index.discard(segment)
    assert len(index) == 0


def covered_by_search(segments: Sequence[StoredSegment], tokens: Tokens) -> set[int]:
    """Places of a prompt that any window of a segment, extended both ways, has."""
    found: set[int] = set()
    for segment in segments:
        stored = segment.info.tokens
        for offset in range(1 - len(stored), len(tokens)):
            low, high = max(offset, 0), min(offset + len(stored), len(tokens))
            equal = tokens[low:high] == stored[low - offset : high - offset]
            edges = low + np.flatnonzero(np.diff(equal, prepend=False, append=False))
            for at, stop in edges.reshape(-1, 2).tolist():
                first = -(-(at - offset) // WINDOW_TOKENS) * WINDOW_TOKENS
                if first + WINDOW_TOKENS <= stop - offset:
                    found.update(range(at, stop))
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_a_search_that_compares_everything(data: st.DataObject) -> None:
    """Runs are real, apart and in order; what they cover is all that a search covers."""
    pieces = [text(seed, 130, vocabulary=50) for seed in range(4)]
    some = st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(70, 130)), max_size=5
    )

    def make() -> list[int]:
        return [t for n, start, stop in data.draw(some) for t in pieces[n][start:stop]]

    segments = [stored_segment(f"s{n}", drawn) for n in range(3) if (drawn := make())]
    prompt = as_tokens(make())
    index = index_of(*segments)

    runs = find(index, prompt)

    position, covered = 0, set()
    for run in runs:
        assert position <= run.start < run.stop <= len(prompt)
        found = run.span.segment.info.tokens[run.span.start : run.span.stop]
        assert np.array_equal(found, prompt[run.start : run.stop])
        assert len(run) >= 1
        position = run.stop
        covered.update(range(run.start, run.stop))
    expected = covered_by_search(segments, prompt)
    assert covered <= expected
    missed = expected - covered
    # A run that begins inside of another one is lost if what is left of it holds no window.
    assert not any(missed >= {*range(at, at + 2 * WINDOW_TOKENS - 1)} for at in missed)


COLUMNS = 1 << 16


def prompt(*blocks: int, rest: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Blocks of equal tokens, and some more."""
    tokens = [token for token in blocks for _ in range(BLOCK_TOKENS)]
    return as_tokens([*tokens, *range(rest)])


# They have the same CRC32.
NAMESPACES = st.sampled_from(["salt301017028x886", "salt534762151x116"])


@given(
    times=st.integers(2, 4),
    asked=st.lists(st.tuples(NAMESPACES, st.lists(st.integers(0, 2), max_size=4)), max_size=30),
)
def test_sights_are_those_of_exact_counts(times: int, asked: list[tuple[str, list[int]]]) -> None:
    frequency = PrefixFrequencySketch(times, new_memory(COLUMNS))
    counts = Counter[tuple[str, tuple[int, ...]]]()
    for namespace, blocks in asked:
        prefixes = [tuple(blocks[: stop + 1]) for stop in range(len(blocks))]
        counts.update((namespace, prefix) for prefix in prefixes)
        often = [prefix for prefix in prefixes if counts[namespace, prefix] >= times]
        found = frequency.count_prefix(namespace, prompt(*blocks, rest=BLOCK_TOKENS - 1))
        assert found == BLOCK_TOKENS * len(often)


def test_what_is_seen_once_is_forgotten_and_what_is_seen_often_is_not() -> None:
    """While more prefixes come than the sketch remembers."""
    columns = 1 << 10
    frequency = PrefixFrequencySketch(2, new_memory(columns))
    once, often = prompt(1), prompt(2)
    frequency.count_prefix("", once)
    for number in range(columns + 1):
        frequency.count_prefix("", prompt(10 + number))
        if number % 100 == 0:
            frequency.count_prefix("", often)
    assert [frequency.count_prefix("", tokens) for tokens in (often, once)] == [BLOCK_TOKENS, 0]


def test_what_was_noted_before_is_not_counted_again() -> None:
    """And what is no request of its own is not counted at all."""
    frequency = PrefixFrequencySketch(2, new_memory(COLUMNS))
    frequency.count_prefix("", prompt(1, rest=9))
    assert frequency.count_prefix("", prompt(1, 2), BLOCK_TOKENS + 9) == 0
    assert frequency.count_prefix("", prompt(1, 2, 3), count=False) == 0
    assert frequency.count_prefix("", prompt(1, 2, 3)) == 2 * BLOCK_TOKENS


def test_replicas_count_together_and_each_of_their_ranks_for_itself() -> None:
    place = prefix_frequency.shared_memory(2, COLUMNS)
    first = PrefixFrequencySketch(2, memory_at(place, 1))
    assert first.count_prefix("", prompt(1, 2)) == 0
    code = f"""
import numpy as np
from impress_sglang.serving.prefix_frequency import PrefixFrequencySketch, memory_at
sketches = [PrefixFrequencySketch(2, memory_at({place}, rank)) for rank in (0, 1)]
tokens = np.repeat(np.array([1, 3], np.int32), {BLOCK_TOKENS})
print(*(sketch.count_prefix("", tokens) for sketch in sketches))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["0", str(BLOCK_TOKENS)]
    assert first.count_prefix("", prompt(1, 3)) == 2 * BLOCK_TOKENS


def test_text_is_seen_wherever_it_stands() -> None:
    """In documents of any length, and once for each request."""
    frequency = PrefixFrequencySketch(2, new_memory(COLUMNS))
    documents = [text(seed, 500 + seed) for seed in range(8)]
    for order in (range(8), [3, 3, 0, 7, 1, 6, 2, 5, 4], [4, 2, 6, 0, 3, 7, 5, 1]):
        tokens, stood = [], []
        for number in order:
            stood.append(len(tokens))
            tokens += [5000, *documents[number]]
        starts, often = frequency.count_text("", as_tokens(tokens))
        if order == range(8):
            assert not often.any() and 80 < len(starts) < 200
    # What crosses from one document into the next was never seen, but all begin with one token.
    crossing = [any(start < at < start + BLOCK_TOKENS - 1 for at in stood) for start in starts]
    assert often.tolist() == [not crosses for crosses in crossing]
    assert not frequency.count_text("tenant", as_tokens(tokens))[1].any()
