"""Packing of NVFP4 weights into words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.nvfp4 import pack_words, words_per_row


def pack(rows: int, columns: int) -> None:
    size = words_per_row(columns)
    pack_words(
        torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"),
        torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(rows, size, dtype=torch.int32, device="meta"),
        torch.empty(rows, size // 8, dtype=torch.int32, device="meta"),
    )


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(pack, 1856, 2688)
    yield "odd", partial(pack, 48, 80)
