"""ForwardBatch: the one kind of batch. Decodes first, then everything that is still consuming its prompt.

A row is a decode when it brings exactly one token and has earlier tokens behind it (then the one-token ops apply and
padding is possible); every other row is a prefill: a first chunk, a later chunk, a first chunk of one token. Which of
the two a row is follows from those two numbers alone, never from whether some state happens to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hemiola.ops import PrefillLayout

PAD = -1
PENDING = -1  # in place of a token id that the step before sampled and that only the device knows yet

Place = Callable[[Sequence[Tensor]], list[Tensor]]  # CPU tensors to where the model runs


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's part of a step.

    token_ids: the tokens to consume now. num_computed: tokens consumed by earlier steps. blocks: the request's KV
    blocks in order, covering num_computed + len(token_ids) tokens. state_slot: its recurrent state slot.
    marks: (tokens, state slot) pairs: the state after so many of this row's tokens goes into that slot, too. What the
    row itself computes is not changed by it in any bit. is_prompt: the tokens belong to the prompt and are to be
    computed like the rest of it, even one that comes alone.
    """

    token_ids: Sequence[int]
    num_computed: int
    blocks: Sequence[int]
    state_slot: int
    marks: Sequence[tuple[int, int]] = ()
    is_prompt: bool = False

    @property
    def is_decode(self) -> bool:
        return len(self.token_ids) == 1 and self.num_computed > 0 and not self.is_prompt


@dataclass(frozen=True)
class Marks:
    """Prefill rows again, each up to a token whose state is kept: M of them, of S tokens in all.

    tokens: (S,) int64 into the prefill rows' tokens. start_loc: (M + 1,) int32. sources, slots: (M,) int32 state slots
    of the request and of the kept state. num_computed: (M,) int32.
    layout: of these rows, where the batch has one.
    """

    tokens: torch.Tensor
    start_loc: torch.Tensor
    sources: torch.Tensor
    slots: torch.Tensor
    num_computed: torch.Tensor
    layout: PrefillLayout | None

    @classmethod
    def build(cls, prefills: Sequence[BatchRow], chunk_size: int | None = None) -> Marks | None:
        """The marks of a batch's prefill rows, None when there are none. chunk_size: as in ForwardBatch.build."""
        tokens: list[int] = []
        starts, sources, slots, computed = [0], [], [], []
        first = 0
        for row in prefills:
            for num_tokens, slot in row.marks:
                assert 0 < num_tokens < len(row.token_ids), "a mark lies inside of its row"
                tokens.extend(range(first, first + num_tokens))
                starts.append(len(tokens))
                sources.append(row.state_slot)
                slots.append(slot)
                computed.append(row.num_computed)
            first += len(row.token_ids)
        if not slots:
            return None
        int32 = [torch.tensor(values, dtype=torch.int32) for values in (starts, sources, slots, computed)]
        return cls(
            tokens=torch.tensor(tokens),
            start_loc=int32[0],
            sources=int32[1],
            slots=int32[2],
            num_computed=int32[3],
            layout=PrefillLayout.build(starts, computed, chunk_size) if chunk_size else None,
        )

    @cached_property
    def has_initial_state(self) -> torch.Tensor:
        """(M,) bool, as in ForwardBatch."""
        return self.num_computed > 0


