"""The Mamba-2 recurrence, token by token in float64: the oracle of both SSD ops."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.support.numerics import INF, randn, uniform


@dataclass(frozen=True)
class SSDInputs:
    """x (T, H, P), dt (T, H), B and C (T, G, N) in the activation dtype; A, D, dt_bias (H,) float32."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor

    @classmethod
    def random(
        cls,
        g: torch.Generator,
        num_tokens: int,
        *,
        heads: int = 4,
        head_dim: int = 3,
        groups: int = 2,
        state_size: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> SSDInputs:
        """Some heads decay slowly (A_log down to -4), so that a wrong or stale state stays visible."""
        return cls(
            x=randn(g, num_tokens, heads, head_dim, dtype=dtype),
            dt=randn(g, num_tokens, heads, dtype=dtype),
            A=-torch.exp(torch.linspace(-4, 1, heads)),
            B=randn(g, num_tokens, groups, state_size, dtype=dtype),
            C=randn(g, num_tokens, groups, state_size, dtype=dtype),
            D=uniform(g, 0.5, 1.5, heads),
            dt_bias=uniform(g, -3.0, 0.5, heads),
        )

    def rows(self, part: slice) -> SSDInputs:
        return replace(self, x=self.x[part], dt=self.dt[part], B=self.B[part], C=self.C[part])

    def step_sizes(self, dt_limit: tuple[float, float] = (0.0, INF)) -> Tensor:
        """(T, H) float64: softplus(dt + dt_bias), clamped."""
        raw = self.dt.double() + self.dt_bias.double()
        return torch.where(raw > 20, raw, torch.log1p(torch.exp(raw))).clamp(*dt_limit)

    def group(self, head: int) -> int:
        return head // (self.x.shape[1] // self.B.shape[1])


def recurrence(
    inputs: SSDInputs, state: Tensor | None = None, dt_limit: tuple[float, float] = (0.0, INF)
) -> tuple[Tensor, Tensor]:
    """Returns y (T, H, P) and the last state (H, P, N), both float64. state: the first one; None is zero."""
    num_tokens, heads, head_dim = inputs.x.shape
    x, A, B, C, D = (t.double() for t in (inputs.x, inputs.A, inputs.B, inputs.C, inputs.D))
    steps = inputs.step_sizes(dt_limit)
    state = torch.zeros(heads, head_dim, B.shape[2], dtype=torch.float64) if state is None else state.double().clone()
    y = torch.zeros(num_tokens, heads, head_dim, dtype=torch.float64)
    for t in range(num_tokens):
        for head in range(heads):
            group, step = inputs.group(head), steps[t, head]
            state[head] = torch.exp(A[head] * step) * state[head] + step * torch.outer(x[t, head], B[t, group])
            y[t, head] = state[head] @ C[t, group] + D[head] * x[t, head]
    return y, state
