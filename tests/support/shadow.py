"""The caches' contents in words: what a model would read and write in every block and slot, without a model.

A block holds, per offset, the tokens up to and including the one that was written there; a state slot holds the tokens
that it has seen. Whatever a step reads is compared with what the request has consumed: a block or state that is stale,
mixed up, half copied, published too early or handed out twice is seen at the first read. Nothing is ever cleared, and
what was never written is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hemiola.cache.movements import CopyState, Forget, LoadBlocks, LoadState, Movement, SaveBlocks, SaveState
from hemiola.cache.prefix import PrefixCache
from hemiola.engine.request import FinishReason, Request, RequestStatus
from hemiola.engine.scheduler import ScheduledRow, Scheduler

Tokens = tuple[int, ...]


class Shadow:
    """Drives one scheduler. Every request says token 1, always."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, plan = scheduler, scheduler.plan
        self.states: list[Tokens | None] = [None] * (plan.num_slots + plan.num_snapshots)
        self.kv: list[list[Tokens | None]] = [[None] * plan.block_size for _ in range(plan.num_blocks)]
        self.host: dict[int, object] = {}
        self.unfinished: list[Request] = []
        self.computed: set[Tokens] = set()  # every prefix that some step has computed

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.unfinished.append(request)

    def abort(self, request: Request) -> None:
        request.finish(FinishReason.ABORT)
        self.release(request)

    def release(self, request: Request) -> None:
        self.unfinished.remove(request)
        self.scheduler.release(request)
        self.move(self.scheduler.take_movements())
        self.check()

    def schedule(self) -> list[ScheduledRow]:
        rows = self.scheduler.schedule()
        self.check()
        self.move(self.scheduler.take_movements())
        for row in rows:
            self._read(row.request)
        return rows

    def run(self, rows: Iterable[ScheduledRow]) -> None:
        """What the model does: it reads what is there and writes the rows' tokens, their states and marks."""
        for row in rows:
            request, start = row.request, row.request.num_computed
            if request.status is RequestStatus.FINISHED:
                continue
            tokens = tuple(request.tokens_between(0, start + row.num_tokens))
            for position in range(start, len(tokens)):
                if self.scheduler.plan.block_bytes:
                    block = request.blocks[position // self.scheduler.plan.block_size]
                    assert self.scheduler.blocks._holders[block] == 1, "a shared block is written"
                    self.kv[block][position % self.scheduler.plan.block_size] = tokens[: position + 1]
                self.computed.add(tokens[: position + 1])
            for count, slot in row.marks:
                assert 0 < count < row.num_tokens
                self.states[slot] = tokens[: start + count]
            self.states[request.state_slot] = tokens

    def complete(self, rows: Sequence[ScheduledRow]) -> None:
        due = [row for row in rows if row.request.status is not RequestStatus.FINISHED and row.reaches_end]
        self.scheduler.complete(rows)
        self.check()
        self.move(self.scheduler.take_movements())
        for row in due:
            row.request.output_ids.append(1)
            if len(row.request.output_ids) == row.request.params.max_tokens:
                row.request.finish(FinishReason.LENGTH)
                self.release(row.request)

    def step(self) -> list[ScheduledRow]:
        rows = self.schedule()
        assert bool(rows) == bool(self.unfinished), "somebody waits and nobody runs"
        self.run(rows)
        self.complete(rows)
        return rows

    def finish(self, limit: int = 5000) -> None:
        """Until nobody is left; then nothing is held."""
        for _ in range(limit):
            if not self.unfinished:
                break
            self.step()
        assert not self.unfinished, "no progress"
        s = self.scheduler
        assert (s.blocks.num_free, s.slots.num_free) == (s.blocks.size, s.slots.size)
        assert s.ledger.swapped_bytes == 0
        assert len(self.host) == s.ledger.snapshots.num_on_host
        assert not s.waiting
        assert not s.running
        assert not s._coming
        assert not s._waited_for

    def move(self, movements: Iterable[Movement]) -> None:
        for movement in movements:
            match movement:
                case CopyState(source, target):
                    self.states[target] = self.states[source]
                case SaveState(slot, host):
                    assert host not in self.host
                    self.host[host] = self.states[slot]
                case LoadState(host, slot):
                    self.states[slot] = self.host[host]  # type: ignore[assignment]
                case SaveBlocks(blocks, host):
                    assert host not in self.host
                    self.host[host] = [list(self.kv[block]) for block in blocks]
                case LoadBlocks(host, blocks):
                    for block, content in zip(blocks, self.host[host], strict=True):  # type: ignore[call-overload]
                        self.kv[block] = list(content)
                case Forget(host):
                    del self.host[host]

    def check(self) -> None:
        self.scheduler.check_integrity()
        for request in self.unfinished:
            cached = tuple(request.prompt_ids[: request.num_cached_tokens or 0])
            assert not cached or cached in self.computed, "more is reused than was computed"
            holding, prefix = request.holding, self.scheduler.ledger.prefix
            if holding.match is not None and holding.matched_at == (request.num_tokens, prefix.version):
                assert holding.match == PrefixCache.find(prefix, holding.keys, request.num_tokens), (
                    "a search's answer is out of date"
                )

    def _read(self, request: Request) -> None:
        plan, tokens = self.scheduler.plan, tuple(request.tokens_between(0, request.num_computed))
        if plan.slot_bytes and tokens:
            assert self.states[request.state_slot] == tokens, f"{request.request_id} reads another state"
        if plan.block_bytes:
            for position in range(len(tokens)):
                content = self.kv[request.blocks[position // plan.block_size]][position % plan.block_size]
                assert content == tokens[: position + 1], f"{request.request_id} reads other KV at {position}"
