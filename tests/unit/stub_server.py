"""A server that records what it is asked and answers what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class StubServer(ThreadingHTTPServer):
    """Gives one answer to everything, unless `reply` is overridden."""

    status, answer = 200, b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, Any, str | None]] = []
        """Method, path, body and authorization of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, path: str, body: Any) -> tuple[int, bytes]:
        return self.status, self.answer

    @contextmanager
    def serving(self) -> Iterator[Self]:
        with self:
            thread = threading.Thread(target=self.serve_forever, args=(0.02,))
            thread.start()
            yield self
            self.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        stub = self.server
        assert isinstance(stub, StubServer)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else None
        stub.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        status, answer = stub.reply(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...
