"""The epilogues behind a library's product, and the quantisation of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.quantize import finish


def behind(rows: int, columns: int, relu_squared: bool, out_scale: float | None) -> object:
    return finish(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), relu_squared, out_scale)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "relu", partial(behind, 8192, 3712, True, None)
    yield "relu-e4m3", partial(behind, 8192, 3712, True, 0.1)
    yield "e4m3", partial(behind, 7, 67, False, 0.1)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None
