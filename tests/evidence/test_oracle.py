"""transformers in process: goldens of it, its defect mended, and what keeps it from being an oracle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hemiola import LLM, SamplingParams
from hemiola.cli import app
from hemiola.cli.ending import REFUSED
from hemiola.evidence import EvidenceError, Golden, Oracle, Verdict, capture_from_transformers, gate
from hemiola.evidence import oracle as module

PROMPTS = [[5, 7, 11, 13], [3], list(range(20, 60))]
CACHES = {"cache_bytes": 16 << 20, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    """Whose dt is mostly below time_step_min, which must not be a limit."""
    return tiny_folder("ME*-", overrides={"time_step_min": 0.5, "time_step_max": 1.0})


def test_a_golden_of_transformers_is_what_the_reference_arm_gives(folder: Path, tmp_path: Path) -> None:
    golden = capture_from_transformers(Oracle(folder), PROMPTS, max_tokens=6, top_k=3)
    assert golden.engine.startswith("transformers 5.")
    assert "48989" in golden.engine
    assert (golden.dtype, golden.kv_dtype, golden.device) == ("float32", "float32", "cpu")
    assert {len(top) for item in golden.items for top in [*item.decode_top, *item.prefill_top]} == {3}
    assert golden.noise is not None
    assert 0 < golden.noise.mean_abs_dlogp < 1e-5
    golden.write(tmp_path / "golden.json")
    result = gate(LLM(folder, **CACHES), Golden.read(tmp_path / "golden.json"))
    assert result.verdict is Verdict.STRICT_PASS
    assert {path.arm for path in result.paths} == {"reference"}


def test_unmended_it_is_far_from_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mend", lambda model: None)
    golden = capture_from_transformers(Oracle(folder), PROMPTS[2:], max_tokens=6)
    assert golden.noise is not None
    assert golden.noise.mean_abs_dlogp > 0.01


def test_quantised_weights_and_inputs_are_as_the_checkpoint_says(seeded_checkpoint: Callable[[str], Path]) -> None:
    """FP8 mamba projections with input scales, NVFP4 experts: the same log-probabilities as the float32 mode's."""
    folder = seeded_checkpoint("lightning")
    oracle = Oracle(folder, {"dtype": "float32"})
    assert oracle.engine.endswith("inputs of FP8 linears rounded to e4m3")
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3)
    (output,) = LLM(folder, dtype="float32", **CACHES).generate([PROMPTS[2]], params)
    ids, rows = oracle.decode(PROMPTS[2], 4, 3)
    assert ids == output.outputs[0].token_ids
    for own, theirs in zip(output.outputs[0].logprobs, rows, strict=True):
        assert dict(own) == pytest.approx(dict(theirs), abs=1e-3)
    oracle.input_scales.clear()
    for name, linear in oracle.model.named_modules():
        if name.endswith(("in_proj", "out_proj")):
            linear._forward_pre_hooks.clear()
    unrounded = oracle.prefill(PROMPTS[2], ids, 3)
    assert dict(unrounded[-1]) != pytest.approx(dict(rows[-1]), abs=1e-3), "the input scales are used"


def test_experts_with_input_scales_are_refused(seeded_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(EvidenceError, match=r"experts\.0\.up_proj.*one tensor without scales"):
        Oracle(seeded_checkpoint("fp8"))


def test_a_model_without_attention_is_refused(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(EvidenceError, match="without attention layers"):
        Oracle(tiny_folder("M-"))


def test_without_the_package_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EvidenceError, match=r"not installed.*pip install 'transformers==5\.24\.0'"):
        Oracle(folder)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.17.0"))
    with pytest.raises(EvidenceError, match=r"too old; found 5\.17\.0; expected 5\.24 or later"):
        Oracle(folder)


def test_a_tensor_that_it_does_not_take_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise transformers would draw it at random."""
    oracle = Oracle(folder)
    modules = [m for m in oracle.manifest.modules if not m.name.endswith("layers.3.mixer.up_proj")]
    manifest = SimpleNamespace(modules=modules, tensor=oracle.manifest.tensor, weight=oracle.manifest.weight)
    monkeypatch.setattr(module, "open_manifest", lambda *_: (folder, oracle.config, manifest))
    with pytest.raises(EvidenceError, match=r"model\.layers\.3\.mixer\.up_proj\.weight"):
        Oracle(folder)


def test_dt_limits_that_are_elsewhere_are_refused(folder: Path) -> None:
    oracle = Oracle(folder)
    del oracle.model.model.layers[0].mixer.time_step_limit
    with pytest.raises(EvidenceError, match="elsewhere"):
        module.mend(oracle.model)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS[:1]))
    out = tmp_path / "golden.json"
    command = ["golden", str(folder), str(out), "--prompt-ids", str(tmp_path / "ids.json"), "--max-tokens", "3"]
    for more, told in (
        (["--oracle", "nobody"], "reference or transformers"),
        (["--oracle", "transformers", "--server", "http://127.0.0.1:9"], "two oracles"),
        (["--oracle", "transformers", "--kv-cache-dtype", "fp8"], "keeps KV in the activation dtype"),
    ):
        refused = CliRunner().invoke(app, [*command, *more])
        assert (refused.exit_code, told in refused.stderr, out.exists()) == (REFUSED, True, False), refused.stderr
    result = CliRunner().invoke(app, [*command, "--oracle", "transformers"])
    assert result.exit_code == 0, result.output
    assert "decode against prefill" in result.stderr
    golden = Golden.read(out)
    assert (len(golden.items[0].output_ids), golden.engine[:14]) == (3, "transformers 5")
