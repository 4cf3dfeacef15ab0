"""Time both projections of one layer's experts, pairs grouped, with the tiles of both of rows_mma's tables.

    PYTHONPATH=. python3 -m benchmarks.kernel_grouped [nvfp4] [fp8] [bf16]

At the geometry of Nemotron-3 Nano 30B. A graph of layers with random routings over two banks is replayed, so that no
projection finds its weights in the L2 cache; each begins beside the one before it, as in a model. Printed are
microseconds a layer, terabytes of weights a second (each expert that is taken counts once), and how far a tile's result
lies from the first one's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_experts import HIDDEN, INTER, NUM_EXPERTS, SCHEMES, TOP_K, bank, graph_time, routing
from hemiola.kernels import align, grouped_wgmma, rows_mma
from hemiola.kernels.experts import NVFP4, ExpertWeights, combine, empty_groups, empty_parts, fill_groups
from hemiola.kernels.grouped_wgmma import WgmmaTile
from hemiola.kernels.rows_mma import GROUP_TILES, WGMMA_TILES, GroupTile

TOKENS = (8, 32, 64, 128, 256)
LAYERS, WORKERS = 8, 16
Banks = tuple[ExpertWeights, ExpertWeights]


def tiles(scheme: int) -> list[GroupTile | WgmmaTile]:
    """Those of both tables."""
    return [tile for table in (GROUP_TILES, WGMMA_TILES) for _, tile in table[scheme] if tile is not None]


def layer(x: Tensor, ids: Tensor, weights: Tensor, banks: Banks, tile: GroupTile | WgmmaTile) -> Callable[[], Tensor]:
    """Both projections of x with a tile, whose groups are made here; what they give, added up, by a second call."""
    up, down = banks
    groups = empty_groups(ids, NUM_EXPERTS, tile.tokens, 0)
    rows = align.empty_rows(x) if up.scheme == NVFP4 and isinstance(tile, GroupTile) else None
    fill_groups(groups, ids, NUM_EXPERTS, tile.tokens, 0, x, rows, early=False)
    hidden_type = x.dtype if down.input_scale is None else torch.float8_e4m3fn
    hidden = torch.empty(ids.numel(), INTER, dtype=hidden_type, device=x.device)
    parts, _ = empty_parts(x, len(x), TOP_K, down)
    launch: Callable[..., None] = rows_mma.project_groups if isinstance(tile, GroupTile) else grouped_wgmma.project
    own_x, order = (x, {}) if rows is None else (rows, {"x_in_place": True})

    def run() -> Tensor:
        launch(own_x, TOP_K, up, TOP_K, *groups, hidden, tile, out_scales=down.input_scale, **order)
        launch(hidden, 1, down, TOP_K, *groups, parts, tile, pair_weights=weights)
        return parts

    return run


def time_scheme(name: str) -> None:
    scheme = SCHEMES[name]
    banks = [(bank(scheme, INTER, HIDDEN), bank(scheme, HIDDEN, INTER)) for _ in range(2)]
    expert_bytes = sum(t.nbytes for b in banks[0] for t in (b.codes, b.block_scales) if t is not None) / NUM_EXPERTS
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        routings = [routing(num_tokens) for _ in range(LAYERS)]
        taken = sum(len(ids.unique()) for ids, _ in routings) / LAYERS
        first = None
        for tile in tiles(scheme):
            layers = [layer(x, *routings[i], banks[i % 2], tile) for i in range(LAYERS)]
            result = combine(layers[0](), None, TOP_K, 1.0, None).float()
            first = result if first is None else first
            difference = ((result - first).norm() / first.norm()).item()
            seconds = graph_time(layers)
            rate = taken * expert_bytes / seconds / 1e12
            print(f"{name} T = {num_tokens}, {taken:.0f} experts, {tile}: {1e6 * seconds:.1f} us, {rate:.2f} TB/s, "
                  f"differs {difference:.1e}", flush=True)  # fmt: skip


def compile_all(schemes: list[str]) -> None:
    """Every tile's kernels, side by side."""
    modules = []
    for scheme in (SCHEMES[name] for name in schemes):
        for one, is_up in ((bank(scheme, INTER, HIDDEN), True), (bank(scheme, HIDDEN, INTER), False)):
            row_bytes = one.codes.shape[2] * one.codes.element_size()
            for tile in tiles(scheme):
                if isinstance(tile, GroupTile):
                    options = rows_mma.group_options(scheme, tile, row_bytes, scheme == NVFP4 and is_up)
                    modules.append(partial(rows_mma._group_function, options))
                else:
                    modules.append(partial(grouped_wgmma.function, tile, grouped_wgmma.row_steps(one)))
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda function: function().module.compile(), modules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("schemes", nargs="*", default=list(SCHEMES), help="nvfp4, fp8, bf16")
    schemes = parser.parse_args().schemes
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("this times kernels for Hopper, and there is no such GPU")
    compile_all(schemes)
    torch.manual_seed(0)
    for name in schemes:
        time_scheme(name)


if __name__ == "__main__":
    main()
