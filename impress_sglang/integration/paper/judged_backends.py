"""What is known of each attention backend of SGLang 0.5.23, as data.

A prefix is put into slots of the pool before a layer attends. So a backend is right with ordinary
rows if it reads the KVs of a row's earlier tokens in that layer, from the pool, in the slots that
`req_to_token` had when the batch was prepared; where it writes new KVs, and whether it is given
them, does not matter. With page size > 1 it reads slots in whole pages, as they are allocated. A
test fails as long as a backend is in no table.

torch_native has served on CPUs, and triton in its interpreter; for fa3 and flex_attention SGLang's
Python code has run behind IMPRESS, for flashinfer its plans. Others are judged by their source.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A backend that is known to be right, and why.

    Attributes:
        kind: the class of its objects, in `sglang.srt.layers.attention`.
        why: what its source does, which makes it right.
        offset_rows: our class that also starts rows at an offset, in this package; None if there
            is none.
    """

    kind: str
    why: str
    offset_rows: str | None = None


_FLASH_ATTENTION = "flashattention_backend.FlashAttentionBackend"

BACKENDS: dict[str, Backend] = {
    "torch_native": Backend(
        "torch_native_backend.TorchNativeAttnBackend",
        "writes new KVs to the pool, then gathers each row's slots from it",
        "torch_native.ImpressTorchNativeBackend",
    ),
    "triton": Backend(
        "triton_backend.TritonAttnBackend",
        "reads earlier tokens by their slots, and new ones as it is given them",
        "paged.ImpressTritonBackend",
    ),
    "flashinfer": Backend(
        "flashinfer_backend.FlashInferAttnBackend",
        "plans with pages of one token, whatever the page size, and reads these from the pool",
        "paged.ImpressFlashInferBackend",
    ),
    "fa3": Backend(
        _FLASH_ATTENTION,
        "writes new KVs to the pool, or finds them there, then reads all of a row by its pages",
    ),
    "fa4": Backend(_FLASH_ATTENTION, "the class of fa3 with other kernels"),
    "trtllm_mha": Backend(
        "trtllm_mha_backend.TRTLLMHAAttnBackend",
        "writes new KVs to the pool, then reads all of a row by its pages, through views of an NHD "
        "pool or a copy that is made in the layer",
    ),
    "hpc_ops": Backend(
        "hpc_ops_backend.HPCOpsAttnBackend",
        "writes new KVs to the pool, then reads all of a row by its pages of 64",
    ),
    "flex_attention": Backend(
        "torch_flex_backend.TorchFlexAttnBackend",
        "writes new KVs to the pool, then gathers each row's slots from it",
    ),
}

# SGLang's object for one backend in prefill and another one in decode, which it keeps in these
# attributes. It calls `forward` of the one that the mode of a batch needs.
HYBRID = "hybrid_attn_backend.HybridAttnBackend"
HYBRID_PARTS = ("prefill_backend", "decode_backend")

_MLA = "it is for MLA models, which keep no keys per head"
_SPARSE = "it attends to a part of the tokens, by an index beside the KVs that is not stored"
REFUSED: dict[str, str] = {
    "flashmla": _MLA,
    "trtllm_mla": _MLA,
    "cutedsl_mla": _MLA,
    "dsa": _SPARSE,
    "nsa": _SPARSE,
    "qsa": _SPARSE,
    "dsv4": _SPARSE,
    "minicpm_flashattn": _SPARSE,
    "minicpm_flashinfer": _SPARSE,
    "llada2_cfg_flashinfer": "it is for diffusion models, whose KVs are not of a prefix alone",
    "wave": "nobody has judged its kernels",
    "aiter": "it fuses writing KVs with other kernels and may lay them out in another way (ROCm)",
    "intel_amx": "its kernels are not in the package of SGLang that IMPRESS is tested with",
    "intel_xpu": "IMPRESS runs on CPUs and CUDA",
    "ascend": "IMPRESS runs on CPUs and CUDA",
}

OFFSET_ROWS = tuple(name for name, backend in BACKENDS.items() if backend.offset_rows)
