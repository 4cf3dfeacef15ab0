"""The seeded checkpoints are, byte for byte, those that the goldens were recorded on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hemiola.config.model import NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.manifest import Manifest
from tests.support.seeded_checkpoint import SCHEMES, write_seeded_checkpoint

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_the_golden_and_all_of_them_are_understood(tmp_path: Path, scheme: str) -> None:
    digest = write_seeded_checkpoint(tmp_path, scheme)
    assert digest == json.loads((GOLDEN / f"golden-{scheme}.json").read_text())["checkpoint_sha256"]
    manifest = Manifest.build(Checkpoint.open(tmp_path), NemotronHConfig.from_folder(tmp_path))
    assert manifest.reports == ()
    for module in manifest.modules:
        tensor = manifest.weight(module.name).dense() if module.is_linear else manifest.tensor(module.name)
        assert torch.isfinite(tensor).all()
