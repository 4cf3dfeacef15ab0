"""The seeded checkpoints are, byte for byte, those that the goldens were recorded on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola.config.model import NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.manifest import Manifest
from hemiola.kernels import mamba2_update
from tests.support.seeded_checkpoint import CONFIG, SCHEMES, WIDE, WIDE_SIZES

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.mark.parametrize("scheme", [*SCHEMES, WIDE])
def test_bytes_are_those_of_the_golden_and_all_of_them_are_understood(
    seeded_checkpoint: Callable[[str], Path], scheme: str
) -> None:
    folder = seeded_checkpoint(scheme)
    checkpoint = Checkpoint.open(folder)
    digest = hashlib.sha256()
    for name in sorted(checkpoint.headers):
        digest.update(name.encode() + checkpoint.tensor(name).flatten().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == json.loads((GOLDEN / f"golden-{scheme}.json").read_text())["checkpoint_sha256"]
    manifest = Manifest.build(checkpoint, NemotronHConfig.from_folder(folder))
    assert manifest.reports == ()
    for module in manifest.modules:
        tensor = manifest.weight(module.name).dense() if module.is_linear else manifest.tensor(module.name)
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize(("sizes", "is_taken"), [(WIDE_SIZES, True), ({}, False)], ids=["wide", "others"])
def test_the_wide_one_is_for_the_kernel_of_clusters(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], is_taken: bool
) -> None:
    """Which the published models take on Hopper: only a gate of this one can cover it."""
    monkeypatch.setattr(mamba2_update, "capability", lambda: 90)
    monkeypatch.setattr(mamba2_update, "missing", lambda: None)
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"
    heads, head_dim, groups, state_size = ((CONFIG | sizes)[name] for name in names)
    z = torch.empty(3, heads * head_dim, dtype=torch.bfloat16, device="meta")
    conv_weight = torch.empty(heads * head_dim + 2 * groups * state_size, 4, dtype=torch.bfloat16, device="meta")
    ssm_state = torch.empty(3, heads, head_dim, state_size, device="meta")
    slots = torch.empty(3, dtype=torch.int32, device="meta")
    reason = mamba2_update.unsupported(z, conv_weight, ssm_state, slots, groups)
    assert (reason is None) == is_taken, reason
