"""IMPRESS for SGLang: serve long shared prefixes by loading only the KVs that matter."""

from __future__ import annotations

from impress_sglang.config import ImpressConfig, enable_for_engine
from impress_sglang.errors import ConfigError, ImpressError, StoreError, UnsupportedError

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "ImpressConfig",
    "ImpressError",
    "StoreError",
    "UnsupportedError",
    "__version__",
    "enable_for_engine",
]
