"""Reading memory, for a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.read import BLOCK, STEPS, read


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "words", partial(read, torch.empty(4 * BLOCK * STEPS, dtype=torch.int32, device="meta"))
