"""Engine: owns a model, its caches and a scheduler; `step()` moves every scheduled request by one step.

A step is: schedule, make the copies that the schedule asks for, run the model and sample, publish what it wrote (and
copy the snapshots), collect the ids. On a GPU the next step is launched first, with the tokens pending, unless a
request needs more than its ids (forced ids, log-probabilities). Once a step's ids are collected the next one's are
drawn, while the device computes: penalties and constraints know all ids before. A request that turns out to be finished
has run for one step too many; its row is dropped, and what it wrote belongs to nobody.

What goes wrong for one request in sampling or log-probabilities ends that request; what goes wrong before leaves no
cached content trusted: everything is computed again, and the error goes to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from hemiola.cache.budget import CachePlan
from hemiola.cache.memory import MemoryBudget, estimate_workspace, memory_rows
from hemiola.cache.plan import plan_engine
from hemiola.cache.tensors import CacheMover, allocate_caches
from hemiola.config.engine import EngineConfig, available_memory
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.runner import Ids, Launched, Runner
from hemiola.engine.sampler import Sampler
from hemiola.engine.scheduler import ScheduledRow, Scheduler
from hemiola.engine.stats import EngineStats, read_stats
from hemiola.errors import HemiolaError, RequestError
from hemiola.model.batch import PENDING, BatchRow
from hemiola.model.nemotron_h import NemotronH
from hemiola.tap import Tap

GRAPH_BYTES = 512 << 20  # of all captured steps together; those of one 30B model took a tenth of it
LOGPROB_ROWS = 256  # rows of (rows, vocab) float32 logits alive at once for prompt log-probabilities
T = TypeVar("T")

_MASK = (1 << 63) - 1
# What one request can make the code raise that serves it alone.
REQUEST_FAULTS = (HemiolaError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


class _Ended:
    """Sampled in place of a request that has ended since its step was launched: the best id, which nobody reads."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    num_outputs = 0
    params = SamplingParams()
    seed = 0
    constraint = None


_ENDED = _Ended()


