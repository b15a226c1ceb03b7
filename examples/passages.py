"""Questions about passages that stand in another order each time, as a retriever returns them.

Nothing of such prompts is a common prefix; with --impress-blend the passages are reused all the
same, wherever they stand. Start a server:

    python -m sglang.launch_server --model-path MODEL --enable-impress --impress-ssd-dir kv \\
        --impress-blend 0.15 --impress-blend-min-tokens 128 --enable-cache-report

then run, in a clone of the repository:

    python examples/passages.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI
from options import client_options

DATA = Path(__file__).parents[1] / "bench" / "data" / "squad_xquad_en"
PASSAGES = 3


def rows() -> list[dict[str, Any]]:
    """Real passages and questions on them (SQuAD, in the XQuAD selection)."""
    lines = (line for path in sorted(DATA.glob("*.jsonl")) for line in path.open(encoding="utf-8"))
    return [json.loads(line) for line in lines]


def store(url: str, passages: list[str]) -> None:
    """Have all passages computed and stored, before anybody asks about them."""
    body = json.dumps({"text": "\n\n".join(passages)}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/impress/warm", body, headers)).close()


def ask(client: OpenAI, model: str, passages: list[str], question: str) -> None:
    prompt = "\n\n".join(["Answer the question from these passages.", *passages, question])
    began = time.perf_counter()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0,
    )
    seconds = time.perf_counter() - began
    print(f"{question}\n  {(answer.choices[0].message.content or '').strip()}")
    usage = answer.usage
    if usage is not None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else "an unknown number"
        print(f"  {seconds:.1f} s, {usage.prompt_tokens} prompt tokens, {cached} of them cached")


def main() -> None:
    url = client_options("Ask about passages in any order").url
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    # Some questions share a passage.
    by_passage = {row["context"]: row["question"] for row in rows()}
    by_length = sorted(by_passage, key=len)
    passages = by_length[len(by_length) // 2 :][:PASSAGES]
    store(url, passages)
    order = random.Random(0)
    for passage in passages:
        ask(client, model, order.sample(passages, PASSAGES), by_passage[passage])


if __name__ == "__main__":
    main()
