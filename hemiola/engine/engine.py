"""Engine: owns a model, its caches and a scheduler; `step()` moves every scheduled request by one step.

A step is: schedule, make the copies that the schedule asks for, run the model, publish what it wrote (and copy the
snapshots), sample. What goes wrong for one request in sampling or log-probabilities ends that request; what goes wrong
before leaves no cached content trusted: everything is computed again, and the error goes to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hemiola.cache.budget import CachePlan, plan_caches
from hemiola.cache.memory import (
    SNAPSHOTS_PER_REQUEST,
    MemoryBudget,
    clamp_cache_bytes,
    estimate_workspace,
    memory_rows,
)
from hemiola.cache.tensors import CacheMover, allocate_caches
from hemiola.config.engine import EngineConfig, available_memory
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.sampler import Sampler
from hemiola.engine.scheduler import ScheduledRow, Scheduler
from hemiola.engine.stats import EngineStats, read_stats
from hemiola.errors import HemiolaError, RequestError
from hemiola.model.batch import BatchRow, ForwardBatch
from hemiola.model.nemotron_h import NemotronH
from hemiola.tap import Tap

LOGPROB_ROWS = 256  # rows of (rows, vocab) float32 logits alive at once for prompt log-probabilities
_MASK = (1 << 63) - 1
# What the parameters of one request can make the sampler raise.
_REQUEST_FAULTS = (HemiolaError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one request: the ids it added (none while its prompt is being consumed)."""

    request: Request
    new_ids: list[int]

    @property
    def finished(self) -> bool:
        return self.request.status is RequestStatus.FINISHED


