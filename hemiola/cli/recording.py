"""Claims from what the commands found out: one per gate, one per cell of a benchmark, one per load on a server."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from hemiola.bench.machine import describe_device, machine_facts, source_facts, versions
from hemiola.evidence.facts import engine_facts, model_facts, path_facts
from hemiola.evidence.gate import GateResult
from hemiola.evidence.gating import Gating
from hemiola.evidence.golden import EvidenceError
from hemiola.evidence.identity import Identity
from hemiola.evidence.records import Claim, Figure, Mark
from hemiola.evidence.trace import TraceResult
from hemiola.llm import LLM
from hemiola.load import LoadReport


def command_line() -> list[str]:
    """As it was typed, the program by its name."""
    return ["hemiola", *sys.argv[1:]]


def check_unchanged(source: Mapping[str, Any]) -> None:
    """source: of `source_facts` when a command began. Raises: EvidenceError where the package's sources are others by
    now: nothing says which of them ran."""
    if (now := source_facts()["sha256"]) != source["sha256"]:
        raise EvidenceError(
            "the sources changed while they ran",
            found=now,
            expected=source["sha256"],
            where="hemiola's sources",
            remedy="Nothing was recorded. Leave them alone, and run it again.",
        )


def gate_claim(source: Mapping[str, Any], model: str, llm: LLM, identity: Identity, result: GateResult) -> Claim:
    """source: of `source_facts` when the command began, here and below."""
    loaded = llm.loaded
    figures = []
    for mode in result.results:
        of, n = mode.figures, mode.figures.num_positions
        figures += [
            Figure(f"{mode.mode}: tokens equal", of.num_matches, f"of {n:,}"),
            _finite(f"{mode.mode}: mean difference of log-probabilities", of.mean, "nats", n),
            _finite(f"{mode.mode}: its 99th percentile", of.percentile_99, "nats", n),
            Figure(f"{mode.mode}: widest fork", max(of.margins, default=0.0), "nats"),
        ]
    return Claim(
        kind="gate",
        run=command_line(),
        source=source,
        model=model_facts(model, loaded.manifest, loaded.config, identity.checkpoint_sha256),
        engine=engine_facts(loaded.engine, loaded.manifest),
        machine=machine_facts(describe_device(loaded.engine.model.device)),
        workload={
            "oracle": result.golden.engine,
            "oracle_device": result.golden.device,
            "golden_sha256": result.golden.sha256,
            "positions": {mode.mode: mode.figures.num_positions for mode in result.results},
            "prompts": len(result.golden.items),
        },
        seed=loaded.engine.config.seed,
        paths=path_facts(result.paths.items()),
        verdict=result.verdict.value,
        figures=figures,
        more={"gate": result.as_dict()},
    )


def trace_claim(source: Mapping[str, Any], result: TraceResult) -> Claim:
    """Where two sides depart, of which one may be stored: the machine is the one that compared them."""
    first = result.first or result.first_local
    figures = [
        Figure("values compared", len(result.differences), "values"),
        Figure("values that depart", sum(d.departs for d in result.differences), "values"),
    ]
    if first is not None:
        figures.append(_finite("error of the first that departs", first.error, f"relative, bound {first.bound:.3g}", 1))
    sides = {"a": result.a, "b": result.b}
    return Claim(
        kind="trace",
        run=command_line(),
        source=source,
        model={"name": FilePath(str(result.a.settings["model"])).resolve().name},
        machine=machine_facts(describe_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))),
        workload={
            "prompt_tokens": len(result.a.prompt_ids),
            "output_tokens": len(result.a.output_ids),
            **{f"side {letter}": side.describe() for letter, side in sides.items()},
        },
        paths=[{**fact, "side": letter} for letter, side in sides.items() for fact in path_facts(side.paths.items())],
        verdict=result.verdict,
        figures=figures,
        more={"trace": result.as_dict()},
    )


def bench_claim(
    source: Mapping[str, Any], document: Mapping[str, Any], row: Mapping[str, Any], gating: Gating
) -> Claim:
    """Of one cell. A cell without a figure is VOID."""
    conditions, nvml = document["conditions"], row.get("nvml", {})
    marks = dict(gating.marks)
    if "refused" in row:
        marks[Mark.VOID.value] = row["refused"]
    if nvml.get("unsteady"):
        marks[Mark.UNSTEADY.value] = nvml["unsteady"]
    asked = {name: row[name] for name in ("cell", "kind", "batch", "prompt_tokens", "output_tokens") if name in row}
    return Claim(
        kind="bench",
        run=command_line(),
        source=source,
        model=document["model"],
        engine=document["engine"],
        machine={**machine_facts(conditions["device"]), "clock_mhz": nvml.get("clock_mhz")},
        workload={**asked, "cache": {"state": "cold", "prefix_caching": document["engine"]["prefix_caching"]}},
        seed=conditions["seed"],
        paths=document["paths"]["calls"],
        gated_by=gating.ids,
        marks=marks,
        figures=[] if "refused" in row else _bench_figures(document, row),
        more={"gate": gating.describe(), "row": row, "device": conditions["device"], "notes": conditions["notes"]},
    )


def _bench_figures(document: Mapping[str, Any], row: Mapping[str, Any]) -> list[Figure]:
    start = Figure("start to first tokens", document["start_s"]["together"], "s")
    ms = row["samples_ms"] if row["kind"] == "decode" else [1000 * seconds for seconds in row["samples_s"]]
    tokens = row["batch"] * (1 if row["kind"] == "decode" else row["prompt_tokens"])
    rates = [1000 * tokens / of_one for of_one in ms]
    if row["kind"] == "prefill":
        return [_median("prefill", ms, "ms"), _median("prefill rate", rates, "tokens/s"), start]
    nvml = row["nvml"]
    figures = [
        _median("time per step", ms, "ms"),
        _median("output rate", rates, "tokens/s"),
        _median("time to first token", [1000 * seconds for seconds in row["samples_first_token_s"]], "ms"),
        start,
    ]
    if nvml["busy"] is None:
        return [*figures, Figure("GPU busy (NVML)", None, "of the time", nvml.get("samples", 0), why=nvml["why"])]
    return [*figures, Figure("GPU busy (NVML)", nvml["busy"], "of the time", nvml["samples"], low=nvml["busy_min"])]


def void_bench_claim(source: Mapping[str, Any], name: str, reason: str) -> Claim:
    """Of a measured process that died: that it was tried, and no figure."""
    return Claim("bench", command_line(), source, {"name": name}, marks={Mark.VOID.value: reason})


def load_claim(source: Mapping[str, Any], report: LoadReport, device: str | None) -> Claim:
    """Of traffic on a server, of which nothing is known but what it answers: never gated. device: that it runs on, as
    the user says."""
    values = report.as_dict()
    options, rate = values["options"], values["output_tokens_per_s"]
    prompt, cached = values["prompt_tokens"], values["cached_tokens"]
    figures = [
        Figure("requests", values["requests_per_s"], "requests/s", values["outcomes"].get("finished", 0)),
        Figure("output rate", rate, "tokens/s", why="" if rate else "the server gives no usage"),
    ]
    for name, summary in values["latencies_s"].items():
        if summary is not None:
            figures += [
                Figure(f"{name.replace('_', ' ')}, {key}", summary[key], "s", summary["count"], high=summary["max"])
                for key in ("p50", "p95")
            ]
    return Claim(
        kind="load",
        run=command_line(),
        source=source,
        model={"name": report.model},
        machine={"device": device, "driver": None, "versions": versions()},
        workload={
            **{name: value for name, value in options.items() if name not in ("url", "seed", "model")},
            "cache": None if cached is None or not prompt else {"cached": f"{cached / prompt:.1%} of prompt tokens"},
        },
        seed=options["seed"],
        marks={Mark.UNGATED.value: "a server does not say which commit and arms it runs"},
        figures=figures,
        more={"url": options["url"], "outcomes": values["outcomes"], "cached_tokens": cached, "prompt_tokens": prompt},
    )


def _median(name: str, samples: Sequence[float], unit: str) -> Figure:
    return Figure(name, statistics.median(samples), unit, len(samples), min(samples), max(samples))


def _finite(name: str, value: float, unit: str, n: int) -> Figure:
    is_finite = math.isfinite(value)
    return Figure(name, value if is_finite else None, unit, n, why="" if is_finite else "no number")
