"""A Python file in a fork of the process that has imported SGLang: it runs in place of a server.

Its last line says with which status it ended.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from tests.serving.harness import ARGUMENTS_VARIABLE, ENDED, SCRIPT_VARIABLE

script = Path(os.environ[SCRIPT_VARIABLE])
sys.argv = [str(script), *json.loads(os.environ[ARGUMENTS_VARIABLE])]
sys.path.insert(0, str(script.parent))
status: object = 0
try:
    runpy.run_path(str(script), run_name="__main__")
except SystemExit as ended:
    status = ended.code or 0
print(f"{ENDED}{status}", flush=True)
sys.exit(0)
