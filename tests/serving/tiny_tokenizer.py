"""A tokenizer for the tiny models: a token per byte, and letters in pairs for the rest."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

from tests.serving.tiny_models import VOCAB

SPECIAL = ("<pad>", "<s>", "</s>")
CHAT = "{% for own in messages %}{{ own['role'] + ': ' + own['content'] + '\n' }}{% endfor %}"
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def add_tokenizer(folder: Path, *, media: bool = False, chat: str = CHAT) -> None:
    """Save it beside a model, for answers in text and for structured output; or for images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("".join(pair) for pair in itertools.product(string.ascii_letters, repeat=2))
    last = MEDIA if media else ()
    room = VOCAB - len(SPECIAL) - len(bytes_) - len(last)
    words = [*SPECIAL, *bytes_, *itertools.islice(pairs, room), *last]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, begin, end = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end
    )
    if media:
        import transformers

        fast.add_special_tokens({"additional_special_tokens": list(MEDIA)})
        parts = transformers.Qwen2VLImageProcessor(), fast, transformers.Qwen2VLVideoProcessor()
        transformers.Qwen2VLProcessor(*parts).save_pretrained(folder)
    else:
        fast.chat_template = chat
        fast.save_pretrained(folder)
