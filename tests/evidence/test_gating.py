"""Which gates a speed may rest on, and which records may be compared: every condition alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hemiola.evidence.comparison import compare, why_not
from hemiola.evidence.gating import MIN_POSITIONS, Gating, find_gates
from hemiola.evidence.records import Claim, Figure, Mark, Record, append, read
from tests.support.claims import ENGINE, MACHINE, MODEL, PATHS, SOURCE, bench_claim, gate_claim


def gated(folder: Path, *claims: Claim, **facts: Any) -> Gating:
    for claim in claims:
        append(folder, claim)
    values = {"source": SOURCE, "model": MODEL, "engine": ENGINE, "machine": MACHINE, "paths": PATHS} | facts
    return find_gates(read(folder), **values)


def test_drawn_weights_rest_on_gates_that_cover_their_formats(tmp_path: Path) -> None:
    fp8 = {**MODEL, "checkpoint_sha256": "1", "name": "fp8", "stored": ["mamba projections: FP8"]}
    nvfp4 = {**MODEL, "checkpoint_sha256": "2", "name": "nvfp4", "stored": ["routed experts: NVFP4"]}
    half = gated(tmp_path, gate_claim(model=fp8))
    assert half.marks == {"UNGATED": "no green gate covers routed experts: NVFP4"}
    both = gated(tmp_path, gate_claim(model=nvfp4))
    assert [record.claim.model["name"] for record in both.by] == ["fp8", "nvfp4"]
    assert both.marks == {}
    assert "other shapes, every format of its linears covered" in both.describe()
    assert f"{both.ids[0]} (NOISE PASS) on fp8" in both.describe()


def test_kv_scales_count_where_the_cache_is_fp8(tmp_path: Path) -> None:
    engine = {**ENGINE, "kv_dtype": "fp8"}
    model = {**MODEL, "checkpoint_sha256": "1", "has_kv_scales": False}
    assert "KV scales" in gated(tmp_path, gate_claim(engine=engine, model=model), engine=engine).why_not
    assert gated(tmp_path, gate_claim(engine=engine), engine=engine).by


def test_a_checkpoint_rests_on_its_own_gate_alone(tmp_path: Path) -> None:
    own = {**MODEL, "checkpoint_sha256": "f" * 64}
    assert gated(tmp_path, gate_claim(), model=own).why_not == "no gate record of this checkpoint"
    assert gated(tmp_path, gate_claim(model=own), model=own).describe().endswith("on lightning: this checkpoint")


def compared(golden: str = "9", decode: int = MIN_POSITIONS, prefill: int = MIN_POSITIONS) -> dict[str, Any]:
    return {"golden_sha256": golden * 64, "positions": {"decode": decode, "prefill": prefill}}


def test_the_latest_gate_of_a_checkpoint_counts(tmp_path: Path) -> None:
    red = gated(tmp_path, gate_claim(), gate_claim(verdict="DIVERGENCE"))
    assert "is red" in red.why_not
    assert gated(tmp_path, model={**MODEL, "checkpoint_sha256": "e" * 64}).why_not.endswith("is red (DIVERGENCE)")
    assert gated(tmp_path, gate_claim()).by, "mended"


def test_the_latest_gate_counts_by_each_golden(tmp_path: Path) -> None:
    """A golden that the engine passes does not take back what another one showed."""
    own = {"model": {**MODEL, "checkpoint_sha256": "e" * 64}}
    red, easy = gate_claim(verdict="DIVERGENCE"), gate_claim(workload=compared("8"))
    for facts in ({}, own):
        assert "is red" in gated(tmp_path, red, easy, **facts).why_not
    both = gated(tmp_path, gate_claim(), **own)
    assert [record.claim.workload["golden_sha256"][0] for record in both.by] == ["9", "8"], "mended by its own golden"


def test_a_red_gate_counts_however_little_it_compared(tmp_path: Path) -> None:
    red = gate_claim(verdict="DIVERGENCE", workload=compared("8", decode=0, prefill=1))
    assert "is red" in gated(tmp_path, gate_claim(), red).why_not
    assert "is red" in gated(tmp_path, gate_claim(workload=compared("8", decode=99))).why_not, "too little to mend it"
    assert gated(tmp_path, gate_claim(workload=compared("8"))).by


def test_a_gate_has_to_have_run_what_the_measurement_took(tmp_path: Path) -> None:
    """Another variant or op, on drawn weights and on the gate's own checkpoint, until one gate has run it."""
    own = {"model": {**MODEL, "checkpoint_sha256": "e" * 64}}
    for change in ({"variant": "w4a16"}, {"op": "ssd_scan"}, {"arm": "reference"}):
        path = {**PATHS[0], **change}
        name = f"{path['op']} on the {path['arm']} arm as {path['variant']}"
        for facts, why in (({}, "no green gate covers"), (own, "its gate did not run")):
            folder = tmp_path / f"{name} {len(facts)}"
            gating = gated(folder, gate_claim(), paths=[*PATHS, path], **facts)
            assert gating.marks == {"UNGATED": f"{why} {name}"}
            second = gate_claim(paths=[{**path, "calls": 1}], workload=compared("8"))
            assert len(gated(folder, second, paths=[*PATHS, path], **facts).by) == 2


