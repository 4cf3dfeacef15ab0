"""Embedding lookup: rows, the cast, and nothing else."""

from __future__ import annotations

import pytest
import torch

from hemiola.ops.embedding import embedding
from hemiola.ops.kept import KeptForms
from tests.support.numerics import generator, randn
from tests.support.weights import plain_weight


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_cast_once_and_not_scaled(stored: torch.dtype, dtype: torch.dtype) -> None:
    table = randn(generator(0), 50, 12, dtype=stored)
    ids = torch.tensor([49, 0, 7, 7])
    result = embedding(ids, plain_weight("embeddings", table), dtype, kept=KeptForms(0))
    assert result.dtype == dtype
    for row, token in enumerate(ids.tolist()):
        assert torch.equal(result[row], table[token].to(dtype))
