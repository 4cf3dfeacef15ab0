"""Products of wgmma overlap with decoding, which a compiler that is not sure of their registers does away with; and
what tile is for what."""

from __future__ import annotations

import pytest
import torch

from hemiola.kernels import cuda, nvfp4_wgmma
from hemiola.kernels.cuda import compile_source
from hemiola.kernels.nvfp4_wgmma import SplitTile, WideTile
from tests.support.offline import assembly

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))


def options(tile: SplitTile | None) -> tuple[str, ...]:
    module = (nvfp4_wgmma.split_function(tile) if tile else nvfp4_wgmma.function(nvfp4_wgmma.EXPERTS)).module
    return module.options


@pytest.mark.parametrize("tile", [None, *nvfp4_wgmma.split_tiles(1), *nvfp4_wgmma.split_tiles(4)[-8:]], ids=str)
def test_products_are_waited_for_at_the_end_alone(tile: SplitTile | None) -> None:
    text = assembly(compile_source(nvfp4_wgmma.source(), 90, options(tile)))
    widths = (tile.tokens if tile else 128) // 32
    assert text.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == widths
    assert text.count("HGMMA") == widths * 2 * (8 if tile is None else tile.rows // 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for an H200's multiprocessors")
def test_columns_are_shared_out_where_items_are_few() -> None:
    for rows, steps in ((3712, 21), (2688, 29)):
        for num_tokens in range(65, 513):
            tile = nvfp4_wgmma.linear_tile(num_tokens, rows, steps)
            assert isinstance(tile, SplitTile)
            assert tile.splits > 1 or num_tokens > 128
            assert isinstance(nvfp4_wgmma.linear_tile(num_tokens, rows, steps, invariant=True), WideTile)
        assert isinstance(nvfp4_wgmma.linear_tile(4096, rows, steps), WideTile)
    few = nvfp4_wgmma.linear_tile(128, 2688, 2)
    assert isinstance(few, SplitTile)
    assert few.splits <= 2
