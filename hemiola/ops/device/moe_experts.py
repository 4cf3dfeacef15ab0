"""Routed experts on a GPU: `kernels.experts`. Contract: `ops.moe_experts`.

A bank of experts is kept packed in one tensor, which is filled expert by expert: what is needed for packing is one
expert's weight as it is on disk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import ExpertBank, Scheme
from hemiola.kernels import nvfp4_mma, nvfp4_wgmma
from hemiola.kernels.experts import ExpertWeights, experts
from hemiola.kernels.launch import capability
from hemiola.kernels.nvfp4 import REMAINDER, TILE, pack_words, words_per_row
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import register
from hemiola.tap import Tap


def unsupported(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertBank,
    down: ExpertBank,
    routed_scale: float = 1.0,
    shared: Tensor | None = None,
    *,
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
    return None


def _is_whole(bank: ExpertBank) -> bool:
    """Whether kernels can read it; where both projections are NVFP4 their sizes are multiples of 16 anyway."""
    return bank.scheme is not Scheme.NVFP4 or bank.shape[0] % TILE == 0


def warm(bank: ExpertBank, resident: ResidentWeights) -> None:
    """Build it ahead of the first call, which is told where it cannot be."""
    if _is_whole(bank):
        prepare(bank, resident)


def prepare(bank: ExpertBank, resident: ResidentWeights) -> ExpertWeights:
    """The bank as kernels read it; built once."""
    return resident.get(bank.name, "experts", lambda: _build(bank, resident))


def run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: ExpertBank,
    down: ExpertBank,
    routed_scale: float = 1.0,
    shared: Tensor | None = None,
    *,
    tap: Tap | None = None,
    resident: ResidentWeights,
    invariant: bool,
) -> Tensor:
    banks, ids = (prepare(up, resident), prepare(down, resident)), ids.to(torch.int32).contiguous()
    if not invariant and nvfp4_mma.takes_experts(x, *banks, *ids.shape):
        return nvfp4_mma.experts(x, ids, weights, *banks, routed_scale, shared)
    if not invariant and nvfp4_wgmma.takes_experts(x, *banks, *ids.shape):
        return nvfp4_wgmma.experts(x, ids, weights, *banks, routed_scale, shared)
    return experts(x, ids, weights, *banks, routed_scale, shared, invariant=invariant)


def _build(bank: ExpertBank, resident: ResidentWeights) -> ExpertWeights:
    columns = bank.shape[1]
    if bank.scheme is Scheme.NVFP4:
        codes = _empty(bank, words_per_row(columns), torch.int32, resident)
        block_scales = _empty(bank, words_per_row(columns) // 8, torch.int32, resident)
        for weight, words, scales in zip(bank, codes, block_scales, strict=True):
            assert weight.block_scale is not None, f"{weight.name} has no block scales"
            pack_words(resident.upload(weight.data), resident.upload(weight.block_scale), words, scales)
        scale = [REMAINDER * _given(weight.scale, weight.name) for weight in bank]
        return ExpertWeights(codes, block_scales, _vector(scale, resident), None)
    if bank.scheme is Scheme.FP8:
        codes = _empty(bank, columns, torch.float8_e4m3fn, resident)
        for weight, out in zip(bank, codes, strict=True):
            resident.upload(weight.data, out)
        input_scale = [_given(weight.input_scale, weight.name) for weight in bank]
        scale = [inner * _given(weight.scale, weight.name) for weight, inner in zip(bank, input_scale, strict=True)]
        return ExpertWeights(codes, None, _vector(scale, resident), _vector(input_scale, resident))
    codes = _empty(bank, columns, torch.bfloat16, resident)
    for weight, out in zip(bank, codes, strict=True):
        if weight.data.dtype == torch.bfloat16:
            resident.upload(weight.data, out)
        else:
            out.copy_(resident.upload(weight.data))
    return ExpertWeights(codes, None, None, None)


def _empty(bank: ExpertBank, row_size: int, dtype: torch.dtype, resident: ResidentWeights) -> Tensor:
    return torch.empty(len(bank), bank.shape[0], row_size, dtype=dtype, device=resident.device)


def _vector(values: list[float], resident: ResidentWeights) -> Tensor:
    return resident.upload(torch.tensor(values, dtype=torch.float32))


def _given(scale: float | None, name: str) -> float:
    assert scale is not None, f"{name} lacks a scale"
    return scale


register(
    op="moe_experts",
    arm="device",
    variant="triton",
    run=run,
    unsupported=unsupported,
    resident=True,
    invariant=True,
    prepare=warm,
)
