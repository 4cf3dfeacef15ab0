"""FP8: rounding against a table of all codes, round trips over all 256 codes, saturation, signs, degenerate weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hemiola.errors import CheckpointError
from hemiola.formats.quant import fp8

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
IS_NAN = torch.tensor([byte & 0x7F == 0x7F for byte in range(256)])


def value_of(byte: int) -> float:
    """The number that an e4m3fn byte stands for, from its bits alone."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 0xF, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


def nearest_byte(x: float) -> int:
    """Byte of the nearest finite code, a tie to the even byte."""
    magnitude = min(abs(x), 448.0)
    byte = min(range(0x7F), key=lambda code: (abs(value_of(code) - magnitude), code & 1))
    return byte | (0x80 if torch.tensor(x).signbit() else 0)


def as_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def test_every_code_has_its_value() -> None:
    values = fp8.dequantize(CODES, 1.0)
    assert torch.isnan(values).tolist() == IS_NAN.tolist()
    assert values[~IS_NAN].tolist() == [value_of(byte) for byte in range(256) if not IS_NAN[byte]]


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 448, 0.0123, 3e-6, 7.7])
def test_every_code_survives_the_round_trip(scale: float) -> None:
    again = fp8.quantize(fp8.dequantize(CODES, scale), scale)
    assert torch.equal(as_bytes(again)[~IS_NAN], as_bytes(CODES)[~IS_NAN])  # -0 (0x80) is among them
    assert torch.isnan(again.float())[IS_NAN].all()


def test_rounding_is_to_nearest_even_and_saturates() -> None:
    every_bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every_bf16[torch.isfinite(every_bf16)].float()
    midpoints = torch.tensor([(value_of(byte) + value_of(byte + 1)) / 2 for byte in range(0x7E)])
    up, down = (torch.nextafter(midpoints, torch.tensor(end)) for end in (1e9, 0.0))
    x = torch.cat([finite[::37], midpoints, -midpoints, up, down])
    assert as_bytes(fp8.quantize(x, 1.0)).tolist() == [nearest_byte(v) for v in x.tolist()]
    beyond = torch.tensor([449.0, 464.0, 1e30, float("inf")])
    assert fp8.quantize(torch.cat([beyond, -beyond]), 1.0).float().tolist() == [448.0] * 4 + [-448.0] * 4


def test_nan_stays_nan() -> None:
    assert torch.isnan(fp8.quantize(torch.tensor([float("nan")]), 2.0).float()).all()


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_encoding_keeps_the_largest_value_and_is_a_fixed_point(values: list[float]) -> None:
    w = torch.tensor(values)
    codes, scale = fp8.encode(w)
    decoded = fp8.dequantize(codes, scale)
    assert scale > 0
    # Half a step of e4m3: 2**-4 of a normal value, half of the smallest code below.
    assert ((decoded - w).abs() <= (w.abs() * 2**-4).clamp(min=scale * 2**-10) * (1 + 1e-6)).all()
    assert torch.equal(as_bytes(fp8.quantize(decoded, scale)), as_bytes(codes))


def test_an_all_zero_weight_has_a_usable_scale() -> None:
    codes, scale = fp8.encode(torch.zeros(2, 16))
    assert scale == 1.0
    assert not codes.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        fp8.encode(torch.tensor([[1.0, bad]]))
