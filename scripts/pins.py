"""Prints a short digest of the project's dependencies, to name an environment that fits them.

`python scripts/pins.py docs` prints what the extra `docs` needs instead.
"""

import hashlib
import json
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
# The site's tools have an environment of their own.
docs = extras.pop("docs")
if sys.argv[1:] == ["docs"]:
    print(*docs, sep="\n")
else:
    # The environment has the one release of SGLang that the extra `dev` names.
    (release,) = (line for line in extras["dev"] if line.startswith("sglang=="))
    extras["dev"].remove(release)
    dependencies = [
        release if line.startswith("sglang") else line for line in project["dependencies"]
    ]
    pins = [dependencies, extras, project["requires-python"]]
    print(hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()[:12])
