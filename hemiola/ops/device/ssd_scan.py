"""ssd_scan on the device: hemiola.kernels.ssd_scan."""

from __future__ import annotations

import torch

from hemiola.kernels import ssd_scan as kernels
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.table import register

_LARGEST_CHUNK = 256
_LARGEST_HEAD = (128, 256)  # (P, N)
_LARGEST_STATE = 128 * 128  # elements of a head's state, its sides rounded up to powers of two


def unsupported(
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
) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"activations are {str(x.dtype).removeprefix('torch.')}: the device arm computes in bfloat16"
    if chunk_size > _LARGEST_CHUNK:
        return f"chunks of {chunk_size} tokens: at most {_LARGEST_CHUNK}"
    head_dim, state_size = ssm_state.shape[2:]
    padded = 1 << (head_dim - 1).bit_length() + (state_size - 1).bit_length()
    if head_dim > _LARGEST_HEAD[0] or state_size > _LARGEST_HEAD[1] or padded > _LARGEST_STATE:
        return f"a head's state is {head_dim} x {state_size}: more than a tile holds"
    return None


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
    if layout is None:
        layout = PrefillLayout.build(query_start_loc.tolist(), num_computed.tolist(), chunk_size, x.device)
    chunks = kernels.Chunks(
        layout.chunk_rows, layout.chunk_starts, layout.chunk_ends, layout.row_first_chunk, layout.token_rows.shape[0]
    )
    return kernels.ssd_scan(
        x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, query_start_loc, num_computed, chunk_size, dt_limit,
        chunks,
    )  # fmt: skip


register(op="ssd_scan", arm="device", variant="triton", run=ssd_scan, unsupported=unsupported, mutates=("ssm_state",))
