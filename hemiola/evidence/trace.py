"""Where two engines depart: the first layer and op whose output, state or KV differs by more than a measured bound.

Both sides run the same prompt and are forced on the same tokens, so that the values of every step can be compared. The
bound of a value comes from the run: NOISE_FACTOR times the largest difference that a side shows to itself, run twice,
up to that value. Two sides of unlike numerics (arms, dtypes, invariant) round differently on top: there the bound is
at least ROUNDING_FACTOR times the coarser dtype's epsilon times the root of the number of layers so far, as independent
rounding errors add up, and one step of FP8 more for a value that is FP8 or a W8A8 product; what such a value differs by
within its bound may come back NOISE_FACTOR times in all that follows. Two engines compose their ops in other ways,
which FOREIGN_FACTOR instead of ROUNDING_FACTOR stands for. Two experts that are nearly tied can change places by
rounding alone, and then count as a departure. What is within the bound is no evidence of a defect, and not of its
absence.

A side can be transformers in this process (oracle.py), which runs the prompt in one piece: hemiola has to, too.

A layer's norm and its first op, which a device may run as one, run one after the other here, so that both are seen.

Where two sides differ in arms alone, each op of A's run is asked once more on B's arm, with the same inputs and copies
of the states (`local`): nothing adds up there, and an op that is beyond the bound is so by itself.

A stored trace is one JSON object: `format`, `settings` (of the side), `config`, `prompt_ids`, `output_ids`, `best` (the
best token of every position), `paths`, `records` (site, op and summary of each value, in order). A number that is not
finite is null.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hemiola import __version__
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.engine import Engine
from hemiola.evidence.bisect import sufficient
from hemiola.evidence.golden import EvidenceError
from hemiola.evidence.identity import config_fields
from hemiola.evidence.oracle import Oracle
from hemiola.evidence.oracle_recorder import OracleRecorder
from hemiola.evidence.paths import Counts, check_paths, describe_paths
from hemiola.evidence.recorder import EMBEDDING, Record, Recorder, Site, Summary, TracedOps, difference
from hemiola.loading import bind_engine, bind_model, bind_ops, kv_is_fp8, open_manifest, warm
from hemiola.ops import Path as OpPath
from hemiola.ops.table import Arm

NOISE_FACTOR = 2.0
ROUNDING_FACTOR = 4.0
FOREIGN_FACTOR = 16.0
FORMAT = 1
ENGINES = ("hemiola", "transformers")
_FP8_STEP = torch.finfo(torch.float8_e4m3fn).eps
_CODES = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class Side:
    """One engine. settings: fields of EngineConfig; of transformers, dtype and device count. engine: one of ENGINES."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    engine: str = "hemiola"


@dataclass(frozen=True, slots=True)
class Trace:
    """A run. settings: engine, model, dtype, kv_dtype, invariant and arms (of every op). best: the best token of every
    output position; output_ids: what the run was forced on, or chose by itself."""

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    best: Sequence[int]
    paths: Counts
    records: Sequence[Record]

    @property
    def kinds(self) -> list[str]:
        return [_CODES.get(kind, str(kind)) for kind in self.config["layers"]]

    @property
    def engine(self) -> str:
        """One of ENGINES."""
        name: str = self.settings.get("engine", "hemiola")  # which the first stored traces did not say
        return name.partition(" ")[0]

    @property
    def steps(self) -> list[int]:
        """Tokens of every step."""
        return [record.summary.shape[0] for record in self.records if record.site.layer == EMBEDDING]

    @property
    def numerics(self) -> dict[str, Any]:
        """What may change a rounding, of the ops that ran."""
        all_arms = self.settings["arms"]
        arms = {record.op: all_arms[record.op] for record in self.records if record.op in all_arms}
        return {name: self.settings[name] for name in ("dtype", "kv_dtype", "invariant")} | {"arms": arms}

    def describe(self) -> str:
        settings = self.settings
        invariant = ", invariant" if settings["invariant"] else ""
        ran = f"; {describe_paths(self.paths)}" if self.paths else ""
        ran += f"; {settings['engine']}" if self.engine != "hemiola" else ""
        return f"{settings['model']}: {settings['dtype']}, KV {settings['kv_dtype']}{invariant}{ran}"

    def write(self, file: Path) -> None:
        document = {
            "format": FORMAT,
            "settings": dict(self.settings),
            "config": dict(self.config),
            "prompt_ids": list(self.prompt_ids),
            "output_ids": list(self.output_ids),
            "best": list(self.best),
            "paths": [[*path, calls] for path, calls in sorted(self.paths.items())],
            "records": [_record_as_list(record) for record in self.records],
        }
        file.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Trace:
        """Raises: EvidenceError when the file is no stored trace."""
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            if raw["format"] != FORMAT:
                raise EvidenceError(
                    "a stored trace of another format", found=raw["format"], expected=FORMAT, where=file
                )
            records = [_record_from_list(entry) for entry in raw["records"]]
            paths = {OpPath(*entry[:-1]): int(entry[-1]) for entry in raw["paths"]}
            names = ("settings", "config", "prompt_ids", "output_ids", "best")
            settings, config, prompt_ids, output_ids, best = (raw[name] for name in names)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvidenceError("no stored trace", found=f"{type(error).__name__}: {error}", where=file) from error
        return cls(settings, config, prompt_ids, output_ids, best, paths, records)


