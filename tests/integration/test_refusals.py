"""What cannot be served is refused at start, in one sentence, with a non-zero exit status.

The checks run in this process, as `python -m sglang.launch_server` runs them before it starts any
other process; `tests/serving/test_restart.py` has one that a whole server makes.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin import compat
from impress_sglang.plugin import entry as plugin
from impress_sglang.plugin.compat import Hook, config_of
from tests.integration.tiny_model import write_config


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    load_plugins()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def resolve(model: Path, *flags: str, enabled: bool = True) -> Any:
    """What the launcher makes of a command line."""
    base = [f"--model-path={model}", "--device=cpu", "--skip-tokenizer-init", "--dtype=float32"]
    if enabled:
        base += ["--enable-impress", f"--impress-ssd-dir={model.parent / 'store'}"]
    server_args = prepare_server_args([*base, *flags])
    server_args.resolve_once()
    return resolved_view(server_args)


@pytest.fixture
def refusal(llama: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The sentence that a refused command line prints."""

    def refused(*flags: str, model: Path = llama, **how: bool) -> str:
        with pytest.raises(SystemExit) as error:
            resolve(model, *flags, **how)
        assert error.value.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "error: " in last
        return last

    return refused


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--impress-schedule=classes", "--schedule-policy=lpm"],
        ["--impress-truncate=0.5"],
        ["--allow-auto-truncate"],
    ],
)
def test_accepted(llama: Path, flags: list[str]) -> None:
    """The control: without a reason to refuse, the options resolve to our tree and attention."""
    view = resolve(llama, *flags)
    assert view.radix_cache_backend == "impress"
    assert view.attention_backend == "torch_native"


def test_options_in_a_file(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"enable-impress: true\nimpress-bits: 5\nimpress-ssd-dir: {tmp_path}\n")
    resolved = resolve(llama, "--config", str(file), enabled=False)
    assert resolved.radix_cache_backend == "impress"


@pytest.mark.parametrize(
    ("usual", "flags", "name"),
    [
        ("breakable", [], "triton"),
        ("full", [], "flashinfer"),
        ("breakable", ["--impress-policy=paper"], "triton"),
        ("full", ["--impress-policy=paper"], "triton"),
    ],
)
def test_backends_of_accelerators(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    usual: str,
    flags: list[str],
) -> None:
    """They keep their CUDA graphs, but where a pass has to load within."""
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: usual)
    flag = f"--attention-backend={name}"
    graphs = resolve(llama, flag, enabled=False).cuda_graph_config
    assert graphs.prefill.backend == usual, "the control: without us it stays"
    assert "switched off" not in capsys.readouterr().err
    view = resolve(llama, flag, *flags)
    assert view.attention_backend == name
    graphs, log = view.cuda_graph_config, capsys.readouterr().err
    for phase, backend in (("prefill", usual), ("decode", "full")):
        assert getattr(graphs, phase).backend == ("disabled" if flags else backend)
        assert (f"CUDA graphs of {phase} are switched off" in log) == bool(flags)


WHOLE = "--impress-policy=as"
PARTS = "--impress-policy=paper"


@pytest.mark.parametrize(
    "flags",
    [
        ["--attention-backend=fa3", "--decode-attention-backend=flashinfer"],
        ["--attention-backend=torch_native", "--decode-attention-backend=triton"],
        ["--page-size=16"],
        ["--page-size=16", "--attention-backend=triton", WHOLE],
        ["--attention-backend=flex_attention", WHOLE],
    ],
)
def test_servers_without_parts_of_prefixes(
    llama: Path, refusal: Callable[..., str], flags: list[str]
) -> None:
    assert resolve(llama, *flags).radix_cache_backend
    asked = [flag for flag in flags if not flag.startswith("--impress-")]
    for more in ("--impress-policy=as+h2o+lfu", "--impress-policy=paper"):
        sentence = refusal(*asked, more)
        assert "parts of prefixes need" in sentence
        assert sentence.endswith(f"or drop {more.replace('=', ' ')}")


