"""Public bug reports about stored schemes and scales, through LLM. Exclusions, activation scales and fused parts (B9 to
B11, B16) are checked where they are decided: tests/formats/test_plan.py, test_declaration.py and tests/ops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hemiola.loading
from hemiola import LLM, SamplingParams
from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import INDEX
from hemiola.formats.weight import Scheme, Weight
from hemiola.inspect import build_report
from hemiola.model.linear import Linear, Linears
from hemiola.model.mixers.moe import MoEMixer
from hemiola.ops import KeptForms, Ops
from hemiola.ops.table import Path as OpPath
from hemiola.ops.table import registered_ops
from tests.support.damage import change_json, change_tensors, shard, truncate
from tests.support.numerics import assert_close, generator, randn
from tests.support.recurrence import Recurrence, Weights
from tests.support.weights import product, values
from tests.support.witness import Witness, widest

Folder = Callable[..., Path]
BOUND = 1e-4


# B12

SCALES = [(0.5, 2.0), (0.037, 0.11)]


@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_b12_kv_scales_of_the_file_are_used(tiny_folder: Folder, scales: tuple[float, float]) -> None:
    """Layer 1 has scales and layer 3 has none: the run is the one with these scales, and not the one with 1.0."""
    folder = tiny_folder("M*M*", kv_scales={1: scales})
    # Without the cuts of prefix caching: a value on the edge of two e4m3 codes may take the other one at other shapes.
    llm = LLM(folder, dtype="float32", max_num_batched_tokens=13, prefix_caching=False)
    manifest = llm.loaded.manifest
    assert manifest.kv_scales(1) == (pytest.approx(scales[0]), pytest.approx(scales[1]), "checkpoint")
    assert manifest.kv_scales(3) == (1.0, 1.0, "fallback 1.0")
    (note,) = llm.loaded.notes
    assert note == "KV scales not in the checkpoint, 1.0 is used: layer 3 k_scale, layer 3 v_scale"
    by_layer = {line.layer: (line.source) for line in build_report(manifest, llm.loaded.config).kv_scales}
    assert by_layer == {1: "checkpoint", 3: "fallback 1.0"}

    witness, prompt = Witness(llm.loaded.engine), randn_ids(40)
    llm.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    seen, weights = witness.seen["request-0.0"], Weights(folder)
    stored = tuple(manifest.kv_scales(1)[:2])
    right = widest(seen, Recurrence(weights, kv_scales={1: stored, 3: (1.0, 1.0)}).read(seen.ids))
    wrong = widest(seen, Recurrence(weights, kv_scales={1: (1.0, 1.0), 3: (1.0, 1.0)}).read(seen.ids))
    assert right < BOUND
    assert wrong > 10 * BOUND, "the scales would not show"


def randn_ids(count: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=generator(count)).tolist()


@pytest.mark.parametrize("is_declared", [True, False])
def test_b12_stored_scales_alone_ask_for_an_fp8_cache(tiny_folder: Folder, tmp_path: Path, is_declared: bool) -> None:
    """Also where no JSON file declares one; and a setting can still say no."""
    folder = shutil.copytree(tiny_folder("M*M*", kv_scales={1: (0.5, 2.0)}), tmp_path / "model")
    if not is_declared:
        change_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    assert LLM(folder).loaded.engine.caches[1][0].dtype is torch.float8_e4m3fn  # type: ignore[index]
    assert LLM(folder, kv_cache_dtype="model").loaded.engine.caches[1][0].dtype is torch.float32  # type: ignore[index]


def test_b12_an_fp8_cache_without_scales_is_reported(tiny_folder: Folder) -> None:
    """Asked for by a setting, of a checkpoint that says nothing about it."""
    folder = tiny_folder("M*-")
    assert LLM(folder).loaded.notes == ()
    (note,) = LLM(folder, kv_cache_dtype="fp8").loaded.notes
    assert note == "kv_cache_dtype fp8: the checkpoint has no KV scales, 1.0 is used in every attention layer"
    assert LLM(tiny_folder("M-"), kv_cache_dtype="fp8").loaded.notes == ()


# B13


@pytest.mark.parametrize("router_dtype", ["float32", "auto"])
def test_b13_no_module_loses_bits(tiny_folder: Folder, router_dtype: str) -> None:
    """FP8 mamba projections, NVFP4 experts, BF16 attention: each runs as it is stored, exactly. The one exception is a
    setting: a router gate rounded to the run's dtype."""
    llm = LLM(tiny_folder("MEM*E-", "lightning"), dtype="bf16", router_dtype=router_dtype)
    modules = build_report(llm.loaded.manifest, llm.loaded.config).modules
    lines = {line.name: (line.on_disk, line.in_run) for line in modules}
    assert lines["backbone.layers.0.mixer.in_proj"] == ("fp8", "fp8 W8A8 static")
    assert lines["backbone.layers.2.mixer.out_proj"] == ("fp8", "fp8 W8A8 static")
    assert lines["backbone.layers.1.mixer.experts.3.up_proj"] == ("nvfp4", "nvfp4 weight-only")
    assert lines["backbone.layers.3.mixer.q_proj"][0] == "bf16"

    llm.generate([randn_ids(30)], SamplingParams(max_tokens=3))
    live, kept = live_weights(llm), llm.loaded.engine.model.ops.kept._forms
    lossy, num_kept = set(), 0
    for name in (module.name for module in llm.loaded.manifest.modules if module.is_linear):
        stored = llm.loaded.manifest.weight(name)
        want = values(stored)
        assert live[name].scheme is stored.scheme
        assert torch.equal(live[name].dense().double(), want.float().double()), name
        for form in [tensor for (owner, _), tensor in kept.items() if owner == name]:
            num_kept += 1
            if not torch.equal(form.double() * (1.0 if stored.scale is None else stored.scale), want):
                lossy.add(name)
    assert lossy == ({f"backbone.layers.{i}.mixer.gate" for i in (1, 4)} if router_dtype == "auto" else set())
    assert num_kept > 20, "the forms that the products read were compared, too"
    assert {weight.scheme for weight in live.values()} == set(Scheme)


