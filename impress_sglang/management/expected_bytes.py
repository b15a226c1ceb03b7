"""What a request is expected to read of a stored prefix from SSD."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from impress_sglang.precision.codec import BASE_BITS, NUM_PLANES, PLANE_BITS


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBytes:
    """What of a stored prefix would have to come from SSD.

    `probe_bytes` are read in any case. `chances` float64 [256] counts the other bytes by the chance
    (in steps of 1/255) that a request with the retention `usual` wants them.
    """

    probe_bytes: int
    chances: npt.NDArray[np.float64]
    usual: float

    def expected(self, retention: float, *, all_keys: bool = False) -> float:
        """Bytes that a request with this retention is expected to read."""
        if retention >= 1.0:
            return self.probe_bytes + float(self.chances.sum())
        chance = np.arange(len(self.chances)) / (len(self.chances) - 1)
        # As if each of a block's tokens were wanted so much more often.
        wanted = 1.0 - (1.0 - chance) ** (retention / self.usual)
        part = float(self.chances @ wanted)
        if all_keys:
            part = (float(self.chances.sum()) + part) / 2
        return self.probe_bytes + part


@dataclasses.dataclass(frozen=True, slots=True)
class CodedBytes:
    """What of a stored prefix in codes would have to come from SSD: its base, and all planes."""

    base: float
    planes: float

    def expected(self, bits: float) -> float:
        """Bytes that a request for so many bits is expected to read."""
        return self.base + (bits - BASE_BITS) / (PLANE_BITS * NUM_PLANES) * self.planes
