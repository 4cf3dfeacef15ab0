"""A tiny checkpoint through all three schemes: what is stored, what it stands for, and what an interruption leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola.config.calibration import CalibrationConfig
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.errors import CheckpointError, ConfigError, HemiolaError, RequestError
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.quant import nvfp4
from hemiola.formats.weight import Scheme
from hemiola.loading import load, open_manifest
from hemiola.quantize import SCHEMES, QuantizeReport, quantize, write
from hemiola.text.tokenizer import Tokenizer
from tests.support.damage import change_json, change_tensors, shard, weight_map
from tests.support.tiny_checkpoint import tiny_tensors, write_tiny_checkpoint
from tests.support.tiny_tokenizer import build_tokenizer
from tests.support.variants import tiny

PATTERN = "MEM*E-M*"
BEFORE_ATTENTION = (2, 6)
OPTIONS = CalibrationConfig(num_tokens=256, window=64)
TEXT = "bada denum kolase ne ri fora and a few words of English, which this tokenizer cuts into letters. " * 3
# Largest share of a seeded defect's change of the log-probabilities that quantisation itself may cause. Measured:
# 0.1 for fp8, 0.35 for nvfp4, 0.3 for lightning.
BOUND = 0.5
SMALL = CalibrationConfig(num_tokens=32, window=16)
IDS = [[5, 6, 7, 8, 9, 100, 200, 300, 400, 500, 11, 12], list(range(40, 60))]


@dataclass(frozen=True)
class Case:
    source: Path
    targets: dict[str, Path]
    reports: dict[str, QuantizeReport]
    windows: list[list[int]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A bf16 source with everything around it, quantised three times. Read only."""
    root = tmp_path_factory.mktemp("quantize")
    source = root / "source"
    raw = tiny(PATTERN, torch_dtype="bfloat16", time_step_limit=[0.0, float("inf")])
    write_tiny_checkpoint(source, raw, "bf16", shards=3)
    build_tokenizer(source, chat_template="{{ messages }}")
    (source / "README.md").write_text("A model card.")
    (source / "pytorch_model.bin").write_bytes(b"weights in another format")
    (root / "text.txt").write_text(TEXT)
    reports = {s: quantize(source, root / s, s, root / "text.txt", options=OPTIONS) for s in SCHEMES}
    tokenizer = Tokenizer.from_folder(source)
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    assert len(ids) <= OPTIONS.num_tokens
    windows = [ids[low : low + OPTIONS.window] for low in range(0, len(ids), OPTIONS.window)]
    return Case(source, {s: root / s for s in SCHEMES}, reports, windows)


def small_source(folder: Path, pattern: str = "ME*", scheme: str = "bf16", **knobs: Any) -> Path:
    """A source without a tokenizer."""
    write_tiny_checkpoint(folder, tiny(pattern, torch_dtype="bfloat16"), scheme, shards=2, **knobs)
    return folder


def quantize_small(source: Path, target: Path, scheme: str = "lightning", **more: Any) -> QuantizeReport:
    ids = target.with_name("ids.json")
    ids.write_text(json.dumps(IDS))
    return quantize(source, target, scheme, ids, options=SMALL, **more)


def tensors(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.tensor(name) for name in checkpoint.headers}


