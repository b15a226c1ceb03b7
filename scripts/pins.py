"""Prints a short digest of the project's dependencies, to name an environment that fits them."""

import hashlib
import json
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
pins = [project["dependencies"], project["optional-dependencies"], project["requires-python"]]
print(hashlib.sha256(json.dumps(pins, sort_keys=True).encode()).hexdigest()[:12])
