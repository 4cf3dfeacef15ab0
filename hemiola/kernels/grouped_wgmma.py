"""FP8 and NVFP4 experts on Hopper, pairs grouped by expert, in CUDA C++. See grouped.cuh.

FP8 (grouped_fp8.cu): a block asks for weights all the time, whatever else it waits for. A sum runs over the columns in
one order: no bit depends on a pair's tile, or on its neighbours. NVFP4 (grouped_nvfp4.cu): weights are decoded in
registers, and sums are those of a block's warpgroups, added in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hemiola.kernels.cuda import CudaFunction, CudaModule, source_of
from hemiola.kernels.experts import FP8, NVFP4, ExpertWeights
from hemiola.kernels.launch import capability, num_sms, uses_pdl
from hemiola.kernels.tiles import PIECE_BYTES, TILE

KERNEL = "experts_grouped_kernel"
_RELU_SQUARED, _QUANTISED, _EARLY = 1, 4, 8
_STRIPS, _X_WARPS, _MOST_STAGES = 4, 7, 16
_ROOM = 226 << 10  # of a block's shared memory, but for a kilobyte of barriers and the like
_TILE_BYTES = TILE * PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """tokens: 8, 16, 24 or 32 pairs. step: tiles of a strip of weights that are fetched at a time, an even number.
    x_buffers: tiles of pairs whose x has room."""

    tokens: int
    step: int
    x_buffers: int

    def x_bytes(self, row_steps: int) -> int:
        """Of x in shared memory: blocks of 128 bytes of each row."""
        return 128 * self.tokens * -(-row_steps // 2)

    def stages(self, row_steps: int) -> int:
        """Of the ring of weights: as many as there is room for."""
        room = _ROOM - 1024 - self.x_buffers * self.x_bytes(row_steps)
        return min(room // (_STRIPS * self.step * _TILE_BYTES), _MOST_STAGES)

    def shared_bytes(self, row_steps: int) -> int:
        ring = self.stages(row_steps) * _STRIPS * self.step * _TILE_BYTES
        return 1024 + self.x_buffers * self.x_bytes(row_steps) + ring

    def threads(self) -> int:
        return 32 * (_STRIPS + 1 + _X_WARPS)

    def fits(self, row_steps: int) -> bool:
        return self.stages(row_steps) > 1

    def macros(self, row_steps: int) -> dict[str, int]:
        stages = self.stages(row_steps)
        return {"STEP": self.step, "STAGES": stages, "X_BUFFERS": self.x_buffers, "X_WARPS": _X_WARPS}


@dataclass(frozen=True, slots=True)
class Nvfp4Tile:
    """tokens: as of Fp8Tile. warpgroups: of a block. most: tiles of a strip that a warp has under way, at most."""

    tokens: int
    warpgroups: int
    most: int

    def depth(self, row_steps: int) -> int:
        """Tiles under way: a number that divides those of a strip, if there is one not much less than `most`."""
        most = min(self.most, row_steps)
        dividing = max(n for n in range(1, most + 1) if row_steps % n == 0)
        return dividing if 2 * dividing >= most else most

    def shared_bytes(self, row_steps: int) -> int:
        """x, and sums that a warpgroup leaves to another."""
        return 1024 + 256 * self.tokens * (row_steps + self.warpgroups)

    def threads(self) -> int:
        return 32 * _STRIPS * self.warpgroups

    def fits(self, row_steps: int) -> bool:
        return self.shared_bytes(row_steps) <= _ROOM

    def macros(self, row_steps: int) -> dict[str, int]:
        depth = self.depth(row_steps)
        words = 2 if depth <= 5 else 1  # for which there are registers
        return {"WARPGROUPS": self.warpgroups, "DEPTH": depth, "AT_A_TIME": words}


WgmmaTile = Fp8Tile | Nvfp4Tile


def product(tile: WgmmaTile) -> str:
    """The wgmma of 64 rows, A in registers, and a tile's columns of B, in shared memory, as a CUDA function."""
    size, is_fp8 = tile.tokens // 2, isinstance(tile, Fp8Tile)
    kind, order = ("k32.f32.e4m3.e4m3", "") if is_fp8 else ("k16.f32.bf16.bf16", ", 0")
    sums = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(size))
    return f"""
__device__ __forceinline__ void product(float (&d)[{size}], const unsigned (&a)[4], unsigned long long b) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{tile.tokens}{kind} "
                 "{{{sums}}}, {{%{size}, %{size + 1}, %{size + 2}, %{size + 3}}}, %{size + 4}, p, 1, 1{order};}}"
                 : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}"""


@cache
def function(tile: WgmmaTile, row_steps: int, options: tuple[str, ...] = ()) -> CudaFunction:
    own = ("grouped.cuh", "grouped_fp8.cu")
    if isinstance(tile, Nvfp4Tile):
        own = ("nvfp4.cuh", "grouped.cuh", "grouped_nvfp4.cu")
    macros = {"TOKENS": tile.tokens, "ROW_STEPS": row_steps, "GROUPED_KERNEL": KERNEL, **tile.macros(row_steps)}
    source = f"{product(tile)}\n{source_of('wgmma.cuh', *own)}"
    module = CudaModule(source, (*(f"-D{name}={value}" for name, value in macros.items()), *options))
    return module.function(KERNEL, "PlPPPPPPPPPPPiiiiiiii")


def row_steps(bank: ExpertWeights) -> int:
    """Tiles of a strip."""
    return bank.codes.shape[2] * bank.codes.element_size() // PIECE_BYTES


def takes(x: Tensor, up: ExpertWeights, down: ExpertWeights, tile: WgmmaTile) -> bool:
    """Whether `project` can take x through up, and what that gives, rows without gaps between them, through down."""
    return (
        capability() == 90
        and len(x) > 0
        and x.shape[1] % TILE == 0
        and up.codes.shape[1] % TILE == 0
        and (len(x) == 1 or x.stride(0) % 8 == 0)
        and x.data_ptr() % 16 == 0
        and all(row_steps(bank) > 0 and tile.fits(row_steps(bank)) for bank in (up, down))
    )


def project(
    x: Tensor,
    pairs_per_x: int,
    bank: ExpertWeights,
    top_k: int,
    sorted_pairs: Tensor,
    experts: Tensor,
    num_tiles: Tensor,
    out: Tensor,
    tile: WgmmaTile,
    *,
    out_scales: Tensor | None = None,
    pair_weights: Tensor | None = None,
    pieces: Tensor | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """As `rows_mma.project_groups`; rows of `x` are as they are for every scheme."""
    steps = row_steps(bank)
    assert bank.scheme == (FP8 if isinstance(tile, Fp8Tile) else NVFP4), f"{tile} is of another scheme"
    assert out_scales is None or bank.scheme == FP8, "what goes to NVFP4 weights is not quantised"
    flags = _RELU_SQUARED if pair_weights is None else _EARLY
    function(tile, steps, options).launch(
        (num_sms(), 1, 1),
        (tile.threads(), 1, 1),
        (
            x, x.stride(0), bank.codes, bank.block_scales, bank.scale, sorted_pairs, experts, num_tiles, pair_weights,
            out, pieces, None if x.dtype == torch.float8_e4m3fn else bank.input_scale, out_scales, len(out),
            pairs_per_x, top_k, bank.num_shared, len(bank.codes), out.shape[1], x.shape[1],
            flags | _QUANTISED * (out_scales is not None),
        ),
        shared_bytes=tile.shared_bytes(steps),
        pdl=uses_pdl(),
    )  # fmt: skip
