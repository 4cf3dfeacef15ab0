"""Embedding rows, rounded to bfloat16."""

from __future__ import annotations

import pytest
import torch

from hemiola.kernels.embedding import embedding
from tests.support.numerics import generator, randn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [256, 1000, 2688])
def test_rows_of_the_table(hidden: int, dtype: torch.dtype) -> None:
    weight = randn(generator(hidden), 50, hidden, dtype=dtype)
    ids = torch.tensor([49, 0, 7, 7, 31])
    assert torch.equal(embedding(ids, weight), weight[ids].bfloat16())
    assert torch.equal(embedding(ids.int(), weight), weight[ids].bfloat16())


def test_no_tokens() -> None:
    assert embedding(torch.zeros(0, dtype=torch.int64), torch.zeros(4, 8)).shape == (0, 8)
