"""What the randomised run asks, and what stock SGLang answers to it.

A finite catalogue, so that stock can answer all of it beforehand, with each weights. Prompts are
conversations: few system prompts, branches of them, turns that go on from the answers, so that
stored prefixes are found, split and grown.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.core.servers import body_of
from tests.serving.harness import Server
from tests.serving.tiny_models import VOCAB, random_tokens

Tokens = list[int]

HIDDEN = 128
NEW_TOKENS = 12
# Scores and log-probabilities of two computations of the same differ by less.
TOLERANCE = 2e-3
# Choices that are closer than this are no test of anything: another order of sums decides them.
LEAST_MARGIN = 5e-3
PLACEHOLDER = 7
# Names of prompts that can be blended begin so.
MIXED = "mixed"
LABELS = [11, 12, 13, 500]

_SCHEMAS = (
    '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99999},'
    ' "ok": {"type": "boolean"}}, "required": ["n", "ok"], "additionalProperties": false}',
    '{"enum": ["red", "green", "blue", "a colour that has no name"]}',
)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request of the catalogue: where it goes, and its body without what a client adds."""

    name: str
    kind: str
    route: str
    body: dict[str, Any]

    @property
    def may_be_partial(self) -> bool:
        """Whether a request can say how much of its prefix is to be loaded."""
        return self.route == "/generate"

    def with_fields(self, wanted: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """The body as it is sent, with custom parameters where it can have them."""
        body = {**self.body, **fields}
        if wanted is not None and self.may_be_partial:
            custom = {"custom_params": wanted}
            body["sampling_params"] = {**body["sampling_params"], **custom}
        return body


@dataclasses.dataclass(frozen=True)
class Talk:
    """A session: the tokens that each turn adds."""

    name: str
    turns: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is compared: tokens of each sequence, and numbers that may differ a little."""

    tokens: tuple[tuple[int, ...], ...] = ()
    numbers: tuple[float, ...] = ()
    # Beams: scores that decide between sequences.
    scores: tuple[float, ...] = ()

    def since(self, first: int) -> Answer:
        """With the numbers from there on only."""
        return dataclasses.replace(self, numbers=self.numbers[first:])

    def difference(self, other: Answer) -> str:
        """How another answer to the same differs; empty if it does not."""
        for mine, its in ((self.numbers, other.numbers), (self.scores, other.scores)):
            if len(mine) != len(its):
                return f"{len(its)} numbers instead of {len(mine)}"
            far = max((abs(a - b) for a, b in zip(mine, its, strict=True)), default=0.0)
            # Also when it is not a number.
            if not far <= TOLERANCE:
                return f"numbers differ by {far}"
        # Beams of equal scores may be told in any order, and each of two be left out.
        if not self.scores and self.tokens != other.tokens:
            return f"tokens {other.tokens} instead of {self.tokens}"
        return ""


def read_answer(ask: Ask, told: Any) -> Answer:
    """The comparable part of a server's answer."""
    if ask.route == "/v1/score":
        return Answer(numbers=tuple(x for row in told["scores"] for x in row))
    sequences = told if isinstance(told, list) else [told]
    if ask.kind == "beam":
        beams = sequences[0]["meta_info"]["beam_results"]
        return Answer(
            tokens=tuple(tuple(beam["output_ids"]) for beam in beams),
            scores=tuple(beam["meta_info"]["sequence_score"] for beam in beams),
        )
    numbers: list[float] = []
    for sequence in sequences if ask.body.get("return_logprob") else ():
        for part in ("input_token_logprobs", "output_token_logprobs"):
            found = [entry[0] for entry in sequence["meta_info"].get(part) or ()]
            # Of the first token of a prompt there is none.
            numbers += [number for number in found if number is not None]
    return Answer(tuple(tuple(s["output_ids"]) for s in sequences), tuple(numbers))


@dataclasses.dataclass
class Catalogue:
    """All that may be asked, and stock's answers by (name, weights)."""

    asks: list[Ask]
    talks: list[Talk]
    answers: dict[tuple[str, str], Answer] = dataclasses.field(default_factory=dict)
    talked: dict[tuple[str, str], list[Answer]] = dataclasses.field(default_factory=dict)

    def kinds(self) -> set[str]:
        return {ask.kind for ask in self.asks}

    def of_kind(self, kind: str) -> list[Ask]:
        return [ask for ask in self.asks if ask.kind == kind]


def make_catalogue(seed: int) -> Catalogue:
    """Prompts that grow from few beginnings, asked in all ways."""
    chance = random.Random(seed)

    def fresh(min_length: int, max_length: int) -> Tokens:
        return random_tokens(chance.randint(min_length, max_length), seed=chance.randrange(1 << 30))

    systems = [fresh(250, 700) for _ in range(4)]
    branches = [[*system, *fresh(60, 260)] for system in systems for _ in range(3)]
    # Some leave a system prompt in its middle.
    branches += [[*system[: len(system) * 2 // 3], *fresh(40, 200)] for system in systems]
    turns = [[*branch, *fresh(20, 120)] for branch in branches for _ in range(2)]
    later = [[*turn, *fresh(80, 200)] for turn in chance.sample(turns, 8)]
    # In a segment of the last ones mapping lists take a block of their own.
    alone = [fresh(300, 900) for _ in range(3)] + [fresh(1200, 1500) for _ in range(2)]
    short = [fresh(5, 60) for _ in range(8)]
    mixed = [_mixed(chance, [*systems, *alone], fresh(10, 60)) for _ in range(8)]
    prompts = [*systems, *branches, *turns, *later, *alone, *short]
    asks = [_generate(f"plain-{i}", "plain", prompt) for i, prompt in enumerate(prompts)]
    asks += [_generate(f"{MIXED}-{i}", "plain", prompt) for i, prompt in enumerate(mixed)]
    asks += _variants(chance, [*branches, *turns, *later])
    asks += _scores(chance, systems)
    talks = [
        Talk(f"talk-{i}", (tuple(chance.choice(branches)), *(tuple(fresh(20, 90)) for _ in "ab")))
        for i in range(4)
    ]
    return Catalogue(asks, talks)


def _mixed(chance: random.Random, texts: list[Tokens], question: Tokens) -> Tokens:
    """What other prompts have, too, but not at their beginning, and a question."""
    parts = [text[chance.randrange(60) :][: chance.randint(150, 350)] for text in texts]
    return [*question[:5], *itertools.chain(*chance.sample(parts, 3)), *question[5:]]


def _variants(chance: random.Random, prompts: list[Tokens]) -> Iterator[Ask]:
    """The same prompts with log-probabilities, several answers, grammars and beams."""
    for i, prompt in enumerate(chance.sample(prompts, 8)):
        start = chance.choice((0, len(prompt) // 2, len(prompt) - 5))
        fields = {"return_logprob": True, "logprob_start_len": start}
        yield _generate(f"logprob-{i}", "logprob", prompt, **fields)
    for i, prompt in enumerate(chance.sample(prompts, 5)):
        yield _generate(f"many-{i}", "many", prompt, {"n": chance.choice((2, 3))})
    for i, prompt in enumerate(chance.sample(prompts, 5)):
        schema = {"json_schema": chance.choice(_SCHEMAS), "ignore_eos": False}
        yield _generate(f"json-{i}", "json", prompt, {**schema, "max_new_tokens": 30})
    for i, prompt in enumerate(chance.sample(prompts, 8)):
        width = chance.randint(2, 4)
        beams = {"beam_width": width, "n": chance.randint(1, width)}
        yield _generate(f"beam-{i}", "beam", prompt, beams)


def _scores(chance: random.Random, systems: list[Tokens]) -> Iterator[Ask]:
    """Scores after a system prompt, some with other embeddings, and the same ids in the clear."""
    for i, system in enumerate(systems):
        query = [*system, PLACEHOLDER, *random_tokens(60, seed=1000 + i), PLACEHOLDER]
        items = [[*random_tokens(20, seed=2000 + 10 * i + j), PLACEHOLDER] for j in range(3)]
        body = {"query": query, "items": items, "label_token_ids": LABELS, "model": "default"}
        body["apply_softmax"] = bool(i % 2)
        yield Ask(f"score-{i}", "score", "/v1/score", body)
        vectors = [[chance.gauss(0, 0.3) for _ in range(HIDDEN)] for _ in range(len(items) + 2)]
        count = query.count(PLACEHOLDER)
        overrides = {
            "embed_override_token_id": PLACEHOLDER,
            "query_embed_overrides": [vectors[j % 2] for j in range(count)],
            "item_embed_overrides": [
                [vectors[2 + j]] * item.count(PLACEHOLDER) for j, item in enumerate(items)
            ],
        }
        yield Ask(f"override-{i}", "override", "/v1/score", {**body, **overrides})
        # What an override left in the store would be found by these.
        for j, item in enumerate(items):
            prompt = [*query, *item, *random_tokens(10, seed=3000 + i)]
            yield _generate(f"plain-scored-{i}-{j}", "plain", prompt)


def _generate(
    name: str, kind: str, prompt: Tokens, sampling: dict[str, Any] | None = None, **fields: Any
) -> Ask:
    body = body_of(prompt, NEW_TOKENS, None)
    body["sampling_params"] |= sampling or {}
    # Only some servers heed priorities.
    return Ask(name, kind, "/generate", body | {"priority": len(prompt) % 8} | fields)


def answer_by_stock(catalogue: Catalogue, stock: Server, weights: str) -> int:
    """Let stock SGLang answer everything with the weights that it has.

    Leaves requests out whose greedy choices are nearly ties; returns how many went.
    """

    def answer(ask: Ask) -> Any:
        greedy = ask.kind in ("plain", "many", "logprob")
        tops = {"return_logprob": True, "top_logprobs_num": 2} if greedy else {}
        response = stock.post(ask.route, **ask.with_fields(**tops))
        assert response.ok, f"stock refuses {ask.name}: {response.text}"
        return response.json()

    unclear = set()
    # With nothing resident from what was asked in another way, and no others beside it.
    for kind in sorted(catalogue.kinds()):
        stock.flush()
        asks = catalogue.of_kind(kind)
        with ThreadPoolExecutor(4) as pool:
            for ask, told in zip(asks, pool.map(answer, asks), strict=True):
                catalogue.answers[ask.name, weights] = read_answer(ask, told)
                if not _is_clear(told):
                    unclear.add(ask.name)
    catalogue.asks = [ask for ask in catalogue.asks if ask.name not in unclear]
    for talk in catalogue.talks:
        told = have_talk(stock.post, talk, talk.name)
        catalogue.talked[talk.name, weights] = told
    return len(unclear)


def _is_clear(told: Any) -> bool:
    """Whether no choice of an answer that says the two best of each is nearly a tie."""
    sequences = told if isinstance(told, list) else [told]
    tops = [one.get("meta_info", {}).get("output_top_logprobs") or () for one in sequences]
    return all(first[0] - second[0] >= LEAST_MARGIN for top in tops for first, second in top)


def have_talk(
    post: Callable[..., Any], talk: Talk, session: str, wanted: dict[str, Any] | None = None
) -> list[Answer]:
    """A session from its opening to its closing; the answer of each turn.

    Raises:
        TalkFailed: the server refused something.
    """
    opened = post("/open_session", capacity_of_str_len=1 << 20, session_id=session)
    _require_ok(opened, "open_session")
    answers, last = [], None
    for turn, tokens in enumerate(talk.turns):
        ask = _generate(f"{talk.name}-{turn}", "plain", list(tokens))
        params = {"id": session, "rid": last}
        # A session goes on where it began.
        fields = {"session_params": params, "routed_dp_rank": 0}
        response = post(ask.route, **ask.with_fields(wanted, **fields))
        _require_ok(response, f"turn {turn}")
        told = response.json()
        if told["meta_info"]["finish_reason"]["type"] == "abort":
            raise TalkFailed(str(told["meta_info"]["finish_reason"]))
        last = told["meta_info"]["id"]
        answers.append(read_answer(ask, told))
    _require_ok(post("/close_session", session_id=session), "close_session")
    return answers


class TalkFailed(Exception):
    """A server refused a step of a session."""


def _require_ok(response: Any, step: str) -> None:
    if not response.ok:
        raise TalkFailed(f"{step}: {response.status_code} {response.text[:300]}")


assert max(LABELS) < VOCAB
