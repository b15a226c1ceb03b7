"""`impress`, the command line: how commands end, exit statuses and errors."""

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
    """A command, any function of it, cannot be carried out as it was given; says why."""

    status = REFUSED


class Unreachable(Exception):
    """There is no server or store that can carry the command out."""

    status = UNREACHABLE
