"""Work for every token, chunk, block or element, as loops compiled with Numba."""
