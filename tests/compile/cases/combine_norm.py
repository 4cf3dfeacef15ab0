"""A token's experts summed and normed: Lightning's, small and the longest rows, with the shared part as pieces, as a
row and without one; by the op's device variant, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.combine_norm import MOST_EXPERTS, combine_norm, unsupported

TOKENS = 64


def norm(hidden: int, top_k: int, num_shared: int, has_shared: bool, out_scale: float | None = None) -> object:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, weight = empty(TOKENS, hidden), empty(hidden)
    assert unsupported(hidden, top_k, rows, weight) is None
    parts = empty(TOKENS * (top_k + num_shared), hidden)
    pieces = empty(TOKENS, num_shared, hidden, dtype=torch.float32) if num_shared else None
    return combine_norm(parts, pieces, top_k, 2.5, rows if has_shared else None, rows, weight, 1e-5, out_scale)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for out_scale in (None, 0.5):
        ending = "" if out_scale is None else "-e4m3"
        yield f"pieces{ending}", partial(norm, 2688, 6, 2, False, out_scale)
        yield f"row{ending}", partial(norm, 2688, 6, 0, True, out_scale)
        yield f"neither{ending}", partial(norm, 2688, 6, 0, False, out_scale)
    for hidden in (8192, 256, 64, 16):
        yield f"{hidden}-pieces", partial(norm, hidden, MOST_EXPERTS, 4, False)
        yield f"{hidden}-row", partial(norm, hidden, MOST_EXPERTS, 0, True, 0.5)


def excludes(name: str, arch: int) -> str | None:
    return "the norm is in Triton" if arch < 90 else None
