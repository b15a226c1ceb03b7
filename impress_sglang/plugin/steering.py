"""What an operator may order: `POST /impress/{warm,pin,unpin,purge,why}`.

SGLang's channel to the scheduler's process lets only numbers through, so an order travels as text
in the id of the message, and so does its answer. The HTTP process checks orders, and turns text
into tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import uuid
from array import array
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from fastapi import Body, Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.options import EXACTLY, OFF
from impress_sglang.plugin.keys import as_tokens, namespace_of
from impress_sglang.plugin.reports import REPORT_KEY
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.serving.custom_params import BITS_KEY, BLEND_KEY, RETENTION_KEY, STORE_KEY
from impress_sglang.serving.truncation import TRUNCATE_KEY
from impress_sglang.serving.why import Reason, Why
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.purging import Purge

logger = logging.getLogger(__name__)

STEER = {"impress_steer": 1}
"""`server_args` of a message whose `rid` is an order."""
_FIELDS = {"text", "input_ids", "extra_key", "cache_salt", "older_than", "all"}
# Seconds between two steps of an order.
PAUSE_S = 0.01
_purging = asyncio.Lock()
_STEPS_FIELDS = ("segments", "tokens", "bytes", "writes", "unpinned", "pool_tokens")


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """An order about a prefix, `input_ids` in a namespace; None: all of it, or `everything`.

    `name` distinguishes an order that is carried out in steps from another one that says the same.
    """

    verb: str
    input_ids: list[int] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    everything: bool = False
    older_than: float | None = None
    name: str = ""

    def to_json(self) -> str:
        """The order as text, as it travels to the scheduler's process."""
        return json.dumps(dataclasses.asdict(self))


class NotDone(Exception):
    """A right order was not carried out; says why in one sentence."""

    def __init__(self, sentence: str, status: int = HTTPStatus.BAD_REQUEST) -> None:
        """`status` is that of the answer."""
        super().__init__(sentence)
        self.status = status


def obey(cache: ServedCache, text: str | None) -> str:
    """Carry out an order on the scheduler's thread; returns the answer as JSON. Raises nothing."""
    try:
        answer = _obey(cache, Order(**json.loads(text or "")))
    except Exception:
        # Whatever the error is, requests are still served.
        logger.exception("an order could not be carried out")
        sentence = "the order could not be carried out; the server's log says why"
        answer = {"error": sentence, "status": HTTPStatus.INTERNAL_SERVER_ERROR}
    return json.dumps(answer)


