"""Sampling on the device: greedy rows by one argmax, all others of the step together, without waiting for the device.

What the contract computes row by row is computed here for many rows at once, with the same roundings. Only the float64
exponentials and the order in which their sums are taken may differ in the last bit from the reference; a draw comes out
otherwise where it falls that close to an id's edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hemiola.kernels.sample import argmax, best_ids
from hemiola.ops.sample import SampleBatch, SampleRow, uniform
from hemiola.ops.table import register

# Rows whose float64 weights exist at the same time.
_ROWS_AT_ONCE = 32
# Up to here, top-k selects; beyond, a row is sorted as a whole.
_LARGEST_SELECTION = 1024


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    ids = argmax(logits)
    for width, rows in _groups(batch, logits.shape[1]):
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            at = _upload([i for i, _ in part], torch.int64, logits.device)
            ids[at] = _sample_rows(logits[at].float(), [row for _, row in part], width)
    return ids


def _groups(batch: SampleBatch, vocab: int) -> list[tuple[int | None, list[tuple[int, SampleRow]]]]:
    """Rows by how many of their best ids have to be in order to draw from them: a selection, all, or none (0). None:
    rows that do not draw."""
    greedy: list[tuple[int, SampleRow]] = []
    unordered: list[tuple[int, SampleRow]] = []
    selected: list[tuple[int, SampleRow]] = []
    sorted_: list[tuple[int, SampleRow]] = []
    for i, row in batch.rows:
        if row.temperature == 0.0:
            greedy.append((i, row))
        elif not row.top_k and row.top_p >= 1.0:
            unordered.append((i, row))
        elif 0 < row.top_k <= _LARGEST_SELECTION:
            selected.append((i, row))
        else:
            sorted_.append((i, row))
    widest = min(vocab, max((row.top_k for _, row in selected), default=0))
    return [(None, greedy), (0, unordered), (widest, selected), (vocab, sorted_)]


def _sample_rows(logits: Tensor, rows: Sequence[SampleRow], width: int | None) -> Tensor:
    """Ids (n,) int64. logits: (n, V) float32, written to. width: as in `_groups`."""
    _adjust(logits, rows)
    greedy = argmax(logits)
    if width is None:
        return greedy
    vocab = logits.shape[1]
    numbers = [
        (row.temperature, row.min_p, min(row.top_k or vocab, vocab), row.top_p, uniform(row.seed, row.position))
        for row in rows
    ]
    temperature, min_p, top_k, top_p, drawn = _upload(numbers, torch.float64, logits.device).split(1, dim=1)
    best = logits.gather(1, greedy[:, None]).double()
    ids = None
    if width:
        ids = best_ids(logits, width)
        logits = logits.gather(1, ids)
    weight = logits.double().sub_(best).div_(temperature).exp_()
    weight.masked_fill_(weight < min_p, 0.0)
    if ids is not None:
        weight.masked_fill_(torch.arange(width, device=logits.device) >= top_k, 0.0)
    cumulative = weight.cumsum(1)
    total = cumulative[:, -1:]
    if ids is not None:
        # The first id at which top_p is reached is the last that stays.
        last = (cumulative < top_p * total).sum(1, keepdim=True)
        total = cumulative.gather(1, last.clamp_(max=width - 1))
    chosen = torch.searchsorted(cumulative, total * drawn, right=True).clamp_(max=cumulative.shape[1] - 1)
    if ids is not None:
        chosen = ids.gather(1, chosen)
    return torch.where(best.isfinite(), chosen, greedy[:, None])[:, 0]


def _adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bias and penalties, in place. logits: (n, V) float32, contiguous."""
    flat = logits.view(-1)
    biased = [(i, row.bias) for i, row in enumerate(rows) if row.bias is not None]
    if biased:
        places, values = _places(biased, logits)
        flat[places] = flat[places] + values
    seen = [(i, row.seen) for i, row in enumerate(rows) if row.seen is not None]
    if seen:
        places, counts = _places(seen, logits)
        sizes = _upload([len(ids) for _, (ids, _) in seen], torch.int64, logits.device)

        def of_each(field: Callable[[SampleRow], float]) -> Tensor:
            values = _upload([field(rows[i]) for i, _ in seen], torch.float32, logits.device)
            return values.repeat_interleave(sizes, output_size=len(places))

        repetition = of_each(lambda row: row.repetition_penalty)
        values = flat[places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - of_each(lambda row: row.frequency_penalty) * counts
        flat[places] = values - of_each(lambda row: row.presence_penalty) * (counts > 0)


def _places(pairs: Sequence[tuple[int, tuple[Tensor, Tensor]]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of (row, (ids, values)): where in the flat logits, and the values, one row after the other."""
    vocab = logits.shape[1]
    places = torch.cat([ids + i * vocab for i, (ids, _) in pairs])
    return places, torch.cat([values for _, (_, values) in pairs])


def _upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Through pinned memory, so that the host does not wait."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


register(op="sample", arm="device", variant="triton", run=sample)