def test_without_the_flag_nothing_changes(llama: Path) -> None:
    view = resolve(llama, "--attention-backend=torch_native", enabled=False)
    assert view.radix_cache_backend is None


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--pp-size=2", "--disaggregation-mode=prefill"], "has no stages that prefill"),
        (["--pp-size=2", "--tp-size=2", "--dp-size=2", "--enable-dp-attention"], "has no stages"),
        (["--kv-cache-dtype=fp8_e4m3", "--impress-bits=6"], "drop --impress-bits 6"),
        ([PARTS, "--attention-backend=wave"], "and this server has wave"),
        ([PARTS, "--speculative-algorithm=NGRAM"], "passes without drafts"),
        (
            [PARTS, "--attention-backend=triton", "--prefill-attention-backend=aiter"],
            "has aiter for prefill and triton for decode",
        ),
        (
            [PARTS, "--attention-backend=triton", "--cuda-graph-backend-prefill=full"],
            "which a CUDA graph skips: drop --cuda-graph-backend-prefill full",
        ),
        (["--radix-cache-backend=flexkv"], "--radix-cache-backend"),
        # Prompts would be cut at both ends.
        (["--impress-truncate=0.5", "--allow-auto-truncate"], "or --impress-truncate"),
        # An order in which nobody may change places.
        (
            ["--impress-schedule=classes", "--schedule-policy=lof"],
            "--schedule-policy lof, or --impress-schedule",
        ),
        # And ours.
        (["--impress-retention=0.5"], "--impress-retention 0.5 needs --impress-policy paper"),
        (["--impress-retention=much"], "--impress-retention"),
        (["--impress-policy=guess"], "--impress-policy"),
        (["--impress-ssd-dir=/proc/nowhere"], "cannot be written"),
    ],
)
def test_options(refusal: Callable[..., str], flags: list[str], word: str) -> None:
    assert word in refusal(*flags)


def test_options_without_the_switch(refusal: Callable[..., str]) -> None:
    said = refusal("--impress-retention=0.5", enabled=False)
    assert "--impress-retention needs --enable-impress" in said


def test_latent_vectors(refusal: Callable[..., str], tmp_path: Path) -> None:
    """They are loaded exactly, and whole."""
    model = write_config(tmp_path, "DeepseekV2")
    resolve(model)
    resolve(model, "--impress-bits=exact")
    assert "which models with MLA do not keep" in refusal(PARTS, model=model)
    assert "drop --impress-bits 6" in refusal("--impress-bits=6", model=model)


def test_unsupported_sglang(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.21.post3")
    assert "pip install sglang==0.5.23" in refusal()


def test_later_sglang(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may serve, and says that nobody has tested that."""
    compat.warn_if_untested()
    assert "newer" not in capsys.readouterr().err
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.0rc1")
    assert resolve(llama).radix_cache_backend == "impress"
    compat.warn_if_untested()
    assert "SGLang 0.6.0rc1 is newer" in capsys.readouterr().err


def test_missing_name_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "RELIED_ON", ("sglang.srt.server_args.no_such_name",))
    with pytest.raises(UnsupportedError, match="no_such_name"):
        compat.check_sglang(())


def test_hook_that_cannot_be_applied(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang only logs it, so we look ourselves, and name it."""
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", resolve, "after")
    monkeypatch.setattr(plugin, "HOOKS", (*plugin.HOOKS, gone))
    assert "no_such_method" in refusal()


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_every_hook_is_looked_for(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plugin that replaces a function leaves our hook out of it."""
    compat.check_sglang(plugin.HOOKS)
    holder, _, name = hook.target.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(holder), name, lambda *_, **__: None)
    with pytest.raises(UnsupportedError, match=name):
        compat.check_sglang(plugin.HOOKS)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("IMPRESS_CONFIG", raising=False)
    yield


def test_engine_configuration_comes_from_the_environment(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sglang.Engine` has no command line: a refusal is an exception there, not an exit."""
    options = {"ssd_dir": str(tmp_path / "kv"), "policy": "paper"}
    monkeypatch.setenv("IMPRESS_CONFIG", json.dumps(options))
    args = ServerArgs(model_path=str(llama), device="cpu", skip_tokenizer_init=True)
    args.resolve_once()
    config = config_of(args)
    assert config is not None and config.policy == "paper"
    refused = ServerArgs(model_path=str(llama), device="cpu", page_size=16)
    with pytest.raises(UnsupportedError, match=r"page-size 1.* drop --impress-policy paper"):
        refused.resolve_once()
