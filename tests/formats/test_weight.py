"""Weight: what each scheme stands for, and that parts of a projection keep their own scales."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hemiola.formats.quant import fp8, nvfp4
from hemiola.formats.weight import Scheme, Weight

W = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))


def fp8_weight(scale: float, input_scale: float | None = None) -> Weight:
    return Weight("m", (6, 32), Scheme.FP8, fp8.quantize(W, 1.0), scale=scale, input_scale=input_scale)


def nvfp4_weight(scale: float) -> Weight:
    packed, block_scale, _ = nvfp4.encode(W)
    return Weight("m", (6, 32), Scheme.NVFP4, packed, block_scale, scale)


def test_plain_is_the_weight_itself() -> None:
    weight = Weight("m", (6, 32), Scheme.PLAIN, W.bfloat16())
    assert weight.dense().dtype is torch.float32
    assert torch.equal(weight.dense(), W.bfloat16().float())
    assert torch.equal(weight.codes(), weight.dense())
    assert weight.stored_bytes == 6 * 32 * 2


def test_fp8_is_code_times_scale_and_ignores_the_input_scale() -> None:
    weight = fp8_weight(0.37, input_scale=5.0)
    assert torch.equal(weight.codes(), fp8.quantize(W, 1.0).float())
    assert torch.equal(weight.dense(), weight.codes() * torch.tensor(0.37))
    assert weight.stored_bytes == 6 * 32


def test_nvfp4_is_code_times_block_scale_times_scale() -> None:
    packed, block_scale, _ = nvfp4.encode(W)
    weight = nvfp4_weight(0.37)
    by_hand = torch.empty(6, 32)
    for row in range(6):
        for column in range(32):
            code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
            by_hand[row, column] = nvfp4.VALUES[code] * block_scale[row, column // 16].float()
    assert torch.equal(weight.codes(), by_hand)
    assert torch.equal(weight.dense(), by_hand * torch.tensor(0.37))
    assert weight.stored_bytes == 6 * 16 + 6 * 2


@pytest.mark.parametrize(("make", "scales"), [(fp8_weight, (0.5, 1.0, 4.0)), (nvfp4_weight, (0.125, 1.0, 8.0))])
def test_three_parts_of_a_projection_keep_their_own_scales(make: object, scales: tuple[float, ...]) -> None:
    assert callable(make)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    parts = [make(scale) for scale in scales]
    unscaled = x.double() @ parts[0].codes().double().T
    for part, scale in zip(parts, scales, strict=True):
        assert torch.equal(x.double() @ part.dense().double().T, unscaled * scale)


def test_a_weight_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fp8_weight(1.0).scale = 2.0  # type: ignore[misc]
