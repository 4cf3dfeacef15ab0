"""Mixture-of-experts mixer (`E`): sigmoid router, routed experts (in a latent space where there is one), shared expert.

The routed scaling factor multiplies the routed output once, before fc2; the shared expert sees the full hidden input
and is never scaled. Source: vLLM 0.25.0 model_executor/models/nemotron_h.py (NemotronHMoE).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hemiola.formats.weight import ExpertBank, Experts, SharedExpert, Weight
from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Linear
from hemiola.model.mixers.mlp import MLPMixer
from hemiola.model.specs import LayerCache
from hemiola.ops import Ops
from hemiola.tap import Tap


@dataclass(frozen=True, slots=True)
class Router:
    """The router's weight and settings."""

    gate: Weight
    gate_dtype: torch.dtype
    correction_bias: torch.Tensor
    top_k: int
    router_groups: int
    topk_router_groups: int
    normalise: bool

    def arguments(self) -> tuple[Any, ...]:
        """Of `ops.moe_route`, after x."""
        groups = (self.router_groups, self.topk_router_groups)
        return self.gate, self.gate_dtype, self.correction_bias, self.top_k, *groups, self.normalise


class Routed(NamedTuple):
    """x: the normed input, (T, hidden). ids, weights: (T, top_k), its experts."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Ended(NamedTuple):
    """What comes after the layer is begun with, as `rms_norm` gives it: x, the layer's output added and normed, (T,
    hidden), or codes for the next mixer; residual: the new one."""

    x: torch.Tensor
    residual: torch.Tensor


class MoEMixer:
    def __init__(
        self,
        router: Router,
        up: ExpertBank,
        down: ExpertBank,
        routed_scaling_factor: float,
        shared: MLPMixer | None,
        latent: tuple[Linear, Linear] | None,
        ops: Ops,
    ) -> None:
        self.router, self.up, self.down = router, up, down
        self.routed_scaling_factor = routed_scaling_factor
        self.shared, self.latent, self.ops = shared, latent, ops
        # Without a latent space in between, one op runs the shared expert with the others.
        self.together = None
        if shared is not None and latent is None:
            self.together = SharedExpert(shared.up_proj.weight, shared.down_proj.weight)
        self.input_scale: float | None = None  # the router, the experts and the shared expert read one input

    def begin(self, *norm: Any) -> tuple[Routed, torch.Tensor] | None:
        """The norm and the router in one op, and the new residual; None where they are two. norm: as `rms_norm` takes
        it."""
        given = (*norm, *self.router.arguments())
        if not self.ops.takes("norm_route", ("rms_norm", "moe_route"), *given):
            return None
        ids, weights, _, normed, total = self.ops.norm_route(*given)
        return Routed(normed, ids, weights), total

    def route(self, x: torch.Tensor) -> Routed:
        ids, weights, _ = self.ops.moe_route(x, *self.router.arguments())
        return Routed(x, ids, weights)

    def __call__(
        self,
        x: torch.Tensor | Routed,
        batch: ForwardBatch,
        cache: LayerCache,
        tap: Tap | None,
        then: tuple[Any, ...] | None = None,
    ) -> torch.Tensor | Ended:
        """x: the normed input, or that with its experts, where they have been begun with. then: the norm that comes
        after the layer, as `rms_norm` takes it behind x; where one op does both, the layer is ended with it."""
        x, ids, weights = x if isinstance(x, Routed) else self.route(x)
        if self.latent is None:
            given = (x, ids, weights, self.up, self.down, self.routed_scaling_factor, self.together)
            if then is not None and self.ops.takes("experts_norm", ("moe_experts", "rms_norm"), given, *then):
                return Ended(*self.ops.experts_norm(given, *then))
            routed: torch.Tensor = self.ops.moe_experts(*given, tap=tap)
            return routed
        shared = None if self.shared is None else self.shared.feed(x, tap)
        inputs = self.latent[0](x, tap)
        routed = self.ops.moe_experts(inputs, ids, weights, self.up, self.down, self.routed_scaling_factor, tap=tap)
        routed = self.latent[1](routed, tap)
        return routed if shared is None else shared + routed

    def warm(self) -> None:
        self.ops.prepare("moe_route", self.router.gate)
        self.ops.prepare("moe_experts", Experts(self.up, self.down, self.together))
        for linear in (None if self.together else self.shared, *(self.latent or ())):
            if linear is not None:
                linear.warm()
