"""Many pairs grouped by expert, in CUDA C++: see align.cu. Few are `experts.align_kernel`'s."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule
from hemiola.kernels.launch import is_interpreted, uses_pdl

COUNT, PLACE = "align_count_kernel", "align_place_kernel"
LEAST_PAIRS = 4096
_THREADS, _WARPS, _MOST_BLOCKS, _MOST_EXPERTS = 512, 16, 64, 512


@cache
def _functions(num_experts: int, top_k: int, num_shared: int, tile: int) -> tuple[CudaFunction, CudaFunction]:
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    counts = (f"-DNUM_EXPERTS={num_experts}", f"-DTOP_K={top_k}", f"-DNUM_SHARED={num_shared}")
    module = CudaModule(source, (*counts, f"-DTILE={tile}"))
    return module.function(COUNT, "PPii"), module.function(PLACE, "PPPPPii")


def takes(ids: Tensor, num_experts: int) -> bool:
    """Whether `align` is for so many pairs; ids have to be int32, in one piece."""
    return (
        not is_interpreted()
        and ids.numel() >= LEAST_PAIRS
        and num_experts <= _MOST_EXPERTS
        and ids.dtype == torch.int32
        and ids.is_contiguous()
    )


def align(
    ids: Tensor,
    num_experts: int,
    num_shared: int,
    tile: int,
    sorted_pairs: Tensor,
    tile_experts: Tensor,
    num_tiles: Tensor,
) -> None:
    """Write what `experts.Groups` says, for ids (T, top_k) int32. num_experts: all, the shared one's pieces, too."""
    num_ids = ids.numel()
    per_block = triton.cdiv(triton.cdiv(num_ids, _MOST_BLOCKS), _THREADS) * _THREADS
    blocks = triton.cdiv(num_ids, per_block)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
    count, place = _functions(num_experts, ids.shape[1], num_shared, tile)
    grid, block, pdl = (blocks, 1, 1), (_THREADS, 1, 1), uses_pdl()
    count.launch(grid, block, (ids, counts, num_ids, per_block), pdl=pdl)
    place.launch(
        grid,
        block,
        (ids, counts, sorted_pairs, tile_experts, num_tiles, num_ids, per_block),
        shared_bytes=4 * _WARPS * num_experts,
        pdl=pdl,
    )
