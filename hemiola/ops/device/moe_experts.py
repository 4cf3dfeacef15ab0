"""Experts on a GPU: `kernels.experts`, `kernels.rows_mma` and `kernels.nvfp4_wgmma`. Contract: `ops.moe_experts`.

A bank of experts is kept packed in one tensor, which is filled expert by expert: what is needed for packing is one
expert's weight as it is on disk. Two variants: `joined`, where the shared expert is cut into pieces of an expert's
size, which are experts of the bank for few tokens; `beside`, where it always runs as two linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from hemiola.formats.weight import ExpertBank, Experts, Scheme, SharedExpert, Weight
from hemiola.kernels import nvfp4_wgmma, router, rows_mma
from hemiola.kernels.experts import BF16, FP8, NVFP4, End, ExpertWeights, SharedLinears, empty_codes, experts
from hemiola.kernels.launch import capability
from hemiola.kernels.nvfp4 import REMAINDER, pack_words, words_per_row
from hemiola.kernels.tiles import TILE, write_tiles
from hemiola.ops.device import linear, linear_fp8, linear_nvfp4
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register
from hemiola.tap import Tap

_LINEAR = {Scheme.PLAIN: linear, Scheme.FP8: linear_fp8, Scheme.NVFP4: linear_nvfp4}
# By scheme: most for which pieces of the shared expert are faster than linears.
TOGETHER_TOKENS = {NVFP4: 48, FP8: 16, BF16: 16}
# By scheme of its down projection: most for which that runs beside the routed experts' up projection.
BESIDE_TOKENS = {Scheme.NVFP4: 512, Scheme.FP8: 42, Scheme.PLAIN: 0}
_PIECE_COLUMNS = 16  # a block of NVFP4, so that a piece of down_proj has whole ones


def unsupported(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertBank,
    down: ExpertBank,
    routed_scale: float = 1.0,
    shared: SharedExpert | None = None,
    *,
    joined: bool,
    tap: Tap | None = None,
) -> str | None:
    if tap is not None:
        return "experts' inputs are not collected on a device"
    if x.dtype != torch.bfloat16:
        return "activations are float32: the device arm computes in bfloat16"
    if Scheme.FP8 in (up.scheme, down.scheme) and 0 < capability() < 89:
        return "FP8 products need compute capability 8.9"
    if parts := [bank for bank in (up, down) if not _is_whole(bank)]:
        return f"NVFP4 weights come in tiles of {TILE} rows: {parts[0].name} has {parts[0].shape[0]}"
    reason = not_joined(Experts(up, down, shared))
    if joined:
        return reason
    return None if reason else "the shared expert is joined to the others"


def not_joined(layer: Experts) -> str | None:
    """Why the shared expert cannot be cut into experts; None where it is."""
    up, down, shared = layer
    if shared is None:
        return "there is no shared expert"
    if (shared.up.scheme, shared.down.scheme) != (up.scheme, down.scheme):
        return f"the shared expert is {shared.up.scheme.value} and {shared.down.scheme.value}, the others are not"
    inter, size = up.shape
    if shared.up.shape[1] != size or shared.up.shape[0] % inter or inter % _PIECE_COLUMNS:
        return f"the shared expert is {shared.up.shape}, no multiple of {up.shape}"
    return None


def _is_whole(bank: ExpertBank) -> bool:
    """Whether kernels can read it; where both projections are NVFP4 their sizes are multiples of 16 anyway."""
    return bank.scheme is not Scheme.NVFP4 or bank.shape[0] % TILE == 0


def prepare(layer: Experts, resident: ResidentWeights, *, joined: bool) -> None:
    """Build ahead of the first call what it needs, where this variant is for the layer and can be."""
    if (not_joined(layer) is None) is joined and _is_whole(layer.up) and _is_whole(layer.down):
        banks(layer, resident)
        for weight in layer.shared or ():
            _LINEAR[weight.scheme].prepare(weight, resident)


def banks(layer: Experts, resident: ResidentWeights) -> tuple[ExpertWeights, ExpertWeights]:
    """Up and down as kernels read them, with the pieces of a shared expert that is joined; built once."""
    up, down, shared = layer
    if shared is None or not_joined(layer):
        return _kept(up, tuple, resident), _kept(down, tuple, resident)
    inter = up.shape[0]
    starts = range(0, shared.up.shape[0], inter)
    return (
        _kept(up, lambda: _pieces(shared.up, _rows, starts, inter, resident), resident),
        _kept(down, lambda: _pieces(shared.down, _columns, starts, inter, resident), resident),
    )


def run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertBank,
    down: ExpertBank,
    routed_scale: float = 1.0,
    shared: SharedExpert | None = None,
    *,
    joined: bool,
    tap: Tap | None = None,
    resident: ResidentWeights,
    invariant: bool,
    end: End | None = None,
) -> Any:
    """end: as `kernels.experts` takes it."""
    first, second = banks(Experts(up, down, shared), resident)
    ids, linears = ids.to(torch.int32).contiguous(), None
    # Pieces have every token: from so many on the linears' kernels, which read a weight once, are faster.
    if shared is not None and not (joined and (invariant or len(x) <= TOGETHER_TOKENS[first.scheme])):
        linears = _shared_linears(x, shared, resident, invariant)
        first, second = first._replace(num_shared=0), second._replace(num_shared=0)  # no id leads to a piece
    if not invariant and rows_mma.takes_experts(x, first, second, *ids.shape):
        return rows_mma.experts(x, ids, weights, first, second, routed_scale, linears, end)
    part = linears.part() if linears else None
    if nvfp4_wgmma.takes_experts(x, first, second, len(ids), ids.shape[1], invariant):
        return nvfp4_wgmma.experts(x, ids, weights, first, second, routed_scale, part, end=end)
    return experts(x, ids, weights, first, second, routed_scale, part, invariant=invariant, end=end)


def _shared_linears(x: Tensor, shared: SharedExpert, resident: ResidentWeights, invariant: bool) -> SharedLinears:
    """The first is launched right behind the router's kernel, before which x was complete, but where that norms x."""
    out_scale = shared.down.input_scale if shared.down.scheme is Scheme.FP8 else None
    first, second = _LINEAR[shared.up.scheme], _LINEAR[shared.down.scheme]
    # An FP8 one quantises x first, in a kernel that waits.
    is_early = first is not linear_fp8 and len(x) not in router.NORM_TOKENS

    def up() -> Tensor:
        given = {"resident": resident, "invariant": invariant, "early": is_early}
        hidden: Tensor = first.run(x, shared.up, x.dtype, True, out_scale, **given)
        return hidden

    def down(hidden: Tensor, early: bool) -> Tensor:
        part: Tensor = second.run(hidden, shared.down, x.dtype, resident=resident, invariant=invariant, early=early)
        return part

    return SharedLinears(up, down, capability() == 90 and len(x) <= BESIDE_TOKENS[shared.down.scheme])


