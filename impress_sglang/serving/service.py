"""What serves stored prefixes in one scheduler: the store, what is learnt of costs, and counts."""

from __future__ import annotations

import dataclasses
import logging

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.options import BITS, EXACT_BITS
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.serving import Serving
from impress_sglang.serving.why import Explainer
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import Quality
from impress_sglang.store.policies import LoadOptions
from impress_sglang.transfer.kv_codec import KVCodec

logger = logging.getLogger(__name__)


class Service(Serving):
    """The store of a scheduler and what goes with it; the scheduler's thread owns it."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
        codec: KVCodec | None = None,
    ) -> None:
        """Open the store; `device`: where slots are, `hidden_size`: of the model.

        `codec` codes KVs, if the shape names a basis.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        super().__init__(config, shape, identity, device, hidden_size, codec)
        self.levels = () if not shape.coded else BITS if codec is None else (codec.bits,)
        """The bits in which prefixes can be loaded from codes, ascending."""
        self.usual = self.class_of(LoadOptions(bits=config.usual_bits, blend=config.usual_blend))
        """The class of a request that asks for nothing else."""
        self.explainer = Explainer(config, self.served, self.least)
        """Says why a request got its prefix, or got none."""

    def class_of(self, wanted: LoadOptions) -> KVClass:
        """The class of the KVs that a request gets."""
        bits = self.policy.bits(wanted)
        if not self.shape.coded:
            bits = EXACT_BITS
        elif self.codec is not None:
            # Named by its own bits; a request names those without a basis that keep as much.
            bits = self.codec.bits if bits <= self.codec.basis.keeps else EXACT_BITS
        return KVClass.of(dataclasses.replace(wanted, bits=bits))

    def least(self, wanted: LoadOptions) -> Quality | None:
        """The worst stored quality that a request takes; None: nothing that is stored."""
        return self.least_of(self.class_of(wanted))

    def least_of(self, own: KVClass) -> Quality | None:
        """The same, of a request in a class."""
        if own.exact and not self.shape.exact:
            return None
        return own.worst(self.config.approximation_depth)
