"""Ops: one per file, each with its contract, its reference and its registration. Importing this registers them all."""

from hemiola.ops import (  # noqa: F401  (imported for their registrations)
    causal_conv1d,
    embedding,
    gated_rms_norm,
    kv_write,
    linear,
    linear_fp8,
    linear_nvfp4,
    moe_experts,
    moe_route,
    paged_attention,
    relu_squared,
    rms_norm,
    router_logits,
    sample,
    ssd_scan,
    ssd_update,
)
from hemiola.ops.kept import KeptForms
from hemiola.ops.table import ARMS, Arm, Ops, Path, Variant, register, registered_ops

__all__ = ["ARMS", "Arm", "KeptForms", "Ops", "Path", "Variant", "register", "registered_ops"]
