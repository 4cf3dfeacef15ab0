"""The gate: its verdicts on good and on broken engines, and everything that it must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hemiola import LLM
from hemiola.cli import app
from hemiola.cli.ending import FAILED, REFUSED
from hemiola.evidence import (
    EvidenceError,
    Golden,
    GoldenItem,
    Identity,
    Noise,
    Verdict,
    capture,
    gate,
    identify,
    measure,
)
from hemiola.evidence.compare import Figures, compare, is_wide
from hemiola.evidence.gate import judge
from hemiola.evidence.paths import check_paths
from hemiola.ops import Path as OpPath
from tests.support.golden import FOLDER

NOISE = Noise(0.04, 0.16, 0.02, 0.25, 1000)
SETTINGS: dict[str, Any] = {"arms": "reference", "cache_bytes": 16 << 20, "max_model_len": 256, "prefix_caching": False}


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("ME*-")


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, **SETTINGS)


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    return capture(LLM(folder, **SETTINGS), [[5, 7, 11], list(range(20, 60))], max_tokens=8)


def few(scheme: str, num_prompts: int, num_tokens: int) -> Golden:
    """The beginning of a recorded golden."""
    golden = Golden.read(FOLDER / f"golden-{scheme}.json")
    items = [
        GoldenItem(
            item.prompt_ids,
            item.output_ids[:num_tokens],
            (item.decode_top or ())[:num_tokens],
            (item.prefill_top or ())[:num_tokens],
        )
        for item in golden.items[:num_prompts]
    ]
    return replace(golden, items=items)


def item(**changes: Any) -> Callable[[Golden], Golden]:
    """A golden whose first prompt differs."""
    return lambda golden: replace(golden, items=[replace(golden.items[0], **changes), *golden.items[1:]])


def test_vllms_answers_pass_and_a_dropped_scale_diverges(
    seeded_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same weights, once as they are and once without the routed experts' scale, through the command line."""
    recorded = few("bf16", num_prompts=6, num_tokens=24)
    recorded.write(tmp_path / "golden.json")
    command = [str(tmp_path / "golden.json"), "--arms", "reference", "--json", str(tmp_path / "result.json")]
    good = CliRunner().invoke(app, ["gate", str(seeded_checkpoint("bf16")), *command])
    assert good.exit_code == 0, good.output
    assert good.stdout.splitlines()[-1] == "verdict: NOISE PASS"
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(mode["mode"], mode["positions"]) for mode in result["modes"]] == [("decode", 144), ("prefill", 144)]
    assert {path["arm"] for path in result["paths"]} == {"reference"}
    for mode in result["modes"]:
        assert f"TOKEN MATCH {mode['matches']}/144, {mode['mode']}: " in good.stdout
        assert all(mode["inside"].values())

    broken = tmp_path / "broken"
    shutil.copytree(seeded_checkpoint("bf16"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    bad = CliRunner().invoke(app, ["gate", str(broken), *command])
    assert bad.exit_code == FAILED, bad.output
    assert bad.stdout.splitlines()[-1] == "verdict: DIVERGENCE"
    assert "OUTSIDE: mean, share" in bad.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert not any(mode["inside"]["mean"] for mode in result["modes"])

    loaded = LLM(seeded_checkpoint("bf16"), **SETTINGS).loaded
    told = replace(recorded, config=identify(loaded.manifest, loaded.config).config)
    told.write(tmp_path / "golden.json")
    refused = CliRunner().invoke(app, ["gate", str(broken), *command])
    assert (refused.exit_code, refused.stdout) == (REFUSED, "")
    assert "found routed_scaling_factor 1.0; expected routed_scaling_factor 2.5" in refused.stderr


def test_a_golden_from_the_command_line_is_passed_strictly(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[5, 7, 11], [3]]")
    file = str(tmp_path / "golden.json")
    captured = CliRunner().invoke(
        app, ["golden", str(folder), file, "--prompt-ids", str(tmp_path / "ids.json"), "--max-tokens", "5"]
    )
    assert captured.exit_code == 0, captured.output
    assert "2 prompts, 10 positions" in captured.stderr
    passed = CliRunner().invoke(app, ["gate", str(folder), file, "--arms", "reference"])
    assert passed.exit_code == 0, passed.output
    assert "prompt 1: TOKEN MATCH 5/5, decode, equal" in passed.stdout
    assert "TOKEN MATCH 10/10, prefill: STRICT PASS" in passed.stdout
    assert passed.stdout.splitlines()[-1] == "verdict: STRICT PASS"
    prefill = CliRunner().invoke(app, ["gate", str(folder), file, "--arms", "reference", "--prefill-only"])
    assert prefill.exit_code == 0
    assert "decode:" not in prefill.stdout


def test_the_tokens_are_those_of_a_run_without_log_probabilities(
    llm: LLM, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong choice that the log-probabilities know nothing of is seen; the rest is checked still."""
    sampler = llm.loaded.engine.sampler
    settle = sampler.settle

    def wrong(request: Any, sampled: int) -> int:
        is_free = not request.params.forced_output_ids
        return sampled ^ 1 if is_free and len(request.output_ids) == 3 else settle(request, sampled)

    monkeypatch.setattr(sampler, "settle", wrong)
    result = gate(llm, replace(golden, noise=NOISE))
    decode, prefill = (mode.figures for mode in result.results)
    assert [(p.num_matches, [f.position for f in p.forks]) for p in decode.prompts] == [(7, [3])] * 2
    assert prefill.num_matches == prefill.num_positions
    assert result.verdict is Verdict.DIVERGENCE
    assert "fork at 3:" in "\n".join(result.lines())


def rows(*best: int) -> list[list[tuple[int, float]]]:
    """Positions of which each has this best token, over the tokens 0 to 9."""
    return [[(token, -0.5), *((t, -3.0) for t in range(10) if t != token)] for token in best]


def test_a_near_tie_hides_no_later_defect() -> None:
    oracle = rows(1, 2, 3, 4)
    oracle[1] = [(2, -0.9), (7, -1.0), (5, -3.0)]
    figures = compare(rows(1, 7, 3, 9), oracle, tokens=[1, 7])
    assert [(f.position, f.token, f.oracle_token) for f in figures.forks] == [(1, 7, 2), (3, 9, 4)]
    assert [is_wide(f.margin, NOISE) for f in figures.forks] == [False, True]
    assert figures.num_matches == 2
    noise = replace(NOISE, argmax_differs=0.5, mean_abs_dlogp=5.0)
    assert judge(Figures([figures]), noise) is Verdict.DIVERGENCE, "the wide one alone"
    assert judge(Figures([compare(rows(1, 7, 3, 4), oracle)]), noise) is Verdict.NOISE_PASS


def test_a_fork_to_a_token_that_the_oracle_does_not_list_is_at_least_as_wide_as_its_last() -> None:
    (fork,) = compare(rows(9), [[(1, -0.1), (2, -2.0)]]).forks
    assert fork.is_at_least
    assert fork.margin == pytest.approx(1.9)


@pytest.mark.parametrize("name", ["mean", "share", "margin"])
def test_each_figure_alone_can_fail(name: str) -> None:
    """1,000 positions, of which 20 fork by 1/16: inside; then one figure is moved over its limit."""
    quiet = [compare(rows(*[1] * 1000), rows(*[1] * 1000))]
    near = [[(1, -1.0), (2, -1.0625)]]
    ours = [[(2, -1.0), (1, -1.0)]]
    wide = [[(1, -1.0), (2, -1.4)]]
    count = {"share": 45}.get(name, 20)
    prompts = [*quiet, *[compare(ours, near)] * count, *([compare(ours, wide)] * 3 if name == "margin" else [])]
    noise = NOISE if name != "mean" else replace(NOISE, mean_abs_dlogp=1e-5)
    inside = Figures(prompts).verdict(noise)
    assert [figure for figure, is_inside in inside.items() if not is_inside] == [name]
    assert judge(Figures(prompts), noise) is Verdict.DIVERGENCE


def test_no_number_is_no_pass() -> None:
    figures = Figures([compare([[(1, float("nan")), (2, -1.0)]], [[(1, -0.5)]])])
    assert figures.num_matches == 1
    assert judge(figures, NOISE) is Verdict.DIVERGENCE


def test_another_checkpoint_is_refused(llm: LLM, golden: Golden) -> None:
    with pytest.raises(EvidenceError, match=f"another checkpoint; found {golden.checkpoint_sha256}; expected 1234"):
        gate(llm, replace(golden, checkpoint_sha256="1234"))


def test_one_other_byte_is_another_checkpoint(folder: Path, golden: Golden, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (file,) = sorted(copy.glob("*.safetensors"))[:1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EvidenceError, match="another checkpoint"):
        gate(LLM(copy, **SETTINGS), golden)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda golden: replace(golden, config={**(golden.config or {}), "head_dim": 7}), "expected head_dim 7"),
        (lambda golden: replace(golden, dtype="bf16"), "another dtype than the golden's; found float32; expected bf16"),
        (lambda golden: replace(golden, kv_dtype="fp8"), "another kv_dtype"),
        (lambda golden: replace(golden, items=[]), "zero tokens to compare"),
        (item(output_ids=[], decode_top=[], prefill_top=[]), "zero tokens to compare.*1 without output ids"),
        (item(decode_top=None), "a missing term.*decode_top"),
        (item(prefill_top=None), "a missing term.*prefill_top"),
    ],
)
def test_what_keeps_it_from_a_verdict_is_named(
    llm: LLM, golden: Golden, change: Callable[[Golden], Golden], named: str
) -> None:
    with pytest.raises(EvidenceError, match=named):
        gate(llm, change(golden))


def test_no_mode_is_refused(llm: LLM, golden: Golden) -> None:
    with pytest.raises(EvidenceError, match="zero tokens to compare"):
        gate(llm, golden, modes=())


def test_a_token_that_the_engine_has_no_term_for_is_refused(llm: LLM, golden: Golden) -> None:
    top = [list(row) for row in golden.items[0].decode_top or ()]
    top[2][-1] = (llm.loaded.config.vocab_size, -5.0)
    with pytest.raises(EvidenceError, match="prompt 0, decode: a missing term"):
        gate(llm, item(decode_top=top)(golden))


def test_a_token_beyond_the_first_alternatives_is_asked_for(
    llm: LLM, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = measure(llm, golden.items, "decode")
    monkeypatch.setattr("hemiola.evidence.compare._ALTERNATIVES", 1)
    assert measure(llm, golden.items, "decode").differences.tolist() == expected.differences.tolist()
    assert len(expected.differences) == 2 * 8 * 5


def test_forks_without_a_noise_are_refused(llm: LLM, golden: Golden) -> None:
    assert gate(llm, replace(golden, noise=None)).verdict is Verdict.STRICT_PASS
    top = [list(row) for row in golden.items[0].prefill_top or ()]
    top[4].reverse()
    with pytest.raises(EvidenceError, match=r"tokens differ.*1 of 16"):
        gate(llm, replace(item(prefill_top=top)(golden), noise=None))


def test_a_counted_fallback_is_refused(llm: LLM, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters say that one call fell back, whatever the tokens are."""
    ops = llm.loaded.engine.model.ops
    before, fallen = ops.snapshot, OpPath("linear", "reference", "reference", "bf16: activations are float32")
    seen: list[int] = []

    def snapshot() -> dict[OpPath, int]:
        seen.append(0)
        return before() | ({fallen: 3} if len(seen) > 1 else {})

    monkeypatch.setattr(ops, "snapshot", snapshot)
    with pytest.raises(EvidenceError, match=r"fell back.*linear: 3 calls \(bf16: activations are float32\)"):
        gate(llm, golden)


def test_paths_are_held_to_the_arms_that_were_asked_for() -> None:
    linear, norm = OpPath("linear", "device", "bf16", ""), OpPath("rms_norm", "reference", "reference", "")
    check_paths({linear: 3, norm: 2}, {"*": "device", "rms_norm": "reference"})
    check_paths({linear: 3}, "device")
    check_paths({linear: 3}, "auto")
    for counts, arms, named in [
        ({linear: 3, norm: 2}, "device", "rms_norm on the reference arm: 2 calls"),
        ({linear: 3, norm: 2}, "auto", "rms_norm on the reference arm"),
        ({linear: 3}, "reference", "linear on the device arm"),
        ({linear: 3}, {"rms_norm": "device"}, "linear on the device arm"),
        ({}, "device", "no path is proven"),
    ]:
        with pytest.raises(EvidenceError, match=named):
            check_paths(counts, arms)


def test_an_identity_that_is_known_is_not_read_again(llm: LLM, golden: Golden) -> None:
    with pytest.raises(EvidenceError, match="found abcd"):
        gate(llm, replace(golden, config=None), identity=Identity("abcd", {}))
