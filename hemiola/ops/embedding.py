"""Embedding lookup.

token_ids: (T,) int64; weight: a plain Weight (vocab, hidden) in any float dtype, never expanded as a whole.
Returns (T, hidden) in `dtype`. Embeddings are not multiplied by anything.
"""

from __future__ import annotations

import torch

from hemiola.formats.weight import Weight
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import register


def embedding(token_ids: torch.Tensor, weight: Weight, dtype: torch.dtype, *, kept: KeptForms) -> torch.Tensor:
    return kept.data(weight)[token_ids].to(dtype)


register(op="embedding", arm="reference", variant="torch", run=embedding, keeps=True)
