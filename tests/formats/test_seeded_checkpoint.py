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
from tests.support.seeded_checkpoint import SCHEMES, WIDE

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
