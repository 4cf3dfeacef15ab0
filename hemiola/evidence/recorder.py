"""What an engine computes, op by op: an op table that shows its calls to a recorder and can move ops between arms.

The model is loaded over this table in the place of the ordinary one; no engine has it otherwise, so that it costs
nothing when nobody traces. The arms' own callables run, with their own arguments: no result changes.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hemiola.formats.weight import Weight
from hemiola.ops.table import Arm, Ops, registered_ops

SAMPLES = 64  # values of a tensor that a stored trace keeps, evenly spaced
EMBEDDING = -1  # in the place of a layer; what comes after the last layer has the number of layers
LAYER = "layer"  # in the place of an op: the residual stream after a layer

# The argument that says which rows of a written tensor a call is about.
_INDEX_OF = {"conv_state": "state_indices", "ssm_state": "state_indices"}
_SLOTS_OF = {"k_cache": "slot_mapping", "v_cache": "slot_mapping"}


class Site(NamedTuple):
    """Where a value was computed. label: the weight's name on disk where the op has one, else the op's name, with #n
    for its n-th further call in the layer and step. part: output, output[n], or the name of what was written in place.
    """

    step: int
    layer: int
    label: str
    part: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a stored trace keeps of a value. samples: SAMPLES values, evenly spaced over the flat tensor."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    norm: float
    samples: tuple[float, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class Record:
    """A value that an op gave or wrote: whole while the run is in memory, in summary when it was read from a file."""

    site: Site
    op: str
    value: Tensor | Summary

    @property
    def is_state(self) -> bool:
        return not self.site.part.startswith("output")

    @property
    def is_fp8(self) -> bool:
        name = self.value.dtype if isinstance(self.value, Summary) else str(self.value.dtype)
        return "float8" in name

    @property
    def summary(self) -> Summary:
        return self.value if isinstance(self.value, Summary) else summarise(self.value)


def summarise(value: Tensor) -> Summary:
    flat = value.flatten()
    picked = torch.linspace(0, max(len(flat) - 1, 0), min(len(flat), SAMPLES), dtype=torch.float64).round().long()
    numbers = flat.double()
    return Summary(
        tuple(value.shape),
        str(value.dtype).removeprefix("torch."),
        hashlib.sha256(_bytes(flat).numpy().data).hexdigest(),
        numbers.norm().item(),
        tuple(numbers[picked].tolist()),
    )


class Call(NamedTuple):
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


class Recorder:
    """Collects the records of a run, in order, while `is_on`. Also the engine's tap, which tells it the layers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.others: list[Record] = []  # what the other arm makes of the same inputs, where it is asked
        self.is_on = False
        self._step, self._layer = -1, EMBEDDING
        self._seen: Counter[str] = Counter()

    def start(self) -> None:
        self.records, self.others, self.is_on, self._step = [], [], True, -1

    def stop(self) -> list[Record]:
        """The records since `start`."""
        self.is_on = False
        return self.records

    def __call__(self, name: str, tensor: Tensor, /) -> None:
        """The tap. Only the layers' outputs are of use: what other taps show are ops' outputs."""
        parts = name.split(".")
        if self.is_on and parts[0] == "layers" and parts[-1] == "output":
            self._add(self.records, LAYER, "output", "output", tensor)
            self._enter(self._layer + 1)

    def called(self, op: str, call: Call, other: Call | None = None) -> None:
        """An op has run; other: and once more on the other arm."""
        if op == "embedding":
            self._step += 1
            self._enter(EMBEDDING)
        names = {}
        for label in dict.fromkeys(label for label, _, _ in _values(op, call)):
            self._seen[label] += 1
            names[label] = label if self._seen[label] == 1 else f"{label}#{self._seen[label]}"
        for records, ran in ((self.records, call), (self.others, other)):
            for label, part, value in () if ran is None else _values(op, ran):
                self._add(records, op, names[label], part, value)
        if op == "embedding":
            self._enter(0)

    def _enter(self, layer: int) -> None:
        self._layer = layer
        self._seen.clear()

    def _add(self, records: list[Record], op: str, label: str, part: str, value: Tensor) -> None:
        copy = value.detach().to("cpu", copy=True).contiguous()
        records.append(Record(Site(self._step, self._layer, label, part), op, copy))


