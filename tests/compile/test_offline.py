"""Every launcher's kernels compile for every architecture that we claim, fit into its shared memory, and do not spill.

A file cases/<module>.py stands for hemiola/kernels/<module>.py:

    def cases() -> Iterable[tuple[str, Callable[[], object]]]  # names, and calls of launchers on meta tensors
    def excludes(name: str, arch: int) -> str | None  # optional: why the launcher's predicate refuses the architecture
    STACK = {"name of a case": bytes}  # optional: stack bytes allowed, each with its reason in a comment
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.offline import ARCHITECTURES, Compiled, compile_launches

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "hemiola" / "kernels"
MODULES = sorted(path.stem for path in (HERE / "cases").glob("*.py"))


def load(module: str) -> ModuleType:
    return importlib.import_module(f"tests.compile.cases.{module}")


CALLS = [(module, name, arch) for module in MODULES for name, _ in load(module).cases() for arch in ARCHITECTURES]


def compile_case(module: str, name: str, arch: int) -> list[Compiled]:
    """In a worker: a case is a closure, so it is found again by name."""
    return compile_launches(dict(load(module).cases())[name], arch)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str, int], Future[list[Compiled]]]]:
    """The selected cases, compiling in two processes."""
    calls = [
        item.callspec.params["call"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "compiled" in item.fixturenames
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        yield {call: pool.submit(compile_case, *call) for call in calls if refusal(*call) is None}
        pool.shutdown(cancel_futures=True)


def refusal(module: str, name: str, arch: int) -> str | None:
    excludes = getattr(load(module), "excludes", None)
    return excludes(name, arch) if excludes else None


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}-{call[1]}-sm_{call[2]}")
def test_kernels_compile_fit_and_do_not_spill(
    call: tuple[str, str, int], compiled: dict[tuple[str, str, int], Future[list[Compiled]]]
) -> None:
    module, name, _ = call
    if reason := refusal(*call):
        pytest.skip(reason)
    kernels = compiled[call].result()
    assert kernels, "the case launches nothing"
    print(*kernels, sep="\n")
    allowed = getattr(load(module), "STACK", {}).get(name, 0)
    problems = [f"{kernel}: {problem}" for kernel in kernels for problem in kernel.problems(allowed)]
    assert not problems, "\n".join(problems)


def launches(path: Path) -> bool:
    """Whether a module contains a `kernel[grid](...)`."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Subscript) for call in calls)


def test_every_launching_module_has_cases() -> None:
    launching = {path.stem for path in KERNELS.glob("*.py") if launches(path)}
    assert launching - {"cuda"} <= set(MODULES), (
        "cuda calls the functions of libraries, and launches what others give it"
    )
