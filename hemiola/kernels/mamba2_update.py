"""What a decoding row of a Mamba-2 layer needs between in_proj and out_proj, in one launch: see mamba2_update.cu.

What Triton cannot say here is that blocks of a cluster exchange their heads' sums, without which the group norm is a
launch of its own; and that states are read past the L1 cache while the launch before still runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, missing
from hemiola.kernels.launch import capability, uses_pdl

KERNEL = "mamba2_update_kernel"
_STATE, _WIDTH = 128, 4  # what the source is written for
_CLUSTERS = (8, 4, 2, 1)  # blocks of a portable cluster
_MOST_THREADS = {4: 1024, 8: 640, 16: 512}  # of a block, by rows of a warp, whose states take up to half the registers


class Tile(NamedTuple):
    """heads: of a block. rows: of a head's P that a warp has under way, 4, 8 or 16. streams: states leave the L2 cache
    before all else."""

    heads: int
    rows: int
    streams: bool = True


class Geometry(NamedTuple):
    heads: int
    groups: int
    head_dim: int


# By the most rows that a tile is for. No bit depends on the tile.
TILES = ((4, Tile(1, 4)), (64, Tile(4, 8, streams=False)), (1 << 30, Tile(2, 8, streams=False)))
_OTHERWISE = Tile(1, 8)


@cache
def source() -> str:
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def options(geometry: Geometry, tile: Tile) -> tuple[str, ...]:
    """What the source's macros stand for."""
    return (
        f"-DHEADS={geometry.heads}", f"-DGROUPS={geometry.groups}", f"-DHEAD_DIM={geometry.head_dim}",
        f"-DBLOCK_HEADS={tile.heads}", f"-DWARP_ROWS={tile.rows}", f"-DSTREAMS={int(tile.streams)}",
    )  # fmt: skip


@cache
def _function(geometry: Geometry, tile: Tile) -> CudaFunction:
    return CudaModule(source(), options(geometry, tile)).function(KERNEL, "PPPlllPPPlPPPPlPPPffffi")


@cache
def fitted(tile: Tile, geometry: Geometry) -> Tile | None:
    """The tile with as many more heads as bring a group into a cluster, and rows that fill whole warps; None: there is
    none."""
    per_group = geometry.heads // geometry.groups
    for blocks in _CLUSTERS:
        heads, rest = divmod(per_group, blocks)
        if rest or heads % tile.heads:
            continue
        for rows in (tile.rows, 16):
            if geometry.head_dim % rows == 0 and heads * geometry.head_dim // rows * 32 <= _MOST_THREADS[rows]:
                return tile._replace(heads=heads, rows=rows)
        return None
    return None


def table_tile(num_rows: int, geometry: Geometry) -> Tile | None:
    """For so many rows; another one where it does not fit, None where none does."""
    return fitted(next(tile for most, tile in TILES if num_rows <= most), geometry) or fitted(_OTHERWISE, geometry)


def unsupported(z: Tensor, conv_weight: Tensor, ssm_state: Tensor, state_indices: Tensor, groups: int) -> str | None:
    """Why the kernel cannot take these, or None. What is not asked for here is as `mamba2_update` says."""
    _, heads, head_dim, state_size = ssm_state.shape
    if capability() < 90:
        return "this GPU has no clusters of blocks: they need compute capability 9.0"
    if (reason := missing()) is not None:
        return reason
    if state_size != _STATE or conv_weight.shape[1] != _WIDTH:
        return f"states of {state_size} and convolutions of {conv_weight.shape[1]} are not {_STATE} and {_WIDTH}"
    if any(table_tile(most, Geometry(heads, groups, head_dim)) is None for most, _ in TILES):
        return f"groups of {heads // groups} heads of {head_dim} fill no cluster"
    if state_indices.dtype != torch.int32:
        return f"slots are {str(state_indices.dtype).removeprefix('torch.')}, not int32"
    if z.data_ptr() % 4 or z.stride(0) % 2 or conv_weight.data_ptr() % 8 or ssm_state.data_ptr() % 16:
        return "an address is not aligned"
    return None


def mamba2_update(
    z: Tensor,
    xBC: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    norm_weight: Tensor,
    group_size: int,
    eps: float,
    dt_limit: tuple[float, float],
    out_scale: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """z (R, Di), xBC (R, Dc), dt (R, H) with contiguous rows, bfloat16 -> (R, Di) bfloat16, or e4m3 with out_scale.

    conv_state (slots, Dc, 3), ssm_state (slots, H, P, 128) float32, contiguous within a slot, and state_indices (R,)
    int32, distinct or -1: two launches or more lie between what wrote them and this one (see the source). conv_weight
    (Dc, 4), conv_bias (Dc,), norm_weight (Di,): bfloat16. A, D, dt_bias: (H,) float32. tile: None takes the table's.
    """
    num_rows, inner = z.shape
    _, heads, head_dim, _ = ssm_state.shape
    dtype = z.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(num_rows, inner, dtype=dtype, device=z.device)
    if not num_rows:
        return out
    geometry = Geometry(heads, inner // group_size, head_dim)
    tile = fitted(tile, geometry) if tile else table_tile(num_rows, geometry)
    assert tile is not None, "unsupported() refuses these heads"
    threads = 32 * tile.heads * head_dim // tile.rows
    _function(geometry, tile).launch(
        (heads // tile.heads, num_rows, 1),
        (threads, 1, 1),
        (
            z, xBC, dt, z.stride(0), xBC.stride(0), dt.stride(0), conv_weight, conv_bias, conv_state,
            conv_state.stride(0), A, D, dt_bias, ssm_state, ssm_state.stride(0), state_indices, norm_weight, out,
            *dt_limit, eps, out_scale or 1.0, int(out_scale is not None),
        ),
        pdl=uses_pdl(),
    )  # fmt: skip
    return out
