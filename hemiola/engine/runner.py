"""Runner: a step's rows through the model, where the model is.

On the CPU a step is a plain forward. On a GPU a batch is placed with one copy, nothing waits for the device, and a step
of decodes replays one CUDA graph: captured when its size is first needed, for a ladder of batch sizes and of block
table widths, with inert rows as padding. What a replay reads lies in buffers that the step writes: no host value is
baked in. The id that a step sampled for a request stays on the device, by state slot, so that the next step can be
launched before the host has seen it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hemiola.model.batch import PENDING, BatchRow, ForwardBatch
from hemiola.model.nemotron_h import NemotronH
from hemiola.model.specs import LayerCache
from hemiola.ops import Path
from hemiola.ops.sample import SampleBatch
from hemiola.tap import Tap

_ALIGNMENT = 16  # bytes, of every tensor in a placed batch
_BATCHES_IN_FLIGHT = 3  # pinned buffers: a batch's copy may still be under way when the next one is built


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was handed to the device; its tensors are valid until the next one.

    hidden: (T, hidden). logits: (due rows, vocab), None when no row is due. best: (due rows,) their best ids, where the
    step has found them already.
    """

    batch: ForwardBatch
    hidden: Tensor
    logits: Tensor | None
    best: Tensor | None


class Ids:
    """The ids of a step on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        if ids.device.type != "cuda":
            self._ids, self._copied = ids, None
            return
        self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        self._ids.copy_(ids, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def tolist(self) -> list[int]:
        """Waits until the device has sampled them."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self._ids.tolist()
        return ids


