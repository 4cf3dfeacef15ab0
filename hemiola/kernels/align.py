"""Pairs grouped by expert, in CUDA C++: see align.cu. The interpreter has `experts.align_kernel`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule
from hemiola.kernels.launch import is_interpreted, uses_pdl

FEW, COUNT, PLACE = "align_few_kernel", "align_count_kernel", "align_place_kernel"
LEAST_PAIRS = 4096  # that are many
_THREADS, _WARPS, _MOST_BLOCKS, _MOST_EXPERTS = 512, 16, 64, 512
_FEW_THREADS, _FEW_WARPS, _STEP = 256, 8, 128


@cache
def _module(num_experts: int, top_k: int, num_shared: int, tile: int) -> CudaModule:
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    counts = (f"-DNUM_EXPERTS={num_experts}", f"-DTOP_K={top_k}", f"-DNUM_SHARED={num_shared}")
    return CudaModule(source, (*counts, f"-DTILE={tile}"))


@cache
def _few(*of_module: int) -> CudaFunction:
    return _module(*of_module).function(FEW, "PPPPiPlPiii")


@cache
def _many(*of_module: int) -> tuple[CudaFunction, CudaFunction]:
    module = _module(*of_module)
    return module.function(COUNT, "PPii"), module.function(PLACE, "PPPPPii")


def takes(ids: Tensor, num_experts: int) -> bool:
    """Whether `align` is for these pairs; ids have to be int32, in one piece."""
    return (
        not is_interpreted()
        and ids.numel() > 0
        and num_experts <= _MOST_EXPERTS
        and ids.dtype == torch.int32
        and ids.is_contiguous()
    )


def takes_rows(ids: Tensor, num_experts: int, x: Tensor) -> bool:
    """Whether `align` can bring rows of x into the order of products."""
    return takes(ids, num_experts) and ids.numel() < LEAST_PAIRS and x.shape[1] % 8 == 0


def empty_rows(x: Tensor) -> Tensor:
    """Room for x in the order of products: (T, whole steps of 128 columns)."""
    return x.new_empty(len(x), triton.cdiv(x.shape[1], _STEP) * _STEP)


def align(
    ids: Tensor,
    num_experts: int,
    num_shared: int,
    tile: int,
    sorted_pairs: Tensor,
    tile_experts: Tensor,
    num_tiles: Tensor,
    x: Tensor | None = None,
    rows: Tensor | None = None,
    early: bool = False,
) -> None:
    """Write what `experts.Groups` says, for ids (T, top_k) int32. num_experts: all, the shared one's pieces, too.

    x: (T, in) bfloat16, with rows, `empty_rows` of it, into which x is brought in the order in which products with
    NVFP4 weights read it, where `takes_rows`; rows of x are 16 bytes aligned. early: ids and x are complete as soon as
    the kernel before this one lets this one begin, which few pairs' does beside it; nothing that it writes may be in
    use there."""
    num_ids, of_module, pdl = ids.numel(), (num_experts, ids.shape[1], num_shared, tile), uses_pdl()
    if num_ids < LEAST_PAIRS:
        blocks, (num_rows, columns) = (
            triton.cdiv(num_experts, _FEW_WARPS),
            (0, 0) if x is None or rows is None else x.shape,
        )
        _few(*of_module).launch(
            (blocks + num_rows, 1, 1),
            (_FEW_THREADS, 1, 1),
            (
                ids, sorted_pairs, tile_experts, num_tiles, num_ids, x, 0 if x is None else x.stride(0), rows,
                columns, blocks, int(early),
            ),
            shared_bytes=max(4 * num_ids, 2 * triton.cdiv(columns, _STEP) * _STEP),
            pdl=pdl,
        )  # fmt: skip
        return
    per_block = triton.cdiv(triton.cdiv(num_ids, _MOST_BLOCKS), _THREADS) * _THREADS
    blocks = triton.cdiv(num_ids, per_block)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
    count, place = _many(*of_module)
    grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
    count.launch(grid, block, (ids, counts, num_ids, per_block), pdl=pdl)
    place.launch(
        grid,
        block,
        (ids, counts, sorted_pairs, tile_experts, num_tiles, num_ids, per_block),
        shared_bytes=4 * _WARPS * num_experts,
        pdl=pdl,
    )
