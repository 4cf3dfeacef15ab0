"""sample: one token id per row of logits, greedy or drawn, after the row's own processing.

Contract: `sample(logits, batch) -> ids`
  logits: (R, V) float32 or the activation dtype, then widened first; read only, so that log-probabilities can be
    taken from the same tensor afterwards.
  batch: SampleBatch; rows that it does not list take their best id.
  ids: (R,) int64, on the logits' device. Among equal logits the lowest id wins, everywhere.

Processing, in vLLM's order. Up to the temperature every operation is float32 with one rounding each:
  1. bias: logits[id] += value (logit_bias; -inf bars an id, which is how min_tokens holds back the ends).
  2. repetition penalty r, over ids of prompt and output: a positive logit is divided by r, any other multiplied.
  3. frequency penalty times the id's count in the output, then presence penalty if it is there at all, subtracted.
  4. temperature 0: the best id is the answer. Otherwise, in float64, weight = exp((logit - best) / temperature).
  5. min-p: ids with weight < min_p (the best id's weight is 1) drop out.
  6. top-k: the k best stay; a tie at the boundary goes to the lower id, so k = 1 is greedy.
  7. top-p: over what is left, best first, an id stays while the probability before it is below top_p; at least one
     stays. Ties are ordered by id here too.
  8. draw: one uniform number u picks the first id whose cumulative weight exceeds u times the total. The order is best
     first when step 6 or 7 is on, and the vocabulary's otherwise.
When the best logit is not finite (every id barred, an overflow, NaN) there is nothing to draw from: the best id is the
answer, and it is always an id of the vocabulary.

The draw is counter-based: `uniform(seed, position)` is a pure function of the request's seed and of how many tokens it
has put out, in 64-bit integer arithmetic that any device can repeat. Rows are processed one by one, so a request's
tokens depend neither on its neighbours nor on its place in the batch.

Source of the order: vLLM 0.25, v1/sample/sampler.py. Of the generator: Steele, Lea and Flood, "Fast splittable
pseudorandom number generators" (OOPSLA 2014), with the SplitMix64 constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hemiola.ops.table import register

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One row's processing. Id tensors hold every id once.

    seed: any int, taken modulo 2**64. position: output tokens so far.
    top_k: 0 keeps all. The ranges are those of SamplingParams.
    bias: ids (B,) int64 with what is added to their logits (B,) float32; None when there is nothing.
    seen: ids of prompt and output (S,) int64 with how often each is in the output (S,) float32; None when no penalty
        is on.
    """

    seed: int
    position: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias: tuple[Tensor, Tensor] | None
    seen: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """The rows that need more than their best id, as (row of the logits, processing); all others are greedy."""

    rows: tuple[tuple[int, SampleRow], ...] = ()


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    """Choose one id per row; the module's docstring is the contract."""
    ids = logits.argmax(dim=-1)
    for i, row in batch.rows:
        ids[i] = _sample_row(logits[i], row)
    return ids


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from (seed, position) alone.

    The seed is mixed before the counter is added, so that neighbouring seeds do not give shifted copies of one stream.
    """
    counter = (_mix64(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK
    return (_mix64(counter) >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every input bit moves every output bit."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _sample_row(logits: Tensor, row: SampleRow) -> Tensor | int:
    logits = _adjust(logits.float(), row)
    best = logits.max()
    if row.temperature == 0.0 or not math.isfinite(best):
        return logits.argmax()
    ids = None
    if row.top_k or row.top_p < 1.0:
        logits, ids = logits.sort(descending=True, stable=True)
        if row.top_k:
            logits = logits[: row.top_k]
    weight = ((logits.double() - best.double()) / row.temperature).exp()
    if row.min_p > 0.0:
        weight[weight < row.min_p] = 0.0
    cumulative = weight.cumsum(0)
    if row.top_p < 1.0:
        num_kept = 1 + (cumulative[:-1] < row.top_p * cumulative[-1]).sum()
        cumulative = cumulative[:num_kept]
    chosen = torch.searchsorted(cumulative, cumulative[-1] * uniform(row.seed, row.position), right=True)
    return chosen if ids is None else ids[chosen]


def _adjust(logits: Tensor, row: SampleRow) -> Tensor:
    """Steps 1 to 3, on a copy where there is something to do. logits: (V,) float32."""
    if row.bias is None and row.seen is None:
        return logits
    logits = logits.clone()
    if row.bias is not None:
        ids, values = row.bias
        logits[ids] += values
    if row.seen is not None:
        ids, counts = row.seen
        seen = logits[ids]
        seen = torch.where(seen > 0, seen / row.repetition_penalty, seen * row.repetition_penalty)
        seen -= row.frequency_penalty * counts
        seen -= row.presence_penalty * (counts > 0)
        logits[ids] = seen
    return logits


register(op="sample", arm="reference", variant="torch", run=sample)
