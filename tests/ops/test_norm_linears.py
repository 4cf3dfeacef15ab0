"""The norm and the linears behind it in one: what the ops give one after the other."""

from __future__ import annotations

import pytest
import torch

from hemiola.formats.weight import Scheme
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear import linears
from hemiola.ops.linear_fp8 import linear_fp8
from hemiola.ops.linear_nvfp4 import linear_nvfp4
from hemiola.ops.norm_linears import norm_linears
from hemiola.ops.rms_norm import rms_norm
from tests.support.numerics import generator, randn
from tests.support.weights import random_weight

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_is_the_ops_one_after_the_other(dtype: torch.dtype, has_residual: bool, num_tokens: int) -> None:
    g, kept = generator(num_tokens), KeptForms(1 << 30)
    x, other = randn(g, 2, num_tokens, 64, dtype=dtype)
    norm = (x, other if has_residual else None, randn(g, 64, dtype=dtype), EPS)
    plain = tuple(random_weight(g, name, Scheme.PLAIN, size, 64) for name, size in (("q", 32), ("k", 16), ("v", 16)))
    codes, nvfp4 = (random_weight(g, s.value, s, 48, 64) for s in (Scheme.FP8, Scheme.NVFP4))
    y, total = rms_norm(*norm)
    quantised, _ = rms_norm(*norm, codes.input_scale)
    for weights, expected in (
        (plain, linears(y, plain, dtype, kept=kept)),
        ((codes,), (linear_fp8(quantised, codes, dtype, kept=kept),)),
        ((nvfp4,), (linear_nvfp4(y, nvfp4, dtype, kept=kept),)),
        ((codes, nvfp4), (linear_fp8(y, codes, dtype, kept=kept), linear_nvfp4(y, nvfp4, dtype, kept=kept))),
    ):
        outputs, new_residual = norm_linears(*norm, weights, dtype, kept=kept)
        assert torch.equal(new_residual, total)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
