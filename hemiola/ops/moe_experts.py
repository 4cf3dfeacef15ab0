"""Routed experts: down(relu(up(x))^2), weighted and summed over a token's experts.

x: (T, in), activation dtype; ids: (T, top_k) int64; weights: (T, top_k) float32; up, down: one Weight per expert, of
any scheme, (inter, in) and (in, inter).
tap: called with each taken expert's inputs, `<weight name>.input`.
Returns (T, in) in the activation dtype. The routed scaling factor is not applied here.
Numerics: up's result and its squared ReLU are rounded to the activation dtype; down's float32 accumulator is multiplied
by the routing weight and rounded; the sum over experts is float32 in order of the routing, rounded once. A token's bits
do not depend on how many of its neighbours share its experts.
Source: vLLM 0.25.0 layers/fused_moe (non-gated relu2 experts).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear import linear_float32
from hemiola.ops.linear_fp8 import linear_fp8_float32
from hemiola.ops.linear_nvfp4 import linear_nvfp4_float32
from hemiola.ops.relu_squared import relu_squared
from hemiola.ops.table import register
from hemiola.tap import Tap

# BLAS picks other kernels, with other orders of summation, for the rows that remain after blocks of this many; in whole
# blocks a row gets the same bits however many there are.
ROW_BLOCK = 4

_PRODUCT = {Scheme.PLAIN: linear_float32, Scheme.FP8: linear_fp8_float32, Scheme.NVFP4: linear_nvfp4_float32}


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: Sequence[Weight],
    down: Sequence[Weight],
    *,
    tap: Tap | None = None,
    kept: KeptForms,
) -> torch.Tensor:
    num_tokens, top_k = ids.shape
    routed = x.new_empty(num_tokens * top_k, x.shape[1])
    flat_weights = weights.reshape(-1, 1)
    pairs = ids.reshape(-1).sort(stable=True)  # (token, expert) pairs, by expert
    start = 0
    for expert, count in zip(*(t.tolist() for t in pairs.values.unique_consecutive(return_counts=True)), strict=True):
        rows = pairs.indices[start : start + count]
        start += count
        inputs = x[rows // top_k]
        if num_tokens > 1:
            inputs = torch.nn.functional.pad(inputs, (0, 0, 0, -count % ROW_BLOCK))
        hidden = relu_squared(_PRODUCT[up[expert].scheme](inputs, up[expert], kept=kept).to(x.dtype))
        if tap is not None:
            tap(f"{up[expert].name}.input", inputs[:count])
            tap(f"{down[expert].name}.input", hidden[:count])
        out = _PRODUCT[down[expert].scheme](hidden, down[expert], kept=kept)
        routed[rows] = (out[:count] * flat_weights[rows]).to(x.dtype)
    return routed.view(num_tokens, top_k, -1).sum(1, dtype=torch.float32).to(x.dtype)


register(op="moe_experts", arm="reference", variant="torch", run=moe_experts, keeps=True)
