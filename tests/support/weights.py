"""Weights of every scheme from random codes, and what they stand for, decoded bit by bit and not by the package."""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.formats.weight import Scheme, Weight
from tests.support.numerics import randn, uniform

SCHEMES = (Scheme.PLAIN, Scheme.FP8, Scheme.NVFP4)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 0x7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E4M3 = torch.tensor([e4m3_value(code) for code in range(0x7F)], dtype=torch.float64)  # without NaN, ascending
_E4M3_ALL = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)


def e4m3_nearest(value: Tensor) -> Tensor:
    """float64 in and out: the nearest e4m3 value, ties to the even code, saturating."""
    magnitude = value.abs().clamp(max=448.0)
    above = torch.searchsorted(_E4M3, magnitude).clamp(min=1)
    below = above - 1
    down, up = magnitude - _E4M3[below], _E4M3[above] - magnitude
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(take_above, _E4M3[above], _E4M3[below]) * torch.sign(value)


def plain_weight(name: str, values: Tensor) -> Weight:
    return Weight(name, (values.shape[0], values.shape[1]), Scheme.PLAIN, values)


def random_weight(
    g: torch.Generator, name: str, scheme: Scheme, out_size: int, in_size: int, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    """Values of a magnitude of about 1 / sqrt(in_size); scales far from one, so that a forgotten one shows."""
    size = in_size**-0.5
    if scheme is Scheme.PLAIN:
        return plain_weight(name, (randn(g, out_size, in_size) * size).to(dtype))
    if scheme is Scheme.FP8:
        codes = (randn(g, out_size, in_size) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Weight(name, (out_size, in_size), scheme, codes, None, float(size / 60), 0.011)
    nibbles = torch.randint(0, 16, (out_size, in_size), generator=g, dtype=torch.uint8)
    block_scale = uniform(g, 4.0, 60.0, out_size, in_size // 16).to(torch.float8_e4m3fn)
    packed = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
    return Weight(name, (out_size, in_size), scheme, packed, block_scale, float(size / 90), 0.007)


def unscaled(weight: Weight) -> Tensor:
    """(out, in) float64: the stored values before the per-tensor scale."""
    if weight.scheme is Scheme.PLAIN:
        return weight.data.double()
    if weight.scheme is Scheme.FP8:
        return _E4M3_ALL[weight.data.view(torch.uint8).long()]
    assert weight.block_scale is not None, "NVFP4 has block scales"
    rows = []
    scales = _E4M3_ALL[weight.block_scale.view(torch.uint8).long()].tolist()
    for row, row_scales in zip(weight.data.tolist(), scales, strict=True):
        nibbles = [nibble for byte in row for nibble in (byte % 16, byte // 16)]
        rows.append([(-1) ** (n // 8) * E2M1[n % 8] * row_scales[i // 16] for i, n in enumerate(nibbles)])
    return torch.tensor(rows, dtype=torch.float64)


def values(weight: Weight) -> Tensor:
    """(out, in) float64: what the weight stands for."""
    return unscaled(weight) * (1.0 if weight.scale is None else weight.scale)


def product(x: Tensor, weight: Weight) -> Tensor:
    """x (T, in) float64 times the weight, float64: activations quantised where the scheme is W8A8, and only there."""
    if weight.scheme is Scheme.FP8:
        assert weight.input_scale is not None, "static W8A8 has an input scale"
        scale = torch.tensor(weight.input_scale, dtype=torch.float32)
        x = e4m3_nearest((x.float() / scale).double()) * weight.input_scale
    return x @ values(weight).T