def live_weights(llm: LLM) -> dict[str, Weight]:
    """The weights that the model's products were given, by name."""
    model = llm.loaded.engine.model
    found = [model.embeddings, model.lm_head.weight]
    for layer in model.layers:
        for part in (layer.mixer, getattr(layer.mixer, "shared", None)):
            for held in vars(part or model.ops).values():
                linears = held.linears if isinstance(held, Linears) else (held,) if isinstance(held, Linear) else ()
                found += [linear.weight for linear in linears]
        if isinstance(layer.mixer, MoEMixer):
            found += [layer.mixer.router.gate, *layer.mixer.up, *layer.mixer.down]
    return {weight.name: weight for weight in found}


# B14


@pytest.mark.parametrize("scheme", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("variant", [v.name for v in registered_ops()["moe_experts"]["reference"]])
def test_b14_every_expert_path_is_squared_relu(tiny_folder: Folder, scheme: str, variant: str) -> None:
    """64 random rows through the live layer against dequantise-then-multiply; the path that ran is named."""
    llm = LLM(tiny_folder("MEM*E-", scheme), dtype="float32")
    model = llm.loaded.engine.model
    mixer = model.layers[1].mixer
    assert isinstance(mixer, MoEMixer)
    x = randn(generator(5), 64, 64)
    got = mixer(x, None, None, None)  # type: ignore[arg-type]  # this mixer does not look at the batch
    assert_close(got, written_out(mixer, x), 2e-2 if scheme == "fp8" else 1e-5)
    path = OpPath("moe_experts", "reference", variant, "")
    assert llm.path_counts()[path] == 1
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    taken = {taken: count for taken, count in llm.path_counts().items() if taken.op == "moe_experts"}
    assert taken == {path: 1 + 2 * 2}, "the default path, in each of two layers and two steps"


def written_out(mixer: MoEMixer, x: Tensor) -> Tensor:
    """The layer in float64, weights dequantised bit by bit."""
    router, wide = mixer.router, x.double()
    scores = torch.sigmoid(wide @ router.gate.data.double().T)
    ids = (scores + router.correction_bias).topk(router.top_k).indices
    rows = []
    for row in range(len(x)):
        total = scores[row, ids[row]].sum()
        out = torch.zeros(x.shape[1], dtype=torch.float64)
        for expert in ids[row].tolist():
            hidden = product(wide[row : row + 1], mixer.up[expert]).clamp(min=0).square()
            out += product(hidden, mixer.down[expert])[0] * scores[row, expert] / total
        rows.append(out * mixer.routed_scaling_factor)
    assert mixer.shared is not None
    shared = product(wide, mixer.shared.up_proj.weight).clamp(min=0).square()
    return torch.stack(rows) + product(shared, mixer.shared.down_proj.weight)


def test_b14_the_comparison_sees_a_gated_silu(tiny_folder: Folder) -> None:
    mixer = LLM(tiny_folder("MEM*E-", "nvfp4")).loaded.engine.model.layers[1].mixer
    assert isinstance(mixer, MoEMixer)
    x = randn(generator(5), 64, 64)
    ops = Ops("reference", KeptForms(0))
    right = ops.moe_experts(x, torch.zeros(64, 1).long(), torch.ones(64, 1), mixer.up, mixer.down)
    up = product(x.double(), mixer.up[0])
    gated = product(up * torch.sigmoid(up), mixer.down[0])
    assert (right.double() - gated).abs().max() > 0.1 * right.abs().max()


# B15


DAMAGES = ["shard 2 deleted", "shard 3 truncated", "tensor not in the index", "scale dropped"]


@pytest.mark.parametrize(
    ("scheme", "damage"),
    [
        (scheme, damage)
        for scheme in ("bf16", "fp8", "nvfp4", "lightning")
        for damage in DAMAGES[: 3 if scheme == "bf16" else 4]  # BF16 has no scales
    ],
)
def test_b15_an_incomplete_checkpoint_never_runs(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, damage: str
) -> None:
    folder = shutil.copytree(tiny_folder("MEM*E-", scheme, shards=3), tmp_path / "model")
    LLM(folder)
    tensor = "backbone.layers.3.mixer.q_proj.weight"
    if damage == "shard 2 deleted":
        shard(folder, 2).unlink()
        name = "model-00002-of-00003.safetensors"
    elif damage == "shard 3 truncated":
        truncate(shard(folder, 3), 8)
        name = "model-00003-of-00003.safetensors"
    elif damage == "tensor not in the index":
        change_json(folder / INDEX, lambda index: index["weight_map"].pop(tensor))
        name = tensor
    else:
        module = "backbone.layers.1.mixer.experts.3.down_proj"
        name = f"{module}.weight_scale" if scheme == "fp8" else f"{module}.weight_scale_2"
        change_tensors(folder, lambda tensors: tensors.pop(name))

    def no_weight_is_read(*args: object) -> None:
        pytest.fail("the model was built")

    monkeypatch.setattr(hemiola.loading, "load_model", no_weight_is_read)
    with pytest.raises(CheckpointError) as error:
        LLM(folder)
    assert name in str(error.value)
    assert str(folder) in str(error.value)
    assert error.value.remedy
