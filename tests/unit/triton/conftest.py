"""Where kernels run in these tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import create_function_from_signature

from impress_sglang.paper import request
from impress_sglang.tiers import cache
from impress_sglang.tiers.copying import PageCopier
from impress_sglang.triton import scores

KERNELS = "impress_sglang.triton"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either "cuda", or "cpu" while kernels are interpreted.

    Kernels are decorated when their module is imported, and Triton's own library when Triton is,
    which may long have happened in this process. So what was compiled is exchanged, for the test
    only. Kernel modules are to be imported before the test runs, and kernels to be looked up in
    them (`module.kernel`, or a function of the module that launches it).
    """
    if torch.cuda.is_available():
        yield "cuda"
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with _unchanged(_language()), _interpreted():
        yield "cpu"


def _language() -> list[Any]:
    """Modules and classes that the interpreter patches while it runs."""
    modules = [module for name, module in sys.modules.items() if _in(name, "triton.language")]
    classes = [value for value in vars(tl.core).values() if inspect.isclass(value)]
    return modules + classes


def _in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@contextmanager
def _unchanged(owners: list[Any]) -> Iterator[None]:
    """Undo changes of attributes: the interpreter leaves some of its own behind."""
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    # Interpreted functions of a module need the names that it got.
                    if inspect.isclass(owner):
                        delattr(owner, name)
                elif value is not attributes[name]:
                    setattr(owner, name, attributes[name])


class _Function(InterpretedFunction):
    """Patches the language when a function of a module is first called, not at each call."""

    def __init__(self, function: Any, patched: set[str]) -> None:
        super().__init__(function)
        self._patched = patched

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in self._patched:
            self._patched.add(self.fn.__module__)
            _patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)


@contextmanager
def _interpreted() -> Iterator[None]:
    """Exchange compiled functions for interpreted ones, in our kernels and Triton's library."""
    names = [name for name in sys.modules if _in(name, KERNELS) or _in(name, "triton.language")]
    exchanged: dict[int, Any] = {}
    # A launch has patched the language for its kernel's module.
    patched = {name for name in names if _in(name, KERNELS)}
    changes = []
    for owner in [*(sys.modules[name] for name in names), tl.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, triton.JITFunction):
                function = exchanged.setdefault(id(value), _Function(value.fn, patched))
                setattr(owner, name, _method(function) if inspect.isclass(owner) else function)
                changes.append((owner, name, value))
    try:
        yield
    finally:
        for owner, name, value in changes:
            setattr(owner, name, value)


def _method(function: Any) -> Any:
    return lambda *arguments, **options: function(*arguments, **options)


@pytest.fixture
def interpreted(device: str) -> None:
    if device == "cuda":
        pytest.skip("stores, caches and pools of these tests are on the CPU")


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a GPU would do with kernels is done with them from now on."""
    monkeypatch.setattr(cache, "PageCopier", lambda *args, **_: PageCopier(*args, kernels=True))
    monkeypatch.setattr(request, "probe_scorer", lambda _: scores.column_sums)


# What compiles for compute capability 9.0 where there is no GPU.
TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


class Launch(NamedTuple):
    kernel: Any
    arguments: Sequence[Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def bound(self) -> Any:
        """Arguments by their names, how a GPU would specialise them, and other options."""
        signature, params = self.kernel.signature, self.kernel.params
        bind = create_function_from_signature(signature, params, BACKEND)
        return bind(*self.arguments, **self.options)


class _Noted:
    """Stands for a kernel, whose launches it notes in place of running it."""

    def __init__(self, kernel: Any, noted: list[Launch]) -> None:
        self._kernel, self._noted = kernel, noted

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        assert all(grid)
        return lambda *args, **options: self._noted.append(Launch(self._kernel, args, options))


@contextmanager
def noting_launches(*modules: Any) -> Iterator[list[Launch]]:
    """All launches of the kernels of modules, none of which is run: no GPU is needed."""
    noted: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    patch.setattr(module, name, _Noted(value, noted))
        yield noted


def compile_launches(module: Any, launch: Callable[[], object]) -> dict[str, Any]:
    """The kernels of a module that a function launches, as a GPU would compile them.

    The interpreter lets things pass that the compiler does not.
    """
    with noting_launches(module) as noted:
        launch()
    return {call.name: _compiled(call) for call in noted}


def _compiled(launch: Launch) -> Any:
    # It tells that kernels are compiled, which stood for others when that was asked.
    launch.options.update({"WIDEN": False} if "WIDEN" in launch.options else {})
    packed = launch.kernel._pack_args(BACKEND, launch.options, *launch.bound())
    options, signature, constants, attributes = packed
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=vars(options))
