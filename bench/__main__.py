"""`python -m bench NAME`."""

import runpy
import sys

ROOMS = {
    "policies": ("serving", "replay"),
    "quality": ("accuracy", "precision", "drift", "decode"),
    "micro": ("pipeline", "kernels", "disk", "planning", "memory", "overhead"),
}
MODULES = {name: f"bench.{room}.{name}" for room, names in ROOMS.items() for name in names}
MODULES["engine"] = "bench.engine.run"

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in MODULES:
        runpy.run_module(MODULES[sys.argv.pop(1)], run_name="__main__", alter_sys=True)
    else:
        sys.exit(f"python -m bench NAME, which is one of {', '.join(MODULES)}")