@dataclass(frozen=True)
class ForwardBatch:
    """A step's tokens, flat, T in all, of R rows of which the first `num_decodes` are decodes (padded ones included).

    token_ids: (T,) int64. query_start_loc: (R + 1,) int32. seq_lens: (R,) int32, tokens including this step's; 0 in a
    padded row. num_computed: (R,) int32. slot_mapping: (T,) int64 KV slot, block * block_size + offset, or PAD.
    block_table: (R, max_blocks) int32. state_indices: (R,) int32 state slot, or PAD. marks: states to keep besides, as
    in BatchRow. layout: of the prefill rows, for a device.
    """

    token_ids: torch.Tensor
    num_decodes: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_computed: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_indices: torch.Tensor
    marks: Marks | None
    layout: PrefillLayout | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[BatchRow],
        block_size: int,
        *,
        pad_decodes_to: int = 0,
        table_width: int = 1,
        chunk_size: int | None = None,
    ) -> ForwardBatch:
        """Lay out `rows`, which must have their decodes first, on the CPU.

        pad_decodes_to: at least this many decode rows, the missing ones inert (PAD slots, token 0, length 0).
        table_width: at least so many columns of the block table. chunk_size: of the SSD grid, where the prefill rows'
        layout is wanted.
        """
        decodes = [row for row in rows if row.is_decode]
        assert list(rows[: len(decodes)]) == decodes, "decode rows come first in a batch"
        padding = max(0, pad_decodes_to - len(decodes))
        tokens: list[int] = []
        slots: list[int] = []
        starts, lengths, computed, states, blocks = [0], [], [], [], []
        for row in [*decodes, *[None] * padding, *rows[len(decodes) :]]:
            if row is None:
                tokens.append(0)
                slots.append(PAD)
                lengths.append(0)
                computed.append(0)
                states.append(PAD)
                blocks.append([0])
            else:
                end = row.num_computed + len(row.token_ids)
                tokens.extend(row.token_ids)
                if row.blocks:
                    positions = range(row.num_computed, end)
                    slots.extend(row.blocks[p // block_size] * block_size + p % block_size for p in positions)
                else:  # a pattern without attention layers has no KV
                    slots.extend([PAD] * len(row.token_ids))
                lengths.append(end)
                computed.append(row.num_computed)
                states.append(row.state_slot)
                blocks.append(list(row.blocks) or [0])
            starts.append(len(tokens))
        table = np.zeros((len(blocks), max(table_width, max(map(len, blocks)))), dtype=np.int32)
        for row_table, row_blocks in zip(table, blocks, strict=True):
            row_table[: len(row_blocks)] = row_blocks
        num_decodes = len(decodes) + padding
        layout = None
        if chunk_size and len(rows) > len(decodes):
            prefill_starts = [start - num_decodes for start in starts[num_decodes:]]
            layout = PrefillLayout.build(prefill_starts, computed[num_decodes:], chunk_size)
        return cls(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            num_decodes=num_decodes,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_computed=torch.tensor(computed, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_table=torch.from_numpy(table),
            state_indices=torch.tensor(states, dtype=torch.int32),
            marks=Marks.build(rows[len(decodes) :], chunk_size),
            layout=layout,
        )

    def placed(self, place: Place) -> ForwardBatch:
        """The same batch where the model runs: all of its tensors go through one call of `place`."""
        placed: ForwardBatch = _with_tensors(self, iter(place(self.tensors)))
        return placed

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `placed` hands them over."""
        return _tensors(self)

    def with_token_ids(self, token_ids: Tensor) -> ForwardBatch:
        """The same batch of other ids. token_ids: (T,) int64."""
        return replace(self, token_ids=token_ids)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.num_requests - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    @cached_property
    def prefill_start_loc(self) -> torch.Tensor:
        """query_start_loc of the prefill rows alone, counted from the first prefill token; (num_prefills + 1,)."""
        return self.query_start_loc[self.num_decodes :] - self.num_decodes

    @cached_property
    def has_initial_state(self) -> torch.Tensor:
        """(R,) bool: earlier steps have left a state for this row."""
        return self.num_computed > 0


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of a dataclass and the dataclasses in it, in order."""
    found: list[Tensor] = []
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, Marks | PrefillLayout):
            found += _tensors(item)
    return found


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors, in the same order."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Tensor):
            changed[field.name] = next(tensors)
        elif isinstance(item, Marks | PrefillLayout):
            changed[field.name] = _with_tensors(item, tensors)
    return replace(value, **changed)
