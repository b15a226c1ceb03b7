"""Architectures, dtypes and pools: what comes back is what was resident.

An answer behind resident KVs is the reference, for what was computed may differ: a pass reads new
KVs before they are rounded. Without `--full-matrix` each kind of KVs has one server and one life,
and drafts have 2 prompts; with it, as many as `--rank-requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving import tiny_models
from tests.serving.compare import Answer, assert_same, logprobs, paths, report
from tests.serving.conftest import Serve, long
from tests.serving.damage import segments, store_damaged
from tests.serving.harness import LATENT, SPECULATING, WINDOWS, Server
from tests.serving.tiny_models import WINDOW, make_adapter, make_model, make_mtp, random_tokens
from tests.serving.tiny_tokenizer import add_tokenizer
from tests.unit.waiting import wait_until

PROMPTS = [random_tokens(length, seed=length) for length in (500, 1100, 2300)]
FLAGS = ("--max-total-tokens=9000", "--impress-keep=auto")


def assert_comes_back(
    server: Server, prompts: Sequence[list[int]] = PROMPTS, *, shared: bool = False
) -> list[Answer]:
    """Exactly, and computed if it is damaged; returns what was answered to the prompts."""

    def ask_again(prompt: list[int]) -> Answer:
        """Once it is forgotten, and if it is `shared`, once another rank knows who has it."""
        answers = []

        def is_known() -> bool:
            server.flush()
            answers.append(server.generate(prompt, 16, return_logprob=True))
            return not shared or report(answers[-1])["why"]["reason"] in ("loaded", "damaged")

        wait_until(is_known)
        return answers[-1]

    told = []
    for prompt in prompts:
        server.generate(prompt, 1)
        resident = server.generate(prompt, 16, return_logprob=True)
        told.append(ask_again(prompt))
        assert paths([resident, told[-1]]) == ["device", "ssd"]
        assert not any(report(answer)["approximate"] for answer in (resident, told[-1]))
        # What was resident ends a token later than what was loaded, which rounds otherwise.
        assert_same([resident], told[-1:], 1e-5)
    damaged = store_damaged(server, 900, seed=81)
    assert_damaged(ask_again([*damaged, *random_tokens(3, seed=82)]))
    return told


def assert_damaged(answer: Answer) -> None:
    """Nothing of it was loaded, and it says why."""
    assert report(answer)["path"] == "computed"
    assert report(answer)["why"]["reason"] == "damaged"


def assert_comes_in_few_bits(server: Server) -> None:
    """Near what is exact, and the same where it is resident."""
    prompt = [*server.store(900, seed=91), *random_tokens(3, seed=92)]
    few = [server.generate(prompt, 16, return_logprob=True, impress_bits=6) for _ in range(2)]
    exact = server.generate(prompt, 1, return_logprob=True, impress_bits="exact")
    assert paths([*few, exact]) == ["ssd", "device", "ssd"]
    assert report(few[0])["bits"] == 6.0
    assert_same(few[:1], few[1:])
    assert 0.0 < abs(logprobs(few[0])[0] - logprobs(exact)[0]) < 0.3


EXACTLY = ("--impress-bits=exact", "--impress-keep=both")
SMALL_CHUNKS = (*EXACTLY, "--chunked-prefill-size=128")
BLENDING = (*SMALL_CHUNKS, "--impress-blend=auto", "--impress-blend-seconds=60")
EIGHT_BITS = "KVs in torch.float8_{} are stored as they are"
# A family, how it is started, and what it says of its KVs.
KINDS: dict[str, tuple[str, tuple[str, ...], str | None, str]] = {
    "e4m3fn": ("llama", ("--kv-cache-dtype=fp8_e4m3",), None, EIGHT_BITS.format("e4m3fn")),
    "e5m2": ("llama", ("--kv-cache-dtype=fp8_e5m2",), None, EIGHT_BITS.format("e5m2")),
    "latents": ("deepseek_v2", (), LATENT, "latent vectors (MLA) are stored as they are"),
    # Three positions of a token are the same one. Whole pages are loaded and freed.
    "media": ("qwen2_vl", ("--enable-multimodal", *EXACTLY, "--page-size=64"), None, ""),
    # What learns positions cannot blend.
    "opt": ("opt", SMALL_CHUNKS, None, ""),
    "qwen2": ("qwen2", BLENDING, None, ""),
    "qwen3": ("qwen3", BLENDING, None, ""),
    # The first family has a pool for layers with windows, the others one pool for all.
    **{family: (family, EXACTLY, WINDOWS, "") for family in ("cohere2", "olmo3", "gemma3")},
    "bfloat16": ("llama", (*SMALL_CHUNKS, "--dtype=bfloat16"), None, ""),
}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *(("opt", 1), ("qwen2", 1), ("qwen3", 1), ("bfloat16", 1)),
        *(("e4m3fn", 1), long("e4m3fn", 2), long("e5m2", 1), ("e5m2", 2)),
        *(long("latents", 1), ("latents", 2), ("media", 1), long("media", 2)),
        *(long("cohere2", 1), ("cohere2", 2), ("gemma3", 1)),
        *(long("olmo3", 1), long("olmo3", 2)),
    ],
)
def test_kinds(workdir: Path, serve: Serve, kind: str, ranks: int, at_length: bool) -> None:
    """Two ranks have the same latent vectors, which the first one writes."""
    family, flags, preload, said = KINDS[kind]
    model, name = make_model(family, workdir / kind), f"{kind}-{ranks}"
    if kind == "media":
        add_tokenizer(model, media=True)
    how: dict[str, Any] = {"model": model, "preload": preload, "ranks": ranks}
    with serve(name, *FLAGS, *flags, **how) as server:
        assert said in server.log_text()
        shared = ranks > 1 and kind == "latents"
        told = assert_comes_back(server, shared=shared)
        if kind == "media" or preload == WINDOWS:
            assert_comes_in_few_bits(server)
        if preload == WINDOWS:
            assert_forks(server)
        elif kind == "latents":
            assert set((workdir / f"store-{name}").glob("*/segments/*/*.kv")) == segments(server)
        elif family in ("opt", "qwen2", "qwen3"):
            assert_blends(server, family)
        server.assert_whole()
    if at_length or kind == "cohere2":
        assert_outlasts(serve, told, name, *FLAGS, *flags, **how)


def assert_forks(server: Server) -> None:
    """What prompts share is restored for others, also where one was stored before the whole."""
    shared = random_tokens(600, seed=91)
    forks = [[*shared, *random_tokens(100, seed=seed)] for seed in (92, 93, 94)]
    for prompt in forks[:2]:
        server.generate(prompt, 1)
    computed = server.generate(forks[2], 16, return_logprob=True)
    server.flush()
    alone = server.generate(forks[2], 16, return_logprob=True)
    assert report(alone)["path"] == "ssd"
    assert_same([computed], [alone], 1e-5)


def assert_blends(server: Server, family: str) -> None:
    """With biases, or norms of heads: what was blended is what the server computes itself."""
    stored = server.store(1000, seed=93)
    prompt = [*random_tokens(9, seed=94), *stored[700:], *stored[:700], *random_tokens(9, seed=95)]
    # All tokens are computed again, but not by way of SGLang's own pass.
    asked = {"impress_blend": 0.99999, "impress_bits": 6, "impress_store": False}
    response = server.ask(prompt, 12, return_logprob=True, **asked)
    if family == "opt":
        assert response.status_code == 400 and "does not blend" in response.text
        return
    blended = response.json()
    assert report(blended)["path"] == "ssd" and report(blended)["approximate"]
    computed = server.generate(prompt, 12, return_logprob=True, extra_key="other")
    assert report(computed)["path"] == "computed"
    assert_same([computed], [blended])


def assert_outlasts(
    serve: Serve,
    told: Sequence[Answer],
    name: str,
    *flags: str,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **how: Any,
) -> None:
    """Another server with the same store answers prompts alike."""
    with serve(name, *flags, **how) as server:
        again = [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]
        assert set(paths(again)) == {"ssd"}
        assert_same(told, again)
        server.assert_whole()


MAKERS = {
    "STANDALONE": tiny_models.make_draft,
    "EAGLE": tiny_models.make_eagle,
    "EAGLE3": tiny_models.make_eagle3,
    "NEXTN": make_mtp,
}
TRITON = ("--attention-backend=triton", "--triton-attention-num-kv-splits=2")


def acceptance(answers: list[Answer]) -> float:
    """Tokens of a verified draft, on average."""
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / verified


def speculating(algorithm: str, draft: Path) -> tuple[str, ...]:
    draft_flags = (f"--speculative-draft-model-path={draft}", "--speculative-num-steps=3")
    return (
        *(f"--speculative-algorithm={algorithm}", "--speculative-num-draft-tokens=4", *draft_flags),
        *("--speculative-eagle-topk=1", "--disable-cuda-graph", "--max-total-tokens=4000"),
    )


@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        *(("STANDALONE", 1), long("STANDALONE", 2)),
        *(long("EAGLE", 1), ("EAGLE", 2), long("EAGLE3", 1), long("NEXTN", 1)),
    ],
)
def test_drafts(
    request: pytest.FixtureRequest,
    workdir: Path,
    serve: Serve,
    algorithm: str,
    ranks: int,
    at_length: bool,
) -> None:
    """Behind what was loaded, as many are accepted as behind what was resident.

    Also where the model's KVs are in few bits, or coded by a basis, beside which a draft's are as
    they were.
    """
    model, draft = MAKERS[algorithm](workdir / algorithm)
    keep = "--impress-keep=both", "--impress-bits=exact"
    if (algorithm, ranks) == ("STANDALONE", 1):
        basis = tiny_models.make_basis(model, workdir / f"{algorithm}.basis")
        keep = "--impress-keep=both", f"--impress-basis={basis}"
    flags = (*TRITON, *speculating(algorithm, draft), *keep)
    name, how = f"{algorithm}-{ranks}", {"model": model, "preload": SPECULATING, "ranks": ranks}
    count = request.config.getoption("--rank-requests") if at_length else 2
    # All begin alike: drafts have KVs that look ahead, also where prompts part.
    prompts = [[5, 6, 7 + seed, *random_tokens(100 + seed % 20, seed)] for seed in range(count)]
    with serve(name, *flags, **how) as server:
        found: dict[str, list[Answer]] = {"device": [], "ssd": [], "few bits": []}
        for prompt in prompts:
            server.generate(prompt, 1, impress_bits="exact")
            for path, answers in found.items():
                bits = {"impress_bits": 6 if path == "few bits" else "exact"}
                answers.append(server.generate(prompt, 16, return_logprob=True, **bits))
                assert report(answers[-1])["path"] == path.replace("few bits", "ssd")
                assert report(answers[-1])["approximate"] == (path == "few bits")
                assert path != "few bits" or report(answers[-1])["bits_mean"] < 8
                server.flush()
        assert_same(found["device"], found["ssd"])
        accepted = {path: acceptance(answers) for path, answers in found.items()}
        print(f"{algorithm} on {ranks} of {len(prompts)} prompts: {accepted}")
        assert accepted["ssd"] > 0.98 * accepted["device"] > 2.0, accepted
        # A few tokens that differ in few bits decide as long as prompts are few.
        min_share = 0.98 if count >= 100 else 0.95
        assert accepted["few bits"] > min_share * accepted["device"], accepted
        # In the draft's layer.
        assert_damaged(server.generate([*store_damaged(server, 300, seed=81), 5, 6], 12))
        server.assert_whole()
    if at_length:
        last = {"prompts": prompts[-2:], **how}
        assert_outlasts(serve, found["ssd"][-2:], name, *flags, **last)


@pytest.mark.parametrize("ranks", [long(1), 2])
def test_adapters(workdir: Path, serve: Serve, ranks: int) -> None:
    """Nobody reads what other weights have made, also of an adapter with the same name and path."""
    folder = make_adapter(workdir / f"adapter-{ranks}", seed=1)
    flags = (
        *("--enable-lora", f"--lora-paths=own={folder}", "--lora-backend=torch_native"),
        *("--max-total-tokens=9000", "--impress-bits=exact"),
    )
    prompt, answers = random_tokens(600, seed=7), {}

    def ask(server: Server, name: str, path: str, adapter: str | None) -> None:
        """Behind nothing, what was loaded, and what is resident, in this order."""
        answer = server.generate(prompt, 12, return_logprob=True, lora_path=adapter)
        assert report(answer)["path"] == path
        assert_same([answers.setdefault(name, answer)], [answer])
        server.flush()

    with serve(f"adapters-{ranks}", *flags, preload=SPECULATING, ranks=ranks) as server:
        for name, adapter in (("base", None), ("first", "own")):
            for path in ("computed", "ssd"):
                ask(server, name, path, adapter)
        for name, seed, path in (("second", 2, "computed"), ("first", 1, "ssd")):
            server.post("/unload_lora_adapter", lora_name="own").raise_for_status()
            make_adapter(folder, seed)
            server.post(
                "/load_lora_adapter", lora_name="own", lora_path=str(folder)
            ).raise_for_status()
            ask(server, name, path, "own")
        with ThreadPoolExecutor(2) as pool:
            # In one batch, behind what both have in common but for their weights.
            list(pool.map(ask, [server] * 2, ("base", "first"), ("ssd",) * 2, (None, "own")))
        damaged = store_damaged(server, 300, seed=81, lora_path="own")
        for adapter in ("own", None):
            answer = server.generate([*damaged, 5], 4, lora_path=adapter)
            assert report(answer)["path"] == "computed"
            assert (report(answer)["why"]["reason"] == "damaged") == (adapter == "own")
        server.assert_whole()
    make_adapter(folder, 2)
    with serve(f"adapters-{ranks}", *flags, preload=SPECULATING, ranks=ranks) as server:
        for name, adapter in (("base", None), ("second", "own")):
            ask(server, name, "ssd", adapter)
            few = server.generate([*prompt, 5], 1, lora_path=adapter, impress_bits=6)
            assert report(few)["bits"] == 6.0
    assert len({tuple(answer["output_ids"]) for answer in answers.values()}) == 3


# Of a pool for layers with windows: for less than half of the slots.
FEW_ROWS = ("--max-total-tokens=5120", "--swa-full-tokens-ratio=0.3", "--chunked-prefill-size=512")


def test_rows_for_few_tokens(serve: Serve, workdir: Path) -> None:
    """Prompts are computed in chunks, and what is behind a window is overwritten before the end.

    Also in pages.
    """
    model = make_model("cohere2", workdir / "cohere2")
    prompts = [random_tokens(900, seed=10 + number) for number in range(6)]
    flags = (*FEW_ROWS, "--impress-bits=exact", "--page-size=16")
    with serve("few-rows", *flags, model=model, preload=WINDOWS) as server:
        computed = [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]
        server.flush()
        alone = [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]
        assert_same(computed, alone)
        assert set(paths(alone)) == {"ssd"}
        assert {report(answer)["loaded_tokens"] for answer in alone} == {896}
        server.flush()
        # All together they need more rows than there are.
        together = server.generate_together([*prompts, *prompts], 16, return_logprob=True)
        assert_same([*computed, *computed], together)
        assert "ssd" in paths(together)
        # Of a part nothing is left but what is before the last tokens.
        for length, path in ((600, "computed"), (899, "ssd")):
            server.flush()
            part = [*prompts[0][:length], *random_tokens(40, seed=length)]
            assert report(server.generate(part, 1))["path"] == path
        server.abort_in_every_phase(prompts)
        server.assert_whole()
    assert WINDOW < 512
