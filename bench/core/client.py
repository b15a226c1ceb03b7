"""Requests measured by SGLang's own benchmark client, `sglang.benchmark.serving`.

Its request function sends one prompt and takes the time until the stream's first chunk with text;
how many are under way is decided here, as its `--max-concurrency` does.
"""

from __future__ import annotations

import argparse
import asyncio
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.servers import BenchFailed

# What `python -m sglang.bench_serving` sets when these options are not given.
_DEFAULTS = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "logprob_start_len": -1,
    "return_logprob": False,
    "return_routed_experts": False,
    "disable_ignore_eos": False,
    "disable_stream": False,
    "cache_report": False,
    "header": None,
}
_SAMPLING = {
    "temperature": 0.0,
    "max_new_tokens": 1,
    "ignore_eos": True,
    # The client does not see a first token without text.
    "skip_special_tokens": False,
}


class Client:
    """Sends prompts as token ids and asks for one new token each."""

    def __init__(self, concurrency: int) -> None:
        """Import SGLang's client, which takes a while."""
        with warnings.catch_warnings():
            # Of quantization kernels that are not used here.
            warnings.simplefilter("ignore")
            from sglang.benchmark import serving

        serving.set_global_args(argparse.Namespace(**_DEFAULTS))
        self._serving: Any = serving
        self._concurrency = concurrency

    def ask(
        self, url: str, prompts: Sequence[Sequence[int]], on_done: Callable[[], None]
    ) -> list[float]:
        """Send all prompts; milliseconds to the first token of each, in order.

        Raises:
            BenchFailed: a request failed.
        """
        return asyncio.run(self._ask_all(url, prompts, on_done))

    async def _ask_all(
        self, url: str, prompts: Sequence[Sequence[int]], on_done: Callable[[], None]
    ) -> list[float]:
        slots = asyncio.Semaphore(self._concurrency)

        async def ask_one(prompt: Sequence[int]) -> float:
            async with slots:
                ttft_ms = await self._ask(url, prompt)
            on_done()
            return ttft_ms

        return await asyncio.gather(*(ask_one(prompt) for prompt in prompts))

    async def _ask(self, url: str, prompt: Sequence[int]) -> float:
        order = self._serving.RequestFuncInput(
            prompt=list(prompt),
            api_url=f"{url}/generate",
            prompt_len=len(prompt),
            output_len=1,
            model="",
            lora_name=None,
            image_data=None,
            extra_request_body={"sampling_params": _SAMPLING},
        )
        answer = await self._serving.async_request_sglang_generate(order)
        if not answer.success:
            raise BenchFailed(f"a request failed: {answer.error}")
        if not answer.ttft:
            raise BenchFailed("a request was answered without text, so its TTFT is not known")
        return float(answer.ttft * 1e3)
