"""Router of a mixture-of-experts layer: its logits, and the choice of experts.

For few tokens it is one launch, in CUDA C++, see router.cu, for very few together with the norm before it; otherwise,
and where that cannot run, two in Triton.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, source_of
from hemiola.kernels.launch import (
    capability,
    gdc_launch_dependents,
    gdc_wait,
    is_interpreted,
    launch_options,
    num_sms,
    uses_pdl,
)
from hemiola.kernels.rms_norm import takes_cuda

KERNEL = "router_kernel"
FUSED_TOKENS = 512
"""Most tokens for which logits and choice are one launch; for any number where rows are not to differ."""

FEW_TOKENS = 8
"""Most tokens for which a program takes one token and a few experts, without tensor cores."""

MANY_TOKENS = 1024
"""Least tokens for which a program takes all experts that fit, and reads its tokens once."""

NORM_TOKENS = (1, 2, 4)
"""Numbers of tokens whose norm every block computes: each is compiled for itself, and others are no graph's."""

_NORM_SPANS = ((2816, 6), (4096, 3))  # of 256 columns, that a warp has registers for; by the most columns of a row
_CLUSTER = 8  # blocks of a cluster, and tokens of a tile, in router.cu
_FUSED_TILES = (1, 2, 4)  # of 8 tokens, that a cluster may take
_FUSED_TOP_K = 32
_STATIC_SHARED = 48 << 10

_DROPPED = tl.constexpr(-3.0e38)  # an expert of a group that is out of the choice: after all others, before those taken