class Engine:
    """model: anything with NemotronH's `config`, `dtype`, `ops`, `cache_specs`, `forward` and `logits`.

    eos_token_ids: ids that end an output unless the request ignores them. kv_dtype: of the KV cache.
    weight_bytes: of the weights that stay resident, for the memory budget. available_bytes: of memory beside what the
    process holds already; None asks the machine.
    tap: called with activations of every step (see hemiola.tap); None costs nothing.
    """

    def __init__(
        self,
        model: NemotronH,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int],
        kv_dtype: torch.dtype,
        weight_bytes: int = 0,
        available_bytes: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.model, self.config, self.tap = model, config, tap
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = config.max_model_len or model.config.max_position_embeddings
        available = available_memory() if available_bytes is None else available_bytes
        self.plan, self.memory, self.notes = self._plan(kv_dtype, weight_bytes, available)
        self.caches = allocate_caches(model.cache_specs, self.plan, model.dtype, kv_dtype)
        self.mover = CacheMover(self.caches)
        self.scheduler = Scheduler(
            self.plan, config, max_model_len=self.max_model_len, chunk_size=model.config.chunk_size or 1
        )
        self.sampler = Sampler(model.ops, self.vocab_size, tuple(sorted(self.eos_token_ids)))
        self.requests: dict[str, Request] = {}
        self._num_added = 0
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0
        self._last_progress_s = time.monotonic()

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> Request:
        """Queue a prompt of token ids. priority: lower runs first.

        Raises: RequestError (empty prompt, an id outside the vocabulary, a parameter out of range, an id in use),
        CapacityError (it could never run). Nobody else's request is touched.
        """
        if request_id in self.requests:
            raise RequestError("request id in use", found=request_id, where="request_id")
        params.validate_for(self.vocab_size)
        for position, token in enumerate(prompt_ids):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    "token id outside the vocabulary",
                    found=f"{token} at position {position}",
                    expected=f"0 to {self.vocab_size - 1}",
                    where=f"{request_id}: prompt",
                )
        seed = params.seed if params.seed is not None else self.config.seed * 1_000_003 + self._num_added
        request = Request(request_id, list(prompt_ids), params, seed & _MASK, priority=priority)
        self.scheduler.add(request)
        if not self.requests:
            self._last_progress_s = time.monotonic()
        self.requests[request_id] = request
        self._num_added += 1
        return request

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request from outside (a stop string, an abort) and free what it holds; unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.finish(reason, stop_reason)
            self.scheduler.release(request)

    def healthy(self, now: float | None = None) -> bool:
        """Whether there is no work, or a step was completed in the last stall_seconds. now: time.monotonic()."""
        now = time.monotonic() if now is None else now
        return not self.requests or now - self._last_progress_s < self.config.stall_seconds

    def stats(self) -> EngineStats:
        return read_stats(
            self.scheduler,
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
        )

    def check_integrity(self) -> None:
        """Every block, slot, snapshot and host byte is owned exactly once. Cheap enough to ask for in production.

        Raises: AssertionError naming what is not.
        """
        self.scheduler.check_integrity()
        queued = {r.request_id for r in [*self.scheduler.waiting, *self.scheduler.running]}
        assert queued == set(self.requests), "requests and queues disagree"
        if not self.requests:
            expected = self.scheduler.ledger.snapshots.num_on_host * self.plan.slot_bytes
            assert self.mover.host_bytes == expected, "host copies that nobody needs"

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One cycle; returns what changed, in batch order."""
        try:
            rows = self.scheduler.schedule()
            self.mover.apply(self.scheduler.take_movements())
            if not rows:
                return []
            batch = ForwardBatch.build([self._batch_row(row) for row in rows], self.config.block_size)
            hidden = self.model.forward(batch, self.caches, self.tap)
            ends = batch.query_start_loc.tolist()
            due = [index for index, row in enumerate(rows) if row.reaches_end]
            # Where every row brings one token and is due, as in a step of decodes, there is nothing to pick.
            last = hidden if len(due) == len(hidden) else hidden[[ends[index + 1] - 1 for index in due]]
            logits = self.model.logits(last, self.tap) if due else None
            starts = [row.request.num_computed for row in rows]
            self.scheduler.complete(rows)
            self.mover.apply(self.scheduler.take_movements())
        except BaseException:
            self.scheduler.distrust()
            self.mover.forget_all()
            raise
        for row, first, start in zip(rows, starts, ends, strict=False):
            if row.request.params.prompt_logprobs is not None:
                prompt_rows = hidden[start : start + row.num_tokens]
                self._for(row.request, partial(self._add_prompt_logprobs, row.request, first, prompt_rows))
        new_ids = self._sample(logits, [rows[index].request for index in due]) if logits is not None else {}
        self._num_steps += 1
        self._num_decode_tokens += batch.num_decodes
        self._num_prefill_tokens += batch.num_prefill_tokens
        self._last_progress_s = time.monotonic()
        return [StepOutput(row.request, new_ids.get(row.request.request_id, [])) for row in rows]

    def _sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> dict[str, list[int]]:
        """The next id of each request, appended to it; nothing for one whose own parameters fail."""
        try:
            sampled = dict(enumerate(self.sampler.sample(logits, requests)))
        except _REQUEST_FAULTS:
            sampled = {}  # one by one, to see whose fault it is; draws depend on nothing else
            for index, request in enumerate(requests):
                self._for(request, partial(self._sample_one, logits, index, request, sampled))
        new_ids = {}
        for index, token in sampled.items():
            request = requests[index]
            if request.status is not RequestStatus.FINISHED:
                self._for(request, partial(self._add_logprobs, request, logits[index : index + 1], token))
            if request.status is not RequestStatus.FINISHED:
                new_ids[request.request_id] = [token]
                self._append(request, token)
        return new_ids

    def _sample_one(self, logits: torch.Tensor, index: int, request: Request, sampled: dict[int, int]) -> None:
        (sampled[index],) = self.sampler.sample(logits[index : index + 1], [request])

    def _for(self, request: Request, act: Callable[[], None]) -> None:
        """Do something that concerns one request alone; when it fails, that request ends with the error."""
        try:
            act()
        except _REQUEST_FAULTS as fault:
            request.error = RequestError(f"{type(fault).__name__}: {fault}", where=request.request_id)
            self.finish(request.request_id, FinishReason.ERROR)

    def _batch_row(self, row: ScheduledRow) -> BatchRow:
        request = row.request
        tokens = request.tokens_between(request.num_computed, request.num_computed + row.num_tokens)
        return BatchRow(tokens, request.num_computed, request.blocks, request.state_slot, row.marks)

    def _append(self, request: Request, token: int) -> None:
        """Add a sampled token and end the request where it has to end."""
        request.output_ids.append(token)
        params, count = request.params, len(request.output_ids)
        if count >= params.min_tokens and token in self.eos_token_ids and not params.ignore_eos:
            self.finish(request.request_id, FinishReason.STOP)
        elif count >= params.min_tokens and token in (params.stop_token_ids or ()):
            self.finish(request.request_id, FinishReason.STOP, token)
        elif count >= params.max_tokens:
            self.finish(request.request_id, FinishReason.LENGTH)

    def _add_logprobs(self, request: Request, logits: torch.Tensor, token: int) -> None:
        if (k := request.params.logprobs) is not None:
            request.logprobs += self.sampler.top_logprobs(logits, k, [token])

    def _add_prompt_logprobs(self, request: Request, first: int, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that the tokens from `first` on predict, as far as they are not there
        yet (a request that had to make room runs its prompt again); hidden: (num_tokens, hidden)."""
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        known = len(request.prompt_logprobs)
        targets = request.prompt_ids[known : first + 1 + len(hidden)]
        hidden = hidden[known - first - 1 :] if targets else hidden
        assert request.params.prompt_logprobs is not None, "prompt log-probabilities were not asked for"
        for low in range(0, len(targets), LOGPROB_ROWS):
            chosen = targets[low : low + LOGPROB_ROWS]
            logits = self.model.logits(hidden[low : low + len(chosen)])
            request.prompt_logprobs += self.sampler.top_logprobs(logits, request.params.prompt_logprobs, chosen)

    def _plan(
        self, kv_dtype: torch.dtype, weight_bytes: int, available: int
    ) -> tuple[CachePlan, MemoryBudget, tuple[str, ...]]:
        """Sizes of the caches, clamped to the memory there is, and the table of where all memory goes."""
        config, model = self.config, self.model
        workspace = estimate_workspace(model.config, config.max_num_batched_tokens, config.max_num_seqs)
        snapshot_bytes = config.cache_bytes // 4 if config.snapshot_bytes is None else config.snapshot_bytes
        cache_bytes, snapshot_bytes, notes = clamp_cache_bytes(
            config.cache_bytes, snapshot_bytes, available - weight_bytes - workspace
        )
        plan = plan_caches(
            model.cache_specs,
            budget_bytes=cache_bytes,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            activation_bytes=model.dtype.itemsize,
            kv_element_bytes=kv_dtype.itemsize,
            prefix_caching=config.prefix_caching,
            snapshot_bytes=snapshot_bytes,
            host_snapshot_bytes=config.host_snapshot_bytes,
            max_snapshots=SNAPSHOTS_PER_REQUEST * config.max_num_seqs if config.snapshot_bytes is None else None,
        )
        rows = memory_rows(
            plan,
            weight_bytes=weight_bytes,
            expanded_bytes=config.expanded_bytes,
            workspace_bytes=workspace,
            swap_bytes=config.swap_bytes,
        )
        return plan, MemoryBudget(rows, available), (*notes, *plan.notes)
