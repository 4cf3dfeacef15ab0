"""Chunked SSD scan: the Mamba-2 recurrence for any number of tokens per request, a state in and a state out.

x: (T, H, P); dt: (T, H) raw; B, C: (T, G, N); activation dtype, requests one after the other.
A, D, dt_bias: (H,) float32; dt_limit as in `ssd_update`.
ssm_state: (slots, H, P, N) float32, updated in place; state_indices: (R,) int32, -1 for a padded row, which reads and
writes no state and returns zeros.
query_start_loc: (R + 1,) int32; num_computed: (R,) int32, tokens of the request that earlier steps have consumed; where
it is zero the initial state is zero, whatever the slot holds.
chunk_size: chunks start at multiples of it counted from the request's own token 0, so how a prompt is split into steps
and who shares the batch move no chunk edge (a split off the grid adds one). layout: of the same rows, for a device (see
`hemiola.ops.layout`).
Returns y (T, H, P) in the activation dtype.
Numerics (c is the inclusive cumulative sum of A dt within a chunk): decays, states and accumulators are float32; what
enters a matrix product is rounded to the activation dtype: B weighted by exp(c_last - c_k) dt_k, the carried state, and
the weighted scores (C_m B_k) exp(c_m - c_k) dt_k. y is rounded once.
Source: Mamba-2 paper (arXiv 2405.21060) section 6; vLLM 0.25.0 layers/mamba/ops/ssd_*.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register

_ELEMENTS = 1 << 22  # bounds the scores and weighted inputs of the chunks that are computed together


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
    layout: PrefillLayout | None = None,
) -> torch.Tensor:
    y = torch.zeros_like(x)
    step = torch.nn.functional.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    at_once = max(1, _ELEMENTS // (x.shape[1] * chunk_size * max(chunk_size, B.shape[2])))
    starts = query_start_loc.tolist()
    rows = zip(starts, starts[1:], state_indices.tolist(), num_computed.tolist(), strict=False)
    for start, end, slot, computed in rows:
        if slot < 0 or start == end:
            continue
        state = ssm_state[slot].clone() if computed else torch.zeros_like(ssm_state[slot])
        for low, high, num_chunks in _pieces(start, end, computed, chunk_size, at_once):
            part = slice(low, high)
            y[part], state = _chunks(num_chunks, x[part], step[part], A, B[part], C[part], D, state)
        ssm_state[slot] = state
    return y


def _pieces(start: int, end: int, computed: int, chunk_size: int, at_once: int) -> Iterator[tuple[int, int, int]]:
    """Tokens [start, end) of a request that has consumed `computed`, as (low, high, chunks of equal length).

    Whole chunks come up to `at_once` together, what the request's own grid cuts off at either end alone.
    """
    low = start
    while low < end:
        to_edge = chunk_size - (computed + low - start) % chunk_size
        num_chunks = min((end - low) // chunk_size, at_once) if to_edge == chunk_size else 0
        high = low + num_chunks * chunk_size if num_chunks else min(low + to_edge, end)
        yield low, high, num_chunks or 1
        low = high


def _chunks(
    num_chunks: int,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """c chunks of Q tokens: x (c Q, H, P), dt (c Q, H) after softplus, B and C (c Q, G, N), state (H, P, N) before.

    Returns y (c Q, H, P) in x's dtype and the state after the last. Heads are laid out as (G, heads per group).
    """
    x, dt, B, C = (t.unflatten(0, (num_chunks, -1)) for t in (x, dt, B, C))
    _, num_tokens, num_heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    by_group = (num_chunks, groups, num_heads // groups, num_tokens)
    rounded = x.dtype

    cumulative = torch.cumsum(dt * A, dim=1).transpose(1, 2).contiguous()  # (c, H, Q)
    dt_heads = dt.transpose(1, 2).contiguous()  # (c, H, Q)
    x_heads = x.float().transpose(1, 2)  # (c, H, Q, P)
    B_groups, C_groups = B.float().transpose(1, 2), C.float().transpose(1, 2)  # (c, G, Q, N)

    # The state that each chunk adds, and from it the state that each chunk starts with.
    to_end = (cumulative[..., -1:] - cumulative).clamp_(max=0).exp_().mul_(dt_heads)
    weighted_B = (B_groups[:, :, None] * to_end.view(*by_group, 1)).to(rounded).float().flatten(1, 2)
    added = x_heads.transpose(2, 3) @ weighted_B  # (c, H, P, N)
    decay = torch.exp(cumulative[..., -1])[..., None, None]
    carried = torch.empty_like(added)
    for chunk in range(num_chunks):
        carried[chunk] = state
        state = decay[chunk] * state + added[chunk]

    # What the carried state contributes to each token.
    carried = carried.to(rounded).float().view(num_chunks, groups, -1, state_size)
    y = (C_groups @ carried.transpose(2, 3)).view(num_chunks, groups, num_tokens, -1, head_dim)
    y = y.transpose(2, 3).reshape(num_chunks, num_heads, num_tokens, head_dim) * torch.exp(cumulative)[..., None]

    # What the chunk's own tokens contribute.
    scores = (cumulative[..., :, None] - cumulative[..., None, :]).clamp_(max=0).exp_().mul_(dt_heads[:, :, None, :])
    scores.view(*by_group, num_tokens).mul_((C_groups @ B_groups.transpose(2, 3))[:, :, None])
    y += scores.to(rounded).float().tril_() @ x_heads
    y += x_heads * D[:, None, None]
    return y.transpose(1, 2).flatten(0, 1).to(rounded), state


register(op="ssd_scan", arm="reference", variant="torch", run=ssd_scan, mutates=("ssm_state",))
