"""`hemiola selftest`: each instrument broken on purpose, or shown something broken, and whether it goes red.

An instrument that cannot fail proves nothing by passing. Everything runs on the CPU with a checkpoint of drawn weights
that is written for the occasion; the first case of each instrument changes nothing and has to stay green.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hemiola.bench.machine import Sample
from hemiola.bench.observe import MeasuredProcessError, busy_in, observe
from hemiola.bench.trace import covered
from hemiola.bench.window import Span, WindowError, check_window
from hemiola.evidence import EvidenceError, Golden, Verdict, capture, gate
from hemiola.evidence.compare import MODES
from hemiola.evidence.comparison import why_not
from hemiola.evidence.gating import MIN_POSITIONS, find_gates
from hemiola.evidence.records import FILE, Claim, append, read
from hemiola.evidence.trace import Side
from hemiola.evidence.trace import trace as run_trace
from hemiola.formats.weight import ExpertBank, Scheme, SharedExpert, Weight
from hemiola.front import Front
from hemiola.llm import LLM
from hemiola.loading import bind_engine, bind_model
from hemiola.ops import Ops
from hemiola.synthetic import write_checkpoint

MODEL = "lightning-30b-tiny"
SETTINGS: dict[str, Any] = {
    "arms": "reference",
    "dtype": "float32",
    "kv_cache_dtype": "model",
    "cache_bytes": 16 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,  # so that the longest prompt crosses a border of pieces
    "prefix_caching": False,
}
PROMPTS = ([5, 7, 11, 13], list(range(20, 120)), list(range(300, 340)))
NUM_TOKENS = 6
TRACED_LAYER = 1  # whose routed experts lose a scale

Change = Callable[[str | int, Any], Any]  # of one argument of a call, by its name or position


@dataclass(frozen=True, slots=True)
class Case:
    """run: gives what the instrument said, and whether it was red. is_red: what it has to be."""

    instrument: str
    broken: str
    is_red: bool
    run: Callable[[], tuple[bool, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    instrument: str
    broken: str
    saw: str
    is_right: bool


def selftest() -> Iterator[Outcome]:
    """The outcome of every case, as they run."""
    with TemporaryDirectory(prefix="hemiola-selftest-") as name:
        folder = Path(name)
        for case in (*gate_cases(folder), *trace_cases(folder), *bench_cases(), *record_cases(folder)):
            is_red, saw = case.run()
            yield Outcome(case.instrument, case.broken, saw, is_red == case.is_red)


def gate_cases(folder: Path) -> Iterator[Case]:
    model = folder / "model"
    write_checkpoint(MODEL, model)
    golden = capture(LLM(model, **SETTINGS), PROMPTS, NUM_TOKENS)

    def gated(ops: Mapping[str, Change], golden: Golden = golden, arms: str = "reference") -> tuple[bool, str]:
        llm = LLM(model, **SETTINGS)
        _break(llm, ops)
        llm.loaded.engine.config = replace(llm.loaded.engine.config, arms=arms)
        try:
            verdict = gate(llm, golden).verdict
        except EvidenceError as error:
            return True, f"refused: {error.problem}"
        return verdict is Verdict.DIVERGENCE, verdict.value

    def case(broken: str, *args: Any, is_red: bool = True, **changed: Any) -> Case:
        return Case("gate", broken, is_red, lambda: gated(*args, **changed))

    linears = ("linear_fp8", "linear_nvfp4", "moe_experts")
    other_sum = replace(golden, checkpoint_sha256="0" * 64)
    yield case("nothing", {}, is_red=False)
    yield case("recurrent state dropped before each decode step", {"mamba2_update": _no_state})
    yield case("recurrent state dropped between pieces of a prompt", {"ssd_scan": _from_zero})
    yield case("nibbles of NVFP4 weights swapped", dict.fromkeys(linears, _of_weights(_swap_nibbles)))
    yield case("input_scale of FP8 products ignored", dict.fromkeys(linears, _of_weights(_no_input_scale)))
    yield case("scale of FP8 and NVFP4 weights skipped", dict.fromkeys(linears, _of_weights(_no_scale)))
    yield case("an arm claimed that did not run", {}, arms="device")
    yield case("zero tokens", {}, replace(golden, items=[]))
    yield case("a golden of another checkpoint", {}, other_sum)


def trace_cases(folder: Path) -> Iterator[Case]:
    """model: written by `gate_cases`."""
    model, other = folder / "model", folder / "other"

    def traced(b: Path) -> tuple[bool, str]:
        first = run_trace(Side(str(model), SETTINGS), Side(str(b), SETTINGS), PROMPTS[2], 2, bisects=False).first
        if first is None:
            return False, "no departure"
        return first.site.layer == TRACED_LAYER, f"departs first in layer {first.site.layer}, {first.op}"

    def halved() -> tuple[bool, str]:
        shutil.copytree(model, other)
        for file in other.glob("*.safetensors"):
            tensors = load_file(file)
            prefix = f"backbone.layers.{TRACED_LAYER}.mixer.experts."
            scales = [name for name in tensors if name.startswith(prefix) and name.endswith(".weight_scale_2")]
            save_file(tensors | {name: tensors[name] / 2 for name in scales}, file, metadata={"format": "pt"})
        return traced(other)

    yield Case("trace", "nothing", False, lambda: traced(model))
    yield Case("trace", f"scales halved in layer {TRACED_LAYER}'s experts", True, halved)


def bench_cases() -> Iterator[Case]:
    """On a clock that reads 0 at the start: 10 s of load with an idle GPU, 1 s of prefill, 2 s of decoding."""
    load, prefill, decode = Span("load", 0.0, 10.0), Span("prefill", 10.0, 11.0), Span("decode", 11.0, 13.0)

    def sampled(window: Span, clock_after: int = 1980) -> tuple[bool, str]:
        at = [step / 50 for step in range(700)]
        samples = [Sample(s, 97 if s > 11 else 4, 1980 if s < 12 else clock_after, 500.0, 0) for s in at]
        try:
            seen = busy_in(window, (load, prefill), samples)
        except WindowError as error:
            return True, f"refused: {error.problem}"
        if seen["unsteady"]:
            return True, f"UNSTEADY: {seen['unsteady']}"
        return seen["busy"] != 0.97, f"busy {seen['busy']:.0%} in {seen['samples']} samples"

    def divided(window: Span) -> tuple[bool, str]:
        try:
            check_window(window, ())
        except WindowError as error:
            return True, f"refused: {error.problem}"
        return False, "taken"

    def counted(count: Callable[[list[tuple[float, float]], tuple[float, float]], float]) -> tuple[bool, str]:
        """Of a prefill before the window and three kernels in it that overlap: 20 of 30 is right."""
        running = count([(-9.0, -1.0), (0.0, 10.0), (5.0, 15.0), (20.0, 25.0)], (0.0, 30.0))
        return running != 20.0, f"{running:g} of 30 busy"

    def added(spans: list[tuple[float, float]], window: tuple[float, float]) -> float:
        return sum(end - start for start, end in spans if start >= window[0])

    def unclipped(spans: list[tuple[float, float]], window: tuple[float, float]) -> float:
        return covered(spans, (min(start for start, _ in spans), window[1]))

    yield Case("busy sampler", "nothing", False, lambda: sampled(decode))
    yield Case("busy sampler", "sampled over the load", True, lambda: sampled(Span("decode", 8.0, 13.0)))
    yield Case("busy sampler", "sampled over the prefill", True, lambda: sampled(Span("decode", 10.5, 13.0)))
    yield Case("busy sampler", "the clock falls half-way", True, lambda: sampled(decode, clock_after=660))
    yield Case("busy sampler", "the measured process dies in its load", True, _died)
    yield Case("kernel times", "nothing", False, lambda: counted(covered))
    yield Case("kernel times", "added up instead of merged", True, lambda: counted(added))
    yield Case("kernel times", "those of the prefill counted", True, lambda: counted(unclipped))
    yield Case("decode window", "nothing", False, lambda: divided(decode))
    yield Case("decode window", "empty", True, lambda: divided(Span("decode", 11.0, 11.0)))
    yield Case("decode window", "negative", True, lambda: divided(Span("decode", 11.0, 9.0)))


def record_cases(folder: Path) -> Iterator[Case]:
    source = {"commit": "a" * 40, "is_dirty": False, "sha256": "a" * 64}
    model = {"name": "m", "checkpoint_sha256": "b" * 64, "stored": ["mamba projections: FP8"], "has_kv_scales": False}
    engine = {"arms": {"linear": "device"}, "dtype": "bf16", "kv_dtype": "bf16"}
    claim = Claim(
        kind="gate",
        run=("selftest",),
        source=source,
        model=model,
        engine=engine,
        machine={"device": "one GPU"},
        workload={"positions": dict.fromkeys(MODES, MIN_POSITIONS), "cache": {"state": "cold"}},
        paths=[{"op": "linear", "arm": "device", "variant": "v", "reason": ""}],
        verdict=Verdict.STRICT_PASS.value,
    )
    records = folder / "records"
    for _ in range(3):
        append(records, claim)
    lines = (records / FILE).read_bytes().splitlines(keepends=True)

    def chained(lines: Sequence[bytes]) -> tuple[bool, str]:
        (records / FILE).write_bytes(b"".join(lines))
        chain = read(records)
        return chain.broken_at is not None, f"broken at line {chain.broken_at}" if chain.broken_at else "whole"

    def gated(source: Mapping[str, Any] = source, engine: Mapping[str, Any] = engine) -> tuple[bool, str]:
        gating = find_gates(chain, source, model, engine, claim.machine, claim.paths)
        return not gating.by, "gated" if gating.by else gating.describe()

    def compared(other: Claim) -> tuple[bool, str]:
        reason = why_not(claim, other)
        return bool(reason), f"declined: {reason}" if reason else "compared"

    chain = read(records)
    changed = [lines[0], lines[1].replace(b"STRICT PASS", b"NOISE PASS"), lines[2]]
    yield Case("records", "nothing", False, lambda: chained(lines))
    yield Case("records", "a line changed", True, lambda: chained(changed))
    yield Case("records", "a line taken out", True, lambda: chained([lines[0], lines[2]]))
    yield Case("records", "two lines in the other order", True, lambda: chained([lines[1], lines[0], lines[2]]))
    yield Case("gate of a speed", "nothing", False, gated)
    yield Case("gate of a speed", "another commit", True, lambda: gated(source={**source, "commit": "c" * 40}))
    yield Case("gate of a speed", "a dirty tree", True, lambda: gated(source={**source, "is_dirty": True}))
    yield Case(
        "gate of a speed", "another arm", True, lambda: gated(engine={**engine, "arms": {"linear": "reference"}})
    )
    yield Case("comparison", "nothing", False, lambda: compared(claim))
    yield Case(
        "comparison", "other hardware", True, lambda: compared(replace(claim, machine={"device": "another GPU"}))
    )
    warm = {**claim.workload, "cache": {"state": "warm"}}
    yield Case("comparison", "another cache state", True, lambda: compared(replace(claim, workload=warm)))


def _died() -> tuple[bool, str]:
    program = (
        "import json, sys, time\n"
        "sys.stdout.write(json.dumps({'event': 'begin', 'phase': 'load', 'at_s': time.monotonic()}) + chr(10))\n"
        "sys.exit(3)\n"
    )
    try:
        observe([sys.executable, "-S", "-c", program], lambda address: _NoGpu())
    except MeasuredProcessError as error:
        return error.status == 3, str(error)
    return False, "a figure"


class _NoGpu:
    problem: str | None = "no GPU"

    def sample(self) -> Sample | None:
        return None


class _BrokenOps(Ops):
    """An op table that changes the arguments of some ops' calls."""

    def __init__(self, ops: Ops, changes: Mapping[str, Change]) -> None:
        self._changes = changes
        super().__init__(ops.policy, ops.kept, strict=ops.strict, invariant=ops.invariant)

    def _bind(self, op: str, arm: Any) -> Callable[..., Any]:
        run = super()._bind(op, arm)
        if (change := self._changes.get(op)) is None:
            return run

        def call(*args: Any, **kwargs: Any) -> Any:
            changed = [change(index, value) for index, value in enumerate(args)]
            return run(*changed, **{name: change(name, value) for name, value in kwargs.items()})

        return call


