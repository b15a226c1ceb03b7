"""One part at a time: reading ahead, overhead, memory, planning, the drive, kernels."""
