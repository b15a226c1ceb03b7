"""The attention backends of SGLang 0.5.23 whose rows can start at an offset, as data.

A prefix is put into slots of the pool before a layer attends. So a backend must read the KVs of a
row's earlier tokens in that layer, from the pool, in the slots that `req_to_token` had when the
batch was prepared; where it writes new KVs, and whether it is given them, does not matter.

torch_native has served on CPUs, and triton in its interpreter; for flashinfer its plans have run.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A backend that is known to be right: the names of classes.

    Attributes:
        kind: of its objects, in `sglang.srt.layers.attention`.
        own: of ours, in this package.
    """

    kind: str
    own: str


BACKENDS: dict[str, Backend] = {
    # Writes new KVs to the pool, then gathers each row's slots from it.
    "torch_native": Backend(
        "torch_native_backend.TorchNativeAttnBackend", "torch_native.ImpressTorchNativeBackend"
    ),
    # Reads earlier tokens by their slots, and new ones as it is given them.
    "triton": Backend("triton_backend.TritonAttnBackend", "paged.ImpressTritonBackend"),
    # Plans with pages of one token, whatever the page size, and reads these from the pool.
    "flashinfer": Backend(
        "flashinfer_backend.FlashInferAttnBackend", "paged.ImpressFlashInferBackend"
    ),
}
