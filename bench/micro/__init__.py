"""One part at a time: overhead, memory, kernels."""
