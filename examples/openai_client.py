"""Chat completions of the OpenAI client that share a long system prompt.

Start a server (the last flag makes it report cached tokens):

    python -m sglang.launch_server --model-path MODEL --enable-impress --impress-ssd-dir kv \\
        --enable-cache-report

then run:

    python examples/openai_client.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam
from options import client_options

HOUSE_RULES = """You work at the desk of the Fjord Observatory.
Answer in one sentence, from these rules.

1. Guests are welcome from Thursday to Sunday, from dusk until one in the morning.
2. A ticket costs nine crowns; students, pensioners and lighthouse keepers pay five.
3. The large telescope was built in 1911. It is for staff only, except in the first week of March.
4. The two small telescopes on the terrace may be used by everybody for ten minutes at a time.
5. Torches must have a red filter. Filters are lent at the desk for a deposit of one crown.
6. When clouds cover more than half of the sky, the film about the comet of 1858 is shown instead.
7. Photographs with flash are forbidden in the dome, because the plates on the north wall fade.
8. Groups of more than twelve must write a week before and are guided by Professor Aune.
9. The last bus to the harbour leaves at half past one from the gate, not from the car park.
10. Hot chocolate is sold in the old clock room. Cups stay in the clock room.
11. Children under eight must hold somebody's hand on the spiral stairs, which have 94 steps.
12. In case of fire everybody meets at the sundial; the goat is fetched by the caretaker.
13. Lost gloves are kept for a year in the drawer under the star globe, and then given to the choir.
14. The meteorite in the hall may be touched. It weighs 31 kilograms; a baker found it in 1874.
15. Weather reports are put up at the door at five in the afternoon and corrected at eight.
16. Whoever discovers something new writes it into the green book and rings the small bell once.
"""
QUESTIONS = ("What does a ticket for a student cost?", "Where is hot chocolate sold?")
STREAMED = "When does the last bus leave?"


def messages(question: str) -> list[ChatCompletionMessageParam]:
    return [
        {"role": "system", "content": HOUSE_RULES},
        {"role": "user", "content": question},
    ]


def ask(client: OpenAI, model: str, question: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=messages(question), max_tokens=32, temperature=0
    )
    print(f"{question}\n  {(completion.choices[0].message.content or '').strip()}")
    print_usage(completion.usage)


def ask_streaming(client: OpenAI, model: str, question: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=messages(question),
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"{question}\n  ", end="")
    usage = None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        usage = chunk.usage or usage
    print()
    print_usage(usage)


def print_usage(usage: CompletionUsage | None) -> None:
    if usage is None:
        return
    details = usage.prompt_tokens_details
    cached = f", {details.cached_tokens} of them cached" if details else ""
    print(f"  {usage.prompt_tokens} prompt tokens{cached}")


def main() -> None:
    url = client_options("Ask at the desk of an observatory").url
    # The server wants no key, the client wants one.
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for question in QUESTIONS:
        ask(client, model, question)
    ask_streaming(client, model, STREAMED)


if __name__ == "__main__":
    main()
