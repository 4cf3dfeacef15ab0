"""A step by its parts: every kernel of the package has one, times add up to the step, the largest gap comes first."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from hemiola.bench.profile import IDLE, REST, as_rows, part_of, profile
from hemiola.bench.traffic import Traffic
from hemiola.cli.bench import _parts
from hemiola.kernels import (
    align,
    combine_norm,
    dense_wgmma,
    grouped_wgmma,
    mamba2_update,
    norm_linear,
    nvfp4_wgmma,
    rms_norm,
    router,
    rows_mma,
)

KERNELS = Path(rows_mma.__file__).parent
TRAFFIC = Traffic(experts=8_000_000, other_weights=2_000_000, states=4_000_000, kv=0)


def launched() -> list[str]:
    """Names of kernels that a module of the package launches as `name[grid](...)`, those of no step aside."""
    names = set()
    for file in KERNELS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        compiled = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
        for node in nodes:
            is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if is_launch and isinstance(node.func.value, ast.Name) and node.func.value.id in compiled:
                names.add(node.func.value.id)
    return sorted(names - {"pack_words_kernel", "read_kernel"})


IN_CUDA = (
    *(rows_mma.LINEAR, rows_mma.EXPERTS, "down_kernel", mamba2_update.KERNEL, rms_norm.KERNEL, router.KERNEL),
    *(nvfp4_wgmma.LINEAR, nvfp4_wgmma.EXPERTS, align.COUNT, align.PLACE, norm_linear.KERNEL, dense_wgmma.KERNEL),
    *(combine_norm.KERNEL, grouped_wgmma.KERNEL),
)


@pytest.mark.parametrize("kernel", [*launched(), *IN_CUDA])
def test_every_kernel_belongs_to_a_part(kernel: str) -> None:
    assert part_of(kernel) != REST


def test_kernels_are_told_apart() -> None:
    assert len(launched()) > 20
    assert part_of(rows_mma.LINEAR) == part_of("nvjet_sm90_qqtst_128x8_128x12_4x1_v_bz_TNT") == "linears"
    assert part_of(rows_mma.EXPERTS) == part_of("combine_kernel") == part_of(combine_norm.KERNEL) == "experts"
    assert part_of(grouped_wgmma.KERNEL) == "experts"
    assert part_of("_combine_kernel") == "attention"
    assert part_of(mamba2_update.KERNEL) == "states"
    assert part_of("logits_rows_kernel") == part_of(router.KERNEL) == "router"
    assert part_of(rms_norm.KERNEL) == "norms"
    assert part_of(norm_linear.KERNEL) == part_of(dense_wgmma.KERNEL) == "linears"
    assert part_of("Memcpy HtoD (Pinned -> Device)") == REST


def traced() -> dict[str, object]:
    """Four steps of 20 us: 15 us of kernels in each."""
    own = {"experts_rows_kernel": 5.0, "down_kernel": 1.0, "_ssd_update": 4.0, "_gemv": 2.0, "_rms_norm": 2.5, "x": 0.5}
    kernels = [
        {"name": name, "own_us_per_step": us, "us_per_step": 2 * us, "launches_per_step": 3.0}
        for name, us in own.items()
    ]
    return {"window_us": 80.0, "steps": 4, "kernels": kernels}


def test_times_add_up_and_floors_are_bytes_over_the_rate() -> None:
    parts = profile(traced(), TRAFFIC, bytes_per_s=2e12)
    assert sum(part.us for part in parts) == pytest.approx(20.0)
    found = {part.part: (part.us, part.floor_us, part.launches) for part in parts}
    assert found == {
        "experts": (6.0, 4.0, 6.0),
        "states": (4.0, 2.0, 3.0),
        "linears": (2.0, 1.0, 3.0),
        "norms": (2.5, None, 3.0),
        REST: (0.5, None, 3.0),
        IDLE: (5.0, None, 0.0),
    }
    gaps = [part.gap_us for part in parts]
    assert gaps == sorted(gaps, reverse=True)
    assert parts[0].part == IDLE


def test_the_table_says_what_would_be_saved() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(_parts(as_rows(profile(traced(), TRAFFIC, bytes_per_s=2e12))))
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.getvalue().splitlines()]
    rows = {name: figures for name, *figures in lines}
    assert rows["experts"] == ["6", "4", "67%", "2", "6"]
    assert rows["norms"] == ["2", "2", "3"]
