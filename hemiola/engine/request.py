"""Request: one prompt on its way to its output. Pure data; no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hemiola.config.sampling import SamplingParams

TokenLogprobs = list[tuple[int, float]]  # (token id, natural log-probability), best first


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """stop: an eos id, a stop id or a stop string. length: max_tokens. abort: the caller withdrew it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """seed: resolved seed of this request's random draws. num_computed: tokens whose KV and state are in the caches.

    stop_reason: the stop id or stop string that ended it; None for eos and for other reasons.
    prompt_logprobs: per prompt position, None for the first; filled as the prompt is consumed.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    blocks: list[int] = field(default_factory=list)
    state_slot: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens whose KV the request can ever need."""
        return len(self.prompt_ids) + self.params.max_tokens

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Prompt and output as one sequence, [start, end)."""
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + self.output_ids[max(0, start - split) : max(0, end - split)]

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status, self.finish_reason, self.stop_reason = RequestStatus.FINISHED, reason, stop_reason
