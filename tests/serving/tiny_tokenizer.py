"""A tokenizer for the tiny models: a token per byte, and letters in pairs for the rest."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

from tests.serving.tiny_models import VOCAB

SPECIAL = ("<pad>", "<s>", "</s>")


def add_tokenizer(folder: Path) -> None:
    """Save it beside a model, for answers in text and for structured output."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("".join(pair) for pair in itertools.product(string.ascii_letters, repeat=2))
    room = VOCAB - len(SPECIAL) - len(bytes_)
    words = [*SPECIAL, *bytes_, *itertools.islice(pairs, room)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end
    ).save_pretrained(folder)
