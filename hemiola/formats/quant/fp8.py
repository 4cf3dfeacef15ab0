"""FP8 e4m3 with one fp32 scale per tensor, as in ModelOpt's static W8A8: value = float(code) * scale.

e4m3 is the "fn" variant: largest finite value 448, no infinities, NaN at 0x7F and 0xFF. Owns the rounding; knows
nothing of files, names or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hemiola.errors import CheckpointError

MAX = 448.0


def quantize(x: Tensor, scale: float) -> Tensor:
    """Round x / scale to e4m3, to nearest even, saturating at +-448; NaN stays NaN and the sign of zero is kept.

    x: any shape, any float dtype; divided in fp32. scale: positive, finite. Returns float8_e4m3fn of x's shape.
    """
    # A tensor, because torch turns division by a Python number into a multiplication on some devices.
    divisor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    # Clamped before the cast: what the cast does above 448 depends on the torch version.
    return (x.float() / divisor).clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def dequantize(codes: Tensor, scale: float) -> Tensor:
    """Value of each code: float(code) * scale, rounded once, in fp32. codes: float8_e4m3fn, any shape."""
    return codes.float() * scale


def encode(w: Tensor) -> tuple[Tensor, float]:
    """Quantise a weight by its largest magnitude: (float8_e4m3fn codes of w's shape, scale = amax / 448 in fp32).

    An all-zero weight gets scale 1.0, so that a scale on disk is always positive.

    Raises: CheckpointError when w holds NaN or infinity.
    """
    amax = w.float().abs().max()
    if not torch.isfinite(amax):
        raise CheckpointError(
            "cannot quantise a weight that holds NaN or infinity", remedy="Repair the source weights."
        )
    scale = float(amax / MAX) or 1.0
    return quantize(w, scale), scale
