"""`hemiola doctor`: what it finds of variants that run, refuse, fail or compute nonsense, and when it says no."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hemiola import doctor
from hemiola.bench.cells import Driver
from hemiola.cli import app
from hemiola.config.engine import EngineConfig
from hemiola.doctor import Diagnosis, Finding, covering_layers, probe
from hemiola.ops import Variant, registered_ops, table
from hemiola.synthetic import open_synthetic

JOINED = ("norm_route", "norm_linears", "experts_norm")  # what is called instead of others, where there is a variant
CONFIG = EngineConfig(expanded_bytes=1 << 28)
Patch = Callable[[Variant], list[Variant]]


@pytest.fixture
def device_arm(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Patch]], None]:
    """Give every op a device arm: the reference under another name, or what a patch makes of that; without one, none
    to an op that is called instead of others."""

    monkeypatch.setattr(doctor, "DECODE_BATCHES", (1, 3))
    monkeypatch.setattr(doctor, "PROMPT_TOKENS", 70)

    def install(patches: dict[str, Patch]) -> None:
        registry: dict[str, Any] = {}
        for op, arms in registered_ops().items():
            same = replace(arms["reference"][0], arm="device", name="same")
            patch = patches.get(op, lambda variant: [] if variant.op in JOINED else [variant])
            registry[op] = {"reference": arms["reference"], "device": patch(same)}
        monkeypatch.setattr(table, "_registry", registry)
        monkeypatch.setattr(table, "load_device_variants", lambda: None)

    return install


def probed(name: str = "lightning-30b-tiny") -> Diagnosis:
    manifest = open_synthetic(name)
    diagnosis = Diagnosis({}, {}, {})
    probe(diagnosis, manifest, manifest.geometry.config, CONFIG, torch.device("cpu"))
    return diagnosis


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor this device")


def statuses(diagnosis: Diagnosis, op: str, variant: str) -> set[str]:
    return {f.status for f in diagnosis.findings if (f.op, f.variant) == (op, variant)}


def test_a_device_arm_that_runs_is_found_to_run(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    device_arm({})
    diagnosis = probed()
    assert diagnosis.can_start_strict, diagnosis.problems
    assert {finding.op for finding in diagnosis.findings} == {
        *("causal_conv1d", "embedding", "gated_rms_norm", "kv_write", "linear", "linear_fp8", "linear_nvfp4"),
        *("linears", "mamba2_update", "moe_experts", "moe_route", "paged_attention_decode"),
        *("paged_attention_prefill", "rms_norm", "sample", "ssd_scan"),
    }
    assert {finding.status for finding in diagnosis.findings} == {"runs"}
    assert {arm for _, arm, _ in diagnosis.uses["paths"]} == {"device"}
    decodes = [f.at for f in diagnosis.findings if f.op == "moe_route"]
    assert any("bfloat16[3, 192]" in at for at in decodes)


def test_an_op_instead_of_others_is_tried_beside_them(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    def few(x: torch.Tensor, *args: Any) -> str | None:
        return "too many" if len(x) > 2 else None

    device_arm({"norm_route": lambda same: [replace(same, unsupported=few)]})
    diagnosis = probed()
    assert diagnosis.can_start_strict
    assert statuses(diagnosis, "norm_route", "same") == {"runs", "too many"}
    calls = [f.at for f in diagnosis.findings if f.op == "moe_route"]
    assert {"bfloat16[1, 192]", "bfloat16[3, 192]"} <= {at.partition("],")[0] + "]" for at in calls}
    ran = {op for op, _, _ in diagnosis.uses["paths"]}
    assert {"norm_route", "moe_route", "rms_norm"} <= ran


def test_a_variant_that_fails_ends_strict_mode(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    device_arm({"moe_route": lambda same: [replace(same, name="broken", run=failing, keeps=False)]})
    diagnosis = probed()
    assert statuses(diagnosis, "moe_route", "broken") == {"RuntimeError: no kernel image is available"}
    assert not diagnosis.can_start_strict
    assert "no kernel image" in diagnosis.problems[0]
    assert statuses(diagnosis, "moe_experts", "same") == {"runs"}, "the others are tried all the same"


def test_a_variant_behind_one_that_refuses_is_enough(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    device_arm(
        {"rms_norm": lambda same: [replace(same, name="wide", unsupported=lambda *a, **k: "rows are narrow"), same]}
    )
    diagnosis = probed()
    refusals = [finding for finding in diagnosis.findings if finding.is_refusal]
    assert {(f.op, f.variant, f.status) for f in refusals} == {("rms_norm", "wide", "rows are narrow")}
    assert diagnosis.can_start_strict


def test_an_op_that_every_variant_refuses_ends_strict_mode(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    device_arm({"ssd_scan": lambda same: [replace(same, unsupported=lambda *a, **k: "states of 32")]})
    diagnosis = probed()
    assert "states of 32" in diagnosis.problems[0]


def test_a_result_that_is_not_finite_is_said(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    def nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((2,), float("nan"))

    device_arm({"gated_rms_norm": lambda same: [replace(same, name="nan", run=nan, keeps=False), same]})
    assert statuses(probed(), "gated_rms_norm", "nan") == {"runs, but its result is not finite"}


def test_a_weight_that_cannot_be_prepared_is_said(device_arm: Callable[[dict[str, Patch]], None]) -> None:
    device_arm({"linear_fp8": lambda same: [replace(same, prepare=failing)]})
    diagnosis = probed()
    found = [f for f in diagnosis.findings if f.what == "prepare"]
    assert {(f.op, f.status) for f in found} == {("linear_fp8", "RuntimeError: no kernel image is available")}
    assert not diagnosis.can_start_strict


def test_what_a_variant_destroys_is_a_copy(
    device_arm: Callable[[dict[str, Patch]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that ruins what it may write and then fails leaves the tokens as they are."""
    ids: list[list[int]] = []
    run = Driver.run

    def recording(self: Driver, prompts: Any, num_output: int) -> Any:
        result = run(self, prompts, num_output)
        ids.extend(request.output_ids for request in result.requests)
        return result

    def ruining(same: Variant) -> list[Variant]:
        def ruin(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(same.run).bind_partial(*args, **kwargs).arguments
            for name in same.mutates:
                bound[name].fill_(7.0)
            return failing()

        return [replace(same, name="ruin", run=ruin, keeps=False)]

    monkeypatch.setattr(Driver, "run", recording)
    device_arm({})
    probed()
    expected, ids = ids[: len(ids) // 2], []
    device_arm({op: ruining for op in ("causal_conv1d", "mamba2_update", "kv_write")})
    probed()
    assert expected
    assert ids[: len(expected)] == expected


def test_the_layers_cover_every_scheme_of_every_linear() -> None:
    manifest = open_synthetic("super-120b")
    layers = covering_layers(manifest)
    forms = {(m.name.rpartition(".")[2], m.role, m.scheme) for m in manifest.modules if m.layer is not None}
    chosen = {(m.name.rpartition(".")[2], m.role, m.scheme) for m in manifest.modules if m.layer in layers}
    assert chosen == forms
    assert len(layers) <= 10
    assert covering_layers(open_synthetic("lightning-30b")) == (0, 1, 5)


def test_without_a_gpu_it_says_so_and_fails() -> None:
    result = CliRunner().invoke(app, ["doctor", "--synthetic", "nano-fp8-30b-tiny"])
    assert result.exit_code == 1
    assert "there is no GPU that torch can use" in result.stdout
    assert "linear_fp8" in result.stdout
    result = CliRunner().invoke(app, ["doctor", "--synthetic", "nano-fp8-30b-tiny", "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["can_start_strict"]) == (1, False)
    assert document["uses"]["arms"] == "reference"
    assert document["checkpoint"]["schemes"]["mamba projections"] == {"fp8": 10, "plain": 2}


def test_statuses_are_grouped_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    from hemiola.cli.doctor import show

    findings = [Finding("linear", "a", "call", f"bfloat16[{n}, 8]", doctor.RUNS) for n in (1, 2, 3)]
    show(Diagnosis({"device": "x"}, {}, {}, (0,), findings), shapes=False)
    assert "bfloat16[1, 8] and 2 more" in capsys.readouterr().out
