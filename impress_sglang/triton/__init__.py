"""Triton kernels: scores of the probe column, selection, gathering rows.

Each has its torch reference beside it or in `impress_sglang.importance`. Nothing here is needed on
a CPU, and nothing imports it there, but tests run the kernels in Triton's interpreter.
"""
