"""The norm and a linear in one: Lightning's in_proj and attention, Super's, small ones; a token and two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.norm_linear import TOKENS, norm_linear, unsupported


def product(num_tokens: int, dtype: torch.dtype, num_rows: int, columns: int, has_residual: bool = True) -> object:
    x, norm_weight = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((num_tokens, columns), (columns,)))
    residual = x if has_residual else None
    assert unsupported(x, residual, norm_weight, dtype) is None
    weight = torch.empty(num_rows, columns, dtype=dtype, device="meta")
    return norm_linear(x, residual, norm_weight, 1e-5, weight, 0.1, 0.2)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for dtype, num_rows in ((torch.float8_e4m3fn, 10304), (torch.bfloat16, 4608)):
        for num_tokens in range(1, TOKENS + 1):
            for columns in (2688, 4096, 3136, 192, 16):
                yield f"{columns}-{num_tokens}-{dtype}", partial(product, num_tokens, dtype, num_rows, columns)
        yield f"first-{dtype}", partial(product, 1, dtype, num_rows, 2688, False)


def excludes(name: str, arch: int) -> str | None:
    return "the norm is in Triton" if arch < 90 else None
