"""Engine: owns a model, its caches and a scheduler; `step()` moves every scheduled request by one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hemiola.cache.budget import plan_caches
from hemiola.cache.tensors import allocate_caches
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.sampler import Sampler
from hemiola.engine.scheduler import ScheduledRow, Scheduler
from hemiola.errors import RequestError
from hemiola.model.batch import BatchRow, ForwardBatch
from hemiola.model.nemotron_h import NemotronH
from hemiola.tap import Tap

LOGPROB_ROWS = 256  # rows of (rows, vocab) float32 logits alive at once for prompt log-probabilities
_MASK = (1 << 63) - 1


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
    tap: called with activations of every step (see hemiola.tap); None costs nothing.
    """

    def __init__(
        self,
        model: NemotronH,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int],
        kv_dtype: torch.dtype,
        tap: Tap | None = None,
    ) -> None:
        self.model, self.config, self.tap = model, config, tap
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = config.max_model_len or model.config.max_position_embeddings
        self.plan = plan_caches(
            model.cache_specs,
            budget_bytes=config.cache_bytes,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            activation_bytes=model.dtype.itemsize,
            kv_element_bytes=kv_dtype.itemsize,
        )
        self.caches = allocate_caches(model.cache_specs, self.plan, model.dtype, kv_dtype)
        self.scheduler = Scheduler(
            self.plan,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            chunk_size=model.config.chunk_size or 1,
        )
        self.sampler = Sampler(model.ops, self.vocab_size, tuple(sorted(self.eos_token_ids)))
        self.requests: dict[str, Request] = {}
        self._num_added = 0

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of token ids.

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
        request = Request(request_id, list(prompt_ids), params, seed & _MASK)
        self.scheduler.add(request)
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

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One schedule-run-sample cycle; returns what changed, in batch order."""
        rows = self.scheduler.schedule()
        if not rows:
            return []
        batch = ForwardBatch.build([self._batch_row(row) for row in rows], self.config.block_size)
        hidden = self.model.forward(batch, self.caches, self.tap)
        ends = batch.query_start_loc.tolist()
        for row, start in zip(rows, ends, strict=False):
            if row.request.params.prompt_logprobs is not None:
                self._add_prompt_logprobs(row, hidden[start : start + row.num_tokens])
        due = [index for index, row in enumerate(rows) if row.reaches_end]
        for row in rows:
            row.request.num_computed += row.num_tokens
        new_ids: dict[int, int] = {}
        if due:
            # Where every row brings one token and is due, as in a step of decodes, there is nothing to pick.
            last = hidden if len(due) == len(hidden) else hidden[[ends[index + 1] - 1 for index in due]]
            logits = self.model.logits(last, self.tap)
            requests = [rows[index].request for index in due]
            sampled = self.sampler.sample(logits, requests)
            self._add_logprobs(logits, requests, sampled)
            new_ids = dict(zip(due, sampled, strict=True))
            for request, token in zip(requests, sampled, strict=True):
                self._append(request, token)
        return [StepOutput(row.request, [new_ids[i]] if i in new_ids else []) for i, row in enumerate(rows)]

    def _batch_row(self, row: ScheduledRow) -> BatchRow:
        request = row.request
        tokens = request.tokens_between(request.num_computed, request.num_computed + row.num_tokens)
        return BatchRow(tokens, request.num_computed, request.blocks, request.state_slot)

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

    def _add_logprobs(self, logits: torch.Tensor, requests: Sequence[Request], sampled: Sequence[int]) -> None:
        for index, request in enumerate(requests):
            if (k := request.params.logprobs) is not None:
                request.logprobs += self.sampler.top_logprobs(logits[index : index + 1], k, sampled[index : index + 1])

    def _add_prompt_logprobs(self, row: ScheduledRow, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that this row's tokens predict; hidden: (num_tokens, hidden)."""
        request, first = row.request, row.request.num_computed
        if first == 0:
            request.prompt_logprobs.append(None)
        targets = request.prompt_ids[first + 1 : first + 1 + row.num_tokens]
        assert request.params.prompt_logprobs is not None, "prompt log-probabilities were not asked for"
        for low in range(0, len(targets), LOGPROB_ROWS):
            chosen = targets[low : low + LOGPROB_ROWS]
            logits = self.model.logits(hidden[low : low + len(chosen)])
            request.prompt_logprobs += self.sampler.top_logprobs(logits, request.params.prompt_logprobs, chosen)
