"""Ops: one per file, each with its contract, its reference and its registration. Importing this registers them all."""

from hemiola.ops import (  # noqa: F401  (imported for their registrations)
    causal_conv1d,
    embedding,
    experts_norm,
    gated_rms_norm,
    kv_write,
    linear,
    linear_fp8,
    linear_nvfp4,
    mamba2_update,
    moe_experts,
    moe_route,
    norm_linears,
    norm_route,
    paged_attention,
    rms_norm,
    sample,
    ssd_scan,
)
from hemiola.ops.kept import KeptForms
from hemiola.ops.layout import PrefillLayout
from hemiola.ops.resident import ResidentWeights
from hemiola.ops.table import ARMS, Arm, Ops, Path, Variant, load_device_variants, register, registered_ops

__all__ = [
    "ARMS",
    "Arm",
    "KeptForms",
    "Ops",
    "Path",
    "PrefillLayout",
    "ResidentWeights",
    "Variant",
    "load_device_variants",
    "register",
    "registered_ops",
]
