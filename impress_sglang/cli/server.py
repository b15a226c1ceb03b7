"""A running server, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from impress_sglang.cli.outcome import Refused, Unreachable

TIMEOUT_S = 600.0


class Server:
    """The routes under `/impress` of a server, with its key if it has one."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._key = key

    def stats(self) -> dict[str, Any]:
        """See `GET /impress/stats`."""
        return self._ask("GET", "stats")

    def overview(self) -> dict[str, Any]:
        """See `GET /impress/overview`."""
        return self._ask("GET", "overview")

    def order(self, verb: str, prefix: dict[str, Any]) -> dict[str, Any]:
        """See `POST /impress/{warm,pin,unpin,purge}`."""
        return self._ask("POST", verb, prefix)

    def _ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(
                f"{self._url}/impress/{route}",
                None if body is None else json.dumps(body).encode(),
                headers,
                method=method,
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise _meaning(error) from error
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self._url} does not answer as expected: {error}") from error


def _meaning(error: urllib.error.HTTPError) -> Exception:
    """What a status says."""
    if error.code in (401, 403):
        return Refused("the server wants a key: give --key, or set IMPRESS_KEY")
    if error.code == 404:
        return Unreachable("there is no IMPRESS there: was the server started with it?")
    try:
        return Refused(str(json.load(error)["error"]))
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"the server answers with status {error.code}")
