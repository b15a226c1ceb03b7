"""Device and host chunk caches above the SSD: which chunk stands where, and its bytes there."""
