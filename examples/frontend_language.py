"""A program in SGLang's frontend language whose calls share a long system prompt.

Start a server:

    python -m sglang.launch_server --model-path MODEL --enable-impress --impress-ssd-dir kv

then run:

    python examples/frontend_language.py --url http://127.0.0.1:30000

The first question computes the guide. The others find it in the device pool, or on SSD once it has
been evicted (or flushed, or the server was restarted): run it twice with a restart in between.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from options import client_options

GUIDE = """You are the concierge of the Harbour Library. Answer in one sentence, from this guide
only.

Opening hours. The library opens at nine in the morning and closes at eight in the evening from
Monday to Friday. On Saturday it closes at four in the afternoon. On Sunday only the reading room
on the first floor is open, from noon to five.
Membership. A card is free for everybody who lives in the city and costs twelve crowns a year for
everybody else. Children get a card of their own at the age of six. A lost card is replaced for
two crowns at the desk on the ground floor.
Lending. Books may be kept for four weeks, films and games for one week. Loans can be extended
twice, unless somebody else is waiting. Each day of delay costs a quarter of a crown, and never
more than ten crowns. Newspapers, maps and everything from the archive stay in the building.
Archive. The archive in the cellar holds the logbooks of the harbour since 1702, the plans of the
old shipyard and nine thousand photographs. Visits are on Tuesday and Thursday after two o'clock;
please write to the archivist three days before. Pencils are welcome, pens are not.
Rooms. There are six study rooms for four people each on the second floor. They can be booked for
two hours a day. The large hall is rented to clubs on Wednesday evening. The workshop next to it
has two sewing machines, a laser cutter and a printing press; an introduction on Monday at six is
required.
Children. Stories are read in the blue room on Saturday at ten. The toy shelf is emptied and
washed on the first Friday of the month. Prams can be left under the stairs, dogs cannot.
Cafe. The cafe on the roof sells soup at lunch and cake in the afternoon. Food stays on the roof;
water in closed bottles may be taken anywhere but into the archive.
"""
TOPICS = [" film", " archive", " room"]


@sgl.function
def ask(s: Any, question: str) -> None:
    s += sgl.system(GUIDE)
    s += sgl.user(question)
    s += sgl.assistant_begin()
    answer, summary = s.fork(2)
    answer += sgl.gen("text", max_tokens=32, temperature=0)
    summary += "In a few words: " + sgl.gen("text", max_tokens=12, temperature=0)
    s += "The keyword of the question is" + sgl.select("topic", TOPICS)
    s["answer"], s["summary"] = answer["text"], summary["text"]
    s["cached_tokens"] = answer.get_meta_info("text")["cached_tokens"]


def main() -> None:
    url = client_options("Ask a library's concierge").url
    sgl.set_default_backend(sgl.RuntimeEndpoint(url, chat_template_name="chatml"))

    for question in (
        "How long may I keep a film?",
        "When can I visit the archive?",
        "How many people fit into a study room?",
    ):
        state = ask.run(question=question)
        print(f"{question}  ({state['cached_tokens']} tokens were cached)")
        print(f"  answer:  {state['answer'].strip()}")
        print(f"  summary: {state['summary'].strip()}")
        print(f"  topic:   {state['topic'].strip()}")


if __name__ == "__main__":
    main()
