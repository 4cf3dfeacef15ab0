"""The norm and a linear in one: Lightning's in_proj and attention, Super's, small ones; a token and two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.kernels.norm_linear import TOKENS
from hemiola.ops.device import norm_linears
from hemiola.ops.resident import ResidentWeights


def product(num_tokens: int, dtype: torch.dtype, sizes: tuple[int, ...], columns: int, first: bool = False) -> object:
    """By the op's device variant, of weights of these sizes."""
    x, norm_weight = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((num_tokens, columns), (columns,)))
    scheme = Scheme.FP8 if dtype == torch.float8_e4m3fn else Scheme.PLAIN
    data = [torch.empty(size, columns, dtype=dtype, device="meta") for size in sizes]
    weights = tuple(Weight(f"w{len(d)}", (len(d), columns), scheme, d, None, 0.1, 0.2) for d in data)
    norm = (x, None if first else x, norm_weight, 1e-5)
    assert norm_linears.unsupported(*norm, weights, x.dtype) is None
    return norm_linears.run(*norm, weights, x.dtype, resident=ResidentWeights(torch.device("meta")))


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for dtype, sizes in ((torch.float8_e4m3fn, (10304,)), (torch.bfloat16, (4096, 256, 257))):
        for num_tokens in range(1, TOKENS + 1):
            for columns in (2688, 4096, 3136, 192, 16):
                yield f"{columns}-{num_tokens}-{dtype}", partial(product, num_tokens, dtype, sizes, columns)
        yield f"first-{dtype}", partial(product, 1, dtype, sizes, 2688, True)


def excludes(name: str, arch: int) -> str | None:
    return "the norm is in Triton" if arch < 90 else None
