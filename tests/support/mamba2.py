"""Inputs of mamba2_update as the mixer gives them, slices of in_proj's output; and one step of it in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.numerics import INF, randn, uniform

EPS = 1e-5
NO_LIMIT = (0.0, INF)


@dataclass(frozen=True)
class Mamba2Inputs:
    """z (R, Di), xBC (R, Dc), dt (R, H), conv_weight (Dc, K), conv_bias (Dc,), norm_weight (Di,): activation dtype.
    A, D, dt_bias (H,): float32. history (R, Dc, K-1) and state (R, H, P, N) float32: of the rows."""

    z: Tensor
    xBC: Tensor
    dt: Tensor
    conv_weight: Tensor
    conv_bias: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    history: Tensor
    state: Tensor
    groups: int

    @classmethod
    def random(
        cls,
        g: torch.Generator,
        num_rows: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        width: int = 4,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Mamba2Inputs:
        """Channels of different sizes, so that groups, heads and channels show; some heads decay slowly; D is large."""
        inner = heads * head_dim
        channels = inner + 2 * groups * state_size
        whole = randn(g, num_rows, inner + channels + heads)
        whole[:, : inner + channels] *= torch.linspace(0.5, 2, inner + channels).roll(3 * inner // 7)
        z, xBC, dt = whole.to(dtype).split([inner, channels, heads], 1)
        return cls(
            z, xBC, dt,
            conv_weight=randn(g, channels, width, dtype=dtype),
            conv_bias=randn(g, channels, dtype=dtype),
            A=-torch.exp(torch.linspace(-4, 1, heads)),
            D=uniform(g, 3, 6, heads),
            dt_bias=uniform(g, -3.0, 0.5, heads),
            norm_weight=uniform(g, 0.5, 1.5, inner).to(dtype),
            history=randn(g, num_rows, channels, width - 1, dtype=dtype),
            state=randn(g, num_rows, heads, head_dim, state_size),
            groups=groups,
        )  # fmt: skip

    @property
    def group_size(self) -> int:
        return self.z.shape[1] // self.groups

    def cuda(self) -> Mamba2Inputs:
        """The rows stay slices of one tensor."""
        whole = torch.cat([self.z, self.xBC, self.dt], 1).cuda()
        z, xBC, dt = whole.split([self.z.shape[1], self.xBC.shape[1], self.dt.shape[1]], 1)
        others = {f.name: getattr(self, f.name).cuda() for f in fields(self) if f.name not in (*_ROWS, "groups")}
        return replace(self, z=z, xBC=xBC, dt=dt, **others)

    def rows(self, which: Any) -> Mamba2Inputs:
        return replace(self, **{name: getattr(self, name)[which] for name in (*_ROWS, "history", "state")})

    def pools(self, num_slots: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States of `num_slots` slots, NaN but for the rows' own."""
        conv = self.history.new_full((num_slots, *self.history.shape[1:]), torch.nan)
        ssm = self.state.new_full((num_slots, *self.state.shape[1:]), torch.nan)
        for row, slot in enumerate(slots):
            if slot >= 0:
                conv[slot], ssm[slot] = self.history[row], self.state[row]
        return conv, ssm

    def arguments(
        self,
        conv_state: Tensor,
        ssm_state: Tensor,
        slots: Tensor,
        dt_limit: tuple[float, float] = NO_LIMIT,
        out_scale: float | None = None,
    ) -> tuple[Any, ...]:
        """The op's, in order."""
        return (
            self.z, self.xBC, self.dt, self.conv_weight, self.conv_bias, conv_state, self.A, self.D, self.dt_bias,
            ssm_state, slots, self.norm_weight, self.group_size, EPS, dt_limit, out_scale,
        )  # fmt: skip

    def exact(self, dt_limit: tuple[float, float] = NO_LIMIT, norm_size: int | None = None) -> tuple[Tensor, Tensor]:
        """(R, Di) and the new states (R, H, P, N), float64, nothing rounded. norm_size: other groups for the norm."""
        num_rows, heads, head_dim, state_size = self.state.shape
        inner, bc = heads * head_dim, self.groups * state_size
        window = torch.cat([self.history, self.xBC[..., None]], -1).double()
        convolved = silu((window * self.conv_weight.double()).sum(-1) + self.conv_bias.double())
        x, B, C = convolved.split([inner, bc, bc], 1)
        x = x.view(num_rows, heads, head_dim)
        B, C = (t.view(num_rows, self.groups, -1).repeat_interleave(heads // self.groups, 1) for t in (B, C))
        step = torch.nn.functional.softplus(self.dt.double() + self.dt_bias.double()).clamp(*dt_limit)
        decay = torch.exp(self.A.double() * step)[..., None, None]
        new = decay * self.state.double() + x[..., None] * (step[..., None] * B)[:, :, None]
        y = (new @ C[..., None]).squeeze(-1) + self.D.double()[:, None] * x
        gated = (y.flatten(1) * silu(self.z.double())).view(num_rows, -1, norm_size or self.group_size)
        normed = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + EPS)
        return normed.flatten(1) * self.norm_weight.double(), new


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


_ROWS = ("z", "xBC", "dt")
