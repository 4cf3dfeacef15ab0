"""Reading memory: every word of it, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hemiola.kernels.read import BLOCK, STEPS, read


def test_every_word_is_read() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (2, BLOCK * STEPS), dtype=torch.int32)
    expected = np.bitwise_xor.reduce(words.numpy(), axis=1)
    assert read(words).tolist() == expected.tolist()


def test_a_part_is_whole() -> None:
    with pytest.raises(AssertionError, match="131071 words are no multiple of 131072"):
        read(torch.zeros(BLOCK * STEPS - 1, dtype=torch.int32))
