"""Which prefixes were seen before, against exact counts."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.serving.sights import Sights, memory_at, new_memory, shared_memory
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from tests.unit.kv_factory import as_tokens

COLUMNS = 1 << 16


def prompt(*blocks: int, rest: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Blocks of equal tokens, and some more."""
    tokens = [token for token in blocks for _ in range(BLOCK_TOKENS)]
    return as_tokens([*tokens, *range(rest)])


@given(
    least=st.integers(2, 4),
    asked=st.lists(
        st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(0, 2), max_size=4)), max_size=30
    ),
)
def test_against_exact_counts(least: int, asked: list[tuple[str, list[int]]]) -> None:
    sights, counts = Sights(least, new_memory(COLUMNS)), Counter[tuple[str, tuple[int, ...]]]()
    for namespace, blocks in asked:
        prefixes = [tuple(blocks[: stop + 1]) for stop in range(len(blocks))]
        counts.update((namespace, own) for own in prefixes)
        often = [own for own in prefixes if counts[namespace, own] >= least]
        found = sights.note(namespace, prompt(*blocks, rest=BLOCK_TOKENS - 1))
        assert found == BLOCK_TOKENS * len(often)


def test_what_is_seen_once_is_forgotten_and_what_is_seen_often_is_not() -> None:
    """While more prefixes come than the sketch remembers."""
    columns = 1 << 10
    sights = Sights(2, new_memory(columns))
    once, often = prompt(1), prompt(2)
    sights.note("", once)
    for number in range(columns + 1):
        sights.note("", prompt(10 + number))
        if number % 100 == 0:
            sights.note("", often)
    assert sights.note("", often) == BLOCK_TOKENS
    assert sights.note("", once) == 0


def test_namespaces_are_kept_apart_by_more_than_a_checksum() -> None:
    """These have the same CRC32."""
    sights = Sights(2, new_memory(COLUMNS))
    assert sights.note("salt301017028x886", prompt(1)) == 0
    assert sights.note("salt534762151x116", prompt(1)) == 0


def test_what_was_noted_before_is_not_counted_again() -> None:
    """And what is no request of its own is not counted at all."""
    sights = Sights(2, new_memory(COLUMNS))
    sights.note("", prompt(1, rest=9))
    assert sights.note("", prompt(1, 2), BLOCK_TOKENS + 9) == 0
    assert sights.note("", prompt(1, 2, 3), count=False) == 0
    assert sights.note("", prompt(1, 2, 3)) == 2 * BLOCK_TOKENS


def test_replicas_count_together_and_each_of_their_ranks_for_itself() -> None:
    place = shared_memory(2, COLUMNS)
    first = Sights(2, memory_at(place, 1))
    assert first.note("", prompt(1, 2)) == 0
    code = f"""
from impress_sglang.serving.sights import Sights, memory_at
from tests.unit.test_sights import prompt
print(*(Sights(2, memory_at({place}, rank)).note("", prompt(1, 3)) for rank in (0, 1)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["0", str(BLOCK_TOKENS)]
    assert first.note("", prompt(1, 3)) == 2 * BLOCK_TOKENS


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_text_is_seen_wherever_it_stands() -> None:
    """In documents of any length, and once for each request."""
    sights = Sights(2, new_memory(COLUMNS))
    documents = [text(seed, 500 + seed) for seed in range(8)]
    for order in (range(8), [3, 3, 0, 7, 1, 6, 2, 5, 4], [4, 2, 6, 0, 3, 7, 5, 1]):
        tokens, stood = [], []
        for number in order:
            stood.append(len(tokens))
            tokens += [5000, *documents[number]]
        starts, often = sights.note_text("", as_tokens(tokens))
        if order == range(8):
            assert not often.any() and 80 < len(starts) < 200
    # What crosses from one document into the next was never seen, but all begin with one token.
    crossing = [any(start < at < start + BLOCK_TOKENS - 1 for at in stood) for start in starts]
    assert often.tolist() == [not own for own in crossing]
    assert not sights.note_text("tenant", as_tokens(tokens))[1].any()
