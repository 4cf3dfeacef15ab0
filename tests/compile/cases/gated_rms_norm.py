"""The gated norm of Lightning's, 12B's and small groups, quantising and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.gated_rms_norm import gated_rms_norm


def norm(groups: int, group_size: int, out_scale: float | None) -> object:
    width = groups * group_size
    z = torch.empty(64, 3 * width, dtype=torch.bfloat16, device="meta")[:, :width]
    y, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((64, width), (width,)))
    return gated_rms_norm(y, z, weight, group_size, 1e-5, out_scale)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for groups, group_size in ((8, 512), (8, 1280), (2, 64)):
        yield f"{groups}x{group_size}", partial(norm, groups, group_size, None)
    yield "8x512-e4m3", partial(norm, 8, 512, 0.5)


def excludes(name: str, arch: int) -> str | None:
    return "e4m3 conversions need compute capability 8.9" if "e4m3" in name and arch < 89 else None
