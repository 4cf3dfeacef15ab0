"""Scheduler: which requests bring how many tokens to the next step, and who makes room for whom. Pure Python; no torch.

Order: lower priority numbers first, then earlier arrivals. A step spends its token budget on decodes first, in order.
What is left goes to prompts, which take turns: in every second step with prompts the first in order comes first, in the
others the one with the least left (within a priority). So the oldest prompt gets at least every second step's budget,
however many short ones arrive, and a short one waits for a long one for one step at most once it runs. Requests are
admitted in order; one that finds no memory is not overtaken. A prompt is cut where the budget ends, at a multiple of
the SSD chunk size where one is in reach, and at the last such multiple before a snapshot, which changes no bit of what
it computes; the snapshot itself is taken inside the next piece (a mark).

Blocks are taken as tokens come. A request is admitted when the tokens it has fit beside those that running requests
still have to consume; it makes lower priorities give way, equal ones not. When a running request finds no block, the
last in order gives way (perhaps itself), never the first, which therefore always gets on.

Invariant: where a request's tokens must not depend on what runs beside it to the last bit, a prompt is cut on the SSD
grid only, its last piece counts as one even if it is a single token, tokens that it said itself are consumed one by one
even when they are computed again, and what is kept for others ends on the grid within the prompt.

A prompt whose prefix is being computed right now waits for it (for one other request at most) and reuses it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from operator import itemgetter

from hemiola.cache.budget import CachePlan
from hemiola.cache.ledger import Ledger
from hemiola.cache.movements import Movement
from hemiola.cache.prefix import Match, MissReason, PrefixMiss
from hemiola.config.engine import EngineConfig
from hemiola.engine.preemption import PreemptionCosts, PreemptionCounts, PreemptionKind
from hemiola.engine.refusal import refuse_impossible
from hemiola.engine.request import Request, RequestStatus
from hemiola.errors import CapacityError, ConfigError


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`request` consumes its next `num_tokens` tokens in this step. marks, is_prompt: see model.batch.BatchRow."""

    request: Request
    num_tokens: int
    marks: tuple[tuple[int, int], ...] = ()
    is_prompt: bool = False

    @property
    def is_decode(self) -> bool:
        """One token with earlier ones behind it (see model.batch)."""
        return self.num_tokens == 1 and self.request.num_computed > 0 and not self.is_prompt

    @property
    def reaches_end(self) -> bool:
        """After this step every known token is consumed, so a new one is due."""
        return self.num_tokens == self.request.num_remaining


