"""The report: what each module is on disk and in the run, byte by byte on a small model, and both of its outputs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hemiola.config.model import NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.manifest import Manifest
from hemiola.inspect import Inspection, build_report, kv_bytes_per_token, render, state_bytes_per_request, to_json
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.variants import public, tiny


def inspect(folder: Path, scheme: str, raw: dict[str, Any], **knobs: Any) -> Inspection:
    config = write_tiny_checkpoint(folder, raw, scheme, **knobs)
    return build_report(Manifest.build(Checkpoint.open(folder), config), config)


# Published: recurrent state per request, KV bytes per token in bf16.
COSTS = {
    "nano-3-30b-a3b": (49.08e6, 6_144),
    "super-120b-a12b": (170.2e6, 8_192),
    "ultra-550b-a55b": (408.0e6, 12_288),
    "nano-3-4b": (83.8e6, 16_384),
    "nano-9b-v2": (143.6e6, 16_384),
    "nano-12b-v2": (148.9e6, 24_576),
    "h-4b": (89.4e6, 16_384),
    "h-8b": (102.1e6, 16_384),
    "h-47b": (760.5e6, 20_480),
    "h-56b": (912.6e6, 40_960),
}


@pytest.mark.parametrize("name", COSTS)
def test_state_and_kv_bytes_of_public_models(name: str) -> None:
    config = NemotronHConfig.from_dict(public(name))
    assert state_bytes_per_request(config) == pytest.approx(COSTS[name][0], rel=1e-3)
    assert kv_bytes_per_token(config, 2) == COSTS[name][1]


def test_bytes_by_role(tmp_path: Path) -> None:
    """Sizes by hand: hidden 64, vocabulary 512, 8 experts of 32 with 2 chosen, shared 64."""
    report = inspect(tmp_path, "lightning", tiny("ME*"))
    lines = {line.role: line for line in report.roles}
    nvfp4 = 9 / 16  # bytes per weight
    experts, head = 8 * 2 * 32 * 64 * nvfp4, 512 * 64 * nvfp4
    in_proj_rows = 2 * 64 + 2 * 2 * 16 + 8
    expected = {
        "routed experts": (experts, experts / 4),
        "shared experts": (2 * 64 * 64 * nvfp4,) * 2,
        "router": (4 * (8 * 64 + 8),) * 2,
        "mamba projections": ((in_proj_rows + 64) * 64,) * 2,
        "attention": (2 * 64 * (64 + 32 + 32 + 64),) * 2,
        "norms, conv, A, D, dt": (2 * (4 * 64 + 64 + 3 * 8 + 128 * 4 + 128),) * 2,
        "lm_head": (head, head),
        "embedding": (2 * 512 * 64, 2 * 64),
    }
    assert {role: (line.stored_bytes, line.token_bytes) for role, line in lines.items()} == expected
    assert lines["norms, conv, A, D, dt"].resident_bytes - lines["norms, conv, A, D, dt"].stored_bytes == 3 * 8 * 2
    assert lines["mamba projections"].num_tensors == 6
    assert report.stored_bytes == sum(stored for stored, _ in expected.values())
    assert report.state_bytes == 8 * 8 * 16 * 4 + 128 * 3 * 2
    assert report.token_bytes == sum(token for _, token in expected.values()) + 2 * report.state_bytes
    assert report.token_time_us["H200"] == pytest.approx(report.token_bytes / 4.8e6)


def test_a_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    report = inspect(tmp_path, "bf16", tiny("M", tie_word_embeddings=True))
    (embedding,) = (line for line in report.roles if line.role == "embedding")
    assert embedding.token_bytes == 2 * 64 + 2 * 512 * 64


def test_each_module_on_disk_and_in_the_run(tmp_path: Path) -> None:
    report = inspect(tmp_path, "lightning", tiny("ME*"), algorithms={"backbone.layers.2.mixer.o_proj": "FP8"})
    modules = {line.name: (line.on_disk, line.in_run) for line in report.modules}
    assert modules["backbone.layers.0.mixer.in_proj"] == ("fp8", "fp8 W8A8 static")
    assert modules["backbone.layers.2.mixer.o_proj"] == ("fp8", "fp8 W8A8 static")
    assert modules["backbone.layers.2.mixer.q_proj"] == ("bf16", "bf16")
    assert modules["backbone.layers.1.mixer.experts.7.up_proj"] == ("nvfp4", "nvfp4 weight-only")
    assert modules["backbone.layers.1.mixer.gate"] == ("f32", "f32, rounded to bf16 in bf16 mode")
    assert modules["lm_head"] == ("nvfp4", "nvfp4 weight-only")
    assert report.num_quantized_modules == sum(line.on_disk in ("fp8", "nvfp4") for line in report.modules) == 22


def test_json_is_plain_and_whole(tmp_path: Path) -> None:
    report = inspect(tmp_path, "nvfp4", tiny("M*", surprise=1), kv_scales={1: (0.5, None)})
    document = json.loads(json.dumps(to_json(report)))
    assert document["kv_scales"] == [
        {"layer": 1, "k_scale": 0.5, "v_scale": 1.0, "source": "checkpoint, v_scale fallback 1.0"}
    ]
    assert document["pattern"] == "M*"
    assert document["num_layers"] == {"mamba": 1, "attention": 1}
    assert document["num_scalar_scales"] == 2 * 2 + 1
    assert len(document["modules"]) == len(report.modules)
    assert any("surprise" in line for line in document["reports"])
    assert any("v_scale" in line for line in document["reports"])


def test_rendering(tmp_path: Path) -> None:
    report = inspect(tmp_path, "lightning", tiny("ME*"), kv_scales={2: (0.5, 2.0)})

    def rendered(**options: bool) -> str:
        console = Console(file=io.StringIO(), width=160)
        render(report, console, **options)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    text = rendered()
    for part in ("1 mamba, 1 attention, 1 moe", "nvfp4 x 16", f"{report.resident_bytes:,}", f"{report.token_bytes:,}"):
        assert part in text
    assert "H200 (4.8 TB/s vendor peak)" in text
    assert "backbone.layers.0.mixer.in_proj" not in text
    line = next(line for line in rendered(modules=True).splitlines() if "backbone.layers.0.mixer.in_proj" in line)
    assert "fp8 W8A8 static" in line
    assert "200 x 64" in line
