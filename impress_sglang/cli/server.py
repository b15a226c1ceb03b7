"""Client of a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from impress_sglang.cli import CommandError, Unreachable

TIMEOUT_S = 600.0
FLUSH_TIMEOUT_S = 60.0


class Server:
    """Calls the routes of a server, with its key if it has one."""

    def __init__(self, url: str, key: str | None = None, api_key: str | None = None) -> None:
        """`key`: for admin requests; `api_key`: for other requests, if it differs."""
        self._url = url.rstrip("/")
        self._key = key
        self._api_key = api_key or key

    def stats(self) -> dict[str, Any]:
        return self._ask("GET", "/impress/stats", self._api_key, field="store")

    def overview(self) -> dict[str, Any]:
        return self._ask("GET", "/impress/overview", self._key, field="stats")

    def order(self, verb: str, prefix: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", f"/impress/{verb}", self._key, prefix)

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to SGLang's `/generate`; return its `meta_info["impress"]`."""
        answer = self._ask("POST", "/generate", self._api_key, body)
        try:
            report: dict[str, Any] = answer["meta_info"]["impress"]
        except (KeyError, TypeError) as error:
            raise Unreachable(f"{self._url} does not report as expected: {error!r}") from error
        return report

    def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return self._ask("POST", "/tokenize", self._api_key, body)["tokens"]

    def flush(self) -> None:
        """Empty SGLang's pool as soon as no request is running."""
        self._send("POST", f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}", self._key)

    def _ask(
        self,
        method: str,
        path: str,
        key: str | None,
        body: dict[str, Any] | None = None,
        field: str | None = None,
    ) -> dict[str, Any]:
        """Send a request; return its answer, which must have `field`."""
        try:
            answer: Any = json.loads(self._send(method, path, key, body))
            is_ours = isinstance(answer, dict | list) and (field is None or field in answer)
            if not is_ours:
                raise ValueError(f"{answer!r:.100}")
            return answer
        except ValueError as error:
            raise Unreachable(f"{self._url} does not answer as expected: {error}") from error

    def _send(
        self, method: str, path: str, key: str | None, body: dict[str, Any] | None = None
    ) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            request = urllib.request.Request(
                f"{self._url}{path}",
                None if body is None else json.dumps(body).encode(),
                headers,
                method=method,
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                raise _meaning(error) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._url} does not answer as expected: {error}") from error


def _meaning(error: urllib.error.HTTPError) -> Exception:
    if error.code in (401, 403):
        return CommandError("the server wants another key: give --key, or set IMPRESS_KEY")
    if error.code == 404:
        return Unreachable("there is no IMPRESS there: was the server started with it?")
    text = error.read()
    try:
        content = json.loads(text)["error"]
        # SGLang's own errors are objects with a message.
        return CommandError(str(content["message"] if isinstance(content, dict) else content))
    except (ValueError, KeyError, TypeError):
        refusal = text.decode(errors="replace").strip().split("\n")[0]
        if error.code == 400 and refusal:
            return CommandError(refusal)
        return Unreachable(f"the server answers with status {error.code}")
