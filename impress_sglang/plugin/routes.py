"""Our routes under `/impress`, in the process of the HTTP server.

Admin requests are checked here, text becomes tokens, and `admin.py` carries them out in the
scheduler's process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Body, Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse

from impress_sglang.config import EXACTLY, OFF
from impress_sglang.plugin.admin import MESSAGE
from impress_sglang.plugin.compat import config_of
from impress_sglang.plugin.report_transport import REPORT_KEY
from impress_sglang.plugin.tree_cache import OK, RUNNING
from impress_sglang.serving.custom_params import (
    BITS_KEY,
    BLEND_KEY,
    RETENTION_KEY,
    STORE_KEY,
    TRUNCATE_KEY,
)
from impress_sglang.serving.why import Reason

# Seconds between two steps of a multi-step request.
PAUSE_S = 0.01
_BODY = {"text", "input_ids", "extra_key", "cache_salt", "older_than", "all"}
_purging = asyncio.Lock()
_MAX_CHARS = 120
# The page is three files, served as one self-contained document.
_PAGE = Path(__file__).parents[1] / "page"
# Requests that only administrators may send, each a POST route.
VERBS = ("warm", "pin", "unpin", "purge", "why", "check", "reorder")


class AdminHTTPError(ValueError):
    """A request was not carried out; the message says why in one sentence."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


def tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server.get_global_state().tokenizer_manager


async def send(verb: str, **fields: Any) -> Any:
    """Send a request to the scheduler's process, of all replicas if several; returns the answer.

    Raises `AdminHTTPError` if it was not carried out.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReq

    manager = tokenizer_manager()
    manager.auto_create_handle_loop()
    message = SetInternalStateReq(server_args=MESSAGE, rid=json.dumps({"verb": verb} | fields))
    replies = await manager.set_internal_state_communicator(message)
    answers = [json.loads(reply.rid) for reply in replies]
    for answer in answers:
        if isinstance(answer, dict) and "error" in answer:
            raise AdminHTTPError(answer["error"], answer.get("status", 400))
    return answers[0] if len(answers) == 1 else merged(verb, answers)


def merged(verb: str, answers: Sequence[Any]) -> Any:
    """Merge the answers of several replicas (`--dp-size`), whose stores have the same prefixes."""
    if verb == "stats":
        answers = sorted(answers, key=_directory_in)
        return {**answers[0], "replicas": answers}
    if verb == "overview":
        return min(answers, key=lambda answer: _directory_in(answer["stats"]))
    if verb == "check":
        states = [answer["integrity"] for answer in answers]
        worst = max(states, key=lambda state: state != OK)
        return {"integrity": RUNNING if RUNNING in states else worst}
    if verb == "purge":
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}
    if verb in ("why", "warm"):
        return max(answers, key=lambda answer: int(answer["stored_tokens"]))
    if verb in ("pin", "unpin"):
        pins = [answer["pins"] for answer in answers]
        merged_pins = {name: max(pin[name] for pin in pins) for name in pins[0]}
        merged_pins["bytes"] = sum(pin["bytes"] for pin in pins)
        unpinned = [answer["unpinned"] for answer in answers] if verb == "unpin" else []
        counts = {"unpinned": max(unpinned)} if unpinned else {}
        return {**answers[0], **counts, "pins": merged_pins}
    return answers


def _directory_in(stats: Mapping[str, Any]) -> str:
    return str((stats["store"] or {}).get("directory", ""))


async def carry_out(verb: str, body: object, request: Request | None = None) -> Any:
    """Carry out the body of a `request`; returns the answer of the route.

    Raises `ValueError` if the body is wrong, and `AdminHTTPError`.
    """
    if verb == "reorder":
        return await send(verb)
    if verb == "check":
        answer = await send(verb, begin=True)
        while answer["integrity"] == RUNNING:
            await asyncio.sleep(PAUSE_S)
            answer = await send(verb)
        return answer
    several, manager = _several(body) if verb == "warm" else None, tokenizer_manager()
    bodies = [body] if several is None else several
    first, *others = (fields_of(verb, prefix_body, manager) for prefix_body in bodies)
    if verb == "purge":
        return await _purge(first)
    if verb != "warm":
        return await send(verb, **first)
    answers = list[dict[str, Any]]()
    # Sequentially: a later one may begin like an earlier one.
    for fields in (first, *others):
        try:
            answers.append(await _warm(fields, request))
        except ValueError as error:
            if not others:
                raise
            done = f"{len(answers)} of {len(bodies)} prefixes were warmed"
            status = getattr(error, "status", 400)
            raise AdminHTTPError(f"{done}, and then: {error}", status) from error
    return answers[0] if several is None else answers


async def _purge(asked: dict[str, Any]) -> dict[str, Any]:
    # One at a time, so that each completes however many come. In steps, so that client requests
    # are served between them.
    async with _purging:
        step, total, unfinished = asked | {"name": uuid.uuid4().hex}, Counter[str](), True
        while unfinished:
            answer = await send("purge", **step)
            unfinished = answer.pop("left")
            total.update(answer)
            await asyncio.sleep(PAUSE_S if unfinished else 0)
        return dict(total)


async def _warm(asked: dict[str, Any], request: Request | None) -> dict[str, Any]:
    """Request a prefix such that it is stored at its first request.

    It is computed exactly, after exact stored KVs. So every request may use it, and its text may be
    reused where it is not a prefix.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    custom = {STORE_KEY: True, TRUNCATE_KEY: OFF, BLEND_KEY: OFF}
    custom |= {BITS_KEY: EXACTLY, RETENTION_KEY: 1.0}
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": custom}
    before = await send("warm", **asked)
    try:
        # If the client disconnects, SGLang aborts the request.
        made = tokenizer_manager().generate_request(
            GenerateReqInput(sampling_params=sampling, **asked), request
        )
        (answer,) = [output async for output in made]
    except HTTPException as error:
        raise AdminHTTPError(str(error.detail), error.status_code) from error
    meta_info = answer["meta_info"]
    if (end := meta_info["finish_reason"])["type"] == "abort":
        sentence = f"the request that warms it was aborted ({end['message']}): send it again"
        raise AdminHTTPError(sentence, 503)
    after = await send("warm", **asked)
    # Derive the outcome from the reasons why no more of it is stored.
    was, now = (answer["why"]["rest"] or answer["why"]["reason"] for answer in (before, after))
    outcome = now if now in (Reason.BEING_WRITTEN, Reason.STORED) else "not_stored"
    outcome = "stored_before" if was == now == Reason.STORED else outcome
    return {**after, "path": meta_info[REPORT_KEY]["path"], "outcome": outcome}