@triton.jit
def logits_rows_kernel(
    x, x_stride, gate, out,
    num_experts: tl.constexpr, num_columns: tl.constexpr,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.minimum(expert, num_experts - 1)[:, None] * num_columns
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((EXPERTS, COLUMNS), tl.float32)
    for start in tl.static_range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        weight = tl.load(gate + row + column[None, :], mask=is_column[None, :], other=0.0).to(tl.float32)
        values = tl.load(x + token * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
        acc += weight * values[None, :]
    tl.store(out + token * num_experts + expert, tl.sum(acc, axis=1), mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_tokens"])
def logits_tiles_kernel(
    x, x_stride, gate, out, num_tokens,
    num_experts: tl.constexpr, num_columns: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    x_row = x + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * x_stride
    gate_row = gate + (tl.minimum(expert, num_experts - 1) * num_columns)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for start in tl.range(0, num_columns, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        values = tl.load(x_row + column[None, :], mask=is_column[None, :], other=0.0)
        weight = tl.load(gate_row + column[:, None], mask=is_column[:, None], other=0.0)
        if gate.dtype.element_ty == tl.float32:
            acc = tl.dot(values.to(tl.float32), weight, acc, input_precision="ieee")
        else:
            acc = tl.dot(values, weight, acc)
    is_out = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * num_experts + expert[None, :], acc, mask=is_out)


@triton.jit
def route_kernel(
    logits, bias, ids, weights,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TAKEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, TOP_K_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Experts are a tile (groups, experts of a group), padded in both directions."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_BLOCK)[:, None]
    member = tl.arange(0, SIZE_BLOCK)[None, :]
    expert = group * GROUP_SIZE + member
    is_expert = (group < GROUPS) & (member < GROUP_SIZE)
    correction = tl.load(bias + expert, mask=is_expert, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    scores = tl.sigmoid(tl.load(logits + token * (GROUPS * GROUP_SIZE) + expert, mask=is_expert, other=0.0))
    choice = tl.where(is_expert, scores + correction, float("-inf"))
    if TAKEN_GROUPS < GROUPS:
        best = tl.max(choice, axis=1, keep_dims=True)
        if GROUP_SIZE > 1:
            first = tl.min(tl.where(choice == best, member, SIZE_BLOCK), axis=1, keep_dims=True)
            best += tl.max(tl.where(member == first, float("-inf"), choice), axis=1, keep_dims=True)
        mine = tl.where(group < GROUPS, best, float("-inf"))
        others = tl.trans(mine)  # (1, GROUPS_BLOCK)
        other = tl.arange(0, GROUPS_BLOCK)[None, :]
        is_before = (others > mine) | ((others == mine) & (other < group))
        rank = tl.sum(is_before.to(tl.int32), axis=1, keep_dims=True)
        choice = tl.where(is_expert & (rank >= TAKEN_GROUPS), _DROPPED, choice)
    expert = tl.where(is_expert, expert, GROUPS * GROUP_SIZE)
    choice = tl.reshape(choice, (GROUPS_BLOCK * SIZE_BLOCK,))
    scores = tl.reshape(scores, (GROUPS_BLOCK * SIZE_BLOCK,))
    experts = tl.reshape(expert, (GROUPS_BLOCK * SIZE_BLOCK,))
    k = tl.arange(0, TOP_K_BLOCK)
    taken = tl.zeros((TOP_K_BLOCK,), tl.int32)
    taken_scores = tl.zeros((TOP_K_BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        # The lowest id among the largest; some valid id where there are only NaNs.
        best = tl.min(tl.where(choice == tl.max(choice, axis=0), experts, GROUPS * GROUP_SIZE - 1), axis=0)
        score = tl.sum(tl.where(experts == best, scores, 0.0), axis=0)
        taken = tl.where(k == place, best, taken)
        taken_scores = tl.where(k == place, score, taken_scores)
        choice = tl.where(experts == best, float("-inf"), choice)
    if NORMALISE:
        taken_scores = tl.div_rn(taken_scores, tl.broadcast_to(tl.sum(taken_scores, axis=0) + 1e-20, (TOP_K_BLOCK,)))
    tl.store(ids + token * TOP_K + k, taken, mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, taken_scores, mask=k < TOP_K)


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, hidden) bfloat16, rows may lie apart; gate (E, hidden) bfloat16 or float32; bias (E,) float32; all else
    contiguous. Returns ids int32 and weights float32, (T, top_k), and logits (T, E) float32."""
    if takes_fused(x, gate, top_k) and len(x) > 0 and (invariant or len(x) <= FUSED_TOKENS):
        return fused(x, gate, bias, top_k, router_groups, topk_router_groups, normalise)
    logits = router_logits(x, gate, invariant=invariant)
    return *moe_route(logits, bias, top_k, router_groups, topk_router_groups, normalise), logits


def takes_fused(x: Tensor, gate: Tensor, top_k: int) -> bool:
    """Whether `fused` can run: for any number of tokens, or for none."""
    return gate.dtype == torch.bfloat16 and gate.data_ptr() % 16 == 0 and _takes_rows(x, len(gate), top_k)


def _takes_rows(x: Tensor, num_experts: int, top_k: int) -> bool:
    return (
        not is_interpreted()
        and 90 <= capability() < 120
        and top_k <= _FUSED_TOP_K
        and x.shape[1] % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and _fused_shared(num_experts, _FUSED_TILES[0]) <= _STATIC_SHARED
    )


def _fused_shared(num_experts: int, tiles: int) -> int:
    """Bytes of shared memory of a block, with a group an expert, which is the most."""
    rows = 16 * _fused_warps(num_experts)
    rows *= -(-num_experts // rows)
    return 4 * (tiles * (_CLUSTER * rows + 3 * num_experts) + num_experts) + 8


def fused_tiles(num_tokens: int, num_experts: int) -> int:
    """Tiles of a cluster: as few as fill the GPU once."""
    fitting = [tiles for tiles in _FUSED_TILES if _fused_shared(num_experts, tiles) <= _STATIC_SHARED]
    clusters = num_sms() * 3 // 4 // _CLUSTER  # that find room at once: processors come in groups of 16 or 18
    return next((tiles for tiles in fitting if num_tokens <= _CLUSTER * tiles * clusters), fitting[-1])


class Norm(NamedTuple):
    """The norm before the router. residual: (T, hidden) or None; weight: (hidden,); bfloat16."""

    residual: Tensor | None
    weight: Tensor
    eps: float


def takes_norm(x: Tensor, residual: Tensor | None, weight: Tensor, num_experts: int, top_k: int) -> bool:
    """Whether `fused_with_norm` can run, with an aligned gate in bfloat16."""
    num_tokens, size = x.shape
    if num_tokens not in NORM_TOKENS:
        return False
    spans = triton.cdiv(size, 256)
    most = next((most for columns, most in _NORM_SPANS if size <= columns), 0)
    columns = 32 * triton.cdiv(triton.cdiv(size, 32), _CLUSTER)  # of a block
    shared = _fused_shared(num_experts, 1) + num_tokens * (2 * columns + 4 * spans + 16) + 16
    return (
        num_tokens * spans <= most * _fused_warps(num_experts)
        and shared <= _STATIC_SHARED
        and takes_cuda(x, residual, weight)
        and _takes_rows(x, num_experts, top_k)
    )


@cache
def fused_function(
    num_experts: int, num_columns: int, tiles: int, top_k: int, groups: int, taken: int, normalise: bool,
    norm_tokens: int = 0, has_residual: bool = False,
) -> CudaFunction:  # fmt: skip
    options = {
        "EXPERTS": num_experts, "COLUMNS": num_columns, "NT": tiles, "TOP_K": top_k, "GROUPS": groups, "TAKEN": taken,
        "NORMALISE": int(normalise), "WARPS": _fused_warps(num_experts), "NORM": norm_tokens,
        "RESIDUAL": int(has_residual),
    }  # fmt: skip
    source = source_of("norm.cuh", "router.cu")
    module = CudaModule(source, tuple(f"-D{name}={value}" for name, value in options.items()))
    return module.function(KERNEL, "PlPPPPPiPlPPPf")


def _fused_warps(num_experts: int) -> int:
    return min(8, -(-num_experts // 16))


def fused(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    tiles: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` in one launch, where `takes_fused` says so. A token's bits depend neither on the others nor on tiles."""
    tiles = tiles or fused_tiles(len(x), len(gate))
    return _fused(x, gate, bias, top_k, router_groups, topk_router_groups, normalise, tiles)


def fused_with_norm(
    x: Tensor,
    norm: Norm,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm` and `fused` of what it gives, in one launch, where `takes_norm` says so; with their bits. Returns ids,
    weights, logits, the normed rows and x + residual, which is x without one."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if norm.residual is None else torch.empty_like(y)
    choice = _fused(x, gate, bias, top_k, router_groups, topk_router_groups, normalise, 1, norm, y, total)
    return *choice, y, total


def _fused(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    router_groups: int,
    topk_router_groups: int,
    normalise: bool,
    tiles: int,
    norm: Norm | None = None,
    y: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, total: what the norm writes."""
    (num_tokens, size), num_experts = x.shape, len(gate)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    residual = None if norm is None else norm.residual
    groups, taken = (router_groups, topk_router_groups) if topk_router_groups < router_groups else (1, 1)
    norm_tokens = 0 if norm is None else num_tokens
    fused_function(
        num_experts, size, tiles, top_k, groups, taken, normalise, norm_tokens, residual is not None
    ).launch(
        (_CLUSTER * triton.cdiv(num_tokens, _CLUSTER * tiles), 1, 1),
        (32 * _fused_warps(num_experts), 1, 1),
        (
            x, x.stride(0), gate, bias, logits, ids, weights, num_tokens,
            residual, 0 if residual is None else residual.stride(0), None if norm is None else norm.weight, y, total,
            0.0 if norm is None else norm.eps,
        ),
        pdl=uses_pdl(),
    )  # fmt: skip
    return ids, weights, logits


def router_logits(x: Tensor, gate: Tensor, *, invariant: bool = False) -> Tensor:
    """x (T, hidden) bfloat16, rows may lie apart; gate (E, hidden) bfloat16 or float32. Returns (T, E) float32."""
    (num_tokens, size), num_experts = x.shape, len(gate)
    out = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return out
    pdl = uses_pdl()
    if num_tokens <= FEW_TOKENS and not invariant:
        few = 2
        logits_rows_kernel[triton.cdiv(num_experts, few), num_tokens](
            x, x.stride(0), gate, out, num_experts=num_experts, num_columns=size,
            EXPERTS=few, COLUMNS=min(1024, triton.next_power_of_2(size)), PDL=pdl,
            num_warps=4, **launch_options(pdl),
        )  # fmt: skip
        return out
    is_exact = gate.dtype == torch.float32
    if num_tokens >= MANY_TOKENS and not invariant and not is_exact:
        tokens, experts, columns, stages = 64, 128, 64, 4
    else:
        tokens, experts, columns, stages = 16, 32, 64 if is_exact else 256, 3
    logits_tiles_kernel[triton.cdiv(num_tokens, tokens), triton.cdiv(num_experts, experts)](
        x, x.stride(0), gate, out, num_tokens, num_experts=num_experts, num_columns=size,
        TOKENS=tokens, EXPERTS=experts, COLUMNS=columns, STAGES=stages, PDL=pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def moe_route(
    logits: Tensor, bias: Tensor, top_k: int, router_groups: int, topk_router_groups: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """logits (T, E) float32; bias (E,) float32; contiguous. Returns ids int32 and weights float32, both (T, top_k)."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    groups, taken_groups = (router_groups, topk_router_groups) if topk_router_groups < router_groups else (1, 1)
    size = num_experts // groups
    pdl = uses_pdl()
    route_kernel[(num_tokens,)](
        logits, bias, ids, weights,
        GROUPS=groups, GROUP_SIZE=size, TAKEN_GROUPS=taken_groups, TOP_K=top_k, NORMALISE=normalise,
        GROUPS_BLOCK=triton.next_power_of_2(groups), SIZE_BLOCK=triton.next_power_of_2(size),
        TOP_K_BLOCK=triton.next_power_of_2(top_k), PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return ids, weights
