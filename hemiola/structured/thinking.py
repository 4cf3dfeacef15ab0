"""From a thought to the answer: a constraint that leaves the thought alone, ends it by its budget, and then lets a
grammar begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hemiola.engine.constraint import WORD_BITS, LogitsConstraint


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """How a model's thoughts end.

    end_id: the id of the closing mark where it is a token, else None. mark: its bytes. token_bytes: of any id.
    num_tokens: ids that there are. end_ids: what is forced when a budget is used up.
    gap_ids: the newlines that may stand between the mark and a structured answer, one of them.
    eos_ids: what ends an answer.
    """

    mark: bytes
    end_id: int | None
    token_bytes: Callable[[int], bytes]
    num_tokens: int
    end_ids: tuple[int, ...]
    gap_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def barred(self, num_matched: int) -> list[int]:
        """Ids that would complete the mark and say more than newlines after it, when the thought ends with the first
        num_matched bytes of the mark: the grammar would not see that. None where the mark is a token."""
        return [] if self.end_id is not None else _barred(self, num_matched)


@cache
def _completing(marks: ThoughtMarks) -> tuple[tuple[int, bytes], ...]:
    """Ids that hold the mark's last byte with something after it."""
    last = marks.mark[-1:]
    tokens = ((token_id, marks.token_bytes(token_id)) for token_id in range(marks.num_tokens))
    return tuple((token_id, text) for token_id, text in tokens if last in text.rstrip(b"\n")[:-1])


@cache
def _barred(marks: ThoughtMarks, num_matched: int) -> list[int]:
    begun = marks.mark[:num_matched]
    tails = ((token_id, (begun + text).partition(marks.mark)[2]) for token_id, text in _completing(marks))
    return [token_id for token_id, tail in tails if tail.strip(b"\n")]


class ThinkingConstraint:
    """marks: of the model. budget: ids that may be thought, None without a limit. answer: what constrains the answer
    after the thought, None when nothing does; it then may not end inside of the thought either."""

    def __init__(self, marks: ThoughtMarks, budget: int | None, answer: LogitsConstraint | None) -> None:
        self._marks, self._budget, self._answer = marks, budget, answer
        self.num_accepted = 0
        self._is_thinking, self._is_in_gap = True, False
        self._num_forced: int | None = None  # of end_ids, once forcing has begun
        self._recent = b""

    @property
    def is_finished(self) -> bool:
        return not self._is_thinking and self._answer is not None and self._answer.is_finished

    def accept(self, token_id: int) -> None:
        self.num_accepted += 1
        if self._num_forced is not None:
            self._num_forced += 1
        if self._is_thinking:
            if self._ends_thought(token_id):
                self._is_thinking, self._is_in_gap = False, True
        elif self._is_in_gap and token_id in self._marks.gap_ids:
            self._is_in_gap = False
        else:
            self._is_in_gap = False
            if self._answer is not None:
                self._answer.accept(token_id)

    def fill(self, mask: Tensor) -> bool:
        if (forced_id := self._forced_id()) is not None:
            mask.zero_()
            _allow(mask, [forced_id])
            return True
        if self._answer is None:
            return False
        if self._is_thinking:
            mask.fill_(-1)
            _bar(mask, [*self._marks.eos_ids, *self._marks.barred(self._num_matched())])
            return True
        is_constrained = self._answer.fill(mask)
        if self._is_in_gap:
            _allow(mask, self._marks.gap_ids)
        return is_constrained

    def _forced_id(self) -> int | None:
        is_due = self._is_thinking and self._budget is not None and self.num_accepted >= self._budget
        if self._num_forced is None and is_due:
            self._num_forced = 0
        if self._num_forced is None or self._num_forced >= len(self._marks.end_ids):
            return None
        return self._marks.end_ids[self._num_forced]

    def _ends_thought(self, token_id: int) -> bool:
        if self._marks.end_id is not None:
            return token_id == self._marks.end_id
        self._recent += self._marks.token_bytes(token_id)
        found = self._marks.mark in self._recent
        self._recent = self._recent[-len(self._marks.mark) + 1 :]
        return found

    def _num_matched(self) -> int:
        """Bytes of the mark that the thought ends with."""
        mark = self._marks.mark
        return max(n for n in range(len(mark)) if self._recent.endswith(mark[:n]))


def _allow(mask: Tensor, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id // WORD_BITS] |= _bit(token_id)


def _bar(mask: Tensor, ids: Sequence[int]) -> None:
    for token_id in ids:
        mask[token_id // WORD_BITS] &= ~_bit(token_id)


def _bit(token_id: int) -> Tensor:
    return torch.tensor(1, dtype=torch.int32) << (token_id % WORD_BITS)
