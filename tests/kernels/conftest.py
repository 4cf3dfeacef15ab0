"""Tests of kernels on the CPU: Triton's interpreter, which a process has to choose before it imports triton.

`pytest tests/kernels[/test_x.py[::test]]`, alone, chooses it here and runs the tests as any others. As part of a larger
run, where kernels are compiled, each file of this folder is one test, `interpreted`; the first of them runs all of the
files in two child processes, and each reports what its file did there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pytest_configure(config: pytest.Config) -> None:
    start = config.invocation_params.dir
    if all((start / argument.partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args):
        os.environ["TRITON_INTERPRET"] = "1"
    if is_interpreting():
        from tests.support.interpreter import repair

        repair()


def is_interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if is_interpreting() or not module_path.is_relative_to(HERE):
        return None
    return KernelFile.from_parent(parent, path=module_path)


class KernelFile(pytest.File):
    """A test file that this process may not import."""

    def collect(self) -> list[pytest.Item]:
        return [Interpreted.from_parent(self, name="interpreted")]


class Interpreted(pytest.Item):
    """What a file's tests did in the child process."""

    def runtest(self) -> None:
        files = sorted({str(item.path) for item in self.session.items if isinstance(item, Interpreted)})
        outcomes, output = run_children(tuple(files))
        module = self.path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        failures = [text for text in outcomes[module] if text]
        if failures or not outcomes[module]:
            raise pytest.fail.Exception("\n\n".join(failures) or output, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} in the interpreter"


@cache
def run_children(files: tuple[str, ...]) -> tuple[dict[str, list[str]], str]:
    """By module and per test: an empty string, or what failed. And the children's whole output."""
    shares: tuple[list[str], ...] = ([], [])  # of about as many bytes
    for file in sorted(files, key=lambda file: -Path(file).stat().st_size):
        min(shares, key=lambda share: sum(Path(file).stat().st_size for file in share)).append(file)
    with ThreadPoolExecutor(len(shares)) as pool:
        done = list(pool.map(run_child, filter(None, shares)))
    outcomes = defaultdict(list, {module: texts for child, _ in done for module, texts in child.items()})
    return outcomes, "\n".join(output for _, output in done)


def run_child(files: list[str]) -> tuple[dict[str, list[str]], str]:
    """One child's share of `run_children`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--continue-on-collection-errors",
            f"--junitxml={report}",
            *files,
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        child = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        outcomes: dict[str, list[str]] = defaultdict(list)
        for case in cases:
            failed = [f"{case.get('name')}\n{part.text}" for part in case if part.tag in {"failure", "error"}]
            # A file that cannot be collected is a case without a class, named after its module.
            outcomes[case.get("classname") or case.get("name", "")].append("\n".join(failed))
    return outcomes, child.stdout + child.stderr