class TracedOps(Ops):
    """An op table whose ops can change arms between two calls (by `policy`) and whose calls are shown to a recorder."""

    recorder: Recorder | None = None
    other: Mapping[str, Arm] | None = None  # arms to ask as well while recording; the run goes on with `policy`'s

    def _bind(self, op: str, arm: Arm) -> Callable[..., Any]:
        bind = super()._bind
        arms = {arm: bind(op, arm)}

        def on(arm: Arm) -> Callable[..., Any]:
            if arm not in arms:
                arms[arm] = bind(op, arm)
            return arms[arm]

        def call(*args: Any, **kwargs: Any) -> Any:
            now = self.policy[op]
            if self.recorder is None or not self.recorder.is_on:
                return on(now)(*args, **kwargs)
            if "tap" in kwargs:  # variants may take another way when they are tapped
                kwargs["tap"] = None
            other = None
            if self.other is not None and self.other[op] != now:
                own = _with_copies(op, args, kwargs)
                other = Call(own, kwargs, on(self.other[op])(*own, **kwargs))
            result = on(now)(*args, **kwargs)
            self.recorder.called(op, Call(args, kwargs, result), other)
            return result

        return call


def difference(a: Record, b: Record) -> float:
    """How far two values of one site are apart, relative to their size; 0 only where they are equal as far as is known.

    Whole values: the largest over all rows (tokens, requests) of the norm of the difference by that of the larger row,
    or of the average row where that is larger; of integers (chosen experts, ids) the share of a row that differs,
    whatever their order. Summaries: the same over the samples as one row; where these agree and the digests do not,
    what the norms differ by, and at least the smallest positive number.
    """
    if isinstance(a.value, Tensor) and isinstance(b.value, Tensor):
        return _apart(a.value, b.value)
    one, other = a.summary, b.summary
    if one.shape != other.shape or one.is_float != other.is_float:
        return math.inf
    if one.sha256 == other.sha256:
        return 0.0
    dtype = torch.float64 if one.is_float else torch.int64
    samples = (torch.tensor(s.samples, dtype=torch.float64).to(dtype)[None] for s in (one, other))
    norms = abs(one.norm - other.norm) / max(one.norm, other.norm, math.ulp(0.0))
    return max(_apart(*samples), norms if math.isfinite(norms) else math.inf, math.ulp(0.0))


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return math.inf
    if (a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))) or a.numel() == 0:
        return 0.0
    rows, other_rows = (v.reshape(v.shape[0] if v.dim() else 1, -1) for v in (a, b))
    if not a.is_floating_point():
        return (rows.sort(dim=1).values != other_rows.sort(dim=1).values).double().mean(dim=1).max().item()
    x, y = rows.double(), other_rows.double()
    size = torch.maximum(x.norm(dim=1), y.norm(dim=1))
    size = torch.maximum(size, size.mean())
    error = (x - y).norm(dim=1) / size
    error[(x == y).all(dim=1)] = 0.0
    worst = torch.nan_to_num(error, nan=math.inf).max().item()
    return worst


def _with_copies(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The positional arguments, with copies of those that the op writes."""
    contract = registered_ops()[op]["reference"][0]
    names = list(inspect.signature(contract.run).parameters)
    assert not set(contract.mutates) & set(kwargs), "what an op writes is given by position"
    own = [arg.clone() if name in contract.mutates else arg for name, arg in zip(names, args, strict=False)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # states are older than the launch before: see `ops.mamba2_update`
    return own


def _values(op: str, call: Call) -> Iterator[tuple[str, str, Tensor]]:
    """Label, part and value of what a call gave, and of what it wrote in place for the rows that it was about."""
    several = next((arg for arg in call.args if type(arg) is tuple and isinstance(arg[0], Weight)), None)
    if several is not None:  # an output for each; a SharedExpert is no such tuple
        yield from ((weight.name, "output", output) for weight, output in zip(several, call.result, strict=True))
        return
    label = next((arg.name for arg in call.args if isinstance(arg, Weight)), op)
    outputs = call.result if isinstance(call.result, tuple) else (call.result,)
    for index, output in enumerate(outputs):
        if isinstance(output, Tensor):
            yield label, f"output[{index}]" if index else "output", output
    contract = registered_ops()[op]["reference"][0]
    if not contract.mutates:
        return
    given = inspect.signature(contract.run).bind(*call.args, **call.kwargs).arguments
    for name in contract.mutates:
        tensor = given[name]
        if name in _SLOTS_OF:
            tensor, index = tensor.view(-1, *tensor.shape[2:]), given[_SLOTS_OF[name]]
        else:
            index = given[_INDEX_OF[name]]
        index = index[index >= 0].long()
        yield label, name, _bytes(tensor)[index].view(tensor.dtype) if tensor.dtype.itemsize == 1 else tensor[index]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
