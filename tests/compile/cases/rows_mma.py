"""The CUDA kernels for few tokens: each tile of the tables at Lightning's and Super's sizes.

On Hopper, too, where pairs grouped by expert take other tiles: grouped_fp8.py and grouped_nvfp4.py have those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from unittest import mock

import torch

from hemiola.kernels import rows_mma
from hemiola.kernels.experts import BF16, FP8, NVFP4, ExpertWeights, SharedLinears
from hemiola.kernels.linear_nvfp4 import MMA_TILES, linear_nvfp4
from hemiola.kernels.nvfp4 import words_per_row
from hemiola.kernels.rows_mma import DIRECT, GROUP_TILES
from hemiola.kernels.tiles import tiled_shape
from tests.support.offline import SHARED_LIMIT

SCHEMES = {"nvfp4": NVFP4, "fp8": FP8, "bf16": BF16}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def linear(tokens: int, rows: int, columns: int) -> object:
    size = words_per_row(columns)
    words, scales = (empty(rows, n, dtype=torch.int32) for n in (size, size // 8))
    return linear_nvfp4(empty(tokens, columns), words, scales, rows, 0.1, True)


def bank(scheme: int, experts: int, rows: int, columns: int) -> ExpertWeights:
    vector = empty(experts, dtype=torch.float32)
    if scheme == NVFP4:
        words = words_per_row(columns)
        codes, scales = (empty(experts, rows, n, dtype=torch.int32) for n in (words, words // 8))
        return ExpertWeights(codes, scales, vector, None)
    dtype = torch.float8_e4m3fn if scheme == FP8 else torch.bfloat16
    codes = empty(experts, *tiled_shape(rows, columns, dtype), dtype=dtype)
    return ExpertWeights(codes, None, *((vector, vector) if scheme == FP8 else (None, None)))


def banks(
    scheme: int, num_experts: int, hidden: int, inter: int, num_shared: int
) -> tuple[ExpertWeights, ExpertWeights]:
    num_experts += num_shared
    up, down = bank(scheme, num_experts, inter, hidden), bank(scheme, num_experts, hidden, inter)
    return up._replace(num_shared=num_shared), down._replace(num_shared=num_shared)


def experts(
    scheme: int, tokens: int, top_k: int, num_experts: int, hidden: int, inter: int, num_shared: int = 0
) -> object:
    up, down = banks(scheme, num_experts, hidden, inter, num_shared)
    ids = empty(tokens, top_k, dtype=torch.int32)
    x = empty(tokens, hidden)
    shared = None if num_shared else SharedLinears(lambda: x, lambda hidden, early: hidden, beside=False)
    with mock.patch.dict(rows_mma.WGMMA_TILES, {scheme: ()}):
        return rows_mma.experts(x, ids, empty(tokens, top_k, dtype=torch.float32), up, down, 2.5, shared)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for tokens, _, _ in MMA_TILES:
        yield f"shared-up-{tokens}", partial(linear, tokens, 3712, 2688)
        yield f"lm-head-{tokens}", partial(linear, tokens, 131072, 2688)
    for name, scheme in SCHEMES.items():
        for tokens in range(1, len(DIRECT[scheme]) + 1):
            yield f"{name}-{tokens}", partial(experts, scheme, tokens, 6, 128, 2688, 1856)
            yield f"{name}-{tokens}-joined", partial(experts, scheme, tokens, 6, 128, 2688, 1856, 2)
        for most, _ in GROUP_TILES[scheme]:
            yield f"{name}-{most}", partial(experts, scheme, int(most * 128 / 6), 6, 128, 2688, 1856)
        yield f"super-{name}", partial(experts, scheme, 1, 22, 512, 1024, 2688)


def excludes(name: str, arch: int) -> str | None:
    if "fp8" in name and arch < 89:
        return "FP8 products need compute capability 8.9"
    scheme_name, _, most_pairs = name.partition("-")
    scheme = SCHEMES.get(scheme_name)
    for most, tile in GROUP_TILES.get(scheme, ()):
        # As `rows_mma.takes` has it, for up's rows, which are the longer.
        row_bytes = {NVFP4: 4 * words_per_row(2688), FP8: 2688, BF16: 2 * 2688}.get(scheme, 0)
        shared = rows_mma.group_shared_bytes(scheme, tile, row_bytes) + rows_mma.group_fixed_bytes(tile)
        if str(most) == most_pairs and tile.blocks * shared > SHARED_LIMIT[arch]:
            return f"a tile's blocks do not find room in {SHARED_LIMIT[arch]} bytes of shared memory"
    return None
