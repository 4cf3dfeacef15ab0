"""Mamba-2 mixer (`M`): in_proj, causal conv, SSD, gated group norm, out_proj.

in_proj's rows are [z, xBC, dt]; xBC is [x, B, C]. Decode rows take one op from there to out_proj, prefill rows the
varlen ones and the norm; the projections run over all rows at once. Source: vLLM 0.25.0 layers/mamba/mamba_mixer2.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Begun, Linear
from hemiola.model.specs import LayerCache, StateSpec, StateTensors
from hemiola.ops import Ops, PrefillLayout
from hemiola.tap import Tap


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """conv_weight (Dc, K), conv_bias (Dc,) or None, norm_weight (Di,): activation dtype; A, D, dt_bias (H,) float32."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor


class Mamba2Mixer:
    def __init__(
        self,
        spec: StateSpec,
        in_proj: Linear,
        out_proj: Linear,
        parameters: Mamba2Parameters,
        ssm_groups: int,
        chunk_size: int,
        dt_limit: tuple[float, float],
        eps: float,
        ops: Ops,
    ) -> None:
        self.spec, self.in_proj, self.out_proj, self.parameters = spec, in_proj, out_proj, parameters
        self.ssm_groups, self.chunk_size, self.dt_limit, self.eps, self.ops = ssm_groups, chunk_size, dt_limit, eps, ops
        self.input_scale = in_proj.input_scale
        self.inner = spec.num_heads * spec.head_dim
        self.group_size = self.inner // ssm_groups
        self.bc_size = ssm_groups * spec.state_size
        self.parts = [self.inner, spec.conv_dim, spec.num_heads]

    def begin(self, *norm: Any) -> Begun | None:
        """The norm before in_proj and that in one; None where they are two. norm: as `rms_norm` takes it."""
        return self.in_proj.begin(*norm)

    def __call__(
        self, x: torch.Tensor | tuple[torch.Tensor, ...], batch: ForwardBatch, cache: LayerCache, tap: Tap | None
    ) -> torch.Tensor:
        """x: the normed input, or in_proj's output alone in a tuple, where it has been begun with."""
        assert isinstance(cache, StateTensors), f"{self.in_proj.weight.name} was given no state"
        projected = x[0] if isinstance(x, tuple) else self.in_proj(x, tap)
        z, xBC, dt = projected.split_with_sizes(self.parts, dim=-1)
        parts = []
        d = batch.num_decodes
        if d:
            parts.append(self._update(z[:d], xBC[:d], dt[:d], batch.state_indices[:d], cache))
        if batch.num_prefills:
            y = self._scan(xBC[d:], dt[d:], batch, cache)
            parts.append(
                self.ops.gated_rms_norm(
                    y.flatten(1), z[d:], self.parameters.norm_weight, self.group_size, self.eps,
                    self.out_proj.input_scale,
                )
            )  # fmt: skip
        return self.out_proj(parts[0] if len(parts) == 1 else torch.cat(parts), tap)

    def warm(self) -> None:
        self.in_proj.warm()
        self.out_proj.warm()

    def _update(
        self, z: torch.Tensor, xBC: torch.Tensor, dt: torch.Tensor, state_indices: torch.Tensor, cache: StateTensors
    ) -> torch.Tensor:
        """One token per row: (R, Di), (R, Dc) and (R, H) -> (R, Di), as out_proj takes it.

        Nothing in this layer has written a decode row's state yet, as the op demands.
        """
        p = self.parameters
        gated: torch.Tensor = self.ops.mamba2_update(
            z, xBC, dt, p.conv_weight, p.conv_bias, cache.conv, p.A, p.D, p.dt_bias, cache.ssm, state_indices,
            p.norm_weight, self.group_size, self.eps, self.dt_limit, self.out_proj.input_scale,
        )  # fmt: skip
        return gated

    def _scan(self, xBC: torch.Tensor, dt: torch.Tensor, batch: ForwardBatch, cache: StateTensors) -> torch.Tensor:
        """The prefill rows' tokens: (T, Dc) and (T, H) -> (T, H, P)."""
        d, marks = batch.num_decodes, batch.marks
        if marks is not None:  # the request's own state has to be copied before its rows move on
            for states in cache:
                states[marks.slots] = states[marks.sources]
            self._scan_rows(
                xBC[marks.tokens], dt[marks.tokens], marks.slots, marks.start_loc, marks.num_computed,
                marks.has_initial_state, marks.layout, cache,
            )  # fmt: skip
        return self._scan_rows(
            xBC, dt, batch.state_indices[d:], batch.prefill_start_loc, batch.num_computed[d:],
            batch.has_initial_state[d:], batch.layout, cache,
        )  # fmt: skip

    def _scan_rows(
        self,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        num_computed: torch.Tensor,
        has_initial_state: torch.Tensor,
        layout: PrefillLayout | None,
        cache: StateTensors,
    ) -> torch.Tensor:
        p = self.parameters
        convolved = self.ops.causal_conv1d(
            xBC, p.conv_weight, p.conv_bias, cache.conv, slots, starts, has_initial_state, layout
        )
        inputs, B, C = self._split(convolved)
        y: torch.Tensor = self.ops.ssd_scan(
            inputs, dt, p.A, B, C, p.D, p.dt_bias, cache.ssm, slots, starts, num_computed, self.chunk_size,
            self.dt_limit, layout,
        )  # fmt: skip
        return y

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, Dc) -> x (T, H, P), B and C (T, G, N)."""
        x, B, C = convolved.split_with_sizes([self.inner, self.bc_size, self.bc_size], dim=-1)
        groups = (-1, self.ssm_groups, self.spec.state_size)
        return x.view(-1, self.spec.num_heads, self.spec.head_dim), B.view(groups), C.view(groups)
