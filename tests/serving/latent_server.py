"""A server of DeepSeek's models on a CPU, where they would have no way to attend.

With torch_native they attend to latent vectors, as they do with most backends.
"""

from __future__ import annotations

from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

handler.AttentionBackendRegistry._handlers["torch_native"] = lambda *_: AttnForwardMethod.MLA