def fields_of(verb: str, body: object, manager: Any) -> dict[str, Any]:
    """Return the fields of a request from its body, for SGLang's tokenizer manager.

    Raises `ValueError` if the body is wrong.
    """
    vocab_size = manager.model_config.vocab_size
    if not isinstance(body, Mapping) or not body.keys() <= _BODY:
        raise ValueError(f"the body must be a JSON object of {', '.join(sorted(_BODY))}")
    fields = {name: body[name] for name in ("extra_key", "cache_salt") if body.get(name)}
    if not all(isinstance(name, str) for name in fields.values()):
        raise ValueError("extra_key and cache_salt must be texts")
    everything: Any = body.get("all", False)
    age: Any = body.get("older_than")
    text, tokens = body.get("text"), body.get("input_ids")
    if text is not None and tokens is not None:
        raise ValueError('give "text" or "input_ids", not both')
    if text is not None:
        tokenizer = getattr(manager, "tokenizer", None)
        if not isinstance(text, str) or tokenizer is None:
            raise ValueError('"text" must be a text, and needs a server with a tokenizer')
        tokens = tokenizer.encode(text)
    if tokens is not None:
        # type() and not isinstance(): True is an int to isinstance.
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError('"input_ids" must be a list of token ids')
        if not all(0 <= token < vocab_size for token in tokens):
            raise ValueError(f"token ids of this model are from 0 to {vocab_size - 1:,}")
        if not tokens:
            raise ValueError("an empty prefix is all of a namespace: leave it out")
        if len(tokens) > manager.context_len:
            raise ValueError(f"a prompt has at most {manager.context_len:,} tokens here")
    if verb != "purge" and not {"all", "older_than"}.isdisjoint(body):
        raise ValueError('"all" and "older_than" are for purge')
    if "older_than" in body and not (type(age) in (int, float) and 0 <= age < math.inf):
        raise ValueError('"older_than" must be a number of seconds')
    if everything is not False and (everything is not True or body.keys() - {"all", "older_than"}):
        raise ValueError('"all" must be true, and names all that there is')
    has_namespace = verb == "purge" and not {"extra_key", "cache_salt"}.isdisjoint(body)
    if tokens is None and not everything and not has_namespace:
        raise ValueError('which prefix? give "text" or "input_ids"')
    more = {"input_ids": tokens, "everything": everything or None, "older_than": age}
    return fields | {name: value for name, value in more.items() if value is not None}


