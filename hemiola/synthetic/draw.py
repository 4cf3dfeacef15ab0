"""The values of drawn weights: each tensor from its own generator, keyed by seed and name, on any device.

Quantised weights are drawn as codes and scales, never quantised: that is fast, and every code occurs. The gains keep a
network of any depth in order: each mixer adds about a fifth of what the embedding brings.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from hemiola.formats.layout import Module, Role
from hemiola.formats.quant import fp8, nvfp4

# Standard deviation of a linear's outputs for inputs of variance one; 1 where not listed. A down_proj sees squares of
# ReLUs, of mean square 1.5; a routed sum is as large as an expert's output times scale / sqrt(top_k).
_GAINS = {"out_proj": 0.2, "o_proj": 0.3, "down_proj": 0.12, "lm_head": 2.0}
# Largest input that an activation scale is made for; the others see a norm's output.
_AMAX = {"out_proj": 10.0, "down_proj": 24.0}
_NORM_AMAX = 6.0
KV_SCALE = 6.0 / fp8.MAX

_FP8_DEVIATION = 80.0  # of e4m3 codes drawn from a normal distribution
_BLOCK_SCALES = (0x58, 0x68)  # bytes of e4m3 block scales, 16 to 60
_BLOCK_SCALE_VALUES = torch.arange(*_BLOCK_SCALES, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_NVFP4_DEVIATION = float(nvfp4.VALUES.square().mean().sqrt() * _BLOCK_SCALE_VALUES.square().mean().sqrt())


class Source:
    """Draws tensors on `device`. The same seed, name and device give the same values."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.seed = device, seed

    def _generator(self, name: str) -> torch.Generator:
        # 32 bits: torch's generator on the CPU takes no more of a seed.
        return torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def vector(self, module: Module) -> Tensor:
        """What is no linear: norms, conv, A_log, D, dt_bias (bfloat16) and the router's correction bias (float32)."""
        generator, leaf = self._generator(module.name), module.name.rpartition(".")[2]

        def uniform(low: float, high: float) -> Tensor:
            values = torch.rand(module.shape, generator=generator, device=self.device)
            return values.mul_(high - low).add_(low)

        if module.role is Role.ROUTER:
            return uniform(-0.05, 0.05)
        if leaf == "A_log":
            values = uniform(1.0, 16.0).log_()
        elif leaf == "dt_bias":
            values = uniform(math.log(1e-3), math.log(0.1)).exp_().expm1_().log_()
        elif leaf == "D":
            values = uniform(0.5, 1.5)
        elif ".conv1d." in module.name:
            values = uniform(-0.7, 0.7) if leaf == "weight" else uniform(-0.1, 0.1)
        else:
            values = uniform(0.9, 1.1)
        return values.to(torch.bfloat16)

    def plain(self, module: Module) -> Tensor:
        """(out, in) bfloat16; float32 for a router's gate."""
        dtype = torch.float32 if module.role is Role.ROUTER else torch.bfloat16
        return self._normal(module, dtype).mul_(deviation(module))

    def fp8(self, module: Module) -> Tensor:
        """(out, in) float8_e4m3fn codes."""
        values = self._normal(module, torch.bfloat16).mul_(_FP8_DEVIATION)
        return values.clamp_(-fp8.MAX, fp8.MAX).to(torch.float8_e4m3fn)

    def nvfp4(self, module: Module) -> tuple[Tensor, Tensor]:
        """Packed codes (out, in / 2) uint8, all sixteen equally often; block scales (out, in / 16) float8_e4m3fn."""
        generator, (rows, columns) = self._generator(module.name), module.shape
        size = rows * columns // 2
        words = torch.empty(-(-size // 8), dtype=torch.int64, device=self.device)
        words.random_(-(1 << 63), None, generator=generator)
        scales = torch.empty(rows, columns // nvfp4.BLOCK, dtype=torch.uint8, device=self.device)
        scales.random_(*_BLOCK_SCALES, generator=generator)
        return words.view(torch.uint8)[:size].view(rows, columns // 2), scales.view(torch.float8_e4m3fn)

    def _normal(self, module: Module, dtype: torch.dtype) -> Tensor:
        generator = self._generator(module.name)
        return torch.randn(module.shape, generator=generator, dtype=dtype, device=self.device)


def deviation(module: Module) -> float:
    """Standard deviation of a linear's weight."""
    if module.role is Role.EMBEDDING:
        return 1.0
    return _GAINS.get(module.name.rpartition(".")[2], 1.0) / math.sqrt(module.shape[1])


def fp8_scale(module: Module) -> float:
    """weight_scale of codes from `Source.fp8`."""
    return deviation(module) / _FP8_DEVIATION


def nvfp4_scale(module: Module) -> float:
    """weight_scale_2 of codes from `Source.nvfp4`."""
    return deviation(module) / _NVFP4_DEVIATION


def input_scale(module: Module, largest_code: float) -> float:
    """Activation scale that maps the largest expected input to `largest_code`."""
    return _AMAX.get(module.name.rpartition(".")[2], _NORM_AMAX) / largest_code
