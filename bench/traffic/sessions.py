"""Sessions of published traces, scaled down: who asks for what, and how long they think.

Traces have no text, only the lengths of prompts and answers and ids of blocks; equal ids are equal
text. All lengths are divided by one number, a block stays a block, and its tokens are taken from a
text where its id says. What an answer was is in the blocks of the next prompt, as in the trace.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.core.data import EXCERPTS
from bench.core.options import Option

TRACE = Option(
    "trace",
    EXCERPTS / "agents" / "sessions.jsonl",
    "a file or a folder, see `traffic/sessions.py` (two sessions of agents)",
    parse=Path,
)
# Of a block, in Mooncake's traces.
MOONCAKE_BLOCK = 512
# Ids of a session are below it where each session has ids of its own.
SESSION_IDS = 10**9


class Turn(NamedTuple):
    """A request of a trace.

    Attributes:
        at: seconds since the trace began.
        blocks: ids of the whole blocks of its prompt.
        block_tokens: of each.
        prompt_tokens: of the prompt, those after its last whole block included.
        answer_tokens: of the answer.
        think_seconds: between the answer before it and this request.
    """

    at: float
    blocks: tuple[int, ...]
    block_tokens: int
    prompt_tokens: int
    answer_tokens: int
    think_seconds: float


Session = Sequence[Turn]


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a trace.

    Args:
        path: a file whose lines are requests, as Mooncake publishes them, or sessions of agents
            (`requests` with `t`, `in`, `out`, `hash_ids`, `think_time`), or a folder with one such
            session a file.
    """
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        files = sorted(path.glob("*.json"))
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if rows and "requests" in rows[0]:
        return [_agent(number, row) for number, row in enumerate(rows)]
    return _follow(rows)


def _agent(number: int, told: dict[str, Any]) -> Session:
    found, before = [], 0.0
    for request in told["requests"]:
        if request.get("hash_ids"):
            pause = request["t"] - before - request.get("api_time", 0.0)
            # Ids of blocks are those of their session.
            blocks = tuple(number * SESSION_IDS + block for block in request["hash_ids"])
            think = request.get("think_time", max(0.0, pause))
            turn = Turn(
                request["t"], blocks, told["block_size"], request["in"], request["out"], think
            )
            found.append(turn)
            before = request["t"]
    return found


def _follow(requests: Iterable[dict[str, Any]]) -> list[Session]:
    """A request goes on from the one whose blocks, but for the last one, are its first."""
    sessions: list[list[Turn]] = []
    latest: dict[tuple[int, ...], list[Turn]] = {}
    for request in requests:
        blocks = tuple(request["hash_ids"])
        known = (latest.pop(blocks[:size], None) for size in range(len(blocks), 1, -1))
        session = next((found for found in known if found), None)
        at = request["timestamp"] / 1e3
        if session is None:
            session = []
            sessions.append(session)
        turn = Turn(
            at,
            blocks,
            MOONCAKE_BLOCK,
            request["input_length"],
            request["output_length"],
            at - session[-1].at if session else 0.0,
        )
        session.append(turn)
        latest[blocks[:-1]] = session
    return sessions


class Ask(NamedTuple):
    """What is asked: all tokens of a prompt, how many are answered, and the pause before."""

    tokens: Sequence[int]
    answer_tokens: int
    pause_seconds: float


@dataclasses.dataclass
class Scale:
    """Makes requests of turns.

    Lengths are divided by `divide`, and pauses by `hurry` and are never longer than `longest`
    seconds; tokens of blocks are taken from `text`.
    """

    text: Sequence[int]
    divide: int
    hurry: float
    longest: float
    seed: int

    def ask(self, turn: Turn) -> Ask:
        """The request of a turn."""
        size = self._size(turn)
        tokens = [token for block in turn.blocks for token in self._block(block, size)]
        wanted = turn.prompt_tokens // self.divide
        # What is behind the last whole block is new.
        fresh = self._place(f"{turn.blocks[-1]} {turn.prompt_tokens}")
        end = [] if wanted < len(tokens) else self._piece(fresh, max(1, wanted - len(tokens)))
        pause = min(turn.think_seconds / self.hurry, self.longest)
        return Ask([*tokens[:wanted], *end], max(1, turn.answer_tokens // self.divide), pause)

    def working_set(self, sessions: Iterable[Session]) -> int:
        """Tokens of all blocks, each once."""
        turns = [turn for session in sessions for turn in session]
        sizes = {block: self._size(turn) for turn in turns for block in turn.blocks}
        return sum(sizes.values())

    def _size(self, turn: Turn) -> int:
        return max(1, turn.block_tokens // self.divide)

    def _block(self, block: int, size: int) -> list[int]:
        """Blocks that come one after another in a session are text that does, too."""
        session, number = divmod(block, SESSION_IDS)
        return self._piece(self._place(f"session {session}") + number * size, size)

    def _place(self, name: str) -> int:
        return random.Random(f"{self.seed} {name}").randrange(len(self.text))

    def _piece(self, at: int, count: int) -> list[int]:
        return [self.text[(at + i) % len(self.text)] for i in range(count)]
