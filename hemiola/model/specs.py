"""What a layer needs kept between steps, and the tensors it is given for it.

Mixers declare needs (`KVSpec`, `StateSpec`), caches allocate, the runner binds: the model never sizes a cache, and a
cache never looks into a mixer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of one attention layer, per token."""

    layer: int
    kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state of one mamba2 layer, per request: raw conv inputs and the SSM state."""

    layer: int
    conv_dim: int
    conv_history: int  # K - 1
    num_heads: int
    head_dim: int
    state_size: int

    @property
    def conv_elements(self) -> int:
        return self.conv_dim * self.conv_history

    @property
    def ssm_elements(self) -> int:
        return self.num_heads * self.head_dim * self.state_size


class KVTensors(NamedTuple):
    """k, v: (blocks, block_size, Hkv, D), activation dtype or float8_e4m3fn."""

    k: torch.Tensor
    v: torch.Tensor


class StateTensors(NamedTuple):
    """conv: (slots, Dc, K-1) activation dtype; ssm: (slots, H, P, N) float32."""

    conv: torch.Tensor
    ssm: torch.Tensor


LayerCache = KVTensors | StateTensors | None