def _several(body: object) -> Sequence[Mapping[str, Any]] | None:
    """Split a body with several prefixes, as for `/generate`; None if it has one."""
    if not isinstance(body, Mapping):
        return None
    names = ("texts", "text", "input_ids")
    given = {name: body[name] for name in names if body.get(name) is not None}
    lists = [name for name, value in given.items() if isinstance(value, list)]
    if lists == ["input_ids"] and not any(isinstance(item, list) for item in given["input_ids"]):
        return None
    if not lists and "texts" not in given:
        return None
    if len(given) > 1 or not lists or not given[lists[0]]:
        raise ValueError('several prefixes are a list of "texts", or of "input_ids"')
    (name,) = lists
    common = {key: value for key, value in body.items() if key not in names}
    return [{**common, "text" if name == "texts" else name: prefix} for prefix in given[name]]


def refuse_foreign(request: Request) -> None:
    """Guard our routes that reveal prompts or change anything.

    SGLang lets pages of any site send requests and read answers, in the browser of a user who can
    reach the server: they get status 403. If there is a key, they do not have it.
    """
    arguments, headers = tokenizer_manager().server_args, request.headers
    origin = None if arguments.api_key or arguments.admin_api_key else headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise HTTPException(403, "not for pages of other sites")


def with_text(overview: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Replace tokens by text, or by None if they are hidden or not text, or without a tokenizer."""
    for row in (*overview.get("requests", ()), *overview.get("segments", ())):
        tokens, row["text"] = row.pop("words"), None
        if tokens is not None and tokenizer is not None:
            # Of ids that it lacks, such as that of media, each tokenizer raises something else.
            with contextlib.suppress(Exception):
                row["text"] = tokenizer.decode(tokens)[:_MAX_CHARS]
    return overview


def document() -> tuple[str, str]:
    """Return the page, and a content security policy that allows only its own content."""
    html, style, script = (
        (_PAGE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    digests = (hashlib.sha256(text.encode()).digest() for text in (style, script))
    of_style, of_script = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; style-src {of_style}; script-src {of_script}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.replace("/* page.css */", style).replace("/* page.js */", script), policy


def before_http_server(server_args: Any, *_: Any, **__: Any) -> None:
    """Before the HTTP server starts: add our routes, if IMPRESS is on."""
    if config_of(server_args) is not None:
        add_routes()


def add_routes() -> None:
    """Add our routes to SGLang's application.

    Not in a router: SGLang does not find the `auth_level` of a route in an included router, and
    would accept admin requests with any key, or none.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    html, policy = document()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    @app.get("/impress/stats")
    async def impress_stats() -> dict[str, Any]:
        return await send("stats")

    @app.get("/impress")
    async def impress_page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    @app.get("/impress/overview", dependencies=[Depends(refuse_foreign)])
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_overview(after: int = 0, below: str | None = None) -> JSONResponse:
        try:
            overview, status = await send("overview", after=after, below=below), 200
        except AdminHTTPError as error:
            overview, status = {"error": str(error)}, error.status
        overview = with_text(overview, getattr(tokenizer_manager(), "tokenizer", None))
        return JSONResponse(overview, status, headers={"Cache-Control": "no-store"})

    def add(verb: str) -> None:
        @app.post(f"/impress/{verb}", dependencies=[Depends(refuse_foreign)])
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def admin(request: Request, body: Any = Body(None)) -> Any:  # noqa: B008
            try:
                return await carry_out(verb, body, request)
            except ValueError as error:
                status = getattr(error, "status", 400)
                return JSONResponse({"error": str(error)}, status)

    for verb in VERBS:
        add(verb)
