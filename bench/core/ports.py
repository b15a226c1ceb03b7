"""Ports for servers on this machine."""

from __future__ import annotations

import socket


class ReservedPort:
    """A free port of 127.0.0.1 that nobody else is given until it is closed.

    A port that was only looked up can be gone when a server has imported enough to listen: to
    another server, or to the near end of any connection. This one is bound all the while. It never
    listens, and so a server that sets SO_REUSEADDR, as servers do, still gets it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let others have it."""
        self._socket.close()
