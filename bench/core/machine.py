"""What a result was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory and versions, for the record beside every figure."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "sglang", "impress-sglang")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