class Runner:
    """One engine's model, caches and graphs.

    max_num_seqs: rows of a step at most. max_blocks: KV blocks of a request at most. num_slots: state slots of
    requests. use_graphs: replay steps of decodes; `graph_notes` says why not, where that is refused.
    capture_seconds, graph_bytes: what the graphs have cost so far.
    """

    def __init__(
        self,
        model: NemotronH,
        caches: Sequence[LayerCache],
        *,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        num_slots: int,
        use_graphs: bool,
        tap: Tap | None,
    ) -> None:
        self.model, self.caches, self.tap = model, caches, tap
        self._block_size, self._max_blocks = block_size, max(1, max_blocks)
        self._on_device = model.device.type == "cuda"
        self.graph_notes = self._why_no_graphs() if use_graphs else ()
        self.uses_graphs = use_graphs and self._on_device and not self.graph_notes
        self._ladder = batch_ladder(max_num_seqs)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._graph_pool: Any = None  # of torch, whose name for its type differs between versions
        self.capture_seconds = 0.0
        self.graph_bytes = 0
        self._stage = _Stage(model.device) if self._on_device else None
        # One more than there are slots: a padded row's slot is -1, which is the last.
        self._sampled = torch.zeros(num_slots + 1, dtype=torch.int64, device=model.device)

    def launch(self, rows: Sequence[BatchRow], due: Sequence[int]) -> Launched:
        """Run `rows`, decodes first; of those at the indices `due` the next id is wanted."""
        if self.uses_graphs and len(due) == len(rows) and all(row.is_decode for row in rows):
            return self._replay(rows)
        chunk_size = (self.model.config.chunk_size or 1) if self._on_device else None
        batch = ForwardBatch.build(rows, self._block_size, chunk_size=chunk_size)
        ends = batch.query_start_loc.tolist()
        is_pending = any(row.token_ids[0] == PENDING for row in rows)
        if self._stage is not None:
            batch = batch.placed(self._stage.place)
        hidden = self._forward(batch, self.tap, is_pending)
        # Where every row brings one token and is due, as in a step of decodes, there is nothing to pick.
        if len(due) == len(hidden):
            last = hidden
        else:
            last = hidden[self._placed(torch.tensor([ends[index + 1] - 1 for index in due], dtype=torch.int64))]
        logits = self.model.logits(last, self.tap) if due else None
        return Launched(batch, hidden, logits, None)

    def remember(self, slots: Sequence[int], ids: Tensor) -> None:
        """Keep the ids just sampled for the requests in these state slots, for rows that bring PENDING next."""
        self._sampled[self._placed(torch.tensor(slots))] = ids

    def _forward(self, batch: ForwardBatch, tap: Tap | None, is_pending: bool = True) -> Tensor:
        """is_pending: whether some token may be PENDING."""
        if is_pending:
            ids = torch.where(batch.token_ids == PENDING, self._sampled[self._slots_of_tokens(batch)], batch.token_ids)
            batch = batch.with_token_ids(ids)
        return self.model.forward(batch, self.caches, tap)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor if self._stage is None else self._stage.place([tensor])[0]

    def _slots_of_tokens(self, batch: ForwardBatch) -> Tensor:
        """(T,) the state slot of each decode's token; PENDING is never a prefill's."""
        slots = batch.state_indices[: batch.num_decodes]
        return torch.nn.functional.pad(slots, (0, batch.num_tokens - batch.num_decodes), value=-1)

    def compile(self, max_num_tokens: int) -> None:
        """Compile what steps of decodes and prompts of up to so many tokens launch, ahead of the first request.

        Without it each kernel is compiled when it is first needed, one after the other. Kernels that depend on more
        than a step's size, such as those for very long contexts, still are. Nothing happens on a CPU, and where some op
        is on the reference arm, or may fall back to it: it would compute on what memory holds.
        """
        ops = self.model.ops
        if not self._on_device or not ops.strict or set(ops.policy.values()) != {"device"}:
            return
        assert self._stage is not None, "on a device"
        width = table_width(1, self._max_blocks)
        sizes = [1 << bits for bits in range(max_num_tokens.bit_length()) if 1 << bits < max_num_tokens]
        with ops.compiling():
            for num_rows in self._ladder:
                inert = ForwardBatch.build([], self._block_size, pad_decodes_to=num_rows, table_width=width)
                self._step(inert.placed(self._stage.place))
            for size in (*sizes, max_num_tokens):
                row = BatchRow([0] * size, 0, [0] * -(-size // self._block_size), 0, is_prompt=True)
                batch = ForwardBatch.build([row], self._block_size, chunk_size=self.model.config.chunk_size or 1)
                self._step(batch.placed(self._stage.place))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of the largest step's activations

    def _step(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, the logits of the first rows, one each, and their best ids, which are remembered."""
        hidden = self._forward(batch, None)
        logits = self.model.logits(hidden[: batch.state_indices.shape[0]])
        best = self.model.ops.sample(logits, SampleBatch())
        self._sampled[batch.state_indices] = best
        return hidden, logits, best

    # Graphs

    def _why_no_graphs(self) -> tuple[str, ...]:
        if not self._on_device:
            return ()
        if not self.model.ops.strict:
            return ("steps run without CUDA graphs: a fallback could not be counted in a replay",)
        on_reference = sorted(op for op in _DECODE_OPS if self.model.ops.policy[op] == "reference")
        if on_reference:
            return (f"steps run without CUDA graphs: on the reference arm are {', '.join(on_reference)}",)
        return ("steps run without CUDA graphs: activations are tapped",) if self.tap is not None else ()

    def _replay(self, rows: Sequence[BatchRow]) -> Launched:
        graph = self._graph(len(rows), max(len(row.blocks) for row in rows))
        batch = ForwardBatch.build(rows, self._block_size, pad_decodes_to=graph.num_rows, table_width=graph.table_width)
        assert self._stage is not None, "graphs are for a GPU"
        batch = batch.placed(partial(self._stage.place, target=graph.inputs))
        graph.graph.replay()
        self.model.ops.count(graph.calls)
        n = len(rows)
        return Launched(batch, graph.hidden[:n], graph.logits[:n], graph.best[:n])

    def _graph(self, num_rows: int, num_blocks: int) -> _Graph:
        num_rows = next(size for size in self._ladder if size >= num_rows)
        width = table_width(num_blocks, self._max_blocks)
        key = (num_rows, width)
        if key not in self._graphs:
            start = time.perf_counter()
            torch.cuda.empty_cache()  # as a capture does itself
            before = torch.cuda.memory_reserved()
            self._graphs[key] = self._captured(num_rows, width)
            self.capture_seconds += time.perf_counter() - start
            self.graph_bytes += torch.cuda.memory_reserved() - before
        return self._graphs[key]

    def _captured(self, num_rows: int, width: int) -> _Graph:
        inert = ForwardBatch.build([], self._block_size, pad_decodes_to=num_rows, table_width=width)
        assert self._stage is not None, "graphs are for a GPU"
        inputs = self._stage.room_for(inert)
        batch = inert.placed(partial(self._stage.place, target=inputs))

        graph = torch.cuda.CUDAGraph()
        with self.model.ops.recorded():  # kernels are compiled and loaded before a capture, which can do neither
            self._step(batch)
        torch.cuda.synchronize()
        with self.model.ops.recorded() as calls, torch.cuda.graph(graph, pool=self._graph_pool):
            hidden, logits, best = self._step(batch)
        self._graph_pool = graph.pool()
        return _Graph(graph, num_rows, width, inputs, hidden, logits, best, calls)


@dataclass(frozen=True, slots=True)
class _Graph:
    """inputs: the bytes of its batch. hidden, logits, best: what a replay writes. calls: what a replay runs."""

    graph: torch.cuda.CUDAGraph
    num_rows: int
    table_width: int
    inputs: Tensor
    hidden: Tensor
    logits: Tensor
    best: Tensor
    calls: Mapping[Path, int]


_DECODE_OPS = (
    "embedding", "kv_write", "linear", "linear_fp8", "linear_nvfp4", "linears", "mamba2_update", "moe_experts",
    "moe_route", "paged_attention_decode", "rms_norm", "sample",
)  # fmt: skip


def batch_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that graphs are captured for: dense where a row is a large part of the step."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), *range(320, max_num_seqs + 64, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def table_width(num_blocks: int, max_blocks: int) -> int:
    """Columns of a block table: 64 times a power of four, or what the longest request can have."""
    width = 64
    while width < num_blocks:
        width *= 4
    return min(width, max_blocks)


class _Stage:
    """Brings a batch's tensors to the device with one copy, from pinned buffers that take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True) for _ in range(_BATCHES_IN_FLIGHT)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def room_for(self, batch: ForwardBatch) -> Tensor:
        """Bytes on the device for the tensors of a batch."""
        return torch.empty(_size_of(batch.tensors), dtype=torch.uint8, device=self._device)

    def place(self, tensors: Sequence[Tensor], target: Tensor | None = None) -> list[Tensor]:
        """The tensors on the device, in `target` (its bytes) where that is given."""
        size = _size_of(tensors)
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        buffer = self._buffers[self._turn][:size]
        views: list[Callable[[Tensor], Tensor]] = []
        start = 0
        for tensor in tensors:
            end = start + tensor.nbytes
            buffer[start:end].copy_(tensor.reshape(-1).view(torch.uint8))
            views.append(_view(start, end, tensor))
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if target is None:
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
        target.copy_(buffer, non_blocking=True)
        self._copied[self._turn].record()
        return [view(target) for view in views]


def _size_of(tensors: Sequence[Tensor]) -> int:
    return sum(-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors)


def _view(start: int, end: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda target: target[start:end].view(like.dtype).view(like.shape)
