"""A server of DeepSeek's models with HiCache, on a CPU."""

from __future__ import annotations

import bench.core.hicache_server  # noqa: F401
import tests.serving.latent_server  # noqa: F401
