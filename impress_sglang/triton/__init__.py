"""Place of the Triton kernels (probe scoring, top-k, gather); none is needed on a CPU.

The torch code in `impress_sglang.importance` is the reference that kernels are compared with.
"""
