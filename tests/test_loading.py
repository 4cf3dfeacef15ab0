"""Loading's memory: what is resident is the weights, once.

Measured in a process of its own, in which a small model has run before: growth of the peak resident set, from just
before the loading to after a forward pass and a read of every weight. The weights are mapped, not copied, so their
pages count when they are read. Forms that the reference arm expands are not weights; KeptForms counts them, and they
are taken off.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.errors import ConfigError
from hemiola.formats.layout import expected_modules
from hemiola.loading import load, part_of_memory
from tests.support.variants import tiny

BOUND = 1.15

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")


def write_checkpoint(folder: Path, pattern: str) -> None:
    """About 200 MB of BF16 tensors in one file."""
    raw: dict[str, Any] = tiny(
        pattern,
        hidden_size=1024,
        vocab_size=4096,
        intermediate_size=8192,
        moe_intermediate_size=1024,
        moe_shared_expert_intermediate_size=1024,
        mamba_num_heads=32,
        mamba_head_dim=64,
        torch_dtype="bfloat16",
    )
    (folder / "config.json").write_text(json.dumps(raw))
    tile = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    tensors = {}
    for module in expected_modules(NemotronHConfig.from_dict(raw)):
        size = torch.Size(module.shape).numel()
        tensors[module.tensor_name] = tile.repeat(-(-size // len(tile)))[:size].view(module.shape).clone()
    save_file(tensors, folder / "model.safetensors")


def misalign(file: Path) -> None:
    """Make the header one byte longer, so that every tensor lies at an odd address of the mapped file."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])


def figures(small: Path, folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.measure_loading", str(small), str(folder)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=Path(__file__).parents[1])
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("is_aligned", [True, False], ids=["mapped", "misaligned"])
def test_loading_takes_the_weights_memory_once(
    tiny_folder: Callable[..., Path], tmp_path: Path, is_aligned: bool
) -> None:
    write_checkpoint(tmp_path, "M-M*-M-M-")
    if not is_aligned:
        misalign(tmp_path / "model.safetensors")
    measured = figures(tiny_folder("MEM*E-", "bf16"), tmp_path)
    assert measured["weights"] > 150_000_000
    assert measured["kept"] == 0, "BF16 linears are used as they are"
    assert measured["peak"] < BOUND * measured["weights"], measured
    assert measured["peak"] > 0.95 * measured["weights"], "the measurement does not see the weights"
    assert measured["peak_loading"] <= measured["peak"]


def test_expanded_forms_are_counted_apart(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "MEM*E")
    measured = figures(tiny_folder("MEM*E-", "bf16"), tmp_path)
    assert measured["kept"] > 0
    assert measured["peak"] - measured["kept"] < BOUND * measured["weights"], measured


def test_what_is_left_of_a_part_of_a_devices_memory() -> None:
    """100 in all, of which this engine could have 70: others hold 30."""
    assert part_of_memory(100, 70, 0.9) == 60
    assert part_of_memory(100, 70, 1.0) == 70
    assert part_of_memory(100, 70, 0.2) == -10


def test_a_part_of_a_gpu_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: this engine uses no GPU; found 0.9"):
        load(None, EngineConfig(arms="reference", gpu_memory_utilization=0.9))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: not a part of the memory; found 1.5"):
        EngineConfig(gpu_memory_utilization=1.5)
