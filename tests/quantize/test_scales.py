"""From amax to scales: the arithmetic, the one rule by which a scale is borrowed, and where none is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError
from hemiola.quantize.plan import QuantPlan
from hemiola.quantize.scales import ActivationScales, activation_scales, tap_names
from tests.support.variants import tiny

EXPERT = "backbone.layers.1.mixer.experts"


def build(scheme: str, **changes: float) -> tuple[dict[str, str], ActivationScales]:
    """Scales when every tap has met 7.0, but for `changes` by a part of the tap's name."""
    plan = QuantPlan.build(NemotronHConfig.from_dict(tiny("ME*E", n_routed_experts=4)), scheme)
    taps = tap_names(plan)
    amax = dict.fromkeys(taps.values(), 7.0)
    for part, value in changes.items():
        hit = [tap for tap in amax if part in tap]
        assert hit, f"{part} is in no tap's name"
        amax |= dict.fromkeys(hit, value)
    return taps, activation_scales(plan, amax, Path("model"))


def float32(value: float) -> float:
    return float(torch.tensor(value))


def test_fp8_inputs_and_kv_are_over_448() -> None:
    taps, scales = build("lightning", **{"mixer.k": 3.0})
    in_proj = "backbone.layers.0.mixer.in_proj"
    k_scale, v_scale = (f"backbone.layers.2.mixer.{x}_proj.{x}_scale" for x in "kv")
    assert taps[in_proj] == f"{in_proj}.input"
    assert (taps[k_scale], taps[v_scale]) == ("backbone.layers.2.mixer.k", "backbone.layers.2.mixer.v")
    assert scales.kv == {k_scale: float32(3.0 / 448), v_scale: float32(7.0 / 448)}
    assert scales.inputs == dict.fromkeys([in_proj, in_proj.replace("in_", "out_")], float32(7.0 / 448))


def test_nvfp4_inputs_are_over_2688_and_have_no_kv_scales() -> None:
    _, scales = build("nvfp4")
    assert set(scales.inputs.values()) == {float32(7.0 / 2688)}
    assert scales.kv == {}


def test_an_unreached_expert_borrows_its_layer_s_largest_and_is_named() -> None:
    changes = {f"{EXPERT}.2.": 0.0, f"{EXPERT}.0.up": 11.0, f"{EXPERT}.1.down": 5.0, "layers.3.mixer.experts": 90.0}
    changes |= {f"{EXPERT}.3.down": 0.0}  # reached, but its hidden activations were all zero
    _, scales = build("fp8", **changes)
    assert scales.borrowed_experts == (f"{EXPERT}.2", f"{EXPERT}.3")
    assert scales.inputs[f"{EXPERT}.2.up_proj"] == float32(11.0 / 448)
    assert scales.inputs[f"{EXPERT}.2.down_proj"] == float32(7.0 / 448)
    assert scales.inputs[f"{EXPERT}.3.up_proj"] == float32(7.0 / 448)
    assert scales.inputs[f"{EXPERT}.1.down_proj"] == float32(5.0 / 448)


@pytest.mark.parametrize(
    ("scheme", "part", "value", "problem", "count"),
    [
        ("fp8", EXPERT, 0.0, "zero or never met", 8),
        ("nvfp4", "layers.3.mixer.shared_experts.down", 0.0, "zero or never met", 1),
        ("lightning", "mixer.v", 0.0, "zero or never met", 1),
        ("lightning", "layers.0.mixer.in_proj", float("nan"), "NaN or infinity", 1),
        ("fp8", f"{EXPERT}.1.up", float("inf"), "NaN or infinity", 1),
    ],
)
def test_no_scale_is_made_up(scheme: str, part: str, value: float, problem: str, count: int) -> None:
    with pytest.raises(CheckpointError, match=rf"{problem} \({count}\): .*{part.replace('mixer.v', 'v_scale')}"):
        build(scheme, **{part: value})
