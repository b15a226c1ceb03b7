"""SGLang whose store is on a file system that fails; see `tests.fault_control`.

The module level code runs in the main process and again in each spawned child, before plugins are
loaded there; forked children have what it did.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from impress_sglang.storage.files import install
from impress_sglang.store import health
from tests.fault_control import CONTROL_VARIABLE, ControlledFaults
from tests.faults import FaultyFileSystem


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# One fault follows the other here, which looks like a disk that never gets well.
health.LONGEST_PAUSE_S = 0.5
install(FaultyFileSystem(ControlledFaults(Path(os.environ[CONTROL_VARIABLE])), kill=_kill))
