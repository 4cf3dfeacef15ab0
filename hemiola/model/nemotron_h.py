"""The model: embedding, layers of (norm, mixer, add), final norm, head. No kernel, no arm, no cache policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hemiola.config.model import NemotronHConfig
from hemiola.formats.weight import Weight
from hemiola.model.batch import ForwardBatch
from hemiola.model.linear import Linear
from hemiola.model.mixers.attention import AttentionMixer
from hemiola.model.mixers.mamba2 import Mamba2Mixer
from hemiola.model.mixers.mlp import MLPMixer
from hemiola.model.mixers.moe import Ended, MoEMixer
from hemiola.model.specs import KVSpec, LayerCache, StateSpec
from hemiola.ops import Ops
from hemiola.tap import Tap

Mixer = Mamba2Mixer | AttentionMixer | MLPMixer | MoEMixer


@dataclass(frozen=True, slots=True)
class Layer:
    """norm_weight: (hidden,) activation dtype."""

    norm_weight: torch.Tensor
    mixer: Mixer


class NemotronH:
    """A loaded model bound to the ops of one engine.

    dtype: activation dtype, float32 or bfloat16; it is also the numeric mode (ops round where they say they do).
    device: where activations and caches are.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        dtype: torch.dtype,
        embeddings: Weight,
        layers: Sequence[Layer],
        norm_f: torch.Tensor,
        lm_head: Linear,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self.config, self.dtype, self.ops, self.device = config, dtype, ops, device
        self.embeddings, self.layers, self.norm_f, self.lm_head = embeddings, tuple(layers), norm_f, lm_head

    @property
    def cache_specs(self) -> tuple[KVSpec | StateSpec | None, ...]:
        """What each layer needs kept between steps."""
        return tuple(getattr(layer.mixer, "spec", None) for layer in self.layers)

    def warm(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Bring all weights to where their ops read them, ahead of the first step. progress: called with the number of
        layers that are done."""
        self.ops.prepare("embedding", self.embeddings)
        for index, layer in enumerate(self.layers):
            layer.mixer.warm()
            progress(index + 1)
        self.lm_head.warm()

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], tap: Tap | None = None) -> torch.Tensor:
        """One step. Returns the final-norm hidden state of every token, (T, hidden); caches are updated in place."""
        x: Any = self.ops.embedding(batch.token_ids, self.embeddings, self.dtype)
        residual: torch.Tensor | None = None
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            begun, residual = x if isinstance(x, Ended) else self._begun(index, x, residual, tap)
            if isinstance(layer.mixer, MoEMixer) and tap is None:
                x = layer.mixer(begun, batch, cache, tap, (residual, *self._norm(index + 1)))
            else:
                x = layer.mixer(begun, batch, cache, tap)
            if tap is not None:
                tap(f"layers.{index}.output", residual + x)
        ended = x if isinstance(x, Ended) else self.ops.rms_norm(x, residual, *self._norm(len(self.layers)))
        hidden: torch.Tensor = ended[0]
        return hidden

    def _begun(self, index: int, x: torch.Tensor, residual: torch.Tensor | None, tap: Tap | None) -> Any:
        """What a layer's mixer starts from, and the new residual: the normed input, or what the norm and the mixer's
        first op give in one. With a tap, which may ask for what lies between, they are two.

        Not asked where the layer before is `Ended` with the norm. So no op is lost that begins with it: those are for
        few tokens, `experts_norm` for more."""
        norm = self._norm(index)
        begun = self.layers[index].mixer.begin(x, residual, *norm[:2]) if tap is None else None
        return begun or self.ops.rms_norm(x, residual, *norm)

    def _norm(self, index: int) -> tuple[torch.Tensor, float, float | None]:
        """The norm before a layer, or behind the last one: what `rms_norm` takes behind the residual."""
        if index == len(self.layers):
            return self.norm_f, self.config.norm_eps, None
        layer = self.layers[index]
        return layer.norm_weight, self.config.norm_eps, layer.mixer.input_scale

    def logits(self, hidden: torch.Tensor, tap: Tap | None = None) -> torch.Tensor:
        """hidden: (n, hidden) rows of `forward`. Returns (n, vocab) in the activation dtype."""
        return self.lm_head(hidden, tap)