def _pieces(
    weight: Weight,
    cut: Callable[[Weight, int, int], Weight],
    starts: Iterable[int],
    count: int,
    resident: ResidentWeights,
) -> list[Weight]:
    """A weight of the shared expert, uploaded once, as a linear's and as pieces."""
    block_scale = None if weight.block_scale is None else resident.upload(weight.block_scale)
    there = _piece(weight, weight.shape, resident.upload(weight.data), block_scale)
    _LINEAR[weight.scheme].prepare(there, resident)
    return [cut(there, start, count) for start in starts]


def _rows(weight: Weight, start: int, count: int) -> Weight:
    """A piece of an up projection."""
    rows = slice(start, start + count)
    block_scale = None if weight.block_scale is None else weight.block_scale[rows]
    return _piece(weight, (count, weight.shape[1]), weight.data[rows], block_scale)


def _columns(weight: Weight, start: int, count: int) -> Weight:
    """A piece of a down projection."""
    per_byte = 2 if weight.scheme is Scheme.NVFP4 else 1
    data = weight.data[:, start // per_byte : (start + count) // per_byte].contiguous()
    block_scale = weight.block_scale
    if block_scale is not None:
        block_scale = block_scale[:, start // _PIECE_COLUMNS : (start + count) // _PIECE_COLUMNS].contiguous()
    return _piece(weight, (weight.shape[0], count), data, block_scale)


def _piece(weight: Weight, shape: tuple[int, int], data: Tensor, block_scale: Tensor | None) -> Weight:
    return Weight(weight.name, shape, weight.scheme, data, block_scale, weight.scale, weight.input_scale)


def _kept(bank: ExpertBank, pieces: Callable[[], Sequence[Weight]], resident: ResidentWeights) -> ExpertWeights:
    """The bank as kernels read it; built once."""
    return resident.get(bank.name, "experts", lambda: _build(bank, pieces(), resident))


def _build(bank: ExpertBank, pieces: Sequence[Weight], resident: ResidentWeights) -> ExpertWeights:
    weights, (rows, columns), num_shared = (*bank, *pieces), bank.shape, len(pieces)

    def empty(row_size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(len(weights), rows, row_size, dtype=dtype, device=resident.device)

    if bank.scheme is Scheme.NVFP4:
        codes = empty(words_per_row(columns), torch.int32)
        block_scales = empty(words_per_row(columns) // 8, torch.int32)
        for weight, words, scales in zip(weights, codes, block_scales, strict=True):
            assert weight.block_scale is not None, f"{weight.name} has no block scales"
            pack_words(resident.upload(weight.data), resident.upload(weight.block_scale), words, scales)
        scale = [REMAINDER * _given(weight.scale, weight.name) for weight in weights]
        return ExpertWeights(codes, block_scales, _vector(scale, resident), None, num_shared)
    if bank.scheme is Scheme.FP8:
        codes = empty_codes(len(weights), rows, columns, torch.float8_e4m3fn, resident.device)
        for weight, out in zip(weights, codes, strict=True):
            write_tiles(resident.upload(weight.data), out)
        input_scale = [_given(weight.input_scale, weight.name) for weight in weights]
        scale = [inner * _given(weight.scale, weight.name) for weight, inner in zip(weights, input_scale, strict=True)]
        one = len(set(input_scale[: len(bank)])) == 1
        return ExpertWeights(codes, None, _vector(scale, resident), _vector(input_scale, resident), num_shared, one)
    codes = empty_codes(len(weights), rows, columns, torch.bfloat16, resident.device)
    for weight, out in zip(weights, codes, strict=True):
        write_tiles(resident.upload(weight.data).to(torch.bfloat16), out)
    return ExpertWeights(codes, None, None, None, num_shared)


def _vector(values: list[float], resident: ResidentWeights) -> Tensor:
    return resident.upload(torch.tensor(values, dtype=torch.float32))


def _given(scale: float | None, name: str) -> float:
    assert scale is not None, f"{name} lacks a scale"
    return scale


def _bound(function: Callable[..., Any], joined: bool) -> Callable[..., Any]:
    return update_wrapper(partial(function, joined=joined), function)


for _joined in (True, False):
    register(
        op="moe_experts",
        arm="device",
        variant="joined" if _joined else "beside",
        run=_bound(run, _joined),
        unsupported=_bound(unsupported, _joined),
        resident=True,
        invariant=True,
        prepare=_bound(prepare, _joined),
    )
