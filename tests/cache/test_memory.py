"""The memory budget: its rows, the clamp and its arithmetic, and the notes that say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hemiola import LLM
from hemiola.cache.memory import clamp_cache_bytes
from hemiola.cli import app
from hemiola.config.engine import EngineConfig
from hemiola.engine.engine import Engine
from hemiola.errors import CapacityError, ConfigError

Folder = Callable[..., Path]


def test_the_clamp_shrinks_both_by_the_same_factor_and_says_so() -> None:
    assert clamp_cache_bytes(800, 200, 1000) == (800, 200, ())
    caches, snapshots, (note,) = clamp_cache_bytes(800, 200, 500)
    assert (caches, snapshots) == (400, 100)
    assert note == (
        "cache_bytes 800 + snapshot_bytes 200 = 1,000 clamped to 400 + 100: 500 bytes of memory are available beside "
        "weights and workspace"
    )
    assert clamp_cache_bytes(800, 200, -5)[:2] == (0, 0)


def test_rows_add_up_to_what_is_allocated(tiny_folder: Folder) -> None:
    llm = LLM(tiny_folder("MEM*-"), host_snapshot_bytes=1 << 20)
    engine = llm.loaded.engine
    rows = {row.name: row.num_bytes for row in engine.memory.rows}
    tensors = sum(t.nbytes for cache in engine.caches if cache is not None for t in cache)
    assert rows["KV blocks"] + rows["states"] + rows["snapshots"] == tensors == engine.plan.total_bytes
    assert rows["weights"] == sum(m.resident_bytes for m in llm.loaded.manifest.modules)
    assert 0 < rows["snapshots on the host"] <= 1 << 20
    assert rows["workspace"] > 0
    assert engine.memory.total_bytes == sum(rows.values())


def engine_with(llm: LLM, available: int, **settings: int) -> Engine:
    old = llm.loaded.engine
    return Engine(
        old.model, EngineConfig(**settings), eos_token_ids=(), kv_dtype=old.model.dtype, available_bytes=available
    )


def test_less_memory_than_asked_for_is_clamped_and_noted(tiny_folder: Folder) -> None:
    llm = LLM(tiny_folder("MEM*-"))
    engine = engine_with(llm, 40 << 20)
    (note,) = engine.notes
    assert note.startswith("cache_bytes 2,147,483,648 + snapshot_bytes 536,870,912")
    assert engine.plan.total_bytes < 40 << 20
    assert engine_with(llm, 1 << 40).notes == ()


def test_no_memory_at_all_is_refused_with_the_arithmetic(tiny_folder: Folder) -> None:
    with pytest.raises(CapacityError, match=r"holds not even one request: .* found 0 bytes; expected at least"):
        engine_with(LLM(tiny_folder("MEM*-")), 0)


def test_no_room_for_a_snapshot_is_said(tiny_folder: Folder) -> None:
    llm = LLM(tiny_folder("MEM*-"), snapshot_bytes=100)
    assert any(note.startswith("no prefix is reused: a state snapshot takes") for note in llm.loaded.notes)
    assert not llm.loaded.engine.scheduler.ledger.prefix.enabled


def test_settings_are_checked() -> None:
    for name, value in (("swap_bytes", -1), ("snapshot_bytes", -1), ("stall_seconds", 0), ("host_bytes_per_s", 0)):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_the_command_line_shows_it_when_asked(tiny_folder: Folder, tmp_path: Path) -> None:
    prompts = tmp_path / "ids.json"
    prompts.write_text("[[5, 6, 7]]")
    arguments = ["generate", "--model", str(tiny_folder("MEM*-")), "--prompt-ids", str(prompts), "--json"]
    for options, is_shown in (([], False), (["--verbose"], True)):
        result = CliRunner().invoke(app, [*arguments, "--max-tokens", "2", *options])
        assert result.exit_code == 0
        assert ("KV blocks" in result.stderr) == is_shown
        assert "KV blocks" not in result.stdout