@dataclass(slots=True)
class _Step:
    """A step on its way. due: indices of the rows whose next id is wanted, and `ids` what they get, in that order, or
    `known` and `faults` where they were sampled one by one. starts: of each row, its first token's position.
    """

    rows: list[ScheduledRow]
    due: list[int]
    starts: list[int]
    launched: Launched
    ids: Ids | None
    known: dict[int, int]
    faults: dict[int, Exception]
    must_collect: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave one request: the ids it added (none while its prompt is being consumed)."""

    request: Request
    new_ids: list[int]

    @property
    def finished(self) -> bool:
        return self.request.is_finished


def _joined(earlier: list[StepOutput], later: list[StepOutput]) -> list[StepOutput]:
    """What two steps brought, one output a request: the host took them at once."""
    if not earlier:
        return later
    by_request = {output.request: output for output in earlier}
    for output in later:
        request, before = output.request, by_request.get(output.request)
        by_request[request] = output if before is None else StepOutput(request, before.new_ids + output.new_ids)
    return list(by_request.values())


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
        self.plan, self.memory = self._plan(kv_dtype, weight_bytes, available)
        self.caches = allocate_caches(model.cache_specs, self.plan, model.dtype, kv_dtype, model.device)
        self.mover = CacheMover(self.caches)
        self.scheduler = Scheduler(
            self.plan, config, max_model_len=self.max_model_len, chunk_size=model.config.chunk_size or 1
        )
        self.runner = Runner(
            model,
            self.caches,
            block_size=config.block_size,
            max_num_seqs=self.plan.num_slots,
            max_blocks=self.plan.blocks_for(self.max_model_len),
            num_slots=self.plan.num_slots,
            use_graphs=config.cuda_graphs,
            tap=tap,
        )
        self.notes = (*self.plan.notes, *self.runner.graph_notes)
        self.overlaps = config.overlap and model.device.type == "cuda"
        self._in_flight: _Step | None = None
        self._outputs: list[StepOutput] = []  # what the next step returns: where one fails, not lost
        self.sampler = Sampler(model.ops, self.vocab_size, tuple(sorted(self.eos_token_ids)))
        self.requests: dict[str, Request] = {}
        self._num_added = 0
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0
        self._last_progress_s = time.monotonic()

    def compile(self) -> None:
        """Compile the kernels of the device arm ahead of the first request, side by side."""
        self.runner.compile(self.config.max_num_batched_tokens)

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

    def fail(self, request: Request, fault: Exception) -> None:
        """End a request by a fault of its own, also one that has just ended well."""
        request.error = RequestError(f"{type(fault).__name__}: {fault}", where=request.request_id)
        self.finish(request.request_id, FinishReason.ERROR)
        request.finish(FinishReason.ERROR)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request from outside (a stop string, an abort) and free what it holds; unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.finish(reason, stop_reason)
            self.scheduler.release(request)
            self.mover.apply(self.scheduler.take_movements())

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
        """One cycle; returns what changed, in batch order: of the step before while this one runs, or of this one."""
        before, self._in_flight = self._in_flight, None
        try:
            step = self._launch()
            if before is not None:
                self._outputs = _joined(self._outputs, self._collect(before))
            if step is not None:
                self._draw(step)
                self._complete(step)
                if step.must_collect or not self.overlaps:
                    self._outputs = _joined(self._outputs, self._collect(step))
                else:
                    self._in_flight = step
        except BaseException:
            self._distrust()
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _launch(self) -> _Step | None:
        """Schedule a step and hand it to the device; None when there is nothing to run."""
        rows = self.scheduler.schedule()
        self.mover.apply(self.scheduler.take_movements())
        if not rows:
            return None
        due = [index for index, row in enumerate(rows) if row.reaches_end]
        launched = self.runner.launch([self._batch_row(row) for row in rows], due)
        step = _Step(
            rows=rows,
            due=due,
            starts=[row.request.num_computed for row in rows],
            launched=launched,
            ids=None,
            known={},
            faults={},
            must_collect=any(
                row.request.params.prompt_logprobs is not None or self.sampler.waits_for(row.request) for row in rows
            ),
        )
        self._num_steps += 1
        self._num_decode_tokens += sum(row.is_decode for row in rows)
        self._num_prefill_tokens += sum(row.num_tokens for row in rows if not row.is_decode)
        return step

    def _draw(self, step: _Step) -> None:
        """Sample the next id of each request, whose ids before are known by now, while the device computes the logits.
        One by one when that fails, to see whose fault it is: a draw depends on nothing else."""
        logits = step.launched.logits
        if logits is None:
            return
        due = [step.rows[index].request for index in step.due]
        requests = [_ENDED if request.is_finished else request for request in due]
        try:
            ids = self.sampler.sample(logits, requests, step.launched.best)
        except REQUEST_FAULTS:
            step.must_collect = True
            for place, request in enumerate(requests):
                try:
                    (step.known[place],) = self.sampler.sample(logits[place : place + 1], [request]).tolist()
                except REQUEST_FAULTS as fault:
                    step.faults[place] = fault
            return
        if self.overlaps and ids is not step.launched.best:  # a graph keeps its best ids itself
            self.runner.remember([request.state_slot for request in due], ids)
        step.ids = Ids(ids)

    def _complete(self, step: _Step) -> None:
        """Count and publish what a launched step computes; what comes after it on the device finds it there."""
        self.scheduler.complete(step.rows)
        self.mover.apply(self.scheduler.take_movements())
        for index in step.due:
            request = step.rows[index].request
            if request.status is RequestStatus.RUNNING:
                request.num_pending = 1

    def _collect(self, step: _Step) -> list[StepOutput]:
        """Take a step's ids to its requests; those that were finished in the meantime are passed over."""
        launched, new_ids = step.launched, dict[int, list[int]]()
        open_rows = [(i, row) for i, row in enumerate(step.rows) if not row.request.is_finished]
        sampled = dict(enumerate(step.ids.tolist())) if step.ids is not None else step.known
        offset = 0
        for row, first in zip(step.rows, step.starts, strict=True):
            if row.request.params.prompt_logprobs is not None and not row.request.is_finished:
                prompt_rows = launched.hidden[offset : offset + row.num_tokens]
                self._for(row.request, partial(self._add_prompt_logprobs, row.request, first, prompt_rows))
            offset += row.num_tokens
        for place, index in enumerate(step.due):
            request = step.rows[index].request
            request.num_pending = 0
            if request.is_finished:
                continue
            if place in step.faults:
                self.fail(request, step.faults[place])
                continue
            logits = None if launched.logits is None else launched.logits[place : place + 1]
            token = self._for(request, partial(self._settle, request, sampled[place], logits))
            if token is not None:
                new_ids[index] = [token]
                self._append(request, token)
        self._last_progress_s = time.monotonic()
        return [StepOutput(row.request, new_ids.get(index, [])) for index, row in open_rows]

    def _distrust(self) -> None:
        """A step failed half-way: nothing that is cached is trusted, and no token is pending."""
        for request in self.requests.values():
            request.num_pending = 0
        self.scheduler.distrust()
        self.mover.forget_all()

    def _for(self, request: Request, act: Callable[[], T]) -> T | None:
        """Do something that concerns one request alone; when it fails, that request ends with the error: None then."""
        try:
            return act()
        except REQUEST_FAULTS as fault:
            self.fail(request, fault)
            return None

    def _batch_row(self, row: ScheduledRow) -> BatchRow:
        request = row.request
        end = request.num_computed + row.num_tokens
        tokens = request.tokens_between(request.num_computed, end)
        tokens += [PENDING] * (row.num_tokens - len(tokens))
        return BatchRow(tokens, request.num_computed, request.blocks, request.state_slot, row.marks, row.is_prompt)

    def _settle(self, request: Request, sampled_id: int, logits: torch.Tensor | None) -> int:
        """A request's next id; its log-probabilities are added. logits: (1, vocab), which it was drawn from."""
        token = self.sampler.settle(request, sampled_id)
        if request.params.logprobs is not None:
            assert logits is not None, "a row is due without logits"
            self._add_logprobs(request, logits, token)
        return token

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
            request.logprobs += self.sampler.top_logprobs(logits.float(), k, [token])

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
            logits = self.model.logits(hidden[low : low + len(chosen)]).float()
            request.prompt_logprobs += self.sampler.top_logprobs(logits, request.params.prompt_logprobs, chosen)

    def _plan(self, kv_dtype: torch.dtype, weight_bytes: int, available: int) -> tuple[CachePlan, MemoryBudget]:
        """Sizes of the caches, clamped to the memory there is, and the table of where all memory goes."""
        config, model = self.config, self.model
        workspace = estimate_workspace(model.config, config.max_num_batched_tokens, config.max_num_seqs)
        graphs = GRAPH_BYTES if config.cuda_graphs and model.device.type == "cuda" else 0
        plan = plan_engine(
            config,
            model.cache_specs,
            max_model_len=self.max_model_len,
            activation_bytes=model.dtype.itemsize,
            kv_element_bytes=kv_dtype.itemsize,
            room=available - weight_bytes - workspace - graphs,
        )
        rows = memory_rows(
            plan,
            weight_bytes=weight_bytes,
            expanded_bytes=config.expanded_bytes if "reference" in model.ops.policy.values() else 0,
            workspace_bytes=workspace,
            swap_bytes=config.swap_bytes,
            graph_bytes=graphs,
        )
        return plan, MemoryBudget(rows, available)