def test_calls_that_fell_back_or_were_not_counted_are_not_gated(tmp_path: Path) -> None:
    fallen = {**PATHS[0], "arm": "reference", "variant": "torch", "reason": "no kernel"}
    gating = gated(tmp_path, gate_claim(paths=[*PATHS, fallen]), paths=[*PATHS, fallen])
    assert gating.marks == {"UNGATED": "calls fell back to another arm: linear (no kernel)"}
    assert gated(tmp_path, paths=[]).why_not == "no call was counted"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"source": {**SOURCE, "commit": "1"}}, "1 of another commit"),
        ({"source": {**SOURCE, "is_dirty": True}}, "1 of a dirty tree"),
        ({"machine": {**MACHINE, "device": "GPU Y"}}, "1 on GPU Y"),
        ({"engine": {**ENGINE, "arms": {**ENGINE["arms"], "linear": "reference"}}}, "1 with other arms (linear)"),
        ({"engine": {**ENGINE, "dtype": "float32"}}, "1 with dtype float32, not bf16"),
        ({"engine": {**ENGINE, "kv_dtype": "fp8"}}, "1 with kv_dtype fp8, not bf16"),
        ({"engine": {**ENGINE, "invariant": True}}, "1 with invariant True, not False"),
        ({"engine": {**ENGINE, "cuda_graphs": False}}, "1 with cuda_graphs False, not None"),
        ({"machine": {**MACHINE, "driver": "590.1"}}, "1 with driver 590.1, not 580.1"),
        ({"machine": {**MACHINE, "versions": {"torch": "2.12", "triton": "3.6"}}}, "1 with torch 2.12, not 2.11"),
        ({"machine": {**MACHINE, "versions": {"torch": "2.11"}}}, "1 with triton None, not 3.6"),
        ({"workload": compared(decode=0)}, "1 with fewer than 100 positions (0 in decode)"),
        ({"workload": compared(decode=99, prefill=4)}, "1 with fewer than 100 positions (99 in decode, 4 in prefill)"),
        ({"workload": {}}, "1 with fewer than 100 positions (0 in decode, 0 in prefill)"),
        ({"kind": "trace"}, "no gate record of this commit and engine"),
    ],
)
def test_a_gate_of_something_else_is_none(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    gating = gated(tmp_path, gate_claim(**change))
    assert not gating.by
    assert why in gating.marks["UNGATED"]
    assert gating.describe().startswith("UNGATED: ")


def test_a_dirty_tree_or_no_records_gate_nothing(tmp_path: Path) -> None:
    assert gated(tmp_path, gate_claim()).by
    assert "the tree is dirty" in gated(tmp_path, source={**SOURCE, "is_dirty": True}).why_not
    assert find_gates(None, SOURCE, MODEL, ENGINE, MACHINE, PATHS).why_not.startswith("no folder of records")


def test_without_a_repository_the_sources_have_to_be_the_same(tmp_path: Path) -> None:
    here = {"commit": None, "is_dirty": None, "sha256": SOURCE["sha256"]}
    gating = gated(tmp_path, gate_claim(source=here), source=here)
    assert gating.by
    assert gating.by[0].claim.code == "sources aaaaaaaaaa"
    other = gated(tmp_path, source={**here, "sha256": "b" * 64})
    assert "1 of other sources" in other.why_not
    assert gated(tmp_path, source=SOURCE).by, "a commit of the same sources"


def test_a_gate_that_cannot_be_verified_is_none(tmp_path: Path) -> None:
    assert gated(tmp_path, bench_claim(), gate_claim()).by
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"value":4.0', b'"value":3.0'))
    assert not gated(tmp_path).by


def of(claim: Claim) -> Record:
    return Record(1, "", "", "ab" * 32, claim)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"machine": {**MACHINE, "device": "GPU Y"}}, "hardware differs: GPU X, GPU Y"),
        ({"machine": {**MACHINE, "device": None}}, "hardware is not stated"),
        ({"machine": {**MACHINE, "clock_mhz": {"median": 1755}}}, "clock state differs: 1980 MHz, 1755 MHz"),
        ({"machine": {**MACHINE, "clock_mhz": None}}, "clock state differs: read in one alone"),
        ({"marks": {Mark.UNSTEADY.value: "so"}}, "clock state is unsteady"),
        ({"marks": {Mark.VOID.value: "so"}}, "a side is VOID"),
        ({"marks": {Mark.PENDING.value: "so"}}, "a side is PENDING"),
        ({"model": {**MODEL, "stored": ["mamba projections: BF16"]}}, "workload differs: model stored"),
        ({"model": {**MODEL, "config_sha256": "1"}}, "workload differs: model config_sha256"),
    ],
)
def test_what_is_not_compared_is_said_by_name(change: dict[str, Any], why: str) -> None:
    one, other = bench_claim(), bench_claim(**change)
    assert why in why_not(one, other)
    for before, after in ((one, other), (other, one)):
        (line,) = compare(of(before), of(after))
        assert line.startswith("declined, decode 8 x 128 against abab")
        assert "times" not in line


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch": 16}, "workload differs: batch 8, 16"),
        ({"prompt_tokens": 512}, "workload differs: prompt_tokens 128, 512"),
        ({"cache": {"state": "warm", "prefix_caching": False}}, "cache state differs: state cold, warm"),
        ({"cache": None}, "cache state is not known"),
    ],
)
def test_another_workload_or_cache_state_is_not_compared(change: dict[str, Any], why: str) -> None:
    one = bench_claim()
    assert why_not(one, replace(one, workload={**one.workload, **change})) == why


