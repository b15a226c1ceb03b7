"""The command line `impress`: exit statuses and errors of its commands."""

from __future__ import annotations

DONE, DAMAGED, REFUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_STATUS = {
    DONE: "done",
    DAMAGED: "`verify` has found damage",
    REFUSED: "the command is wrong, or was refused; nothing was changed",
    UNREACHABLE: "there is no server, or no store, or it is in use",
    INTERRUPTED: "it was interrupted",
}


class CommandError(Exception):
    """A command cannot be carried out as given; the message says why."""

    status = REFUSED


class Unreachable(Exception):
    """No server or store can carry out the command."""

    status = UNREACHABLE
