"""Stored text that is no prefix (CacheBlend): planned, loaded, and partly recomputed."""
