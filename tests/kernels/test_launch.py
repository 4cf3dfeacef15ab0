"""Compiling without running: for the thread that asks for it alone, once for each module, and its errors come out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from hemiola.kernels.launch import compiles_only, compiling


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, bool]]:
    """(kernel, whether it was only compiled) of each launch, none of which does anything."""
    seen: list[tuple[object, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append((self, warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def launch(kernel: Any) -> None:
    JITFunction.run(kernel, grid=(1,), warmup=False)


def in_another_thread(act: Any, *args: Any) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act, *args).result()


def test_only_the_thread_that_compiles_leaves_its_launches_out(launches: list[tuple[object, bool]]) -> None:
    launch("before")
    with compiling():
        launch("own")
        in_another_thread(launch, "another's")
    launch("after")
    assert launches == [("before", False), ("own", True), ("another's", False), ("after", False)]


def test_a_module_is_compiled_once_and_by_whoever_compiles() -> None:
    module, compiled = object(), list[int]()
    assert not compiles_only(module, lambda: compiled.append(0))
    with compiling():
        assert compiles_only(module, lambda: compiled.append(1))
        assert compiles_only(module, lambda: compiled.append(2))
        assert not in_another_thread(compiles_only, module, lambda: compiled.append(3))
    assert not compiles_only(module, lambda: compiled.append(4))
    assert compiled == [1]


def test_what_does_not_compile_is_left_to_its_launch_and_nothing_stays(launches: list[tuple[object, bool]]) -> None:
    def fails() -> None:
        raise RuntimeError("no such instruction")

    with compiling():
        compiles_only(object(), fails)
        launch("own")
    launch("after")
    assert launches == [("own", True), ("after", False)]
    with pytest.raises(KeyError), compiling():
        raise KeyError
    launch("again")
    assert launches[-1] == ("again", False)
    with compiling():
        launch("own again")
    assert launches[-1] == ("own again", True)


def test_a_triton_kernel_that_does_not_compile_leaves_the_next_ones_alone() -> None:
    """Triton's own mode ends however its compilations went."""

    def fails() -> None:
        raise RuntimeError("no such instruction")

    with compiling():
        mode = active_mode.get()
        assert mode is not None
        mode.submit("key", fails, lambda kernel: None)
    assert active_mode.get() is None
