"""Device and host chunk caches above the SSD: which chunk is where, and its bytes there."""
