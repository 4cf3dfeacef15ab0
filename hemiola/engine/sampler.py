"""From the requests of a step and their logits to the next ids, and log-probabilities for who asked for them.

Owns the translation of SamplingParams and a request's history into the sample op's rows. Knows no scheduling, no text,
and no arm: the sample op comes from the engine's op table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hemiola.config.sampling import WHOLE_VOCABULARY, SamplingParams
from hemiola.engine.constraint import LogitsConstraint, constrain, on_device
from hemiola.ops.sample import SampleBatch, SampleRow

# Rows of logits whose log-softmax exists at the same time; bounds the extra memory of long prompts.
_ROWS_AT_ONCE = 64


class SampledRequest(Protocol):
    """What the sampler reads of a request. `seed` is the request's own, resolved when it was made; `num_outputs` counts
    output tokens that the host does not know yet, too."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def constraint(self) -> LogitsConstraint | None: ...


class Sampler:
    """One engine's sampler.

    ops: the engine's op table; only `ops.sample` is called.
    eos_token_ids: the ids that end a request unless it ignores them.
    """

    def __init__(self, ops: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)

    def sample(self, logits: Tensor, requests: Sequence[SampledRequest], best: Tensor | None = None) -> Tensor:
        """The next id of each request, (R,) int64 on the logits' device.

        logits: (R, V) float32 or the activation dtype, row i belongs to requests[i]; not written to. best: (R,) their
        best ids where they are known; returned itself when no request needs more.
        """
        rows = ((i, self._row(request, logits.device)) for i, request in enumerate(requests))
        batch = SampleBatch(tuple((i, row) for i, row in rows if row is not None))
        allowed = constrain(logits, requests)
        if best is not None and not batch.rows and allowed is logits:
            return best
        ids: Tensor = self._ops.sample(allowed, batch)
        return ids

    def settle(self, request: SampledRequest, sampled_id: int) -> int:
        """The id that a request gets, when the host knows what was sampled for it."""
        forced_id = _forced_id(request)
        return sampled_id if forced_id is None else forced_id

    def waits_for(self, request: SampledRequest) -> bool:
        """Whether a step with it is collected before the next one is launched: its id is not the one that was sampled,
        or its log-probabilities need logits that the next step writes over. Whoever needs earlier ids alone (penalties,
        constraints) need not: a draw comes after the step before was collected."""
        return request.params.logprobs is not None or bool(request.params.forced_output_ids)

    def top_logprobs(self, logits: Tensor, k: int, chosen_ids: Sequence[int]) -> list[list[tuple[int, float]]]:
        """The k best ids of every row with their log-probabilities, best first, ties to the lower id.

        logits: (T, V) float32 as the model made them, before bias, penalties and temperature. The log-softmax is
        float32; the ranking is that of the logits, so it never contradicts a greedy choice where rounding makes two
        log-probabilities equal.
        k: -1 is the whole vocabulary.
        chosen_ids: one id per row (sampled, or the prompt's); it is appended where it is not among the k best.
        """
        k = self._vocab_size if k == WHOLE_VOCABULARY else k
        result = []
        for start in range(0, len(chosen_ids), _ROWS_AT_ONCE):
            part = logits[start : start + _ROWS_AT_ONCE]
            chosen = chosen_ids[start : start + _ROWS_AT_ONCE]
            logprobs = part.log_softmax(dim=-1, dtype=torch.float32)
            for logit_row, logprob_row, chosen_id in zip(part, logprobs, chosen, strict=True):
                ids = _best_ids(logit_row, k)
                if chosen_id not in ids:
                    ids.append(chosen_id)
                result.append(list(zip(ids, logprob_row[ids].tolist(), strict=True)))
        return result

    def _row(self, request: SampledRequest, device: torch.device) -> SampleRow | None:
        """The op's row of a request; None when the best id is all that it takes."""
        if _forced_id(request) is not None:
            return None
        params, position = request.params, request.num_outputs
        bias = dict(params.logit_bias or {})
        if position < params.min_tokens:
            ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
            bias.update(dict.fromkeys(ends, float("-inf")))
        seen: dict[int, int] = {}
        if _has_penalties(params):
            seen = {**dict.fromkeys(request.prompt_ids, 0), **Counter(request.output_ids)}
        if params.is_greedy and not bias and not seen:
            return None
        return SampleRow(
            seed=request.seed,
            position=position,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias=_id_values(bias, device),
            seen=_id_values(seen, device),
        )


def _has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _forced_id(request: SampledRequest) -> int | None:
    forced, position = request.params.forced_output_ids or (), request.num_outputs
    return forced[position] if position < len(forced) else None


def _id_values(values: Mapping[int, float], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Ids (S,) int64 and their values (S,) float32, or None when there are none."""
    if not values:
        return None
    ids, numbers = torch.tensor(list(values), dtype=torch.int64), torch.tensor(list(values.values()))
    return on_device(ids, device), on_device(numbers.float(), device)


def _best_ids(logits: Tensor, k: int) -> list[int]:
    """The k best ids of (V,) logits, best first, ties to the lower id (which topk alone does not promise)."""
    if k == 0:
        return []
    worst_kept = logits.topk(k).values[-1]
    candidates = (logits >= worst_kept).nonzero().squeeze(1)
    order = logits[candidates].sort(descending=True, stable=True).indices
    ids: list[int] = candidates[order[:k]].tolist()
    return ids
