"""Chunked SSD scan: the Mamba-2 recurrence for any number of tokens per request, a state in and a state out.

x: (T, H, P); dt: (T, H) raw; B, C: (T, G, N); activation dtype, requests one after the other.
A, D, dt_bias: (H,) float32; dt_limit as in `ssd_update`.
ssm_state: (slots, H, P, N) float32, updated in place; state_indices: (R,) int32, -1 for a padded row, which reads and
writes no state and returns zeros.
query_start_loc: (R + 1,) int32; num_computed: (R,) int32, tokens of the request that earlier steps have consumed; where
it is zero the initial state is zero, whatever the slot holds.
chunk_size: chunks start at multiples of it counted from the request's own token 0, so how a prompt is split into steps
and who shares the batch move no chunk edge (a split off the grid adds one).
Returns y (T, H, P) in the activation dtype.
Numerics (c is the inclusive cumulative sum of A dt within a chunk): decays, states and accumulators are float32; what
enters a matrix product is rounded to the activation dtype: B weighted by exp(c_last - c_k) dt_k, the carried state, and
the weighted scores (C_m B_k) exp(c_m - c_k) dt_k. y is rounded once.
Source: Mamba-2 paper (arXiv 2405.21060) section 6; vLLM 0.25.0 layers/mamba/ops/ssd_*.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from hemiola.ops.table import register


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    y = torch.zeros_like(x)
    step = torch.nn.functional.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    starts = query_start_loc.tolist()
    rows = zip(starts, starts[1:], state_indices.tolist(), num_computed.tolist(), strict=False)
    for start, end, slot, computed in rows:
        if slot < 0 or start == end:
            continue
        state = ssm_state[slot].clone() if computed else torch.zeros_like(ssm_state[slot])
        first_edge = start + chunk_size - computed % chunk_size
        edges = [start, *range(first_edge, end, chunk_size), end]
        for low, high in pairwise(edges):
            part = slice(low, high)
            y[part], state = _chunk(x[part], step[part], A, B[part], C[part], D, state)
        ssm_state[slot] = state
    return y


def _chunk(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk of Q tokens: x (Q, H, P), dt (Q, H) after softplus, B and C (Q, G, N), state (H, P, N).

    Returns y (Q, H, P) in x's dtype and the state after the chunk. Heads are laid out as (G, heads per group).
    """
    num_tokens, num_heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    per_head = num_heads // groups
    rounded = x.dtype

    cumulative = torch.cumsum(dt * A, dim=0).T  # (H, Q)
    dt_heads = dt.T  # (H, Q)
    x_heads = x.float().transpose(0, 1)  # (H, Q, P)
    B_groups, C_groups = B.float().transpose(0, 1), C.float().transpose(0, 1)  # (G, Q, N)

    # The state that this chunk adds.
    to_end = torch.exp((cumulative[:, -1:] - cumulative).clamp(max=0)) * dt_heads
    weighted_B = B_groups[:, None] * to_end.view(groups, per_head, num_tokens, 1)
    weighted_B = weighted_B.to(rounded).float().view(num_heads, num_tokens, state_size)
    new_state = torch.exp(cumulative[:, -1])[:, None, None] * state + x_heads.transpose(1, 2) @ weighted_B

    # What the carried state contributes to each token.
    carried = state.to(rounded).float().view(groups, per_head * head_dim, state_size)
    y = (C_groups @ carried.transpose(1, 2)).view(groups, num_tokens, per_head, head_dim)
    y = y.transpose(1, 2).reshape(num_heads, num_tokens, head_dim) * torch.exp(cumulative)[..., None]

    # What the chunk's own tokens contribute.
    decay = torch.exp((cumulative[:, :, None] - cumulative[:, None, :]).clamp(max=0)) * dt_heads[:, None, :]
    scores = (C_groups @ B_groups.transpose(1, 2))[:, None] * decay.view(groups, per_head, num_tokens, num_tokens)
    scores = scores.to(rounded).float().tril().view(num_heads, num_tokens, num_tokens)
    y = y + scores @ x_heads + x_heads * D[:, None, None]
    return y.transpose(0, 1).to(rounded), new_state


register(op="ssd_scan", arm="reference", variant="torch", run=ssd_scan, mutates=("ssm_state",))
