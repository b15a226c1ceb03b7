"""Triton kernels against their torch oracles."""
