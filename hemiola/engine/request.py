"""Request: one prompt on its way to its output. Pure data; no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hemiola.cache.ledger import Holding
from hemiola.cache.prefix import PrefixMiss
from hemiola.config.sampling import SamplingParams
from hemiola.errors import RequestError

if TYPE_CHECKING:
    from hemiola.engine.constraint import LogitsConstraint

TokenLogprobs = list[tuple[int, float]]  # (token id, natural log-probability), best first


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """stop: an eos id, a stop id or a stop string. length: max_tokens. abort: the caller withdrew it. error: something
    that belongs to this request alone failed; the request's `error` says what."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """seed: resolved seed of this request's random draws. num_computed: tokens whose KV and state are in the caches.

    num_pending: 1 while a token that a step has sampled for it is known to the device alone, else 0.

    priority: lower runs first. arrival: number in order of arrival, given by the scheduler.
    num_cached_tokens: prompt tokens that were reused when it first ran, None until then. prefix_miss: why not more.
    num_preemptions: how often it had to make room.
    constraint: what it may say next; None is anything.
    stop_reason: the stop id or stop string that ended it; None for eos and for other reasons.
    prompt_logprobs: per prompt position, None for the first; filled as the prompt is consumed.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    priority: int = 0
    arrival: int = -1
    num_cached_tokens: int | None = None
    prefix_miss: PrefixMiss | None = None
    num_preemptions: int = 0
    constraint: LogitsConstraint | None = None
    holding: Holding = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holding = Holding(self.request_id)

    @property
    def blocks(self) -> list[int]:
        """KV blocks, in order of its tokens."""
        return self.holding.blocks

    @property
    def state_slot(self) -> int:
        return self.holding.state_slot

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority numbers, then earlier arrivals."""
        return self.priority, self.arrival

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def num_remaining(self) -> int:
        """Tokens that are still to be consumed."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """All that is left to consume is the token it said last."""
        return self.num_remaining == 1 and self.num_outputs > 0

    @property
    def is_spent(self) -> bool:
        """It has all the tokens that it may have, of which one is pending: there is nothing to run."""
        return self.num_pending > 0 and self.num_outputs >= self.params.max_tokens

    @property
    def num_outputs(self) -> int:
        """Output tokens, a pending one included."""
        return len(self.output_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, a pending one included."""
        return len(self.prompt_ids) + self.num_outputs

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
