"""The trace: planted defects are found at their layer and op, nothing where nothing is, and the ops that flip a token.

The other arm is a toy: every op of the reference arm once more, with some of them changed, in a registry of the test's.
"""

from __future__ import annotations

import json
import math
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hemiola import LLM, SamplingParams
from hemiola.cli import app
from hemiola.cli.ending import FAILED, REFUSED
from hemiola.config.engine import EngineConfig
from hemiola.evidence import EvidenceError
from hemiola.evidence.bisect import sufficient
from hemiola.evidence.recorder import Record, Site, difference, summarise
from hemiola.evidence.trace import FOREIGN_FACTOR, ROUNDING_FACTOR, Side, Subject, Trace, TraceResult, trace
from hemiola.evidence.trace_plot import render_svg
from hemiola.ops import KeptForms, Ops, table
from tests.support.damage import change_json, change_tensors

PATTERN = "ME*-ME*"
PROMPT = [5, 7, 11, *range(20, 60)]
SETTINGS: dict[str, Any] = {"cache_bytes": 16 << 20, "max_model_len": 256, "max_num_batched_tokens": 32}
WHOLE = {"max_num_batched_tokens": 256}  # a prompt in one piece
Change = Callable[..., Any]  # of the op's own function and its arguments


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(PATTERN)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a toy in the place of the device arm: toy(op=change, ...)."""

    def register(**changes: Change) -> None:
        registry: dict[str, dict[table.Arm, list[table.Variant]]] = {}
        for op, arms in table.registered_ops().items():
            own = arms["reference"][0]
            change = changes.get(op)
            run = own.run if change is None else _changed(change, own.run)
            registry[op] = {"reference": [own], "device": [replace(own, arm="device", name="toy", run=run)]}
        monkeypatch.setattr(table, "_registry", registry)
        monkeypatch.setattr(table, "load_device_variants", lambda: None)
        monkeypatch.setattr("hemiola.evidence.trace.bind_ops", _bind_ops)

    return register


def _changed(change: Change, run: Change) -> Change:
    return lambda *args, **kwargs: change(run, *args, **kwargs)


def _bind_ops(config: EngineConfig) -> tuple[Ops, torch.device]:
    arms = "reference" if config.arms == "auto" else config.arms
    return Ops(arms, KeptForms(config.expanded_bytes), strict=config.strict), torch.device("cpu")


def second(change: Change) -> Change:
    """A change of every second call alone: of the second of two layers, in every step."""
    calls = 0

    def changed(run: Change, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*args, **kwargs) if calls % 2 else change(run, *args, **kwargs)

    return changed


def on_both_arms(model: Path, num_tokens: int = 2, **settings: Any) -> TraceResult:
    a, b = (Side(str(model), {**SETTINGS, **settings, "arms": arm}) for arm in ("reference", "device"))
    return trace(a, b, PROMPT, num_tokens)


def drop_carry(run: Change, *args: Any) -> Any:
    """ssd_scan that begins every chunk of a prompt with an empty state."""
    given = list(args)
    given[10] = torch.zeros_like(given[10])
    return run(*given)


def gate_after_norm(run: Change, y: Tensor, z: Tensor, *args: Any) -> Any:
    gate_of_one = torch.full_like(z, 1.2784645)  # silu of it is 1
    return run(y, gate_of_one, *args) * torch.nn.functional.silu(z)


def bias_as_weight(run: Change, x: Tensor, gate: Any, dtype: Any, bias: Tensor, *args: Any, **kwargs: Any) -> Any:
    ids, weights, logits = run(x, gate, dtype, bias, *args, **kwargs)
    return ids, weights + bias[ids].to(weights.dtype), logits


def without_bias(run: Change, x: Tensor, gate: Any, dtype: Any, bias: Tensor, *args: Any, **kwargs: Any) -> Any:
    return run(x, gate, dtype, 0 * bias, *args, **kwargs)


def label_of(op: str, layer: int) -> str:
    """Of its site: an op with a weight has the weight's name."""
    return f"backbone.layers.{layer}.mixer.gate" if op == "moe_route" else op


