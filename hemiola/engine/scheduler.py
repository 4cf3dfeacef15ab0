"""Scheduler: which requests bring how many tokens to the next step. Pure Python; no torch.

A request is admitted when a state slot and the blocks of its whole length (prompt and max_tokens) are free, so a
running request never runs out of memory. Each step spends a token budget: running decodes first, then prompts that are
under way, then new ones, in order of arrival; a prompt that does not fit is cut, at a multiple of the SSD chunk size
where one is in reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from hemiola.cache.budget import CachePlan
from hemiola.cache.pool import Pool
from hemiola.engine.request import Request, RequestStatus
from hemiola.errors import CapacityError, RequestError


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`request` consumes its next `num_tokens` tokens in this step."""

    request: Request
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """One token with earlier ones behind it (see model.batch)."""
        return self.num_tokens == 1 and self.request.num_computed > 0

    @property
    def reaches_end(self) -> bool:
        """After this step every known token is consumed, so a new one is due."""
        return self.request.num_computed + self.num_tokens == self.request.num_tokens


class Scheduler:
    def __init__(self, plan: CachePlan, *, max_num_batched_tokens: int, max_model_len: int, chunk_size: int) -> None:
        self.plan = plan
        self.max_num_batched_tokens, self.max_model_len = max_num_batched_tokens, max_model_len
        self.chunk_size = chunk_size
        self.blocks = Pool("KV block", plan.num_blocks)
        self.slots = Pool("state slot", plan.num_slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises: CapacityError when it could never run, whatever else finishes."""
        prompt, output = len(request.prompt_ids), request.params.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty", expected="at least one token", where=request.request_id)
        arithmetic = f"{prompt} prompt + {output} output = {prompt + output} tokens"
        if prompt + output > self.max_model_len:
            raise CapacityError(
                "longer than the model allows",
                found=arithmetic,
                expected=f"at most max_model_len {self.max_model_len}",
                where=request.request_id,
                remedy="Shorten the prompt or lower max_tokens.",
            )
        needed = self.plan.blocks_for(prompt + output)
        if needed > self.plan.num_blocks:
            raise CapacityError(
                "can never fit the KV cache",
                found=f"{arithmetic} = {needed} blocks of {self.plan.block_size}",
                expected=f"at most {self.plan.num_blocks} blocks",
                where=request.request_id,
                remedy="Shorten the prompt, lower max_tokens, or raise cache_bytes.",
            )
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledRow]:
        """The next step's rows, decodes first; empty only when nothing is waiting or running."""
        budget = self.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        for request in chain(self._by_stage(decoding=True), self._by_stage(decoding=False), self._admit()):
            count = self._chunk(request, budget)
            rows.append(ScheduledRow(request, count))
            budget -= count
            if budget == 0:
                break
        return sorted(rows, key=lambda row: not row.is_decode)

    def release(self, request: Request) -> None:
        """Take a request out, wherever it is, and free all that it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.blocks.release(request.request_id)
        self.slots.release(request.request_id)
        request.blocks, request.state_slot = [], -1

    def check_integrity(self) -> None:
        """Every block and slot is owned exactly once, and only by running requests."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        assert self.slots.size - self.slots.num_free == len(self.running), "a state slot without a running request"

    def _by_stage(self, *, decoding: bool) -> list[Request]:
        return [r for r in self.running if (r.num_tokens - r.num_computed == 1 and bool(r.output_ids)) == decoding]

    def _admit(self) -> Iterator[Request]:
        """Waiting requests, first come first served, each given its slot and blocks as it is taken."""
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            needed = self.plan.blocks_for(request.max_total_tokens)
            if needed > self.blocks.num_free:
                return
            self.waiting.popleft()
            request.blocks = self.blocks.acquire(request.request_id, needed)
            request.state_slot = self.slots.acquire(request.request_id, 1)[0]
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            yield request

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens to take now: all that remain, or the budget, cut back to the SSD grid where that is in reach."""
        remaining = request.num_tokens - request.num_computed
        if remaining <= budget:
            return remaining
        past_grid = (request.num_computed + budget) % self.chunk_size
        return budget - past_grid if past_grid < budget else budget
