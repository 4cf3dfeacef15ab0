"""Embedding on the GPU: the table's rows, uploaded once."""

from __future__ import annotations

import pytest
import torch

from hemiola.formats.weight import Scheme, Weight
from hemiola.ops.device.embedding import embedding, prepare, unsupported
from hemiola.ops.resident import ResidentWeights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "hidden"), [(131072, 2688), (501, 257)])
def test_rows_of_the_table(vocab: int, hidden: int, dtype: torch.dtype) -> None:
    data = torch.randn(vocab, hidden, dtype=dtype)
    weight = Weight("embeddings", (vocab, hidden), Scheme.PLAIN, data)
    resident = ResidentWeights(torch.device("cuda"))
    assert prepare(weight, resident).dtype == dtype
    for tokens in (1, 7, 300):
        ids = torch.randint(vocab, (tokens,))
        ids[-1] = vocab - 1
        assert unsupported(ids, weight, torch.bfloat16) is None
        out = embedding(ids.cuda(), weight, torch.bfloat16, resident=resident)
        assert torch.equal(out.cpu(), data[ids].bfloat16())
    assert resident.uploaded_bytes == data.nbytes
