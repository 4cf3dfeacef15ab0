"""PrefillLayout: where the prefill rows' tokens and SSD chunks lie, as a device needs to know it before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PrefillLayout:
    """R rows of T tokens in all, and their C chunks on the SSD grid.

    token_rows: (T,) int32, the row of each token. chunk_rows, chunk_starts, chunk_ends: (C,) int32, each chunk's row
    and its tokens [start, end), in order of tokens; a chunk ends where its row ends or where the request's own position
    reaches a multiple of chunk_size. row_first_chunk: (R + 1,) int32.
    max_query_len: tokens of the longest row. max_chunks_per_row: of the row with most.
    """

    token_rows: torch.Tensor
    chunk_rows: torch.Tensor
    chunk_starts: torch.Tensor
    chunk_ends: torch.Tensor
    row_first_chunk: torch.Tensor
    max_query_len: int
    max_chunks_per_row: int

    @classmethod
    def build(
        cls,
        query_start_loc: Sequence[int],
        num_computed: Sequence[int],
        chunk_size: int,
        device: torch.device | str = "cpu",
    ) -> PrefillLayout:
        """From each row's first token (and the end), and the tokens its request has consumed before."""
        token_rows: list[int] = []
        rows: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        first_chunk = [0]
        for row, computed in enumerate(num_computed):
            low, end = query_start_loc[row], query_start_loc[row + 1]
            token_rows.extend([row] * (end - low))
            to_edge = chunk_size - computed % chunk_size
            while low < end:
                high = min(low + to_edge, end)
                rows.append(row)
                starts.append(low)
                ends.append(high)
                low, to_edge = high, chunk_size
            first_chunk.append(len(rows))
        tensors = [
            torch.tensor(values, dtype=torch.int32).to(device)
            for values in (token_rows, rows, starts, ends, first_chunk)
        ]
        lengths = [end - start for start, end in pairwise(query_start_loc)]
        chunks = [end - start for start, end in pairwise(first_chunk)]
        return cls(
            token_rows=tensors[0],
            chunk_rows=tensors[1],
            chunk_starts=tensors[2],
            chunk_ends=tensors[3],
            row_first_chunk=tensors[4],
            max_query_len=max(lengths, default=0),
            max_chunks_per_row=max(chunks, default=0),
        )
