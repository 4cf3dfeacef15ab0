"""The decode step of a Mamba-2 layer: each tile at Lightning's size, and the other public sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.mamba2_update import TILES, Tile, mamba2_update

SIZES = {"super": (128, 64), "nano-4b": (96, 80), "nano-9b": (128, 80), "ultra": (256, 64)}  # heads, head_dim
OTHER_TILES = [
    Tile(*shape, streams) for shape in ((1, 4), (1, 16), (2, 8), (2, 16), (4, 16)) for streams in (True, False)
]


def update(
    heads: int, head_dim: int, rows: int = 3, tile: Tile | None = None, out_scale: float | None = None
) -> object:
    inner, groups, state = heads * head_dim, 8, 128
    channels = inner + 2 * groups * state

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    z, xBC, dt = empty(rows, inner + channels + heads).split([inner, channels, heads], -1)
    A, D, dt_bias = (empty(heads, dtype=torch.float32) for _ in range(3))
    return mamba2_update(
        z, xBC, dt, empty(channels, 4), empty(channels), empty(9, channels, 3), A, D, dt_bias,
        empty(9, heads, head_dim, state, dtype=torch.float32), empty(rows, dtype=torch.int32), empty(inner),
        inner // groups, 1e-5, (0.0, math.inf), out_scale, tile,
    )  # fmt: skip


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    for number, (most, tile) in enumerate(TILES):
        most = min(most, 64)
        yield f"lightning-{number}", partial(update, 64, 64, 3, tile, 0.1)
        for name, size in SIZES.items():
            yield f"{name}-{number}", partial(update, *size, most)
    for tile in OTHER_TILES:
        yield f"lightning-{tile.heads}-{tile.rows}-{tile.streams}", partial(update, 64, 64, 3, tile)


def excludes(name: str, arch: int) -> str | None:
    return "clusters of blocks need compute capability 9.0" if arch < 90 else None


# Two registers on sm_120 alone.
STACK = {"lightning-0": 8}
