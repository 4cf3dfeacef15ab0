"""Geometry: a simulation's caches are those that the engine would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hemiola.config.engine import EngineConfig
from hemiola.config.model import NemotronHConfig
from hemiola.loading import load
from hemiola.simulate.geometry import Geometry
from tests.support.variants import public


@pytest.mark.parametrize("pattern", ["M*-", "M", "*E"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_caching": False},
        {"snapshot_bytes": 60_000, "host_snapshot_bytes": 90_000, "block_size": 8},
        {"kv_cache_dtype": "fp8", "dtype": "bf16", "max_num_seqs": 500, "max_model_len": 99},
    ],
    ids=["defaults", "no-reuse", "snapshots", "fp8"],
)
def test_the_plan_is_the_engines(tiny_folder: Callable[..., Path], pattern: str, settings: dict[str, Any]) -> None:
    config = EngineConfig(cache_bytes=1 << 20, **settings)
    loaded = load(tiny_folder(pattern), config)
    item = 2 if config.dtype == "bf16" else 4
    geometry = Geometry("x", loaded.config, item, 1 if config.kv_cache_dtype == "fp8" else item)
    assert geometry.plan(config) == loaded.engine.plan
    assert geometry.max_model_len(config) == loaded.engine.max_model_len
    assert geometry.chunk_size == loaded.engine.scheduler.chunk_size


@pytest.mark.parametrize(("kv_element_bytes", "per_token"), [(1, 3072), (2, 6144)])
def test_bytes_of_a_public_model(kv_element_bytes: int, per_token: int) -> None:
    config = NemotronHConfig.from_dict(public("nano-3-30b-a3b"))
    plan = Geometry("30B", config, 2, kv_element_bytes).plan(EngineConfig(cache_bytes=40 << 30))
    assert plan.slot_bytes == 49_082_368
    assert plan.block_bytes == 16 * per_token
