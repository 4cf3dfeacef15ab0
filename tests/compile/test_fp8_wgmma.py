"""FP8 products of some tokens follow on each other without a wait or a fence between them; tiles fill a GPU; the layout
of sums has a place for each."""

from __future__ import annotations

import ctypes
import re
from itertools import product

import pytest
import torch

from hemiola.kernels import cuda, fp8_wgmma
from hemiola.kernels.cuda import compile_source
from hemiola.kernels.fp8_wgmma import Tile
from tests.support.offline import assembly

needs_nvrtc = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
SIZES = [(10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712)]


@needs_nvrtc
@pytest.mark.parametrize("tile", [Tile(8, 80, 1, 1, 18), Tile(128, 80, 1, 4, 4), Tile(64, 168, 8, 1, 4)], ids=str)
def test_products_follow_on_each_other(tile: Tile) -> None:
    module = fp8_wgmma.function(tile).module
    text = assembly(compile_source(module.source, 90, module.options))
    assert len(re.findall(rf"QGMMA\.64x{tile.rows}x32\.F32\.E4M3\.E4M3", text)) == 4
    assert text.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 1
    assert ("MEMBAR" in text) == (tile.splits > 1)  # once, before sums are read
    assert text.count("MEMBAR.ALL.GPU") <= 1


def test_tensor_maps_are_arguments_at_64_bytes() -> None:
    function = fp8_wgmma.function(Tile(8, 80, 1, 1, 18))
    maps = bytes(range(128)), bytes(128)
    function.marshal((*maps, torch.empty(1), 0.5, 1.0, 1, 2, 3, 4))
    places = [int(function._pointers[i] or 0) for i in range(2)]
    assert [place % 64 for place in places] == [0, 0]
    assert [ctypes.string_at(place, 128) for place in places] == list(maps)
    with pytest.raises(TypeError, match="TTPffiiii"):
        function.marshal((1, *maps, 0.5, 1.0, 1, 2, 3, 4))


@needs_nvrtc
def test_shared_memory_is_that_of_the_source() -> None:
    for tile in (Tile(8, 80, 1, 1, 18), Tile(128, 208, 1, 1, 2), Tile(64, 168, 8, 1, 4), Tile(96, 24, 3, 1, 5)):
        module = fp8_wgmma.function(tile).module
        check = f"\nstatic_assert(1024 + BARRIERS_AT + 16 * STAGES == {fp8_wgmma.shared_bytes(tile)});"
        compile_source(module.source + check, 90, module.options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for an H200's multiprocessors")
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_tiles_fill_a_gpu_and_fit(rows: int, columns: int) -> None:
    steps = -(-columns // 128)
    for tokens in range(3, 129):
        tile = fp8_wgmma.linear_tile(tokens, rows, steps)
        blocks = -(-rows // (tile.rows * tile.share)) * tile.share * tile.splits
        assert 100 <= blocks <= 264, (tokens, tile)
        assert fp8_wgmma.shared_bytes(tile) <= 227 << 10
        assert tile.tokens >= tokens


def test_every_eight_rows_have_one_block_that_adds_them() -> None:
    """The arithmetic of hand_out() and write()."""
    for pieces, splits in product(range(1, 33), range(1, 9)):
        most = -(-pieces // splits)
        for piece in range(pieces):
            owner = ((piece + 1) * splits - 1) // pieces
            first, last = pieces * owner // splits, pieces * (owner + 1) // splits
            assert first <= piece < last <= first + most