def _obey(cache: ServedCache, order: Order) -> dict[str, Any]:
    store = cache.served.opened
    if store is None or not cache.served.in_use:
        return {"error": no_store(cache.served.suspended)}
    name = None if order.everything else store.namespace(namespace_of(order))
    tokens = None
    if order.verb in ("why", "warm"):
        tokens = as_tokens(order.input_ids or ())
        return cache.foretell(namespace_of(order), tokens, exactly=order.verb == "warm")
    if order.input_ids is not None:
        # What is stored of a prompt ends with a block, and with a page.
        whole_blocks = len(order.input_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        length = whole_blocks // cache.page_size * cache.page_size
        tokens = as_tokens(order.input_ids[:length])
        if not length:
            return {"error": f"a prefix has {BLOCK_TOKENS} tokens at least"}
    assert not order.everything or tokens is None
    if order.verb == "purge":
        return _purge(cache, order, name, tokens)
    assert name is not None and tokens is not None, "wrong orders are refused before"
    if order.verb == "pin":
        refusal = store.pins.pin(name, tokens)
        done: dict[str, Any] = {"tokens": len(tokens), "error": refusal}
    else:
        assert order.verb == "unpin"
        done = {"unpinned": store.pins.unpin(name, tokens)}
    return {key: value for key, value in done.items() if value is not None} | {
        "pins": store.pins.summary()
    }


def no_store(suspended: str | None) -> str:
    """Why an order about the store is refused while none is in use."""
    return f"no store is in use: {suspended or 'by policy'}"


def _purge(cache: ServedCache, order: Order, name: Any, tokens: Any) -> dict[str, Any]:
    served, text = cache.served, order.to_json()
    purge = served.purges.go_on(text, lambda: Purge(name, tokens, order.older_than))
    purged, pool, more = purge.step(served.store), 0, False
    if order.older_than is None:
        # The writes of what is purged have been given up, and lock nothing any more.
        space = None if order.everything else namespace_of(order)
        pool, more = cache.sweep(text, space, _key_of(order, tokens))
    left = purge.left or more
    if not left:
        served.purges.end(text)
    return {
        "segments": len(purged.segment_ids),
        "tokens": purged.tokens,
        "bytes": purged.bytes,
        "writes": purged.writes,
        "unpinned": purged.unpinned,
        "pool_tokens": pool,
        "left": left,
    }


def _key_of(order: Order, tokens: Any) -> RadixKey | None:
    """The prefix of an order as a key of SGLang's tree; None if it has no prefix."""
    if order.input_ids is None:
        return None
    ids = array("q", order.input_ids[: len(tokens)])
    return RadixKey(ids, order.extra_key, cache_salt=order.cache_salt)


def tokenizer_manager() -> Any:
    """SGLang's tokenizer manager, in the process of the HTTP server."""
    from sglang.srt.entrypoints import http_server

    return http_server.get_global_state().tokenizer_manager


async def give(order: Order) -> dict[str, Any]:
    """Give an order to the scheduler's process; returns its answer."""
    return await send(STEER, order.to_json())


async def send(kind: dict[str, int], text: str) -> dict[str, Any]:
    """Send the scheduler's process a text of some kind; returns its answer."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    manager = tokenizer_manager()
    manager.auto_create_handle_loop()
    message = SetInternalStateReq(server_args=kind, rid=text)
    (answer,) = await manager.set_internal_state_communicator(message)
    told: dict[str, Any] = json.loads(answer.rid)
    return told


async def carry_out(
    verb: str, body: object, request: Request | None = None
) -> dict[str, Any] | list[dict[str, Any]]:
    """Carry out the order in the body of a `request`; returns the answer of the route.

    Raises:
        ValueError: the order is wrong; says why in one sentence.
        NotDone: it cannot be carried out, or was not.
    """
    several = _several(body) if verb == "warm" else None
    orders = [_checked_order(verb, own) for own in ([body] if several is None else several)]
    if verb == "warm":
        answers = await _warm_all(orders, request)
        return answers[0] if several is None else answers
    if verb == "purge":
        # One at a time, so that each is completed however many are given.
        async with _purging:
            return await _carry_out(dataclasses.replace(orders[0], name=uuid.uuid4().hex))
    return await _carry_out(orders[0])


def _checked_order(verb: str, body: object) -> Order:
    """Parse the order in the body of a request, and refuse what cannot be a prompt."""
    manager = tokenizer_manager()
    vocab_size = manager.model_config.vocab_size
    order = order_of(verb, body, getattr(manager, "tokenizer", None), vocab_size)
    if order.input_ids is not None and len(order.input_ids) > manager.context_len:
        raise ValueError(f"a prompt has at most {manager.context_len:,} tokens here")
    return order


async def _carry_out(order: Order) -> dict[str, Any]:
    answer = await give(order)
    # A purge is carried out in steps, so that requests are served between them.
    total = {name: answer.get(name, 0) for name in _STEPS_FIELDS}
    while answer.get("left"):
        await asyncio.sleep(PAUSE_S)
        answer = await give(order)
        total = {name: total[name] + answer.get(name, 0) for name in _STEPS_FIELDS}
    if "error" in answer:
        raise NotDone(answer["error"], answer.get("status", HTTPStatus.BAD_REQUEST))
    return total if order.verb == "purge" else answer


async def _warm_all(orders: Sequence[Order], request: Request | None) -> list[dict[str, Any]]:
    """Warm one prefix after the other: a later one may begin like an earlier one."""
    answers = list[dict[str, Any]]()
    for order in orders:
        try:
            answers.append(await _warm(order, request))
        except (ValueError, NotDone) as error:
            if len(orders) == 1:
                raise
            status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
            done = f"{len(answers)} of {len(orders)} prefixes were warmed"
            raise NotDone(f"{done}, and then: {error}", status) from error
    return answers


async def _warm(order: Order, request: Request | None) -> dict[str, Any]:
    """Ask for a prefix like a request that wants to be stored at first sight.

    It is computed exactly, behind exact stored KVs: so every request may use what is then stored,
    and its text may be reused where it is not a prefix.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    custom = {STORE_KEY: True, TRUNCATE_KEY: OFF, BLEND_KEY: OFF}
    custom |= {BITS_KEY: EXACTLY, RETENTION_KEY: 1.0}
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": custom}
    asked = GenerateReqInput(
        input_ids=order.input_ids,
        sampling_params=sampling,
        extra_key=order.extra_key,
        cache_salt=order.cache_salt,
    )
    before = await _carry_out(order)
    try:
        # If the client goes away, SGLang aborts the request.
        (answer,) = [own async for own in tokenizer_manager().generate_request(asked, request)]
    except HTTPException as error:
        raise NotDone(str(error.detail), error.status_code) from error
    meta_info = answer["meta_info"]
    if (end := meta_info["finish_reason"])["type"] == "abort":
        sentence = f"the request that warms it was aborted ({end['message']}): order it again"
        raise NotDone(sentence, HTTPStatus.SERVICE_UNAVAILABLE)
    after = await _carry_out(order)
    path = meta_info[REPORT_KEY]["path"]
    return {**after, "path": path, "outcome": _outcome(before["why"], after["why"])}


def _outcome(before: Why, after: Why) -> str:
    """What became of a prefix that was warmed, by why no more of it is stored."""
    was, now = (why["rest"] or why["reason"] for why in (before, after))
    if now == Reason.STORED:
        return "stored_before" if was == now else "stored"
    return "being_written" if now == Reason.BEING_WRITTEN else "not_stored"


def order_of(verb: str, body: object, tokenizer: Any, vocab_size: int) -> Order:
    """Parse the order in the body of a request; token ids are below `vocab_size`.

    Raises:
        ValueError: the body is not an order.
    """
    if not isinstance(body, Mapping) or not body.keys() <= _FIELDS:
        raise ValueError(f"the body must be a JSON object of {', '.join(sorted(_FIELDS))}")
    names = {name: body.get(name) or None for name in ("extra_key", "cache_salt")}
    if not all(name is None or isinstance(name, str) for name in names.values()):
        raise ValueError("extra_key and cache_salt must be texts")
    everything: Any = body.get("all", False)
    age: Any = body.get("older_than")
    tokens = _tokens_of(body, tokenizer, vocab_size)
    if verb != "purge" and not {"all", "older_than"}.isdisjoint(body):
        raise ValueError('"all" and "older_than" are for purge')
    # type() and not isinstance(): True is an int to isinstance.
    if "older_than" in body and not (type(age) in (int, float) and 0 <= age < math.inf):
        raise ValueError('"older_than" must be a number of seconds')
    if everything is not False and (everything is not True or body.keys() - {"all", "older_than"}):
        raise ValueError('"all" must be true, and names all that there is')
    has_namespace = verb == "purge" and not names.keys().isdisjoint(body)
    if tokens is None and not everything and not has_namespace:
        raise ValueError('which prefix? give "text" or "input_ids"')
    return Order(verb, tokens, names["extra_key"], names["cache_salt"], everything, age)


def _several(body: object) -> Sequence[Mapping[str, Any]] | None:
    """Split a body that gives several prefixes, as for `/generate`; None if it gives one.

    Raises:
        ValueError: there is no prefix in it, or it is not clear which it gives.
    """
    if not isinstance(body, Mapping):
        return None
    names = ("texts", "text", "input_ids")
    given = {name: body[name] for name in names if body.get(name) is not None}
    lists = [name for name, own in given.items() if isinstance(own, list)]
    if lists == ["input_ids"] and not any(isinstance(own, list) for own in given["input_ids"]):
        return None
    if not lists and "texts" not in given:
        return None
    if len(given) > 1 or not lists or not given[lists[0]]:
        raise ValueError('several prefixes are a list of "texts", or of "input_ids"')
    (name,) = lists
    rest = {key: own for key, own in body.items() if key not in names}
    one = "text" if name == "texts" else name
    return [{**rest, one: own} for own in given[name]]


def _tokens_of(body: Mapping[str, Any], tokenizer: Any, vocab_size: int) -> list[int] | None:
    text, tokens = body.get("text"), body.get("input_ids")
    if text is not None and tokens is not None:
        raise ValueError('give "text" or "input_ids", not both')
    if text is not None:
        if not isinstance(text, str) or tokenizer is None:
            raise ValueError('"text" must be a text, and needs a server with a tokenizer')
        tokens = tokenizer.encode(text)
    if tokens is None:
        return None
    # type() and not isinstance(): True is an int to isinstance.
    if not isinstance(tokens, list) or not all(type(own) is int for own in tokens):
        raise ValueError('"input_ids" must be a list of token ids')
    if not all(0 <= own < vocab_size for own in tokens):
        raise ValueError(f"token ids of this model are from 0 to {vocab_size - 1:,}")
    if not tokens:
        raise ValueError("an empty prefix is all of a namespace: leave it out")
    return tokens


def is_foreign(origin: str | None, host: str | None, *, has_key: bool) -> bool:
    """Whether a page of another site asks, in the browser of somebody who can reach the server.

    SGLang lets pages of every site ask and read answers. If there is a key, they do not have it.
    """
    return not has_key and origin is not None and urlsplit(origin).netloc != host


def refuse_foreign(request: Request) -> None:
    """Guard each of our routes that reveals prompts or takes orders.

    Raises:
        HTTPException: a page of another site asks.
    """
    arguments, told = tokenizer_manager().server_args, request.headers
    has_key = bool(arguments.api_key or arguments.admin_api_key)
    if is_foreign(told.get("origin"), told.get("host"), has_key=has_key):
        raise HTTPException(403, "not for pages of other sites")


def add_steering(app: Any) -> None:
    """Add the routes, each of which needs the key of `/flush_cache`."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    def add(verb: str) -> None:
        @app.post(f"/impress/{verb}", dependencies=[Depends(refuse_foreign)])
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def steer(request: Request, body: Any = Body(None)) -> Any:  # noqa: B008
            try:
                return await carry_out(verb, body, request)
            except (ValueError, NotDone) as error:
                status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
                return JSONResponse({"error": str(error)}, status_code=status)

    for verb in ("warm", "pin", "unpin", "purge", "why"):
        add(verb)
