"""As grouped_fp8.py, NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.compile.cases.grouped_fp8 import cases_of, excludes

__all__ = ["cases", "excludes"]


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    return cases_of("nvfp4")
