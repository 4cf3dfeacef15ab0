"""Synthetic models: sizes of the public checkpoints, the same model on disk, and a network that stays in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from hemiola.cache.budget import plan_caches
from hemiola.cache.tensors import allocate_caches
from hemiola.config.model import NemotronHConfig
from hemiola.errors import ConfigError
from hemiola.formats.layout import expected_modules
from hemiola.formats.weight import Scheme
from hemiola.loading import open_manifest
from hemiola.model.batch import BatchRow, ForwardBatch
from hemiola.model.load import load_model
from hemiola.ops import KeptForms, Ops
from hemiola.synthetic import NAMES, geometry, open_synthetic, write_checkpoint
from hemiola.synthetic.draw import deviation
from tests.support.variants import public

TINY = [name for name in NAMES if name.endswith("-tiny")]
FULL = [name for name in NAMES if not name.endswith("-tiny")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("synthetic") / name
        write_checkpoint(name, path, shard_bytes=1 << 20)
        return path

    return folder


# Resident sizes known for these checkpoints, without draft heads. Some count 69 vectors of 64 in bf16 (we: fp32), and
# the last one leaves the 23 correction biases out.
@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("lightning-30b", 18_888_922_112),
        ("nano-nvfp4-30b", 19_339_733_888 + 8_832),
        ("nano-fp8-30b", 32_679_889_792 + 8_832 + 23 * 128 * 4),
    ],
)
def test_the_sizes_are_the_published_ones(name: str, num_bytes: int) -> None:
    assert sum(module.resident_bytes for module in open_synthetic(name).modules) == num_bytes


@pytest.mark.parametrize(
    ("name", "fp8", "nvfp4"), [("lightning-30b", 46, 5_935), ("super-120b", 139, 40_961), ("nano-bf16-30b", 0, 0)]
)
def test_the_schemes_are_counted_as_published(name: str, fp8: int, nvfp4: int) -> None:
    schemes = [module.scheme for module in open_synthetic(name).modules]
    assert (schemes.count(Scheme.FP8), schemes.count(Scheme.NVFP4)) == (fp8, nvfp4)


@pytest.mark.parametrize(
    ("name", "model"),
    [("lightning-30b", "lightning-30b-a3b"), ("nano-fp8-30b", "nano-3-30b-a3b"), ("super-120b", "super-120b-a12b")],
)
def test_the_shapes_are_those_of_the_public_config(name: str, model: str) -> None:
    ours, theirs = geometry(name).config, NemotronHConfig.from_dict(public(model))
    assert list(expected_modules(ours)) == list(expected_modules(theirs))
    for field in ("num_experts_per_tok", "routed_scaling_factor", "chunk_size", "max_position_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="lightning-30b"):
        geometry("lightning")


@pytest.mark.parametrize("name", TINY)
def test_the_checkpoint_on_disk_is_the_same_model(name: str, written: Callable[[str], Path]) -> None:
    folder, config, stored = open_manifest(written(name))
    drawn = open_synthetic(name)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert [report for report in stored.reports if "KV scales" not in report] == []
    assert config.warnings == drawn.geometry.config.warnings == ()
    assert stored.modules == drawn.modules
    assert (stored.kv_cache_declared, stored.num_kv_scales) == (drawn.kv_cache_declared, drawn.num_kv_scales)
    for module in expected_modules(config):
        if not module.is_linear:
            assert torch.equal(stored.tensor(module.name), drawn.tensor(module.name)), module.name
            continue
        a, b = stored.weight(module.name), drawn.weight(module.name)
        assert (a.scheme, a.shape, a.stored_bytes) == (b.scheme, b.shape, b.stored_bytes)
        for x, y in ((a.scale, b.scale), (a.input_scale, b.input_scale)):
            assert x == (None if y is None else pytest.approx(y, rel=1e-6))
        assert torch.equal(a.codes(), b.codes()), module.name


def test_seeds_and_names_give_other_values() -> None:
    name = "backbone.layers.1.mixer.experts.0.up_proj"
    first = open_synthetic("lightning-30b-tiny").weight(name).codes()
    assert torch.equal(first, open_synthetic("lightning-30b-tiny").weight(name).codes())
    assert not torch.equal(first, open_synthetic("lightning-30b-tiny", seed=1).weight(name).codes())
    assert not torch.equal(first, open_synthetic("lightning-30b-tiny").weight(name.replace("0", "1")).codes())


def test_a_weight_is_drawn_once_until_it_is_forgotten() -> None:
    manifest = open_synthetic("lightning-30b-tiny")
    weight = manifest.weight("backbone.layers.1.mixer.experts.0.up_proj")
    data = weight.data
    assert weight.data is data
    manifest.forget()
    assert weight.data is not data
    assert torch.equal(weight.data, data)
    assert weight.stored_bytes == 112 * 192 * 9 // 16


@pytest.mark.parametrize("name", TINY)
def test_every_quantised_weight_has_the_deviation_it_was_drawn_for(name: str) -> None:
    manifest = open_synthetic(name)
    for module in expected_modules(manifest.geometry.config):
        if module.is_linear:
            assert manifest.weight(module.name).dense().std() == pytest.approx(deviation(module), rel=0.1), module.name


@pytest.mark.parametrize("name", TINY)
def test_activations_stay_of_order_one_and_routing_spreads(name: str) -> None:
    manifest = open_synthetic(name)
    config, ops = manifest.geometry.config, Ops("reference", KeptForms(1 << 30))
    model = load_model(manifest, config, ops, torch.bfloat16, torch.bfloat16)
    plan = plan_caches(
        model.cache_specs, budget_bytes=1 << 26, block_size=16, max_num_seqs=2, max_model_len=512, activation_bytes=2,
        kv_element_bytes=2, prefix_caching=False, snapshot_bytes=0, host_snapshot_bytes=0, max_snapshots=None,
    )  # fmt: skip
    caches = allocate_caches(model.cache_specs, plan, torch.bfloat16, torch.bfloat16)
    chosen: list[torch.Tensor] = []
    route = ops.moe_route

    def recording(*args: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, weights, logits = route(*args)
        chosen.append(ids)
        return ids, weights, logits

    ops.moe_route = recording
    norms: dict[str, float] = {}

    def tap(name: str, value: torch.Tensor) -> None:
        if name.startswith("layers."):
            norms[name] = value.float().square().mean().sqrt().item()

    tokens = 128
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, config.vocab_size, (tokens,), generator=generator).tolist()
    with torch.inference_mode():
        batch = ForwardBatch.build([BatchRow(prompt, 0, list(range(8)), 0)], 16)
        logits = model.logits(model.forward(batch, caches, tap)).float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 8
    assert len(logits.argmax(-1).unique()) > tokens / 4
    assert all(0.5 < norm < 3 for norm in norms.values()), norms
    expected = config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens)
    for ids in chosen:
        counts = torch.bincount(ids.flatten().long(), minlength=config.num_experts)
        assert (counts > 0).sum() > 0.9 * expected
        assert counts.max() < 4 * counts.float().mean()
