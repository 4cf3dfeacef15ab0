"""FP8 and BF16 linears: each tile of their tables at Lightning's sizes, and odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels import linear_bf16, linear_fp8
from hemiola.kernels.linear_bf16 import linear_bf16 as bf16
from hemiola.kernels.linear_fp8 import linear_fp8 as fp8


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def product_fp8(
    tokens: int, out_size: int, in_size: int, invariant: bool = False, out_scale: float | None = None
) -> object:
    weight = linear_fp8.Fp8Weight(empty(torch.float8_e4m3fn, out_size, in_size), 0.1, 0.2, empty(torch.float32, 1))
    return fp8(empty(torch.float8_e4m3fn, tokens, in_size), weight, out_scale is not None, out_scale, invariant)


def product_bf16(tokens: int, out_size: int, in_size: int, invariant: bool = False) -> object:
    x, weight = empty(torch.bfloat16, tokens, in_size), empty(torch.bfloat16, out_size, in_size)
    return bf16(x, weight, invariant=invariant)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for tokens in (1, linear_fp8.GEMV_ROWS):
        yield f"fp8-{tokens}", partial(product_fp8, tokens, 10304, 2688)
    yield "fp8-quantizes", partial(product_fp8, 1, 2688, 4096, out_scale=0.1)
    yield "fp8-invariant", partial(product_fp8, 8192, 2688, 4096, True)
    yield "fp8-odd", partial(product_fp8, 7, 67, 131)
    yield "fp8-long", partial(product_fp8, 1, 4096, 15680)
    for tokens in (1, linear_bf16.GEMV_ROWS):
        yield f"bf16-{tokens}", partial(product_bf16, tokens, 4096, 2688)
    yield "bf16-invariant", partial(product_bf16, 8192, 4096, 2688, True)
    yield "bf16-odd", partial(product_bf16, 7, 67, 131, True)
    yield "bf16-odd-1", partial(product_bf16, 1, 67, 131)
    yield "bf16-long", partial(product_bf16, 1, 4096, 8192)


def excludes(name: str, arch: int) -> str | None:
    return "FP8 products need compute capability 8.9" if name.startswith("fp8") and arch < 89 else None


# A register or two on sm_100 (16 bytes, fp8-quantizes) and on sm_120 (8 bytes, all four): no other architecture spills.
STACK = {"fp8-quantizes": 16, "fp8-64": 8, "fp8-invariant": 8, "bf16-invariant": 8}
