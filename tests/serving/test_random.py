"""Hours of everything at once: whatever is asked for and whatever breaks, no wrong answer, no leak.

    pytest tests/serving/test_random.py --random-minutes 60 --random-seed 7

Or a soak: from ten minutes on the second half is one life, in which memory may not grow.

Eight clients ask a finite set of requests in all ways, while caches are flushed, weights replaced,
disks fail and servers are killed. Each answer from a whole prefix is compared with stock SGLang's
to the same request, token for token. Memory is watched as the kernel sees it, and now and then
metrics are compared with what clients have seen, and counts with the files on the disk. A run in
which something of this did not happen fails.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fault_control import FaultControl
from tests.serving.clients import KINDS
from tests.serving.conftest import Serve
from tests.serving.harness import STOCK, Zygote
from tests.serving.lives import INDEPENDENT, RECKONED, Life, Lives
from tests.serving.traffic import Catalogue, answer_by_stock, make_catalogue
from tests.serving.watch import LONG_SECONDS, Watch
from tests.serving.world import World

# SGLang ends with an AssertionError when there are not enough rows for all beams.
FLAGS = ("--dtype=float32", "--max-running-requests=64")
IMPRESS_FLAGS = (
    "--enable-impress",
    "--enable-metrics",
    "--impress-keep=both",
    "--impress-load=always",
    "--impress-min-prefix-tokens=64",
    "--impress-min-free-gb=0",
    "--impress-io-timeout=1",
    "--impress-device-gb=0.002",
    "--impress-host-gb=0.008",
)
LIFE_SECONDS = 8
ENOUGH_LIVES = 8
PATHS = ("ssd", "device", "computed")
# Of the answers: so many at least came from SSD, whole and in part.
LEAST_FROM_SSD = 0.1


@pytest.fixture(scope="module")
def models(tiny_llama: Path, other_llama: Path) -> dict[str, Path]:
    return {"a": tiny_llama, "b": other_llama}


@pytest.fixture(scope="module")
def catalogue(models: dict[str, Path], start: Serve) -> Catalogue:
    """What is asked, and stock's answers with each weights."""
    catalogue = make_catalogue(seed=3)
    with start("random-stock", *FLAGS, model=models["a"], preload=STOCK) as stock:
        for weights in ("a", "b"):
            if weights == "b":
                path = str(models["b"])
                assert stock.post("/update_weights_from_disk", model_path=path).json()["success"]
            assert answer_by_stock(catalogue, stock, weights) < 20
    return catalogue


@pytest.mark.timeout(0)
def test_random_traffic(
    models: dict[str, Path],
    catalogue: Catalogue,
    workdir: Path,
    zygote: Zygote,
    request: pytest.FixtureRequest,
) -> None:
    seed = request.config.getoption("--random-seed")
    minutes = request.config.getoption("--random-minutes")
    ranks = request.config.getoption("--random-ranks")
    without = set(request.config.getoption("--random-without").split(",")) - {""}
    assert without <= {*KINDS, "faults", "weights"}, without
    folder = workdir / f"random-{seed}"
    folder.mkdir()
    world, watch = World(catalogue), Watch()
    lives = Lives(
        world,
        watch,
        models,
        folder / "store",
        (*FLAGS, *IMPRESS_FLAGS),
        FaultControl(folder / "faults", seed),
        kinds=[kind for kind in KINDS if kind not in without],
        with_faults="faults" not in without,
        with_weights="weights" not in without,
        seed=seed,
        ranks=2 if ranks == "tp" else 1,
        replicas=2 if ranks == "dp" else 1,
    )
    end, number = time.monotonic() + 60 * minutes, 0
    # An even number: half of them are killed. A busy machine may need more of them.
    while not world.problems and (
        time.monotonic() < end or number % 2 or (number < ENOUGH_LIVES and _missing(world, lives))
    ):
        left = end - time.monotonic()
        is_long = number % 2 and LONG_SECONDS <= left <= 30 * minutes
        try:
            Life(lives, number).live(left if is_long else LIFE_SECONDS, zygote)
        except Exception as error:
            world.problem(f"life {number}: {type(error).__name__}: {error}")
        number += 1
    print(f"seed {seed}, {number} lives: {dict(sorted(world.counts.items()))}")
    print(f"soak of {minutes:g} min: {watch.summary()}; {_reckoning(world)}")
    world.problems += watch.problems()
    if world.problems:
        pytest.fail(_story(world, seed, folder))
    assert not _missing(world, lives), world.counts


def _story(world: World, seed: int, folder: Path) -> str:
    """What went wrong, and what was done before."""
    operations, problems = "\n".join(world.operations), "\n".join(world.problems[:10])
    return f"seed {seed}, logs in {folder}\n{operations}\n\n{problems}"


def _reckoning(world: World) -> str:
    """How far metrics were from what others counted, where both counted the same."""
    told = []
    for others, names in (("reports", RECKONED), ("clients", INDEPENDENT)):
        counted = {name: world.counts[f"reckoned {name}"] for name in names}
        off = {name: world.counts[f"off {name}"] / max(count, 1) for name, count in counted.items()}
        told.append(f"metrics against {others} {counted}, off by {max(off.values()):.2%} at most")
    return "; ".join(told)


def _missing(world: World, lives: Lives) -> list[str]:
    """What has not happened yet: the run is to be about something."""
    counts = world.counts
    wanted = [f"compared {kind}" for kind in lives.kinds]
    wanted += [
        "killed",
        "accounts checked",
        "disk compared",
        "flushed",
        "aborted",
        "hung up",
        "approximate",
    ]
    if lives.ranks == 1:
        wanted.append("blended_tokens")
    wanted += [f"path {path}" for path in PATHS]
    wanted += [f"reckoned requests_total {path}" for path in PATHS]
    wanted += [f"reckoned {metric}" for metric in INDEPENDENT]
    if lives.with_weights:
        wanted.append("update flush")
    missing = [what for what in wanted if not counts[what]]
    if counts["path ssd"] < LEAST_FROM_SSD * sum(counts[f"path {path}"] for path in PATHS):
        missing.append("enough from SSD")
    if lives.with_weights and not counts["update no flush"] + counts["update refused"]:
        missing.append("update without a flush")
    if lives.with_faults and sum(bool(counts[name]) for name in counts if "fault " in name) < 3:
        missing.append("three faults")
    return missing