class Scheduler:
    """One cycle: rows = schedule(); apply take_movements(); run the rows; complete(rows); apply take_movements()."""

    def __init__(self, plan: CachePlan, config: EngineConfig, *, max_model_len: int, chunk_size: int) -> None:
        self.plan, self.max_model_len, self.chunk_size = plan, max_model_len, chunk_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.invariant = config.invariant
        self._grid = lcm(plan.block_size, chunk_size)  # where invariant prefixes may end
        if self.invariant and config.max_num_batched_tokens < chunk_size + plan.num_slots:
            raise ConfigError(
                "too few tokens per step for invariant prompts, which are cut at multiples of the SSD chunk size",
                found=f"max_num_batched_tokens {config.max_num_batched_tokens}",
                expected=f">= {chunk_size} (chunk_size) + {plan.num_slots} (requests that run together)",
                where="max_num_batched_tokens",
            )
        self.ledger = Ledger(plan, prefix_caching=config.prefix_caching, swap_bytes=config.swap_bytes)
        self.blocks, self.slots = self.ledger.blocks, self.ledger.slots
        self.costs = PreemptionCosts(config.prefill_tokens_per_s, config.host_bytes_per_s)
        self.preemptions = PreemptionCounts()
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self._rows: dict[Request, int] = {}
        # Prefixes that running requests are about to make usable: their lengths, and who computes them.
        self._coming: dict[bytes, tuple[int, Request]] = {}
        self._waited_for: dict[Request, Request] = {}
        self._num_added = 0
        self._is_turn_of_short = False

    def add(self, request: Request) -> None:
        """Queue a request. Raises: RequestError, CapacityError; see `refuse_impossible`."""
        refuse_impossible(request, self.plan, self.max_model_len)
        request.arrival = self._num_added
        self._num_added += 1
        insort(self.waiting, request, key=_order)

    def schedule(self) -> list[ScheduledRow]:
        """The next step's rows, decodes first, then in order; empty only when nothing is waiting or running."""
        self._rows = {}
        for request in [r for r in self.running if r.is_decoding and not r.is_spent]:
            self._take(request)
        self._schedule_prompts()
        rows = [
            ScheduledRow(r, count, self._marks(r, count), self.invariant and r.num_computed < len(r.prompt_ids))
            for r, count in self._rows.items()
        ]
        return sorted(rows, key=lambda row: (not row.is_decode, row.request.order))

    def complete(self, rows: Iterable[ScheduledRow]) -> None:
        """The step that ran these rows is done: count their tokens and publish what they wrote. Requests that were
        released in the meantime are passed over."""
        for row in rows:
            request = row.request
            if request.status is RequestStatus.RUNNING:
                request.num_computed += row.num_tokens
                self._publish(request)
                self._settle(request, [s for s in request.holding.stops if s <= request.num_computed])

    def _publish(self, request: Request) -> None:
        computed, in_prompt = request.num_computed, min(request.num_computed, len(request.prompt_ids))
        if not self.invariant:
            self.ledger.publish(request.holding, computed, request.tokens_between)
        else:
            is_on_grid = computed == in_prompt and computed % self._grid == 0
            self.ledger.publish(request.holding, in_prompt, request.tokens_between, takes_snapshot=is_on_grid)

    def distrust(self) -> None:
        """A step failed half-way: forget all cached content; every request starts again from its first token."""
        for request in self.running:
            self._restart(request)
        for request in [*self.running, *self.waiting]:
            self.ledger.release(request.holding)
            request.num_computed = 0
        self.waiting = sorted([*self.running, *self.waiting], key=_order)
        self.running = []
        self.ledger.prefix.clear()
        self._waited_for.clear()
        self.ledger.take_movements()

    def release(self, request: Request) -> None:
        """Take a request out, wherever it is, and free all that it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._settle(request, request.holding.stops)
        self._waited_for.pop(request, None)
        self.ledger.release(request.holding)

    def take_movements(self) -> list[Movement]:
        """Copies to make now, in order; before the step's rows run, and again after `complete`."""
        return self.ledger.take_movements()

    def check_integrity(self) -> None:
        """Every block, slot, snapshot and host byte is owned exactly once, and only by live requests."""
        self.ledger.check_integrity(r.holding for r in [*self.running, *self.waiting])
        for queue, status in ((self.running, RequestStatus.RUNNING), (self.waiting, RequestStatus.WAITING)):
            assert all(r.status is status for r in queue), f"a request in the wrong queue, not {status.value}"
            assert [r.order for r in queue] == sorted(r.order for r in queue), (
                f"{status.value} requests are out of order"
            )
        assert all(r.state_slot >= 0 for r in self.running), "a running request without a state slot"
        assert all(r.state_slot < 0 and not r.blocks for r in self.waiting), "a waiting request holds memory"
        assert all(r in self.running for _, r in self._coming.values()), "a prefix is awaited that nobody computes"

    # Tokens

    @property
    def _budget(self) -> int:
        return self.max_num_batched_tokens - sum(self._rows.values())

    def _take(self, request: Request) -> None:
        """Put a running request's next tokens into the step, as many as there is budget for, making room for them."""
        budget = self._budget
        if budget and request.status is RequestStatus.RUNNING:
            count = self._chunk(request, budget)
            if count and self._make_room(request, request.num_computed + count):
                self._rows[request] = count

    def _marks(self, request: Request, count: int) -> tuple[tuple[int, int], ...]:
        return self.ledger.reserve(request.holding, request.num_computed, request.num_computed + count)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens to take now: all, or up to the SSD grid before the next snapshot, or the budget, cut back to the grid
        where that is in reach. Invariant: see above; 0 when the grid is not in reach."""
        done, all_left = request.num_computed, request.num_remaining
        if self.invariant:
            in_prompt = len(request.prompt_ids) - done
            all_left = in_prompt if in_prompt > 0 else 1
        edges = [s // self.chunk_size * self.chunk_size - done for s in request.holding.stops]
        wanted = min([edge for edge in edges if edge > 0], default=all_left)
        if wanted <= budget:
            return wanted
        past_grid = (done + budget) % self.chunk_size
        if past_grid < budget:
            return budget - past_grid
        return 0 if self.invariant else budget

    def _schedule_prompts(self) -> None:
        prompts = [r for r in self.running if not r.is_decoding]
        arrivals = self.waiting[: max(1, self.slots.num_free)]
        if not prompts and not arrivals:
            return
        left = [r.num_remaining for r in prompts]
        # Arrivals keep their order: each counts for as much as the longest before it.
        left += accumulate((r.num_remaining for r in arrivals), max)
        candidates = list(zip(left, [*prompts, *arrivals], strict=True))
        if self._is_turn_of_short:
            candidates.sort(key=lambda pair: (pair[1].priority, pair[0], pair[1].arrival))
        else:
            candidates.sort(key=lambda pair: pair[1].order)
        self._is_turn_of_short = not self._is_turn_of_short
        is_full = False
        for _, request in candidates:
            if not self._budget:
                break
            # A prompt that had to give way in this very step is not let in again.
            if request in arrivals and not is_full:
                is_full = not self._admit(request)
            self._take(request)

    # Memory

    def _admit(self, request: Request) -> bool:
        """Let a waiting request run, unless it waits for a prefix. False: there is no room for it now, or it gave way
        while its last token is still pending."""
        if request.num_pending:
            return False
        holding = request.holding
        match = self._find(request)
        if match is not None and self._is_coming(request, match):
            return True
        while not self._fits(request, match):
            victim = self.running[-1] if self.running else None
            if victim is None or victim.priority <= request.priority:
                return False
            self._preempt(victim)
            match = self._find(request)
        try:
            if match is None:
                self.ledger.swap_in(holding)
            else:
                self.ledger.admit(holding, match)
        except CapacityError:
            return False
        if match is not None:
            self._start(request, match)
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)
        return True

    def _start(self, request: Request, match: Match) -> None:
        """Its first token in this run is the one after the reused prefix; plan its snapshots."""
        request.num_computed = match.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.prefix_miss = match.num_tokens, match.miss
            self.ledger.prefix.totals.count(len(request.prompt_ids), match)
        if self.ledger.prefix.enabled and self.ledger.prefix.has_states:
            size = self.plan.block_size
            unit = self._grid if self.invariant else size
            ends = {end // unit * unit for end in (match.diverges_at, len(request.prompt_ids) - 1)}
            request.holding.stops = tuple(sorted(end for end in ends if end > match.num_tokens))
            for stop in request.holding.stops:
                self._coming.setdefault(request.holding.keys[stop // size - 1], (stop, request))
        else:
            request.holding.stops = ()

    def _find(self, request: Request) -> Match | None:
        """The prefix that a waiting request can start from; None for one that is swapped out and needs none."""
        if request.holding.swapped is not None:
            return None
        match = self.ledger.find(request.holding, self._num_reusable(request), request.tokens_between)
        if request.params.prompt_logprobs is None or len(request.prompt_logprobs) == len(request.prompt_ids):
            return match
        # Every prompt token has to be run to know what it predicts.
        missed = match.num_tokens + (match.miss.num_tokens if match.miss else 0)
        return Match(0, None, PrefixMiss(MissReason.DISABLED, missed))

    def _num_reusable(self, request: Request) -> int:
        """The tokens before whose last one a reused prefix may end. With invariance those are the prompt's alone: what
        a request said itself is consumed one by one, also when another's prompt has the same tokens."""
        return min(request.num_tokens, len(request.prompt_ids) + 1) if self.invariant else request.num_tokens

    def _is_coming(self, request: Request, match: Match) -> bool:
        """Whether to wait for a running request that is about to make a longer prefix of this one usable. A request
        waits for one other at most, and for none of lower priority."""
        if request.params.prompt_logprobs is not None:
            return False
        keys, size = request.holding.keys, self.plan.block_size
        longer = [
            (stop, leader)
            for key, (stop, leader) in self._coming.items()
            if match.num_tokens < stop < self._num_reusable(request) and keys[stop // size - 1] == key
        ]
        if not longer:
            return False
        _, leader = max(longer, key=itemgetter(0))
        return leader.priority <= request.priority and self._waited_for.setdefault(request, leader) is leader

    def _settle(self, request: Request, stops: Iterable[int]) -> None:
        """These stops of a request are behind it, or will not come."""
        for stop in stops:
            key = request.holding.keys[stop // self.plan.block_size - 1]
            if self._coming.get(key) == (stop, request):
                del self._coming[key]

    def _fits(self, request: Request, match: Match | None) -> bool:
        """A state slot, and blocks for all known tokens besides what running requests still have to consume."""
        promised = sum(self.plan.blocks_for(r.num_tokens) - len(r.blocks) for r in self.running)
        needed = self.plan.blocks_for(request.num_tokens) - (match.num_held if match else 0)
        return self.slots.num_free > 0 and needed + max(0, promised) <= self.blocks.num_free

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of a running request; False when it had to give way itself, or has to wait."""
        while True:
            try:
                self.ledger.extend(request.holding, num_tokens)
                return True
            except CapacityError:
                victim = self.running[-1]
                if victim is self.running[0]:
                    return False
                self._preempt(victim)
                if victim is request:
                    return False

    def _preempt(self, request: Request) -> None:
        """Take memory from a running request and send it back to the waiting ones, where its order is kept."""
        holding = request.holding
        known = self.ledger.surviving_tokens(holding)
        room = self.ledger.swap_bytes - self.ledger.swapped_bytes
        decision = self.costs.decide(
            request.request_id, max(0, request.num_computed - known), self.ledger.held_bytes(holding), room
        )
        self._rows.pop(request, None)
        self._restart(request)
        self.running.remove(request)
        if decision.kind is PreemptionKind.SWAP and request.num_computed:
            self.ledger.swap_out(holding)
        else:
            self.ledger.release(holding)
            request.num_computed = 0
        insort(self.waiting, request, key=_order)
        self.preemptions.count(decision)

    def _restart(self, request: Request) -> None:
        """From running to waiting, in what does not concern memory."""
        self._settle(request, request.holding.stops)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1


def _order(request: Request) -> tuple[int, int]:
    return request.order