def test_like_is_compared_with_like_in_times_and_rates_alone() -> None:
    slow, fast = bench_claim(ms=4.0), bench_claim(ms=3.0)
    assert compare(of(slow), of(fast)) == [
        "against abababababab (the same engine), time per step: 0.750 times (4 -> 3 ms)",
        "against abababababab (the same engine), output rate: 1.333 times (2000 -> 2667 tokens/s)",
    ], "not the start, which was measured once, nor the busy fraction"
    near = compare(of(slow), of(bench_claim(ms=4.12)))
    assert [line.endswith("spreads overlap") for line in near] == [True, False]
    ungated = replace(fast, gated_by=[], marks={Mark.UNGATED.value: "so"})
    assert all(line.startswith("UNGATED against") for line in compare(of(slow), of(ungated)))
    engine = {**ENGINE, "kv_dtype": "fp8", "arms": {**ENGINE["arms"], "linear": "reference"}}
    (line, _) = compare(of(slow), of(replace(fast, engine=engine, source={**SOURCE, "commit": "1" * 40})))
    assert "(code c0ffeec0ff -> 1111111111; linear on device -> reference; kv_dtype bf16 -> fp8)" in line
    small = {**ENGINE, "max_num_seqs": 8, "max_num_batched_tokens": 512, "legs": "a"}
    machine = {**MACHINE, "driver": "590", "versions": {"torch": "2.12", "commit": "1"}}
    for before, after, told in (
        (
            slow,
            replace(fast, engine=small),
            "max_num_seqs None -> 8; max_num_batched_tokens None -> 512; legs None -> a",
        ),
        (
            replace(slow, engine=small),
            fast,
            "max_num_seqs 8 -> None; max_num_batched_tokens 512 -> None; legs a -> None",
        ),
        (slow, replace(fast, machine=machine), "driver 580.1 -> 590; torch 2.11 -> 2.12; triton 3.6 -> None"),
    ):
        assert compare(of(before), of(after))[0].startswith(f"against abababababab ({told}), time")
    none = replace(fast, figures=[Figure("time per step", None, "ms", why="so")])
    assert compare(of(slow), of(none)) == []