def _break(llm: LLM, changes: Mapping[str, Change]) -> None:
    """Give an LLM an engine of the same kind over a broken op table."""
    loaded = llm.loaded
    config, ops = loaded.engine.config, loaded.engine.model.ops
    model = bind_model(loaded.manifest, loaded.config, config, _BrokenOps(ops, changes), loaded.engine.model.device)
    engine = bind_engine(model, loaded.manifest, config, loaded.config.eos_token_ids)
    llm.loaded = replace(loaded, engine=engine)
    llm.front = Front(engine, loaded.tokenizer)


_SSM_STATE, _NUM_COMPUTED = 9, 10  # positions in mamba2_update and in ssd_scan


def _no_state(which: str | int, value: Any) -> Any:
    return value.zero_() if which == _SSM_STATE else value


def _from_zero(which: str | int, value: Any) -> Any:
    return torch.zeros_like(value) if which == _NUM_COMPUTED else value


def _of_weights(change: Callable[[Weight], Weight]) -> Change:
    def changed(which: str | int, value: Any) -> Any:
        if isinstance(value, ExpertBank):
            return ExpertBank(value.name, tuple(map(change, value)))
        if isinstance(value, SharedExpert):
            return SharedExpert(*map(change, value))
        return change(value) if isinstance(value, Weight) else value

    return changed


def _swap_nibbles(weight: Weight) -> Weight:
    return replace(weight, data=weight.data << 4 | weight.data >> 4) if weight.scheme is Scheme.NVFP4 else weight


def _no_input_scale(weight: Weight) -> Weight:
    return weight if weight.input_scale is None else replace(weight, input_scale=1.0)


def _no_scale(weight: Weight) -> Weight:
    return weight if weight.scale is None else replace(weight, scale=1.0)