def forms(found: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_names_shapes_and_dtypes(case: Case, scheme: str) -> None:
    _, config, manifest = open_manifest(case.targets[scheme])
    plain = [f"backbone.layers.{i}.mixer.{p}_proj" for i in BEFORE_ATTENTION for p in ("in", "out")]
    algorithms = dict.fromkeys(plain) if scheme != "lightning" else None
    expected = forms(tiny_tensors(config, scheme, algorithms=algorithms)[0])
    if scheme == "lightning":
        for layer in (3, 7):
            scales = [f"backbone.layers.{layer}.mixer.{x}_proj.{x}_scale" for x in "kv"]
            expected |= dict.fromkeys(scales, (torch.float32, (1,)))
    assert forms(tensors(case.targets[scheme])) == expected
    missing_kv = "KV scales not in the checkpoint, 1.0 is used: layer 3 k_scale, layer 3 v_scale, layer 7 k_scale"
    assert manifest.reports == (() if scheme == "lightning" else (f"{missing_kv}, layer 7 v_scale",))
    assert manifest.kv_cache_declared == "fp8"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_the_source_s_within_the_format_s_error(case: Case, scheme: str) -> None:
    source, quantised = (open_manifest(folder)[2] for folder in (case.source, case.targets[scheme]))
    seen = set()
    for module in quantised.modules:
        if not module.is_linear:
            assert torch.equal(quantised.tensor(module.name).float(), source.tensor(module.name).float())
            continue
        weight, values = quantised.weight(module.name), source.weight(module.name).dense()
        error = (weight.dense() - values).abs()
        seen.add(weight.scheme)
        if weight.scheme is Scheme.PLAIN:
            assert error.max() == 0
        elif weight.scheme is Scheme.FP8:  # half a step: 2^-4 relative, or of the smallest codes' step
            assert weight.scale is not None
            assert (error <= values.abs() / 16 + weight.scale * 2**-10).all()
        else:  # half of the widest gap between codes, from 4 to 6, which the block's largest reaches
            largest = values.abs().view(values.shape[0], -1, 16).amax(-1).repeat_interleave(16, 1)
            assert (error <= largest / 6 * 1.07).all()
    quantised_as = {"fp8": {Scheme.FP8}, "nvfp4": {Scheme.NVFP4}, "lightning": {Scheme.FP8, Scheme.NVFP4}}
    assert seen == {Scheme.PLAIN, *quantised_as[scheme]}


def test_the_router_is_widened_and_everything_plain_is_bf16(tmp_path: Path) -> None:
    """From a float32 source, whose config then says what the plain tensors are."""
    write_tiny_checkpoint(tmp_path / "source", tiny("ME*", dtype="float32"), "f32", shards=1)
    quantize_small(tmp_path / "source", tmp_path / "target")
    source, target = tensors(tmp_path / "source"), tensors(tmp_path / "target")
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        assert same_bits(target[f"backbone.layers.1.mixer.{name}"], source[f"backbone.layers.1.mixer.{name}"])
    for name in (
        "backbone.embeddings.weight",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.2.mixer.q_proj.weight",
    ):
        assert same_bits(target[name], source[name].bfloat16())
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


@pytest.fixture(scope="module")
def observed(case: Case) -> dict[str, float]:
    """Largest magnitude at each tap in a run of one's own, one window after the other."""
    amax: dict[str, float] = {}

    def tap(name: str, tensor: Tensor) -> None:
        amax[name] = max(amax.get(name, 0.0), -float(tensor.min()), float(tensor.max()))

    engine = load(case.source, EngineConfig(dtype="bf16", kv_cache_dtype="model", max_num_seqs=1), tap=tap).engine
    for index, window in enumerate(case.windows):
        engine.add_request(str(index), window, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return amax


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activation_scales_are_what_a_run_of_one_s_own_observes(
    case: Case, observed: dict[str, float], scheme: str
) -> None:
    near = {"rel": 2**-7}  # other neighbours in the batch may move a bf16 rounding of the largest activation
    report, quantised = case.reports[scheme], open_manifest(case.targets[scheme])[2]
    assert report.calibration_tokens == sum(len(window) for window in case.windows)
    assert report.unreached_experts == ()
    scaled = [module for module in quantised.modules if module.has_input_scale]
    assert len(scaled) == (6 if scheme == "lightning" else sum(report.num_modules.values()))
    for module in scaled:
        largest = 448 if module.scheme is Scheme.FP8 else 2688
        scale = quantised.weight(module.name).input_scale
        assert scale == pytest.approx(observed[f"{module.name}.input"] / largest, **near), module.name
    for layer in (3, 7):
        *scales, origin = quantised.kv_scales(layer)
        if scheme == "lightning":
            expected = [observed[f"backbone.layers.{layer}.mixer.{x}"] / 448 for x in "kv"]
            assert (scales, origin) == (pytest.approx(expected, **near), "checkpoint")
        else:
            assert (scales, origin) == ([1.0, 1.0], "fallback 1.0")


def log_probabilities(folder: Path, ids: list[int]) -> Tensor:
    """(positions, vocab) log-probabilities of the next token, in id order."""
    engine = load(folder, EngineConfig(dtype="bf16")).engine
    request = engine.add_request("r", ids, SamplingParams(max_tokens=1, prompt_logprobs=-1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    rows = [sorted(row)[: engine.vocab_size] for row in request.prompt_logprobs[1:] if row is not None]
    return torch.tensor([[value for _, value in row] for row in rows])


def clip_activations(found: dict[str, Tensor]) -> None:
    """Input scales of another model, an eighth of the right ones: large activations saturate."""
    for name, tensor in found.items():
        if name.endswith(".input_scale"):
            tensor /= 8


def drop_block_scales(found: dict[str, Tensor]) -> None:
    """One block scale for all blocks of a weight."""
    for name, tensor in found.items():
        if name.endswith(".weight_scale") and tensor.dtype is torch.float8_e4m3fn:
            tensor.copy_(tensor.float().mean().to(tensor.dtype).expand_as(tensor))


@pytest.mark.parametrize(
    ("scheme", "defect"),
    [
        ("fp8", clip_activations),
        ("nvfp4", drop_block_scales),
        ("lightning", clip_activations),
        ("lightning", drop_block_scales),
    ],
)
def test_the_model_still_says_what_the_source_says(
    case: Case, tmp_path: Path, scheme: str, defect: Callable[[dict[str, Tensor]], None]
) -> None:
    ids = case.windows[0][:48]
    source = log_probabilities(case.source, ids)
    error = (log_probabilities(case.targets[scheme], ids) - source).abs().mean()
    damaged = tmp_path / "damaged"
    shutil.copytree(case.targets[scheme], damaged)
    change_tensors(damaged, defect)
    seeded = (log_probabilities(damaged, ids) - source).abs().mean()
    assert 0 < error < BOUND * seeded, f"{error:.4f} nats against {seeded:.4f} with the seeded defect"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_files_around_the_weights(case: Case, scheme: str) -> None:
    target = case.targets[scheme]
    rewritten = {"config.json", "model.safetensors.index.json"} | {shard(case.source, n).name for n in (1, 2, 3)}
    copied = {file.name for file in case.source.iterdir()} - rewritten - {"pytorch_model.bin"}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"} < copied
    for name in copied:
        assert (target / name).read_bytes() == (case.source / name).read_bytes()
    declared = set() if scheme == "lightning" else {"hf_quant_config.json"}
    assert {file.name for file in target.iterdir()} == copied | rewritten | declared
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (case.source, target))
    block = after.pop("quantization_config", None)
    assert after == before
    assert after["time_step_limit"] == [0.0, float("inf")]
    assert (block is not None) == (scheme == "lightning")
    assert list(target.parent.glob("*partial*")) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_report_counts_what_is_there(case: Case, scheme: str) -> None:
    report, target = case.reports[scheme], tensors(case.targets[scheme])
    experts, shared, dense = 2 * 8 * 2, 2 * 2, 2
    assert (
        report.num_modules
        == {
            "fp8": {"FP8": experts + shared + dense + 2},
            "nvfp4": {"NVFP4": experts + shared + dense + 2},
            "lightning": {"FP8": 6, "W4A16_NVFP4": experts + shared + dense + 1},
        }[scheme]
    )
    assert report.num_bytes == sum(tensor.nbytes for tensor in target.values())
    assert report.source_bytes == sum(tensor.nbytes for tensor in tensors(case.source).values())
    total = json.loads((case.targets[scheme] / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == report.num_bytes < report.source_bytes
    source, quantised = (open_manifest(folder)[2] for folder in (case.source, case.targets[scheme]))
    for algorithm, error in report.weight_error.items():
        wanted = Scheme.FP8 if algorithm == "FP8" else Scheme.NVFP4
        names = [m.name for m in quantised.modules if m.scheme is wanted]
        pairs = [(quantised.weight(name).dense(), source.weight(name).dense()) for name in names]
        squares = sum(float(w.double().square().sum()) for _, w in pairs)
        errors = sum(float((q - w).double().square().sum()) for q, w in pairs)
        assert error == pytest.approx((errors / squares) ** 0.5, rel=1e-4)
        assert error < (0.027 if wanted is Scheme.FP8 else 0.09), "plain amax encoding of NVFP4 has 0.095"


def test_shards_follow_the_source_and_hold_the_same_modules(case: Case) -> None:
    before, after = weight_map(case.source), weight_map(case.targets["lightning"])
    assert {name: after[name] for name in before} == before
    assert after["backbone.layers.3.mixer.k_proj.k_scale"] == before["backbone.layers.3.mixer.k_proj.weight"]
    assert after["lm_head.weight_scale_2"] == before["lm_head.weight"]


def test_large_weights_are_encoded_in_pieces_with_the_same_result(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_PIECE_ELEMENTS", 200)
    quantize(case.source, tmp_path / "pieces", "lightning", case.source.parent / "text.txt", options=OPTIONS)
    for name in (shard(case.source, number).name for number in (1, 2, 3)):
        assert (tmp_path / "pieces" / name).read_bytes() == (case.targets["lightning"] / name).read_bytes()


def test_weights_trained_to_plain_nvfp4_come_back_as_they_were(tmp_path: Path) -> None:
    """Without four over six the encoding is a projection: what is on its grid already does not move."""
    source, name = small_source(tmp_path / "source", "M", "f32"), "lm_head.weight"

    def round_to_grid(found: dict[str, Tensor]) -> None:
        found[name] = nvfp4.decode(*nvfp4.encode(found[name]))

    change_tensors(source, round_to_grid)
    plain, searched = (quantize_small(source, tmp_path / str(choice), four_over_six=choice) for choice in (False, True))
    assert plain.weight_error["W4A16_NVFP4"] < 1e-6 < 0.01 < searched.weight_error["W4A16_NVFP4"]
    weights = [open_manifest(folder)[2].weight("lm_head").dense() for folder in (plain.folder, source)]
    assert torch.allclose(*weights, rtol=1e-6)


def test_an_expert_that_calibration_never_reached_is_reported(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    bias = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    change_tensors(source, lambda found: found[bias][3:6:2].fill_(-100.0))
    report = quantize_small(source, tmp_path / "fp8", "fp8")
    names = [f"backbone.layers.1.mixer.experts.{expert}" for expert in range(8)]
    assert report.unreached_experts == (names[3], names[5])
    found = tensors(tmp_path / "fp8")
    for projection in ("up_proj", "down_proj"):
        scales = [float(found[f"{name}.{projection}.input_scale"]) for name in names]
        assert scales[3] == scales[5] == max(scales)
        assert len(set(scales)) > 2
    assert quantize_small(source, tmp_path / "lightning").unreached_experts == (), "no activation scale is needed there"


@pytest.mark.parametrize("scheme", ["nvfp4", "lightning"])
def test_the_draft_head_is_copied_and_another_root_becomes_the_public_one(tmp_path: Path, scheme: str) -> None:
    source = small_source(tmp_path / "source")
    mtp = {
        "mtp.layers.0.mixer.q_proj.weight": torch.randn(8, 6).bfloat16(),
        "mtp.layers.0.norm.weight": torch.randn(7),
        "mtp.layers.1.mixer.experts.0.up_proj.weight": torch.randn(16, 16).half(),
    }

    def change(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if name.startswith("backbone.")]:
            found[name.replace("backbone.", "model.")] = found.pop(name)
        found |= mtp
        found["model.layers.2.mixer.rotary_emb.inv_freq"] = torch.ones(4)

    change_tensors(source, change)
    report = quantize_small(source, tmp_path / "target", scheme)
    found = tensors(tmp_path / "target")
    for name, tensor in mtp.items():
        assert same_bits(found[name], tensor)
    assert not [name for name in found if name.startswith("model.") or "inv_freq" in name]
    reports = open_manifest(report.folder)[2].reports
    assert any("3 tensors of the draft head" in line for line in reports)
    assert not [line for line in reports if "declared" in line]


def test_a_single_file_without_an_index_stays_one(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source", "M")
    change_tensors(source, lambda found: None, shards=1)
    (source / "model.safetensors.index.json").unlink()
    shard(source, 1).rename(source / "model.safetensors")
    change_json(source / "config.json", lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"does not have \(1\): lm_head"):
        quantize_small(source, tmp_path / "tied", "lightning")
    change_json(source / "config.json", lambda config: config.update(tie_word_embeddings=False))
    report = quantize_small(source, tmp_path / "target", "lightning")
    assert {file.name for file in report.folder.iterdir()} == {"config.json", "model.safetensors"}
    assert report.num_modules == {"FP8": 2, "W4A16_NVFP4": 1}
    load(report.folder)


class Interruption(Exception):
    """Raised by a test in the middle of things."""


def interrupted_at(point: tuple[str, float]) -> Callable[[str, int, int], None]:
    """A progress that raises in a stage, as soon as the given share of it is done."""
    stage, share = point

    def progress(current: str, done: int, total: int) -> None:
        if current == stage and done >= share * total:
            raise Interruption(f"{current} {done} of {total}")

    return progress


POINTS = [("check", 0.5), ("calibrate", 0.0), ("calibrate", 1.0), ("write", 0.0), ("write", 0.6), ("write", 1.0)]


def test_an_interruption_leaves_nothing_and_a_rerun_succeeds(tmp_path: Path) -> None:
    source, target = small_source(tmp_path / "source"), tmp_path / "target"
    for point in POINTS:
        with pytest.raises(Interruption, match=point[0]):
            quantize_small(source, target, progress=interrupted_at(point))
        assert {path.name for path in tmp_path.iterdir()} == {"source", "ids.json"}
    stages: dict[str, list[int]] = {}
    quantize_small(
        source, target, progress=lambda stage, done, total: stages.setdefault(stage, []).append(total - done)
    )
    assert list(stages) == ["check", "calibrate", "write"]
    assert all(left[-1] == 0 and left == sorted(left, reverse=True) for left in stages.values())
    load(target)


def test_a_killed_run_leaves_nothing_that_is_taken_for_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed: not even the cleaning up happens."""
    source, target = small_source(tmp_path / "source"), tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(write.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Interruption):
            quantize_small(source, target, progress=interrupted_at(("write", 1.0)))
    (left,) = tmp_path.glob("target*")
    assert left != target
    with pytest.raises(HemiolaError):
        load(left)  # the configuration and the index come last
    (left / "model-00009-of-00009.safetensors").write_bytes(b"stale")
    quantize_small(source, target)
    assert not left.exists()
    assert {file.name for file in target.iterdir()} == {file.name for file in source.iterdir()}
    load(target)


def test_refusals_come_before_anything_is_written(tmp_path: Path, case: Case) -> None:
    source, target = small_source(tmp_path / "source"), tmp_path / "target"
    text = case.source.parent / "text.txt"

    def refused(error: type[HemiolaError], match: str, run: Callable[[], object]) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=match):
            run()
        assert sorted(tmp_path.rglob("*")) == before

    quantize_small(source, tmp_path / "first")  # writes ids.json
    refused(CheckpointError, "destination exists", lambda: quantize_small(source, tmp_path / "first"))
    refused(CheckpointError, "destination exists", lambda: quantize_small(source, source))
    refused(ConfigError, "unknown scheme", lambda: quantize_small(source, target, "int8"))
    refused(CheckpointError, "no such model folder", lambda: quantize_small(tmp_path / "absent", target))
    refused(RequestError, "the source has no tokenizer", lambda: quantize(source, target, "fp8", text))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "ids.json").write_text("[[1, 512]]")
    refused(
        RequestError, "outside the vocabulary", lambda: quantize(source, target, "fp8", tmp_path / "bad" / "ids.json")
    )
    refused(
        CheckpointError,
        r"the source is quantised already; found backbone\.layers\.0\.mixer\.in_proj, ",
        lambda: quantize_small(tmp_path / "first", target),
    )
    nan = small_source(tmp_path / "nan")
    infinite = ["backbone.layers.1.mixer.experts.6.up_proj.weight", "backbone.layers.0.mixer.out_proj.weight"]
    change_tensors(nan, lambda found: [found[name][0, :1].fill_(float("-inf")) for name in infinite])
    refused(
        CheckpointError,
        r"NaN or infinity \(2\): backbone\.layers\.0\.mixer\.out_proj, backbone\.layers\.1\.mixer\.experts\.6\.up_proj",
        lambda: quantize_small(nan, target),
    )
    declared = small_source(tmp_path / "declared")
    (declared / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused(CheckpointError, "quantised already; found .*hf_quant_config", lambda: quantize_small(declared, target))
