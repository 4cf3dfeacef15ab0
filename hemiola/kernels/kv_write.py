"""Scatter of a step's keys and values into the paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import gdc_launch_dependents, gdc_wait, launch_options, uses_pdl

_BLOCK_T = 4


@triton.jit
def _e4m3(values, scale):
    """bfloat16 -> e4m3(value / scale): correctly rounded division, saturating, NaN kept."""
    values = tl.math.div_rn(values.to(tl.float32), scale)
    return tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    num_tokens,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_slot,
    stride_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    E4M3: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    elements = tl.arange(0, BLOCK_E)
    heads, dims = elements // HEAD_DIM, elements % HEAD_DIM
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    is_written = (slots >= 0)[:, None] & (elements < KV_HEADS * HEAD_DIM)[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    keys = tl.load(k + tokens * stride_k_token + (heads * stride_k_head + dims)[None, :], mask=is_written)
    values = tl.load(v + tokens * stride_v_token + (heads * stride_v_head + dims)[None, :], mask=is_written)
    if E4M3:
        keys, values = _e4m3(keys, k_scale), _e4m3(values, v_scale)
    places = (slots // BLOCK_SIZE * stride_block + slots % BLOCK_SIZE * stride_slot)[:, None]
    places += (heads * stride_head + dims)[None, :]
    tl.store(k_cache + places, keys, mask=is_written)
    tl.store(v_cache + places, values, mask=is_written)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """k, v: (T, Hkv, D) bfloat16, unit stride along D. k_cache, v_cache: (blocks, block_size, Hkv, D) bfloat16 or e4m3
    (then e4m3(k / k_scale) is stored), of equal strides, unit along D; written. slot_mapping: (T,) int64, block *
    block_size + offset; a token of slot -1 is skipped.
    """
    num_tokens, kv_heads, head_dim = k.shape
    assert k_cache.stride() == v_cache.stride(), "the two caches have different strides"
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == 1, "a last dimension is not contiguous"
    if num_tokens == 0:
        return
    pdl = uses_pdl()
    _kv_write_kernel[(triton.cdiv(num_tokens, _BLOCK_T),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        num_tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_T=_BLOCK_T,
        BLOCK_E=triton.next_power_of_2(kv_heads * head_dim),
        E4M3=k_cache.dtype == torch.float8_e4m3fn,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
