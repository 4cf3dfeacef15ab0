"""Compiling without running: for the thread that asks for it alone, once for each module, and its errors come out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from hemiola.kernels import launch as launch_module
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


def kernels() -> Iterator[tuple[str, str]]:
    """Name and source of each kernel that is launched with programmatic dependent launch."""
    folder = Path(launch_module.__file__).parent
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(arg.arg == "PDL" for arg in node.args.args):
                yield f"{file.name}:{node.name}", ast.unparse(node)
    for file in sorted(folder.glob("*.cu")):
        for index, body in enumerate(file.read_text().split('extern "C"')[1:]):
            yield f"{file.name}:{index}", body


KERNELS = dict(kernels())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_lets_the_next_one_start_only_behind_its_own_wait(kernel: str) -> None:
    """So that all but the two launches before it have ended when a kernel starts: see `hemiola.kernels.launch`. Threads
    that let nothing start wait, too, where they have another part in the kernel, or nothing to do: there the line
    before has to be a wait."""
    calls = re.findall(r"gdc_(wait|launch_dependents)\(\)", KERNELS[kernel])
    assert "launch_dependents" in calls, "it waits, and then lets the next one start"
    if calls[-1] == "wait":
        behind = re.findall(r"^\s*gdc_wait\(\)[^\n]*\n\s*gdc_launch_dependents\(\)", KERNELS[kernel], re.MULTILINE)
        assert len(behind) == calls.count("launch_dependents"), "it waits, and then lets the next one start"
    before = [calls[i - 1] if i else "nothing" for i, call in enumerate(calls) if call == "launch_dependents"]
    assert set(before) == {"wait"}


def test_the_kernels_are_found() -> None:
    assert {"rms_norm.cu:0", "router.cu:0", "mamba2_update.cu:0", "attention_decode.py:_decode_kernel"} <= set(KERNELS)
