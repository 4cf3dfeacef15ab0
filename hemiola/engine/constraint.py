"""What a request may say next: the hook through which grammars and thinking budgets reach sampling.

A constraint follows one request's output and allows some ids for its next position, before any other processing of
the logits. It is brought up to date from the output ids that the request has, so sampling a position again (after a
fault of another row, or after preemption) changes nothing. It has to know all of them, and does: a step is drawn from
after the one before was collected, while the device computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

WORD_BITS = 32


class LogitsConstraint(Protocol):
    """num_accepted: output ids that it has taken. is_finished: nothing but an end may follow.

    Both methods raise RequestError when the request cannot go on; the request alone then ends with it.
    """

    @property
    def num_accepted(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...

    def accept(self, token_id: int) -> None:
        """Take the next output id."""

    def fill(self, mask: Tensor) -> bool:
        """Write which ids are allowed: bit i % 32 of word i // 32 of (ceil(V / 32),) int32 on the CPU, whatever was in
        it. False: all are, and the mask is left as it is."""


class ConstrainedRequest(Protocol):
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def constraint(self) -> LogitsConstraint | None: ...


def constrain(logits: Tensor, requests: Sequence[ConstrainedRequest]) -> Tensor:
    """Logits (R, V) with -inf at every id that its request may not say; the same tensor when all may say anything."""
    constrained = [(row, r, r.constraint) for row, r in enumerate(requests) if r.constraint is not None]
    if not constrained:
        return logits
    num_words = -(-logits.shape[1] // WORD_BITS)
    is_device = logits.device.type != "cpu"
    masks = torch.empty(len(constrained), num_words, dtype=torch.int32, pin_memory=is_device)
    rows: list[int] = []
    for row, request, constraint in constrained:
        for token_id in request.output_ids[constraint.num_accepted :]:
            constraint.accept(token_id)
        if constraint.fill(masks[len(rows)]):
            rows.append(row)
    if not rows:
        return logits
    allowed = unpack(masks[: len(rows)].to(logits.device, non_blocking=True), logits.shape[1])
    if len(rows) == len(requests):
        return logits.masked_fill(~allowed, float("-inf"))
    places = on_device(torch.tensor(rows), logits.device)
    return logits.index_copy(0, places, logits.index_select(0, places).masked_fill(~allowed, float("-inf")))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's there, through pinned memory: without it the host would wait for all that the device has
    to do before."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def unpack(masks: Tensor, vocab_size: int) -> Tensor:
    """Bits (R, W) int32 as (R, V) truth values, by bytes (which are in order on every machine that torch runs on)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((masks.view(torch.uint8)[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
