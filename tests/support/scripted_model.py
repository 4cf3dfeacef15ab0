"""A model that says what it is told: a fixed list of ids per prompt, for tests of everything around the model.

It has the interface that Engine asks for, one attention and one mamba layer's worth of caches (so that blocks and state
slots are handed out), and no weights. A prompt is recognised by its ids, however it is cut into steps. What a request
has consumed is in its state, as the number of a history, so that a state that is copied, restored or mixed up shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.engine.engine import Engine
from hemiola.front import Front
from hemiola.model.batch import ForwardBatch
from hemiola.model.specs import KVSpec, StateSpec
from hemiola.ops import KeptForms, Ops
from hemiola.text.tokenizer import Tokenizer
from tests.support.variants import tiny

# The ids that end an answer: those of tests.support.tiny_tokenizer's generation_config.json.
EOS_IDS = (2, 11)


class ScriptedModel:
    """scripts: the ids to say after each prompt. Whoever asks for more than there are has missed an end."""

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int = 512) -> None:
        self.scripts = {tuple(prompt): list(ids) for prompt, ids in scripts.items()}
        self.config = replace(NemotronHConfig.from_dict(tiny("M*")), vocab_size=vocab_size)
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.ops = Ops("reference", KeptForms(0))
        self.cache_specs = (StateSpec(0, 1, 1, 1, 1, 1), KVSpec(1, 1, 1))
        self._histories: list[list[int]] = []  # by the number that stands in a state

    def forward(self, batch: ForwardBatch, caches: Sequence[Any], tap: object = None) -> Tensor:
        """(T, 1): after a token that completes what is known of a request, the id to say next; elsewhere -1."""
        hidden = torch.full((batch.num_tokens, 1), -1.0)
        starts = batch.query_start_loc.tolist()
        rows = zip(starts, starts[1:], batch.state_indices.tolist(), batch.num_computed.tolist(), strict=False)
        if (marks := batch.marks) is not None:
            ids = batch.token_ids[batch.num_decodes :][marks.tokens].tolist()
            ends = marks.start_loc.tolist()
            for mark, (start, end) in enumerate(pairwise(ends)):
                source, slot = int(marks.sources[mark]), int(marks.slots[mark])
                before = self._consumed(caches, source) if marks.num_computed[mark] else []
                self._keep(caches, slot, before + ids[start:end])
        for start, end, slot, computed in rows:
            consumed = self._consumed(caches, slot) if computed else []
            assert len(consumed) == computed, "a step continues where the last one ended"
            consumed = consumed + batch.token_ids[start:end].tolist()
            self._keep(caches, slot, consumed)
            hidden[end - 1] = self._next(consumed)
        return hidden

    def _consumed(self, caches: Sequence[Any], slot: int) -> list[int]:
        return self._histories[int(caches[0].ssm[slot].flatten()[0])]

    def _keep(self, caches: Sequence[Any], slot: int, consumed: list[int]) -> None:
        caches[0].ssm[slot] = len(self._histories)
        self._histories.append(consumed)

    def logits(self, hidden: Tensor, tap: object = None) -> Tensor:
        """All but one id are far below."""
        ids = hidden.squeeze(1).long()
        assert (ids >= 0).all(), "nothing is scripted here: inside of a prompt, or after the script's end"
        return torch.zeros(len(ids), self.config.vocab_size).index_put_(
            (torch.arange(len(ids)), ids), torch.tensor(9.0)
        )

    def _next(self, consumed: list[int]) -> int:
        for prompt, ids in self.scripts.items():
            said = consumed[len(prompt) :]
            if tuple(consumed[: len(prompt)]) == prompt and len(said) < len(ids):
                return ids[len(said)]
        return -1


def scripted_front(
    scripts: Mapping[tuple[int, ...], Sequence[int]],
    tokenizer: Tokenizer | None = None,
    *,
    vocab_size: int = 512,
    **settings: Any,
) -> Front:
    """A front whose model speaks by script; settings: of EngineConfig."""
    config = EngineConfig(cache_bytes=1 << 20, max_model_len=settings.pop("max_model_len", 256), **settings)
    model: Any = ScriptedModel(scripts, vocab_size)
    return Front(Engine(model, config, eos_token_ids=EOS_IDS, kv_dtype=torch.float32), tokenizer)
