"""A server of DeepSeek's models with HiCache, on a CPU."""

from __future__ import annotations

import bench.core.hicache_server
import tests.serving.latent_server

assert bench.core.hicache_server
assert tests.serving.latent_server
