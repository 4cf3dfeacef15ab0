"""Both convolutions over Lightning's and small channels, with a bias and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hemiola.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update


def convolve(channels: int, width: int, has_bias: bool) -> None:
    x = torch.empty(64, 2 * channels, dtype=torch.bfloat16, device="meta")[:, :channels]
    weight = torch.empty(channels, width, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(channels, dtype=torch.bfloat16, device="meta") if has_bias else None
    state = torch.empty(9, channels, width - 1, dtype=torch.bfloat16, device="meta")
    slots, starts, rows = (torch.empty(n, dtype=torch.int32, device="meta") for n in (4, 5, 64))
    causal_conv1d_update(x[:4], weight, bias, state, slots)
    causal_conv1d(x, weight, bias, state, slots, starts, slots > 0, rows)


def cases() -> Iterable[tuple[str, Callable[[], object]]]:
    yield "lightning", partial(convolve, 6144, 4, True)
    yield "no-bias", partial(convolve, 6144, 4, False)
    yield "small", partial(convolve, 328, 2, True)
