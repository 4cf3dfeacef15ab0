"""Claims for tests of records, gating, comparison and report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hemiola.evidence.records import Claim, Figure

SOURCE: dict[str, Any] = {"commit": "c0ffee" * 6 + "c0ff", "is_dirty": False, "sha256": "a" * 64}
ENGINE: dict[str, Any] = {
    "arms": {"linear": "device", "ssd_scan": "device"},
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "invariant": False,
}
MODEL: dict[str, Any] = {
    "name": "lightning",
    "checkpoint_sha256": None,
    "config_sha256": "d" * 64,
    "stored": ["mamba projections: FP8", "routed experts: NVFP4"],
    "has_kv_scales": True,
}
MACHINE: dict[str, Any] = {
    "device": "GPU X",
    "driver": "580.1",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "clock_mhz": {"start": 1980, "min": 1975, "median": 1980, "max": 1980},
}
PATHS = [{"op": "linear", "arm": "device", "variant": "fp8", "reason": "", "calls": 7}]


def gate_claim(**changes: Any) -> Claim:
    claim = Claim(
        kind="gate",
        run=["hemiola", "gate"],
        source=SOURCE,
        model={**MODEL, "checkpoint_sha256": "e" * 64},
        engine=ENGINE,
        machine=MACHINE,
        workload={
            "oracle": "vLLM 0.25.0",
            "golden_sha256": "9" * 64,
            "prompts": 24,
            "positions": {"decode": 1152, "prefill": 1152},
        },
        seed=0,
        paths=PATHS,
        verdict="NOISE PASS",
        figures=[Figure("decode: tokens equal", 1079, "of 1,152")],
    )
    return replace(claim, **changes)


def bench_claim(batch: int = 8, ms: float = 4.0, **changes: Any) -> Claim:
    claim = Claim(
        kind="bench",
        run=["hemiola", "bench"],
        source=SOURCE,
        model=MODEL,
        engine=ENGINE,
        machine=MACHINE,
        workload={
            "cell": f"decode {batch} x 128",
            "batch": batch,
            "prompt_tokens": 128,
            "cache": {"state": "cold", "prefix_caching": False},
        },
        seed=1,
        paths=PATHS,
        gated_by=["0123456789ab"],
        figures=[
            Figure("time per step", ms, "ms", 3, ms * 0.99, ms * 1.02),
            Figure("output rate", 1000 * batch / ms, "tokens/s", 3, 990 * batch / ms, 1010 * batch / ms),
            Figure("start to first tokens", 30.0, "s"),
            Figure("GPU busy (NVML)", 0.99, "of the time", 83, low=0.97),
        ],
    )
    return replace(claim, **changes)
