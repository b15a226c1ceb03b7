"""Types of the arrays that the loops take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Uint8s = npt.NDArray[np.uint8]
Uint64s = npt.NDArray[np.uint64]
Uint16s = npt.NDArray[np.uint16]
