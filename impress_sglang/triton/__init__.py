"""Triton kernels: scores of the probe column, selection, gathering rows.

Each kernel has a torch reference beside it or in `impress_sglang.importance`. Nothing here is
needed or imported on a CPU, except that tests run the kernels in Triton's interpreter.
"""