@dataclass(frozen=True, slots=True)
class Difference:
    """One value of both sides. op: of side A, and of B where that is another one."""

    site: Site
    op: str
    is_state: bool
    error: float
    bound: float

    @property
    def departs(self) -> bool:
        return self.error > self.bound


@dataclass(frozen=True, slots=True)
class Flip:
    """The first output position whose best token differs. ops: a set that flips it when moved from A's arm to B's;
    is_smallest: no smaller one does. Without ops, `why_not`."""

    position: int
    token_a: int
    token_b: int
    ops: tuple[str, ...] = ()
    is_smallest: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """differences: in A's order. missing: sites that only one side has. noise: the largest difference of a side to
    itself, None where it could not be measured (two stored traces)."""

    a: Trace
    b: Trace
    differences: Sequence[Difference]
    missing: Sequence[str]
    noise: float | None
    is_alike: bool
    flip: Flip | None
    local: Sequence[Difference] = ()

    @property
    def first_local(self) -> Difference | None:
        """The first op whose arms depart on the same inputs."""
        return next((d for d in self.local if d.departs), None)

    @property
    def first(self) -> Difference | None:
        """Where they depart first."""
        return next((d for d in self.differences if d.departs), None)

    def layers(self) -> Iterator[tuple[int, str, list[Difference]]]:
        """Of every layer, the embedding and the head its number, kind and differences."""
        kinds = {EMBEDDING: "embedding", **dict(enumerate(self.a.kinds))}
        for layer in (*kinds, len(self.a.kinds)):
            yield layer, kinds.get(layer, "head"), [d for d in self.differences if d.site.layer == layer]

    def lines(self) -> Iterator[str]:
        """The report, for people."""
        yield f"A: {self.a.describe()}"
        yield f"B: {self.b.describe()}"
        one, other = self.a.config, self.b.config
        if changed := sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k)):
            yield f"configurations differ in {', '.join(changed)}"
        noise = "not measured" if self.noise is None else f"{self.noise:.3g}"
        factor = _rounding_factor(self.a, self.b)
        rounding = "" if self.is_alike else f", or {factor:g} x epsilon x root of layers (unlike numerics)"
        yield f"{len(self.differences)} values compared; noise {noise}; bound {NOISE_FACTOR:g} x noise{rounding}"
        if self.missing:
            yield f"{len(self.missing)} values have no counterpart: {', '.join(list(dict.fromkeys(self.missing))[:4])}"
        yield f"{'layer':>5} {'kind':<10} {'outputs':>9} {'states':>9} {'bound':>9}  first departure"
        for layer, kind, differences in self.layers():
            if not differences:
                continue
            outputs, states = (_worst(d for d in differences if d.is_state == kept) for kept in (False, True))
            first = next((d for d in differences if d.departs), None)
            number = "" if kind in ("embedding", "head") else str(layer)
            bound = max(d.bound for d in differences)
            told = "" if first is None else f"{first.op} {first.site.part}, step {first.site.step}"
            yield f"{number:>5} {kind:<10} {outputs:>9} {states:>9} {bound:>9.2g}  {told}".rstrip()
        yield from self._flip_lines()
        if self.local:
            told = "none departs" if self.first_local is None else self._place(self.first_local)
            yield f"op by op on A's inputs, {len(self.local)} values: {told}"
        yield self.verdict

    @property
    def verdict(self) -> str:
        return "NO DEPARTURE beyond the bound" if self.first is None else f"DEPARTS at {self._place(self.first)}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types; a difference that is not finite is null."""
        first = self.first
        return {
            "departs": first is not None,
            "first": None if first is None else _difference_as_dict(first),
            "local_values": len(self.local),
            "first_local": None if self.first_local is None else _difference_as_dict(self.first_local),
            "noise": self.noise if self.noise is None or math.isfinite(self.noise) else None,
            "alike": self.is_alike,
            "flip": None if self.flip is None else asdict(self.flip),
            "missing": list(self.missing),
            "layers": [
                {"layer": layer, "kind": kind, "values": [_difference_as_dict(d) for d in differences]}
                for layer, kind, differences in self.layers()
            ],
            "sides": [
                {
                    "settings": dict(side.settings),
                    "best": list(side.best),
                    "paths": [{**path._asdict(), "calls": calls} for path, calls in sorted(side.paths.items())],
                }
                for side in (self.a, self.b)
            ],
            "prompt_ids": list(self.a.prompt_ids),
            "output_ids": list(self.a.output_ids),
        }

    def _flip_lines(self) -> Iterator[str]:
        flip = self.flip
        if flip is None:
            yield f"best tokens: all {len(self.a.best)} equal"
            return
        yield f"best tokens: {flip.token_a} in A and {flip.token_b} in B at position {flip.position}"
        if flip.ops:
            word = "the smallest set" if flip.is_smallest else "a set of which none can be left out"
            yield f"flipped by moving {', '.join(flip.ops)} to B's arm ({word})"
        else:
            yield f"not bisected: {flip.why_not}"

    def _place(self, first: Difference) -> str:
        layer, (_, _, label, part) = first.site.layer, first.site
        kinds = self.a.kinds
        place = "the embedding" if layer == EMBEDDING else "the head" if layer == len(kinds) else f"layer {layer}"
        kind = f" ({kinds[layer]})" if 0 <= layer < len(kinds) else ""
        state = ", written in place" if first.is_state else ""
        return (
            f"{place}{kind}, op {first.op}: {part} of {label}{state}, step {first.site.step}, "
            f"relative error {first.error:.3g}, bound {first.bound:.3g}"
        )


