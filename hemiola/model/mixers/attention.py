"""Attention mixer (`*`): grouped-query causal attention over paged KV, without positional encoding, norms or biases.

q, k and v stay three modules with their own scales; plain ones are one product.
Source: vLLM 0.25.0 model_executor/models/nemotron_h.py.
"""

from __future__ import annotations

from typing import Any

import torch

from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Begun, Linear, Linears
from hemiola.model.specs import KVSpec, KVTensors, LayerCache
from hemiola.ops import Ops
from hemiola.tap import Tap


class AttentionMixer:
    """name: the mixer's name on disk, for taps. kv_scales: (k_scale, v_scale) of an fp8 KV cache."""

    def __init__(
        self,
        name: str,
        spec: KVSpec,
        q_proj: Linear,
        k_proj: Linear,
        v_proj: Linear,
        o_proj: Linear,
        scale: float,
        kv_scales: tuple[float, float],
        ops: Ops,
    ) -> None:
        self.name, self.spec = name, spec
        self.qkv, self.o_proj = Linears((q_proj, k_proj, v_proj), ops), o_proj
        self.scale, self.kv_scales, self.ops = scale, kv_scales, ops
        self.input_scale = self.qkv.input_scale

    def begin(self, *norm: Any) -> Begun | None:
        """The norm before q, k and v and these in one; None where they are two. norm: as `rms_norm` takes it."""
        return self.qkv.begin(*norm)

    def __call__(
        self, x: torch.Tensor | tuple[torch.Tensor, ...], batch: ForwardBatch, cache: LayerCache, tap: Tap | None
    ) -> torch.Tensor:
        """x: the normed input, or q, k and v, where they have been begun with."""
        assert isinstance(cache, KVTensors), f"{self.name} was given no KV cache"
        head_dim = self.spec.head_dim
        qkv = x if isinstance(x, tuple) else self.qkv(x, tap)
        q, k, v = (y.view(len(y), -1, head_dim) for y in qkv)
        if tap is not None:
            tap(f"{self.name}.k", k)
            tap(f"{self.name}.v", v)
        self.ops.kv_write(k, v, *cache, batch.slot_mapping, *self.kv_scales)
        parts = []
        d = batch.num_decodes
        if d:
            table, lens = batch.block_table[:d], batch.seq_lens[:d]
            parts.append(self.ops.paged_attention_decode(q[:d], *cache, table, lens, self.scale, *self.kv_scales))
        if batch.num_prefills:
            table, lens, starts = batch.block_table[d:], batch.seq_lens[d:], batch.prefill_start_loc
            parts.append(
                self.ops.paged_attention_prefill(
                    q[d:], *cache, table, starts, lens, self.scale, *self.kv_scales, batch.layout
                )
            )
        heads = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(heads.flatten(1), tap)

    def warm(self) -> None:
        self.qkv.warm()
        self.o_proj.warm()
