"""From largest magnitudes to scales, and what to do where there is none.

An expert that calibration never reached, or whose input was always zero, gets the largest input amax of the same
projection among its layer's other experts, and is reported. Anything else without an amax is an error: no scale is made
up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hemiola.formats.declaration import Algorithm
from hemiola.formats.layout import Module, Role
from hemiola.formats.manifest import Manifest
from hemiola.formats.problems import Problems
from hemiola.formats.quant import fp8, nvfp4
from hemiola.quantize.plan import QuantPlan, has_input_scale
from hemiola.quantize.progress import Progress

_INPUT_RANGE = {Algorithm.FP8: fp8.MAX, Algorithm.NVFP4: nvfp4.MAX * fp8.MAX}


@dataclass(frozen=True, eq=False)
class ActivationScales:
    """inputs: input_scale by module name. kv: k_scale and v_scale by tensor name. All float32 values.

    borrowed_experts: names of the experts ("...mixer.experts.5") that got a neighbour's scale.
    """

    inputs: Mapping[str, float]
    kv: Mapping[str, float]
    borrowed_experts: tuple[str, ...]


def _ratio(amax: float, largest: float) -> float:
    """amax / largest, rounded to float32."""
    return float(torch.tensor(amax / largest))


def weight_scales(manifest: Manifest, plan: QuantPlan, four_over_six: bool, progress: Progress) -> dict[str, float]:
    """The per-tensor scale of each module to quantise, by module name: amax over the range; 1.0 when it is all zero.

    four_over_six: which of NVFP4's two encodings the scale is for.

    Raises: CheckpointError naming every module that holds NaN or infinity.
    """
    modules = plan.quantized()
    nvfp4_range = nvfp4.FOUR_OVER_SIX_RANGE if four_over_six else nvfp4.MAX * fp8.MAX
    total = sum(manifest.tensor(module.tensor_name).nbytes for module in modules)
    problems, scales, done = Problems(), {}, 0
    progress("check", 0, total)
    for module in modules:
        weight = manifest.tensor(module.tensor_name)
        low, high = weight.aminmax()
        amax = max(-float(low), float(high))
        if not math.isfinite(float(low)) or not math.isfinite(float(high)):
            problems.add("weight that holds NaN or infinity", module.name)
        is_fp8 = plan.algorithms[module.name] is Algorithm.FP8
        scales[module.name] = _ratio(amax, fp8.MAX if is_fp8 else nvfp4_range) or 1.0
        done += weight.nbytes
        progress("check", done, total)
    problems.raise_if_any(manifest.checkpoint.folder, "Repair the source weights.")
    return scales


def tap_names(plan: QuantPlan) -> dict[str, str]:
    """Which tap gives the activations of each scale: tap name by module name or KV scale's tensor name."""
    taps = {m.name: f"{m.name}.input" for m in plan.quantized() if has_input_scale(plan.algorithms[m.name])}
    for name in plan.kv_scales():  # "<mixer>.k_proj.k_scale" is of "<mixer>.k"
        taps[name] = f"{name.removesuffix('_scale').rpartition('.')[0].removesuffix('_proj')}"
    return taps


def activation_scales(plan: QuantPlan, amax_of_tap: Mapping[str, float], folder: Path) -> ActivationScales:
    """Scales from what calibration met.

    Raises: CheckpointError naming activations that were not finite, and modules that calibration gave nothing but
        zeros or did not reach, where no neighbour can lend a scale.
    """
    amax = {name: amax_of_tap[tap] for name, tap in tap_names(plan).items()}
    problems = Problems()
    for name in [name for name, value in amax.items() if not math.isfinite(value)]:
        problems.add("activations that hold NaN or infinity", name)
    modules = [module for module in plan.quantized() if module.name in amax]
    borrowed = []
    lenders = _largest_by_projection(modules, amax)
    for module in modules:
        if amax[module.name] == 0 and module.role is Role.ROUTED_EXPERTS:
            amax[module.name] = lenders[_projection(module)]
            borrowed.append(module.name.rpartition(".")[0])
    for name in [name for name, value in amax.items() if value == 0]:
        problems.add("activations that were zero or never met", name)
    problems.raise_if_any(folder, "Calibrate on more, or other, text.")
    inputs = {m.name: _ratio(amax[m.name], _INPUT_RANGE[plan.algorithms[m.name]]) for m in modules}
    kv = {name: _ratio(amax[name], fp8.MAX) for name in plan.kv_scales()}
    return ActivationScales(inputs, kv, tuple(dict.fromkeys(borrowed)))


def _projection(module: Module) -> tuple[int | None, str]:
    """What experts of one layer share: the layer, and "up_proj" or "down_proj"."""
    return module.layer, module.name.rpartition(".")[2]


def _largest_by_projection(modules: list[Module], amax: Mapping[str, float]) -> dict[tuple[int | None, str], float]:
    largest: dict[tuple[int | None, str], float] = {}
    for module in modules:
        if module.role is Role.ROUTED_EXPERTS:
            key = _projection(module)
            largest[key] = max(largest.get(key, 0.0), amax[module.name])
    return largest
