"""Counts and bytes of two public checkpoints: on skeletons with their headers, and on the real ones where they are.

For a real one, give its folder: HEMIOLA_LIGHTNING_NVFP4=... HEMIOLA_NANO_NVFP4=... pytest -m checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hemiola.config.model import NemotronHConfig
from hemiola.errors import CheckpointError
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.layout import Role
from hemiola.formats.manifest import Manifest
from hemiola.inspect import Inspection, build_report
from tests.support.damage import change_json
from tests.support.skeleton import write_lightning, write_nano_nvfp4


@dataclass(frozen=True)
class Published:
    """Published figures. Bytes of the source leave the draft head out; those of the host widen 69 vectors to fp32."""

    write: Callable[[Path], None]
    variable: str
    num_tensors: int
    num_mtp_tensors: int
    num_quantized_modules: int
    num_scalar_scales: int
    stored_bytes: int
    resident_bytes: int
    token_bytes: int
    h200_us: float
    quantized: dict[Role, dict[str, int]]


EXPERTS = {Role.ROUTED_EXPERTS: {"nvfp4": 23 * 128 * 2}, Role.SHARED_EXPERTS: {"nvfp4": 23 * 2}}
LIGHTNING = Published(
    write=write_lightning,
    variable="HEMIOLA_LIGHTNING_NVFP4",
    num_tensors=18_487,
    num_mtp_tensors=270,
    num_quantized_modules=5_981,
    num_scalar_scales=6_039,
    stored_bytes=18_888_913_280,
    resident_bytes=18_888_922_112,
    token_bytes=2_533_641_856,
    h200_us=528,
    quantized={**EXPERTS, Role.MAMBA: {"fp8": 46}, Role.LM_HEAD: {"nvfp4": 1}},
)
NANO = Published(
    write=write_nano_nvfp4,
    variable="HEMIOLA_NANO_NVFP4",
    num_tensors=24_147,
    num_mtp_tensors=0,
    num_quantized_modules=23 * 258 + 34,
    num_scalar_scales=2 * (23 * 258 + 34),
    stored_bytes=19_339_733_888,
    resident_bytes=19_339_742_720,
    token_bytes=2_984_462_464,
    h200_us=622,
    quantized={**EXPERTS, Role.MAMBA: {"nvfp4": 34, "bf16": 12}, Role.LM_HEAD: {"bf16": 1}},
)
CHECKPOINTS = pytest.mark.parametrize("published", [LIGHTNING, NANO], ids=["lightning", "nano"])


def inspect(folder: Path) -> Inspection:
    config = NemotronHConfig.from_folder(folder)
    return build_report(Manifest.build(Checkpoint.open(folder), config), config)


def assert_as_published(report: Inspection, published: Published) -> None:
    for name in ("num_tensors", "num_mtp_tensors", "num_quantized_modules", "num_scalar_scales"):
        assert getattr(report, name) == getattr(published, name), name
    for name in ("stored_bytes", "resident_bytes", "token_bytes"):
        assert getattr(report, name) == getattr(published, name), name
    forms = {line.role: line.forms for line in report.roles}
    assert {role: forms[role.value] for role in published.quantized} == published.quantized
    assert forms[Role.ATTENTION.value] == {"bf16": 24}
    assert report.token_time_us["H200"] == pytest.approx(published.h200_us, abs=0.5)
    assert report.state_bytes == 49_082_368
    assert (report.kv_bytes_bf16, report.kv_bytes_fp8) == (6_144, 3_072)


@CHECKPOINTS
def test_a_skeleton_of_the_true_geometry(tmp_path: Path, published: Published) -> None:
    published.write(tmp_path / "skeleton")
    assert_as_published(inspect(tmp_path / "skeleton"), published)


@pytest.mark.checkpoint
@CHECKPOINTS
def test_the_real_checkpoint(published: Published) -> None:
    folder = os.environ.get(published.variable)
    if not folder:
        pytest.skip(f"{published.variable} names no folder")
    assert_as_published(inspect(Path(folder)), published)


def test_the_source_total_of_lightning() -> None:
    """The third published figure: stored bytes and the scalar scales, without the draft head."""
    assert LIGHTNING.stored_bytes + 4 * LIGHTNING.num_scalar_scales == 18_888_937_436
    assert LIGHTNING.resident_bytes - LIGHTNING.stored_bytes == 69 * 64 * 2


def test_bytes_by_class_of_nano(tmp_path: Path) -> None:
    write_nano_nvfp4(tmp_path / "skeleton")
    report = inspect(tmp_path / "skeleton")
    assert {line.role: (line.stored_bytes, line.token_bytes) for line in report.roles} == {
        "routed experts": (16_523_329_536, 774_531_072),
        "shared experts": (258_177_024, 258_177_024),
        "mamba projections": (370_137_600 + 464_486_400, 370_137_600 + 464_486_400),
        "attention": (280_756_224, 280_756_224),
        "router": (31_665_664, 31_665_664),
        "norms, conv, A, D, dt": (1_895_296, 1_895_296),
        "lm_head": (704_643_072, 704_643_072),
        "embedding": (704_643_072, 5_376),
    }
    assert [line.source for line in report.kv_scales] == ["fallback 1.0"] * 6
    assert len(report.reports) == 1
    assert "KV scales not in the checkpoint" in report.reports[0]


def test_what_lightning_reports(tmp_path: Path) -> None:
    write_lightning(tmp_path / "skeleton")
    report = inspect(tmp_path / "skeleton")
    assert report.kv_cache_declared == "fp8"
    assert [line.layer for line in report.kv_scales] == [5, 12, 19, 26, 33, 42]
    assert {line.source for line in report.kv_scales} == {"checkpoint"}
    assert report.reports == (f"270 tensors of the draft head (mtp.*, {report.mtp_bytes} bytes) are left unread",)


def test_a_skeleton_with_a_hole_fails(tmp_path: Path) -> None:
    """The counts above would not notice if the check itself were lenient."""
    write_lightning(tmp_path / "skeleton")
    change_json(tmp_path / "skeleton" / "config.json", lambda config: config.update(n_routed_experts=127))
    with pytest.raises(CheckpointError, match=r"wrong shape.*gate.*tensor that the model does not have \(138\)"):
        inspect(tmp_path / "skeleton")
