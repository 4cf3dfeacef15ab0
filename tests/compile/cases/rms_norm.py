"""RMSNorm of Lightning's, Super's and small rows, with a residual and without, quantising and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.rms_norm import rms_norm


def norm(hidden: int, has_residual: bool, out_scale: float | None) -> object:
    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((64, hidden), (hidden,)))
    return rms_norm(x, x if has_residual else None, weight, 1e-5, out_scale)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for hidden in (2688, 4096, 8192, 256, 192, 100):
        yield f"{hidden}", partial(norm, hidden, True, None)
    yield "first", partial(norm, 2688, False, None)
    yield "2688-e4m3", partial(norm, 2688, True, 0.5)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None