def wrong_expert(run: Change, x: Tensor, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    return run(x, ids.flip(0), *args, **kwargs)


def short_history(run: Change, x: Tensor, weight: Tensor, bias: Any, state: Tensor, slots: Tensor, *rest: Any) -> Any:
    out = run(x, weight, bias, state, slots, *rest)
    state[slots.long(), :, 0] = 0
    return out


def forgetful(run: Change, *args: Any) -> Any:
    y = run(*args)
    args[7][args[8].long()] *= 0.5
    return y


def ignore_kv_scale(run: Change, *args: Any) -> Any:
    return run(*args[:5], 1.0, args[6])


@pytest.mark.parametrize(
    ("op", "change", "layer", "part", "step"),
    [
        ("ssd_scan", drop_carry, 4, "output", 1),
        ("gated_rms_norm", gate_after_norm, 4, "output", 0),
        ("moe_route", bias_as_weight, 5, "output[1]", 0),
        ("moe_experts", wrong_expert, 5, "output", 0),
        ("causal_conv1d", short_history, 4, "conv_state", 0),
        ("paged_attention_prefill", lambda run, q, *args: run(q.flip(1), *args), 6, "output", 0),
    ],
)
def test_a_defect_is_found_where_it_is(
    folder: Path, toy: Callable[..., None], op: str, change: Change, layer: int, part: str, step: int
) -> None:
    """The prompt takes two steps, and the defect is in the second of two layers of its kind."""
    toy(**{op: second(change)})
    result = on_both_arms(folder)
    first = result.first
    assert first is not None
    assert (first.op, first.site) == (op, Site(step, layer, label_of(op, layer), part))
    assert first.is_state == (part == "conv_state")
    departed = {(d.op, d.site.layer) for d in result.local if d.departs}
    assert departed == {(op, layer)}, "on equal inputs, nothing else departs"
    assert f"DEPARTS at layer {layer}" in list(result.lines())[-1]
    assert f"op {op}: {part}" in list(result.lines())[-1]


def test_an_ignored_kv_scale_is_found_in_the_cache(tiny_folder: Callable[..., Path], toy: Callable[..., None]) -> None:
    model = tiny_folder(PATTERN, "bf16", kv_scales={2: (0.5, 0.5), 6: (0.25, 0.25)})
    toy(kv_write=second(ignore_kv_scale))
    first = on_both_arms(model).first
    assert first is not None
    assert (first.op, first.site.layer, first.site.part, first.is_state) == ("kv_write", 6, "k_cache", True)


def test_a_state_departs_alone(folder: Path, toy: Callable[..., None]) -> None:
    """A state that is wrong after the last token of the prompt, which nobody reads any more."""
    toy(ssd_scan=second(forgetful))
    result = on_both_arms(folder, num_tokens=1, max_num_batched_tokens=256)
    departed = [d for d in result.differences if d.departs]
    assert [(d.site.layer, d.op, d.site.part) for d in departed] == [(4, "ssd_scan", "ssm_state")]
    assert result.flip is None
    assert all(d.error == 0 for d in result.differences if not d.is_state)


def test_equal_sides_do_not_depart(folder: Path, toy: Callable[..., None]) -> None:
    side = Side(str(folder), SETTINGS)
    same = trace(side, side, PROMPT)
    assert (same.first, same.flip, same.noise, same.is_alike, same.missing) == (None, None, 0.0, True, [])
    assert {d.bound for d in same.differences} == {0.0}
    assert {layer for layer, _, found in same.layers() if found} == set(range(-1, len(PATTERN) + 1))
    assert {d.site.part for d in same.differences if d.is_state} == {"conv_state", "ssm_state", "k_cache", "v_cache"}
    assert list(same.lines())[-1] == "NO DEPARTURE beyond the bound"
    toy()
    other = on_both_arms(folder)
    assert (other.first, other.first_local, other.is_alike) == (None, None, False)
    assert len(other.local) == len(other.differences) - len(PATTERN) * 3  # layers' outputs are no op's; three steps
    assert not same.local
    assert other.differences[0].bound == ROUNDING_FACTOR * torch.finfo(torch.float32).eps


def test_the_bound_is_the_runs_own_noise(folder: Path, toy: Callable[..., None], tmp_path: Path) -> None:
    """Both sides on an arm that gives other numbers each time; in one checkpoint, a layer is off by more."""
    scale = 1e-3

    def noisy(run: Change, *args: Any, **kwargs: Any) -> Any:
        y = run(*args, **kwargs)
        return y + scale * y.norm(dim=1, keepdim=True) / math.sqrt(y.shape[1]) * torch.randn_like(y)

    toy(gated_rms_norm=noisy)
    torch.manual_seed(1)
    side = Side(str(folder), {**SETTINGS, "arms": "device"})
    result = trace(side, side, PROMPT, bisects=False)
    assert result.noise is not None
    assert result.noise > scale
    assert (result.first, result.is_alike) == (None, True)

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change_tensors(broken, lambda tensors: tensors["backbone.layers.4.mixer.out_proj.weight"].mul_(1.2))
    first = trace(side, replace(side, model=str(broken)), PROMPT, bisects=False).first
    assert first is not None
    assert (first.op, first.site.layer) == ("linear", 4)
    assert first.bound > 2 * scale


def test_a_run_gives_what_the_ordinary_engine_gives(folder: Path) -> None:
    subject = Subject(Side(str(folder), SETTINGS))
    run = subject.run(PROMPT, 6)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (plain,) = LLM(folder, arms="reference", **SETTINGS).generate([PROMPT], params)
    assert run.output_ids == run.best == plain.outputs[0].token_ids
    assert max(record.site.step for record in run.records) == 6  # two for the prompt, five decodes
    assert len({record.site for record in run.records}) == len(run.records)


def test_a_stored_trace_stands_for_its_side(folder: Path, toy: Callable[..., None], tmp_path: Path) -> None:
    side = Side(str(folder), SETTINGS)
    Subject(side).run(PROMPT, 3).write(tmp_path / "a.json")
    stored = Trace.read(tmp_path / "a.json")
    same = trace(stored, side, [1], 1)
    assert (same.first, same.is_alike, same.noise, len(same.a.output_ids)) == (None, True, 0.0, 3)
    assert trace(stored, stored, []).noise is None

    toy(moe_experts=second(wrong_expert))
    broken = Side(str(folder), {**SETTINGS, "arms": "device"})
    for a, b in ((stored, broken), (broken, stored)):
        first = trace(a, b, []).first
        assert first is not None
        assert (first.op, first.site) == ("moe_experts", Site(0, 5, "moe_experts", "output"))

    change_json(tmp_path / "a.json", lambda raw: raw.update(format=0))
    with pytest.raises(EvidenceError, match="another format"):
        Trace.read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(EvidenceError, match="no stored trace"):
        Trace.read(tmp_path / "a.json")


def test_dtypes_as_sides(folder: Path, tmp_path: Path) -> None:
    """bf16 beside float32 departs by less than its rounding explains; a defect that is larger is found through it."""
    one, other = (Side(str(folder), {**SETTINGS, "dtype": dtype}) for dtype in ("float32", "bf16"))
    result = trace(one, other, PROMPT[:8])
    assert (result.first, result.is_alike, result.noise) == (None, False, 0.0)
    assert max(d.error for d in result.differences) > 1e-3
    assert {d.site.part for d in result.differences if d.is_state and d.error > 0} >= {"ssm_state", "k_cache"}
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change_tensors(broken, lambda tensors: tensors["backbone.layers.2.mixer.o_proj.weight"].mul_(1.2))
    first = trace(one, replace(other, model=str(broken)), PROMPT[:8]).first
    assert first is not None
    assert (first.op, first.site.layer) == ("linear", 2)


def foreign(model: Path, **settings: Any) -> TraceResult:
    """transformers beside hemiola's device arm, the prompt in one piece."""
    whole = {**SETTINGS, **WHOLE, "arms": "device", **settings}
    return trace(Side(str(model), {"dtype": "float32"}, engine="transformers"), Side(str(model), whole), PROMPT)


def test_transformers_as_a_side(folder: Path, toy: Callable[..., None], tmp_path: Path) -> None:
    toy()
    result = foreign(folder)
    assert (result.first, result.is_alike, result.noise, result.flip) == (None, False, 0.0, None)
    assert {d.site.part for d in result.differences if d.is_state} == {"conv_state", "ssm_state", "k_cache", "v_cache"}
    compared = {(d.site.layer, d.op) for d in result.differences}
    assert {op for layer, op in compared if layer == 4} == {
        *("rms_norm", "linear", "causal_conv1d", "ssd_scan", "gated_rms_norm", "layer"),
        "mamba2_update",
    }
    assert {op for layer, op in compared if layer == 5} == {
        *("rms_norm", "linear", "moe_route", "moe_experts", "layer")
    }
    assert {place.split()[0] for place in result.missing} == {"rms_norm", "causal_conv1d", "sample"} | {
        *(f"backbone.layers.{layer}.mixer.gate" for layer in (1, 5)),  # the weights of the experts
    }
    assert "transformers 5." in next(result.lines())
    result.a.write(tmp_path / "stored.json")
    stored = trace(Trace.read(tmp_path / "stored.json"), Side(str(folder), {**SETTINGS, **WHOLE}), [])
    assert (stored.first, stored.a.engine) == (None, "transformers")
    with pytest.raises(EvidenceError, match=r"other steps.*max-num-batched-tokens"):
        foreign(folder, max_num_batched_tokens=32)
    with pytest.raises(EvidenceError, match=r"codes in one side's KV cache.*kv-cache-dtype model"):
        foreign(folder, kv_cache_dtype="fp8")


def test_a_code_on_the_other_side_of_a_border_is_no_departure(seeded_checkpoint: Callable[[str], Path]) -> None:
    """W8A8: one e4m3 code that rounds the other way moves all that follows by more than float32 rounding does."""
    model = str(seeded_checkpoint("lightning"))
    own = Side(model, {**SETTINGS, **WHOLE, "dtype": "float32"})
    result = trace(Side(model, {"dtype": "float32"}, engine="transformers"), own, PROMPT)
    assert result.first is None, list(result.lines())
    assert {d.op for d in result.differences} >= {"linear/linear_fp8", "linear/linear_nvfp4"}
    rounding = FOREIGN_FACTOR * torch.finfo(torch.float32).eps * math.sqrt(13)
    assert max(d.error for d in result.differences if d.op == "layer") > rounding


def test_transformers_with_experts_in_a_latent_space(
    tiny_folder: Callable[..., Path], toy: Callable[..., None]
) -> None:
    toy()
    result = foreign(tiny_folder("ME*", overrides={"moe_latent_size": 32}))
    assert result.first is None
    labels = {d.site.label.rpartition(".")[2] for d in result.differences}
    assert {"fc1_latent_proj", "fc2_latent_proj", "moe_experts"} <= labels


@pytest.mark.parametrize(
    ("op", "change", "layer", "part"),
    [
        ("gated_rms_norm", lambda: gate_after_norm, 4, "output"),
        ("moe_experts", lambda: wrong_expert, 5, "output"),
        ("moe_route", lambda: without_bias, 5, "output"),
        ("causal_conv1d", lambda: short_history, 4, "conv_state"),
        ("ssd_scan", lambda: forgetful, 4, "ssm_state"),
        ("paged_attention_prefill", lambda: lambda run, q, *args: run(q.flip(1), *args), 6, "output"),
    ],
)
def test_a_defect_is_found_beside_transformers(
    folder: Path, toy: Callable[..., None], op: str, change: Callable[[], Change], layer: int, part: str
) -> None:
    toy(**{op: second(change())})
    first = foreign(folder).first
    assert first is not None
    assert (first.op, first.site) == (op, Site(0, layer, label_of(op, layer), part))


def test_other_models_are_refused(folder: Path, tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(EvidenceError, match="other layers"):
        trace(Side(str(folder), SETTINGS), Side(str(tiny_folder("M*-")), SETTINGS), PROMPT)


def test_the_op_that_flips_a_token(folder: Path, toy: Callable[..., None]) -> None:
    """Among ops of which several differ, but by too little."""
    toy(
        moe_experts=lambda run, *args, **kwargs: -3 * run(*args, **kwargs),
        gated_rms_norm=lambda run, *args: run(*args) * (1 + 1e-6),
        paged_attention_prefill=lambda run, *args: run(*args) * (1 + 1e-6),
    )
    flip = on_both_arms(folder, num_tokens=4).flip
    assert flip is not None
    assert flip.token_a != flip.token_b
    assert (flip.ops, flip.is_smallest, flip.why_not) == (("moe_experts",), True, "")


def test_two_ops_that_flip_a_token_only_together(folder: Path, toy: Callable[..., None]) -> None:
    armed = [False]  # by the router, for the head of the same step

    def arm(run: Change, *args: Any, **kwargs: Any) -> Any:
        armed[0] = True
        return run(*args, **kwargs)

    def fire(run: Change, x: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:
        y = run(x, weight, *args, **kwargs)
        if "layers.0" in weight.name:
            armed[0] = False
        return -y if "lm_head" in weight.name and armed[0] else y

    toy(moe_route=arm, linear=fire)
    result = on_both_arms(folder)
    assert result.flip is not None
    assert set(result.flip.ops) == {"moe_route", "linear"}
    assert result.flip.is_smallest
    assert any(line.startswith("flipped by moving") for line in result.lines())


def test_a_flip_that_no_arm_explains_is_not_bisected(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change_tensors(broken, lambda tensors: tensors["lm_head.weight"].neg_())
    flip = trace(Side(str(folder), SETTINGS), Side(str(broken), SETTINGS), PROMPT).flip
    assert flip is not None
    assert (flip.ops, flip.why_not) == ((), "the sides differ in more than arms")


@pytest.mark.parametrize("needed", [{"c"}, {"a", "h"}, {"b", "c", "g"}, set("abcdefgh")])
def test_delta_debugging_finds_the_needed(needed: set[str]) -> None:
    tried: list[frozenset[str]] = []

    def holds(chosen: frozenset[str]) -> bool:
        tried.append(chosen)
        return needed <= chosen

    found, is_smallest = sufficient("abcdefgh", holds)
    assert set(found) == needed
    assert is_smallest == (len(needed) < 8)
    assert len(set(tried)) == len(tried)


def test_a_smaller_set_is_preferred_to_a_minimal_one() -> None:
    found, is_smallest = sufficient("abcdefgh", lambda chosen: {"a", "b", "c"} <= chosen or "h" in chosen)
    assert (found, is_smallest) == (("h",), True)


def test_no_cause_of_many_can_be_left_out() -> None:
    """More than the search for a smaller set may try."""
    causes, needed = [str(number) for number in range(30)], {"0", "7", "8", "20", "29"}
    found, is_smallest = sufficient(causes, lambda chosen: needed <= chosen)
    assert (set(found), is_smallest) == (needed, False)


def test_a_path_that_fell_back_proves_nothing(folder: Path, toy: Callable[..., None]) -> None:
    toy()
    table._registry["moe_route"]["device"].clear()
    with pytest.raises(EvidenceError, match="fell back"):
        on_both_arms(folder, strict=False)


def test_differences() -> None:
    def of(tensor: Tensor, *, stored: bool = False) -> Record:
        return Record(Site(0, 0, "x", "output"), "x", summarise(tensor) if stored else tensor)

    base = torch.ones(4, 8)
    off = base.clone()
    off[2] *= 1.5
    for stored in (False, True):
        assert difference(of(base, stored=stored), of(base.clone())) == 0
        assert difference(of(base, stored=stored), of(off)) > 0.1
        assert difference(of(base), of(base * math.nan, stored=stored)) == math.inf
        assert difference(of(base), of(base[:3], stored=stored)) == math.inf
    assert difference(of(base), of(off)) == pytest.approx(1 / 3)
    wide = torch.ones(1, 4096)
    unsampled = wide.clone()
    unsampled[0, 1] = 1 + 1e-3
    assert 0 < difference(of(wide, stored=True), of(unsampled)) < 1e-3
    ids = torch.tensor([[1, 2], [3, 4]])
    assert difference(of(ids), of(ids.flip(1))) == 0
    assert difference(of(ids), of(torch.tensor([[1, 2], [3, 5]]))) == 0.5


def test_the_command(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    change_tensors(broken, lambda tensors: tensors["backbone.layers.4.mixer.out_proj.weight"].mul_(1.01))
    (tmp_path / "ids.json").write_text(json.dumps([PROMPT]))
    ids = ["--prompt-ids", str(tmp_path / "ids.json"), "--max-model-len", "256"]
    files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "plot.svg")]
    stored = str(tmp_path / "stored.json")

    good = CliRunner().invoke(app, ["trace", str(folder), str(folder), *ids, "--store", stored])
    assert good.exit_code == 0, good.output
    assert good.stdout.splitlines()[-1] == "NO DEPARTURE beyond the bound"
    for a, own in ((str(folder), ids), (stored, ids[2:])):
        bad = CliRunner().invoke(app, ["trace", a, str(broken), *own, *files])
        assert bad.exit_code == FAILED, bad.output
        assert "DEPARTS at layer 4 (mamba2), op linear: output of backbone.layers.4.mixer.out_proj" in bad.stdout
        first = json.loads((tmp_path / "result.json").read_text())["first"]
        assert (first["layer"], first["op"], first["state"]) == (4, "linear", False)
        drawing = ET.parse(tmp_path / "plot.svg").getroot()
        assert "first: linear output" in [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]

    alone = CliRunner().invoke(app, ["trace", str(folder), *ids, "--store", stored, "--dtype-a", "bf16"])
    assert alone.exit_code == 0, alone.output
    assert Trace.read(Path(stored)).settings["dtype"] == "bfloat16"
    beside = CliRunner().invoke(app, ["trace", str(folder), str(folder), *ids, "--engine-b", "transformers"])
    assert beside.exit_code == 0, beside.output
    assert "transformers 5." in beside.stdout
    for refused in (
        ["trace", str(folder), str(folder), *ids, "--engine-b", "nobody"],
        ["trace", str(folder), str(folder), *ids, "--engine-b", "transformers", "--arms-b", "reference"],
        ["trace", stored, str(folder), "--engine-a", "transformers"],
        ["trace", str(folder), *ids],
        ["trace", stored, str(folder), *ids],
        ["trace", stored, str(folder), "--dtype-a", "bf16"],
    ):
        assert CliRunner().invoke(app, refused).exit_code == REFUSED


def test_a_plot_of_nothing_and_of_everything(folder: Path, toy: Callable[..., None]) -> None:
    """No difference at all, and one that is not finite."""
    side = Side(str(folder), SETTINGS)
    ET.fromstring(render_svg(trace(side, side, [5, 7], 1)))
    toy(moe_experts=lambda run, *args, **kwargs: run(*args, **kwargs) * math.nan)
    result = on_both_arms(folder, num_tokens=1)
    assert result.first is not None
    assert result.first.error == math.inf
    assert "nan" not in render_svg(result)
    json.dumps(result.as_dict(), allow_nan=False)
