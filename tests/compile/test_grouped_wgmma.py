"""What the launcher of grouped_fp8.cu and grouped_nvfp4.cu says of a block is what the sources have."""

from __future__ import annotations

import pytest

from hemiola.kernels import cuda, grouped_wgmma
from hemiola.kernels.cuda import compile_source
from hemiola.kernels.grouped_wgmma import Fp8Tile, Nvfp4Tile, WgmmaTile
from hemiola.kernels.rows_mma import WGMMA_TILES
from tests.support.offline import launch_bounds

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
TILES = [tile for table in WGMMA_TILES.values() for _, tile in table if tile]


@pytest.mark.parametrize("tile", [*TILES, Fp8Tile(32, 2, 2), Fp8Tile(8, 4, 3), Nvfp4Tile(8, 4, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 3, 7, 29])
def test_shared_memory_and_threads_are_those_of_the_source(tile: WgmmaTile, steps: int) -> None:
    module = grouped_wgmma.function(tile, steps).module
    used = "1024 + X_BUFFERS * X_BYTES + STAGES * STAGE_BYTES"
    if isinstance(tile, Nvfp4Tile):
        used = "1024 + X_BYTES + WARPGROUPS * SUMS * 4 * WARPGROUP"
    check = f"\nstatic_assert({used} == {tile.shared_bytes(steps)});"
    cubin = compile_source(module.source + check, 90, module.options)
    assert launch_bounds(cubin, grouped_wgmma.KERNEL) == tile.threads()
