"""What an engine computes, seen from outside: the logits of every token and the states of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hemiola.engine.engine import Engine
from hemiola.model.batch import ForwardBatch
from hemiola.model.specs import KVTensors, LayerCache, StateTensors


@dataclass
class Seen:
    """logits: (V,) float32 after each consumed token, in order. conv and ssm: by layer, after the last of them.

    pieces: how many tokens each step brought.
    """

    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    conv: dict[int, Tensor] = field(default_factory=dict)
    ssm: dict[int, Tensor] = field(default_factory=dict)


class Witness:
    """Stands between an engine and its model from now on; `seen` is by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.model = engine, engine.model
        self.seen: dict[str, Seen] = {}
        self.num_rows: list[int] = []  # requests per step
        engine.model = engine.runner.model = self  # type: ignore[assignment]  # it passes on what it does not have

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], tap: Any = None) -> Tensor:
        hidden = self.model.forward(batch, caches, tap)
        logits = self.model.logits(hidden)
        owners = {request.state_slot: request.request_id for request in self.engine.scheduler.running}
        starts = batch.query_start_loc.tolist()
        for start, end, slot in zip(starts, starts[1:], batch.state_indices.tolist(), strict=False):
            seen = self.seen.setdefault(owners[slot], Seen())
            seen.ids += batch.token_ids[start:end].tolist()
            seen.logits += logits[start:end].unbind()
            seen.pieces.append(end - start)
            for layer, cache in enumerate(caches):
                if isinstance(cache, StateTensors):
                    seen.conv[layer], seen.ssm[layer] = cache.conv[slot].clone(), cache.ssm[slot].clone()
        self.num_rows.append(len(starts) - 1)
        return hidden


def poison(engine: Engine) -> None:
    """Fill every cache with NaN: nothing may be read before it is written."""
    for cache in engine.caches:
        if isinstance(cache, KVTensors | StateTensors):
            for tensor in cache:
                tensor.copy_(torch.full_like(tensor, float("nan"), dtype=torch.float32).to(tensor.dtype))


def widest(seen: Seen, reference: Tensor) -> float:
    """Largest difference to a reference's logits, (tokens, V); NaN counts as infinitely far."""
    difference = (torch.stack(seen.logits).double() - reference[: len(seen.logits)]).abs()
    return float(torch.nan_to_num(difference, nan=float("inf")).max())
