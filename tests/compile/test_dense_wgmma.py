"""Products of a few tokens follow on each other without a wait or a fence between them; tiles fill a GPU; each sum
has a place."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import pytest
import torch

from hemiola.kernels import cuda, dense_wgmma
from hemiola.kernels.cuda import compile_source
from hemiola.kernels.dense_wgmma import Tile
from tests.support.offline import assembly

needs_nvrtc = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
for_an_h200 = pytest.mark.skipif(torch.cuda.is_available(), reason="for an H200's multiprocessors")
SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712)]


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "product_name"),
    [(torch.float8_e4m3fn, "QGMMA.64x{}x32.F32.E4M3.E4M3"), (torch.bfloat16, "HGMMA.64x{}x16.F32.BF16")],
    ids=["fp8", "bf16"],
)
@pytest.mark.parametrize(
    "tile", [Tile(8, 80, 1, 9, 21), Tile(64, 80, 1, 4, 4), Tile(64, 168, 8, 4, 3), Tile(128, 64, 2, 4, 3)], ids=str
)
def test_products_follow_on_each_other(tile: Tile, dtype: torch.dtype, product_name: str) -> None:
    module = dense_wgmma.function(tile, dtype).module
    text = assembly(compile_source(module.source, 90, module.options))
    assert len(re.findall(re.escape(product_name.format(tile.rows)), text)) == 4
    assert text.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 1
    assert ("MEMBAR" in text) == (tile.splits > 1)  # once, before sums are read
    assert text.count("MEMBAR.ALL.GPU") <= 1


def test_tensor_maps_are_arguments_at_64_bytes() -> None:
    function = dense_wgmma.function(Tile(8, 80, 1, 9, 21), torch.float8_e4m3fn)
    maps = bytes(range(128)), bytes(128)
    function.marshal((*maps, torch.empty(1), 0.5, 1.0, 1, 2, 3, 4))
    places = [int(function._pointers[i] or 0) for i in range(2)]
    assert [place % 64 for place in places] == [0, 0]
    assert [ctypes.string_at(place, 128) for place in places] == list(maps)
    with pytest.raises(TypeError, match="TTPffiiii"):
        function.marshal((1, *maps, 0.5, 1.0, 1, 2, 3, 4))


@needs_nvrtc
def test_shared_memory_is_that_of_the_source() -> None:
    for tile in (Tile(8, 80, 1, 9, 21), Tile(64, 208, 1, 2, 3), Tile(64, 168, 8, 4, 2), Tile(32, 24, 3, 5, 7)):
        module = dense_wgmma.function(tile, torch.bfloat16).module
        check = f"\nstatic_assert(1024 + BARRIERS_AT + 16 * (STAGES + X_STAGES) == {dense_wgmma.shared_bytes(tile)});"
        compile_source(module.source + check, 90, module.options)


@for_an_h200
@pytest.mark.parametrize("item", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_tiles_fill_a_gpu_and_fit(rows: int, columns: int, item: int) -> None:
    for tokens in range(3, 65):
        tile = dense_wgmma.linear_tile(tokens, rows, -(-columns * item // 128))
        assert tile is not None
        assert 110 <= -(-rows // tile.rows) * tile.splits <= 132, (tokens, tile)
        assert tile.tokens >= tokens


@for_an_h200
def test_tiles_of_the_sizes_that_were_measured() -> None:
    for tokens, width in ((3, 8), (8, 8), (9, 16), (17, 32), (32, 32), (33, 64)):
        few = tokens <= 16
        assert (dense_wgmma.linear_tile(tokens, 10304, 21) or ())[:3] == (width, 80, 1)
        assert (dense_wgmma.linear_tile(tokens, 3712, 21) or ())[:3] == (width, 64, 2)
        assert (dense_wgmma.linear_tile(tokens, 2688, 32) or ())[:3] == (width, *((88, 4) if few else (48, 2)))


@for_an_h200
def test_tiles_of_any_size_fit() -> None:
    for tokens, rows, steps in product((8, 16, 32, 64, 128), range(8, 33000, 136), (*range(1, 40), 200)):
        tile = dense_wgmma.linear_tile(tokens, rows, steps)
        if tile is None:  # rings of fewer rows than products read
            assert steps < 5, (tokens, rows, steps)
            assert rows < 64 * 132, (tokens, rows, steps)
            continue
        own_steps = -(-steps // tile.splits)
        assert tile.splits <= steps
        assert tile.rows in range(max(16, 8 * tile.splits), 257, 8)
        assert min(3, own_steps) <= tile.stages <= own_steps
        assert min(2, own_steps) <= tile.x_stages <= own_steps
        assert (tile.x_stages - 1) * tokens + 64 <= tile.x_stages * tokens + tile.stages * tile.rows
        assert dense_wgmma.shared_bytes(tile) <= 227 << 10
    assert dense_wgmma.linear_tile(129, 10304, 21) is None


def test_every_eight_rows_have_one_block_that_adds_them() -> None:
    """The arithmetic of hand_out() and write()."""
    for pieces, splits in product(range(1, 33), range(1, 9)):
        most = -(-pieces // splits)
        for piece in range(pieces):
            owner = ((piece + 1) * splits - 1) // pieces
            first, last = pieces * owner // splits, pieces * (owner + 1) // splits
            assert first <= piece < last <= first + most
