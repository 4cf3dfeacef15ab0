"""Where a decode step's time goes, part by part, beside the least that memory takes for the part's bytes.

A part's floor is the bytes that it has to move over the measured copy rate; parts that move next to nothing have none.
Shared experts' bytes are the experts', in whose kernels few tokens take them; for many their time is the linears'.
Up to some hundreds of rows a decode step is bound by bytes, so no floor of operations is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hemiola.bench.traffic import Traffic

# Which part a kernel belongs to, by how its name begins; the first that fits. Those of torch's products are cuBLAS's.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "experts",
        (
            *("experts_rows_kernel", "down_kernel", "grouped_kernel", "up_rows_kernel", "down_rows_kernel"),
            *("combine_kernel", "align_", "quantise_pairs_kernel", "experts_wgmma_kernel", "experts_grouped_kernel"),
            "combine_norm_kernel",  # with the next layer's norm
        ),
    ),
    ("router", ("router_kernel", "logits_rows_kernel", "logits_tiles_kernel", "route_kernel")),
    (
        "linears",
        (
            *("linear_rows_kernel", "linear_wgmma_kernel", "_linear_nvfp4", "_gemv", "_dot", "_finish", "nvjet"),
            "dense_wgmma_kernel",
            "norm_linear_kernel",  # with the norm before it
            *("void cublasLt", "cublas", "void cutlass", "cutlass", "sm90_xmma", "gemm"),
        ),
    ),
    (
        "states",
        ("mamba2_update_kernel", "_ssd_update", "_update", "_varlen", "_keep_last", "_states", "_steps", "_outputs"),
    ),
    ("attention", ("_decode_kernel", "_combine_kernel", "_prefill_kernel", "_kv_write_kernel")),
    ("norms", ("rms_norm_kernel", "_rms_norm", "_gated_rms_norm")),
    ("embedding and sampling", ("_embedding_kernel", "_best_of_piece_kernel", "_best_piece_kernel")),
)
REST, IDLE = "the rest", "no kernel runs"


@dataclass(frozen=True, slots=True)
class PartTime:
    """Of one step, in microseconds. floor_us: None where a part moves next to nothing."""

    part: str
    us: float
    floor_us: float | None
    launches: float

    @property
    def gap_us(self) -> float:
        """What a kernel as fast as memory would save."""
        return self.us - (self.floor_us or 0.0)


def part_of(kernel: str) -> str:
    return next((part for part, begins in PARTS if kernel.startswith(begins)), REST)


def profile(trace: Mapping[str, Any], traffic: Traffic, bytes_per_s: float) -> list[PartTime]:
    """The parts of a traced step (`hemiola.bench.trace`), the one with the largest gap first. traffic: of that step.

    Times are what a kernel takes after the end of the one before it; together with IDLE they are the step.
    """
    us: dict[str, float] = {}
    launches: dict[str, float] = {}
    for kernel in trace["kernels"]:
        part = part_of(kernel["name"])
        us[part] = us.get(part, 0.0) + kernel["own_us_per_step"]
        launches[part] = launches.get(part, 0.0) + kernel["launches_per_step"]
    idle = trace["window_us"] / trace["steps"] - sum(us.values())
    moved = {
        "experts": traffic.experts,
        "linears": traffic.other_weights,
        "states": traffic.states,
        "attention": traffic.kv,
    }
    floors = {part: 1e6 * moved[part] / bytes_per_s if part in moved else None for part in us}
    parts = [PartTime(part, us[part], floors[part], launches[part]) for part in us]
    return sorted([*parts, PartTime(IDLE, max(idle, 0.0), None, 0.0)], key=lambda row: -row.gap_us)


def as_rows(parts: list[PartTime]) -> list[dict[str, Any]]:
    return [{**asdict(part), "gap_us": part.gap_us} for part in parts]