class Subject:
    """A side's engine, loaded over a traced op table."""

    def __init__(self, side: Side) -> None:
        self.side = side
        quiet: dict[str, Any] = {"prefix_caching": False, "cuda_graphs": False, "overlap": False, "max_num_seqs": 1}
        config = EngineConfig(**(quiet | dict(side.settings)))
        _, self.config, manifest = open_manifest(side.model, side.revision)
        bound, device = bind_ops(config)
        self.recorder = Recorder()
        self.ops = TracedOps(bound.policy, bound.kept, bound.resident, strict=bound.strict, invariant=bound.invariant)
        self.ops.recorder = self.recorder
        model = bind_model(manifest, self.config, config, self.ops, device)
        if self.ops.resident is not None:
            warm(model)
        self.engine: Engine = bind_engine(model, manifest, config, (), self.recorder)
        self.settings = {
            "engine": f"hemiola {__version__}",
            "model": str(side.model),
            "dtype": _name(model.dtype),
            "kv_dtype": "float8_e4m3fn" if kv_is_fp8(config, manifest) else _name(model.dtype),
            "invariant": config.invariant,
            "arms": dict(self.ops.policy),
        }
        self._num_runs = 0

    def run(self, prompt_ids: Sequence[int], num_tokens: int, forced: Sequence[int] | None = None) -> Trace:
        """Raises: EvidenceError when the run failed, or a path fell back or ran on another arm than asked."""
        before = self.ops.snapshot()
        self.recorder.start()
        try:
            output_ids, best = self.answer(prompt_ids, num_tokens, forced)
        finally:
            records = self.recorder.stop()
        paths = {p: n - before.get(p, 0) for p, n in self.ops.snapshot().items() if n > before.get(p, 0)}
        check_paths(paths, self.ops.policy)
        return Trace(self.settings, config_fields(self.config), prompt_ids, output_ids, best, paths, records)

    def answer(
        self, prompt_ids: Sequence[int], num_tokens: int, forced: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """The output and the best token of every position. Raises: EvidenceError when the request failed."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=1, forced_output_ids=forced)
        self._num_runs += 1
        request = self.engine.add_request(f"trace-{self._num_runs}", prompt_ids, params)
        while self.engine.has_unfinished:
            self.engine.step()
        if request.error is not None or len(request.output_ids) != num_tokens:
            raise EvidenceError(
                "the run did not come to its end", found=request.error, expected=f"{num_tokens} tokens", where="trace"
            )
        return request.output_ids, [row[0][0] for row in request.logprobs]


class OracleSubject:
    """A side that transformers runs."""

    def __init__(self, side: Side) -> None:
        self._oracle = Oracle(side.model, side.settings, side.revision)
        self._recorder = OracleRecorder(self._oracle)
        dtype = _name(self._oracle.dtype)
        self._settings = {
            "engine": self._oracle.engine,
            "model": str(side.model),
            "dtype": dtype,
            "kv_dtype": dtype,
            "invariant": False,
            "arms": {},
        }

    def run(self, prompt_ids: Sequence[int], num_tokens: int, forced: Sequence[int] | None = None) -> Trace:
        output_ids, best, records = self._recorder.run(prompt_ids, num_tokens, forced)
        config = config_fields(self._oracle.config)
        return Trace(self._settings, config, prompt_ids, output_ids, best, {}, records)


def run_side(
    side: Side, prompt_ids: Sequence[int], num_tokens: int, forced: Sequence[int] | None = None, repeats: int = 1
) -> list[Trace]:
    """Runs of one engine; the later ones are forced on the tokens of the first.

    Raises: EvidenceError when a run failed, or proves no path.
    """
    subject = OracleSubject(side) if side.engine == "transformers" else Subject(side)
    runs = [subject.run(prompt_ids, num_tokens, forced)]
    while len(runs) < repeats:
        runs.append(subject.run(prompt_ids, num_tokens, runs[0].output_ids))
    return runs


def trace(
    a: Side | Trace, b: Side | Trace, prompt_ids: Sequence[int], num_tokens: int = 2, *, bisects: bool = True
) -> TraceResult:
    """Run both sides, compare them, and find which ops flip the first token that differs. A stored side decides on the
    tokens; prompt_ids and num_tokens are then its own.

    Raises: EvidenceError when nothing can be compared or a run proves no path.
    """
    stored = next((side for side in (a, b) if isinstance(side, Trace)), None)
    forced = None
    if stored is not None:
        prompt_ids, forced = stored.prompt_ids, list(stored.output_ids)
        num_tokens = len(forced)
    runs: list[Trace] = []
    noise: list[dict[Site, float]] = []
    for side in (a, b):
        if isinstance(side, Trace):
            runs.append(side)
            continue
        run, again = run_side(side, prompt_ids, num_tokens, forced, repeats=2)
        gc.collect()  # one engine at a time: two may not fit
        runs.append(run)
        noise.append(_errors(run, again)[0])
        forced = list(run.output_ids)
    run_a, run_b = runs
    _check_alike(run_a, run_b)
    result = compare(run_a, run_b, noise)
    flip = _first_flip(run_a, run_b)
    why_not = _why_not_one_engine(a, b, run_a, run_b)
    if why_not or not (isinstance(a, Side) and isinstance(b, Side)):
        return TraceResult(run_a, run_b, *result, flip and _declined(flip, why_not))
    subject = Subject(a if "device" in run_a.settings["arms"].values() else b)
    local = _local(subject, run_a, run_b)
    if flip is not None:
        flip = _bisect(subject, run_a, run_b, flip) if bisects else _declined(flip, "not asked for")
    return TraceResult(run_a, run_b, *result, flip, local)


def compare(
    a: Trace, b: Trace, noise: Sequence[Mapping[Site, float]]
) -> tuple[list[Difference], list[str], float | None, bool]:
    """Differences, sites without a counterpart, the largest noise (None where there is none), and whether the sides'
    numerics are alike. noise: differences of a side to itself."""
    errors, missing = _errors(a, b)
    is_alike = a.numerics == b.numerics
    epsilon = max(torch.finfo(_dtype(side.settings["dtype"])).eps for side in (a, b))
    factor = _rounding_factor(a, b)
    largest = passed_on = 0.0
    ops = [{record.site: record for record in side.records} for side in (a, b)]
    differences: list[Difference] = []
    for site, error in errors.items():
        largest = max([largest, *(of_side.get(site, 0.0) for of_side in noise)])
        bound = NOISE_FACTOR * largest
        one, other = (of_side[site] for of_side in ops)
        if not is_alike:
            is_fp8 = one.is_fp8 or other.is_fp8 or "linear_fp8" in (one.op, other.op)
            rounding = factor * epsilon * math.sqrt(site.layer + 2) + (_FP8_STEP if is_fp8 else 0.0)
            bound = max(bound, rounding, NOISE_FACTOR * passed_on)
            if is_fp8 and error <= bound:
                passed_on = max(passed_on, error)
        op = one.op if one.op == other.op else f"{one.op}/{other.op}"
        differences.append(Difference(site, op, one.is_state, error, bound))
    if not differences:
        raise EvidenceError("nothing to compare", found="no value that both sides have", where="trace")
    return differences, missing, largest if noise else None, is_alike


def _rounding_factor(a: Trace, b: Trace) -> float:
    return ROUNDING_FACTOR if a.engine == b.engine else FOREIGN_FACTOR


def _errors(a: Trace, b: Trace) -> tuple[dict[Site, float], list[str]]:
    theirs = {record.site: record for record in b.records}
    errors: dict[Site, float] = {}
    missing: list[str] = []
    for record in a.records:
        other = theirs.pop(record.site, None)
        if other is None:
            missing.append(f"{record.site.label} {record.site.part} (A)")
        else:
            errors[record.site] = difference(record, other)
    missing += [f"{site.label} {site.part} (B)" for site in theirs]
    return errors, missing


def _check_alike(a: Trace, b: Trace) -> None:
    """Raises: EvidenceError for sides that cannot be compared."""
    for name, one, other in (
        ("layers", a.kinds, b.kinds),
        ("hidden_size", a.config["hidden_size"], b.config["hidden_size"]),
        ("prompt_ids", list(a.prompt_ids), list(b.prompt_ids)),
        ("output_ids", list(a.output_ids), list(b.output_ids)),
    ):
        if one != other:
            raise EvidenceError(f"the sides have other {name}", found=f"B {other}", expected=f"A {one}", where=name)
    if a.steps != b.steps:
        raise EvidenceError(
            "the sides have other steps",
            found=f"B {b.steps} tokens",
            expected=f"A {a.steps}",
            where="trace",
            remedy="Set --max-num-batched-tokens: both alike, and over the prompt's length beside transformers.",
        )
    if ("float8" in a.settings["kv_dtype"]) != ("float8" in b.settings["kv_dtype"]):
        raise EvidenceError(
            "codes in one side's KV cache and values in the other's",
            found=f"B {b.settings['kv_dtype']}",
            expected=f"A {a.settings['kv_dtype']}",
            where="kv_cache_dtype",
            remedy="Set --kv-cache-dtype model.",
        )


def _first_flip(a: Trace, b: Trace) -> Flip | None:
    pairs = enumerate(zip(a.best, b.best, strict=True))
    return next((Flip(position, *tokens) for position, tokens in pairs if tokens[0] != tokens[1]), None)


def _why_not_one_engine(a: Side | Trace, b: Side | Trace, run_a: Trace, run_b: Trace) -> str:
    """Why both sides are not one engine whose ops move between arms, or nothing."""
    if isinstance(a, Trace) or isinstance(b, Trace):
        return "a stored trace cannot be run"
    if "transformers" in (a.engine, b.engine):
        return "transformers has no arms"
    one, other = (dict(side.settings) | {"arms": None} for side in (a, b))
    if (a.model, a.revision, one) != (b.model, b.revision, other):
        return "the sides differ in more than arms"
    return "" if _moving(run_a, run_b) else "no op is on different arms"


def _moving(a: Trace, b: Trace) -> list[str]:
    """The ops that ran and are on different arms."""
    arms_a, arms_b = a.settings["arms"], b.settings["arms"]
    return [op for op in dict.fromkeys(path.op for path in a.paths) if arms_a[op] != arms_b[op]]


def _local(subject: Subject, a: Trace, b: Trace) -> list[Difference]:
    """The ops of A's run on both arms, with the same inputs."""
    subject.ops.policy.update(a.settings["arms"])
    subject.ops.other = b.settings["arms"]
    subject.recorder.start()
    subject.answer(a.prompt_ids, len(a.output_ids), a.output_ids)
    others = {record.site: record for record in subject.recorder.others}
    epsilon = torch.finfo(_dtype(a.settings["dtype"])).eps
    found = []
    for record in subject.recorder.stop():
        if (other := others.get(record.site)) is not None:
            bound = ROUNDING_FACTOR * epsilon + (_FP8_STEP if record.is_fp8 or other.is_fp8 else 0.0)
            found.append(Difference(record.site, record.op, record.is_state, difference(record, other), bound))
    subject.ops.other = None
    return found


def _bisect(subject: Subject, run_a: Trace, run_b: Trace, flip: Flip) -> Flip:
    """The ops that flip the token when they move from A's arms to B's."""
    arms_a, arms_b = (run.settings["arms"] for run in (run_a, run_b))
    causes = _moving(run_a, run_b)
    forced = list(run_a.output_ids)

    def token(moved: Iterable[str]) -> int:
        arms: dict[str, Arm] = {**arms_a, **{op: arms_b[op] for op in moved}}
        subject.ops.policy.update(arms)
        best: int = subject.answer(run_a.prompt_ids, flip.position + 1, forced[: flip.position + 1])[1][flip.position]
        return best

    if token(()) != flip.token_a or token(causes) == flip.token_a:
        return _declined(flip, "one engine with its ops moved does not show it")
    ops, is_smallest = sufficient(causes, lambda moved: token(moved) != flip.token_a)
    return Flip(flip.position, flip.token_a, flip.token_b, ops, is_smallest)


def _declined(flip: Flip, why: str) -> Flip:
    return Flip(flip.position, flip.token_a, flip.token_b, why_not=why)


def _worst(differences: Iterable[Difference]) -> str:
    errors = [d.error for d in differences]
    return f"{max(errors):.2g}" if errors else ""


def _difference_as_dict(d: Difference) -> dict[str, Any]:
    error = d.error if math.isfinite(d.error) else None
    bound = d.bound if math.isfinite(d.bound) else None
    return {**d.site._asdict(), "op": d.op, "state": d.is_state, "error": error, "bound": bound, "departs": d.departs}


def _record_as_list(record: Record) -> list[Any]:
    summary = record.summary
    numbers = [value if math.isfinite(value) else None for value in (summary.norm, *summary.samples)]
    return [*record.site, record.op, list(summary.shape), summary.dtype, summary.sha256, *numbers]


def _record_from_list(entry: Sequence[Any]) -> Record:
    step, layer, label, part, op, shape, dtype, digest, *numbers = entry
    norm, *samples = (math.nan if value is None else float(value) for value in numbers)
    return Record(
        Site(int(step), int(layer), str(label), str(part)),
        str(op),
        Summary(tuple(shape), str(dtype), str(digest), norm, tuple(samples)),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
