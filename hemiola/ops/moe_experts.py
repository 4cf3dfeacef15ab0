"""Routed experts: down(relu(up(x))^2), weighted and summed over a token's experts; and the shared one's, added.

x: (T, in), activation dtype; ids: (T, top_k) integers, with a shared expert those that a router has just made of x: a
device may read x before the router's kernel has ended; weights: (T, top_k) float32; up, down: the experts' weights, of
any scheme, (inter, in) and (in, inter).
routed_scale: multiplies the routed sum, once. shared: the expert that every token takes, added last and never scaled;
None where there is none or where a latent projection comes in between.
tap: called with each taken expert's inputs, `<weight name>.input`.
Returns (T, in) in the activation dtype.
Numerics: up's result and its squared ReLU are rounded to the activation dtype; down's float32 accumulator is multiplied
by the routing weight and rounded; the sum over experts is float32 in order of the routing, rounded once; its product
with the scale, and the sum with the shared part (what two linears make), are rounded each. A token's bits do not depend
on how many of its neighbours share its experts.
Source: vLLM 0.25.0 layers/fused_moe (non-gated relu2 experts).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hemiola.formats.weight import ExpertBank, Scheme, SharedExpert
from hemiola.ops.epilogue import relu_squared
from hemiola.ops.kept import KeptForms
from hemiola.ops.linear import linear, linear_float32
from hemiola.ops.linear_fp8 import linear_fp8, linear_fp8_float32
from hemiola.ops.linear_nvfp4 import linear_nvfp4, linear_nvfp4_float32
from hemiola.ops.table import register
from hemiola.tap import Tap

# BLAS picks other kernels, with other orders of summation, for the rows that remain after blocks of this many; in whole
# blocks a row gets the same bits however many there are.
ROW_BLOCK = 4

_LINEAR = {Scheme.PLAIN: linear, Scheme.FP8: linear_fp8, Scheme.NVFP4: linear_nvfp4}
_PRODUCT = {Scheme.PLAIN: linear_float32, Scheme.FP8: linear_fp8_float32, Scheme.NVFP4: linear_nvfp4_float32}


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: ExpertBank,
    down: ExpertBank,
    routed_scale: float = 1.0,
    shared: SharedExpert | None = None,
    *,
    tap: Tap | None = None,
    kept: KeptForms,
) -> torch.Tensor:
    experts, counts, inputs, rows = _by_expert(x, ids)
    outputs = []
    for expert, count, part in zip(experts, counts, inputs, strict=True):
        hidden = relu_squared(_PRODUCT[up[expert].scheme](part, up[expert], kept=kept).to(x.dtype))
        if tap is not None:
            tap(f"{up[expert].name}.input", part[:count])
            tap(f"{down[expert].name}.input", hidden[:count])
        outputs.append(_PRODUCT[down[expert].scheme](hidden, down[expert], kept=kept))
    by_pair = torch.cat(outputs)[rows] if rows is not None else torch.cat(outputs)[None]
    routed = (by_pair * weights[..., None]).to(x.dtype)
    routed = routed.sum(1, dtype=torch.float32).to(x.dtype) * routed_scale
    return routed if shared is None else _shared_part(x, shared, tap, kept) + routed


def _shared_part(x: torch.Tensor, shared: SharedExpert, tap: Tap | None, kept: KeptForms) -> torch.Tensor:
    up, down = shared
    if tap is not None:
        tap(f"{up.name}.input", x)
    out_scale = down.input_scale if down.scheme is Scheme.FP8 else None
    hidden = _LINEAR[up.scheme](x, up, x.dtype, True, out_scale, kept=kept)
    if tap is not None:
        tap(f"{down.name}.input", hidden)
    return _LINEAR[down.scheme](hidden, down, x.dtype, kept=kept)


def _by_expert(
    x: torch.Tensor, ids: torch.Tensor
) -> tuple[list[int], list[int], Sequence[torch.Tensor], torch.Tensor | None]:
    """The experts that are taken, how many tokens each has, its rows of x (whole blocks, the rest zeros), and where
    each (token, expert) pair's row is among all of these rows, (T, top_k); None for a single token, whose are in order.
    """
    num_tokens, top_k = ids.shape
    if num_tokens == 1:
        return ids[0].tolist(), [1] * top_k, [x] * top_k, None
    pairs = ids.flatten().sort(stable=True)
    experts, counts = pairs.values.unique_consecutive(return_counts=True)
    sizes = counts + -counts % ROW_BLOCK
    padding_before = (sizes - counts).cumsum(0) - (sizes - counts)
    rows = torch.empty_like(ids, dtype=torch.int64)
    rows.view(-1)[pairs.indices] = torch.arange(ids.numel(), device=ids.device) + padding_before.repeat_interleave(
        counts
    )
    stacked = x.new_zeros(int(sizes.sum()), x.shape[1])
    stacked[rows] = x[:, None]
    return experts.tolist(), counts.tolist(), stacked.split(sizes.tolist()), rows


register(op="moe_experts", arm="reference", variant="torch", run=moe_experts, keeps=True)
