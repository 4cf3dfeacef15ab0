"""Taps: how activations leave a forward pass without the model knowing who looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Tap(Protocol):
    """Called with a stable name and a tensor that the callee must not change or keep without cloning.

    Names are `<module>.input` for the input of a linear module (the module's name on disk), `<mixer>.k` and
    `<mixer>.v` for what the KV cache is about to store, and `layers.<i>.output` for the residual stream after layer i.
    """

    def __call__(self, name: str, tensor: torch.Tensor, /) -> None: ...
