"""What a checkpoint is and what running it costs, from its headers: schemes, bytes, state, and the byte roofline.

Reads no weight (only the KV scales, a few numbers). Knows no console beyond what `render` is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.layout import Role
from hemiola.formats.manifest import Manifest
from hemiola.formats.plan import StoredModule
from hemiola.formats.weight import Scheme

PEAK_BANDWIDTHS = {"H100 SXM": 3.35e12, "H200": 4.8e12, "B200": 8e12}
"""Device memory bandwidth in bytes per second, vendor peak figures; sustained is typically 85 to 92 % of it."""

_IN_RUN = {Scheme.FP8: "fp8 W8A8 static", Scheme.NVFP4: "nvfp4 weight-only"}
_STATE = "recurrent state, read and written"


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """One module: its form on disk ("nvfp4", or the dtype of a plain one) and the form that the engine computes in."""

    name: str
    role: str
    shape: tuple[int, ...]
    on_disk: str
    in_run: str
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RoleLine:
    """All modules of one role. forms: number of modules by form on disk. token_bytes: read per decoded token, batch 1.

    Bytes leave out the scalar scales; resident bytes have A_log, D and dt_bias in fp32.
    """

    role: str
    num_modules: int
    num_tensors: int
    forms: dict[str, int]
    stored_bytes: int
    resident_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class KVScaleLine:
    """The KV-cache scales of one attention layer and where they come from."""

    layer: int
    k_scale: float
    v_scale: float
    source: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """The report. Bytes are exact; state_bytes are per request (fp32 SSM, bf16 conv), KV bytes per token of context.

    num_tensors counts everything in the checkpoint, num_scalar_scales the scalar scales among them (KV scales too).
    token_bytes: read and written per decoded token at batch 1 and no context; KV adds kv_bytes per token of context.
    token_time_us: that over each vendor peak bandwidth, a lower bound, in microseconds.
    """

    folder: str
    pattern: str
    num_layers: dict[str, int]
    num_tensors: int
    num_scalar_scales: int
    num_quantized_modules: int
    num_mtp_tensors: int
    mtp_bytes: int
    roles: tuple[RoleLine, ...]
    modules: tuple[ModuleLine, ...]
    stored_bytes: int
    resident_bytes: int
    kv_cache_declared: str | None
    kv_scales: tuple[KVScaleLine, ...]
    state_bytes: int
    kv_bytes_bf16: int
    kv_bytes_fp8: int
    token_bytes: int
    token_time_us: dict[str, float]
    reports: tuple[str, ...]


def state_bytes_per_request(config: NemotronHConfig) -> int:
    """fp32 SSM state and bf16 conv state of all mamba layers."""
    ssm = 4 * config.mamba_inner * config.ssm_state_size
    conv = 2 * config.conv_dim * (config.conv_kernel - 1)
    return config.count(LayerKind.MAMBA) * (ssm + conv)


def kv_bytes_per_token(config: NemotronHConfig, item_bytes: int) -> int:
    """Keys and values of all attention layers for one token."""
    return 2 * config.count(LayerKind.ATTENTION) * config.num_key_value_heads * config.head_dim * item_bytes


def _form(stored: StoredModule) -> str:
    return stored.dtype.lower() if stored.scheme is Scheme.PLAIN else stored.scheme.value


def _form_in_run(stored: StoredModule) -> str:
    """The router's gate is the one module whose form follows the run (EngineConfig.router_dtype)."""
    if stored.role is Role.ROUTER and stored.is_linear:
        return f"{_form(stored)}, rounded to bf16 in bf16 mode"
    return _IN_RUN.get(stored.scheme, _form(stored))


def _token_bytes(role: Role, stored_bytes: int, config: NemotronHConfig) -> int:
    """Weight bytes that one decoded token reads: of the embedding a row, of the experts the chosen ones, else all."""
    if role is Role.EMBEDDING:
        row = stored_bytes // config.vocab_size
        return row + (stored_bytes if config.tie_word_embeddings else 0)
    if role is Role.ROUTED_EXPERTS:
        return stored_bytes * config.num_experts_per_tok // config.num_experts
    return stored_bytes


def _role_line(role: Role, modules: list[StoredModule], config: NemotronHConfig) -> RoleLine:
    stored_bytes = sum(module.stored_bytes for module in modules)
    return RoleLine(
        role=role.value,
        num_modules=len(modules),
        num_tensors=sum(module.num_tensors for module in modules),
        forms=dict(Counter(_form(module) for module in modules)),
        stored_bytes=stored_bytes,
        resident_bytes=sum(module.resident_bytes for module in modules),
        token_bytes=_token_bytes(role, stored_bytes, config),
    )


def build_report(manifest: Manifest, config: NemotronHConfig) -> Inspection:
    """Account for a checkpoint; the only payloads read are KV scales.

    Raises: CheckpointError when a KV scale is not positive and finite.
    """
    by_role = {role: [m for m in manifest.modules if m.role is role] for role in Role}
    roles = tuple(_role_line(role, modules, config) for role, modules in by_role.items() if modules)
    state_bytes = state_bytes_per_request(config)
    token_bytes = sum(line.token_bytes for line in roles) + 2 * state_bytes
    return Inspection(
        folder=str(manifest.checkpoint.folder),
        pattern=config.pattern,
        num_layers={kind.name.lower(): config.count(kind) for kind in LayerKind if config.count(kind)},
        num_tensors=len(manifest.checkpoint.headers),
        num_scalar_scales=sum(m.num_scalars for m in manifest.modules) + manifest.num_kv_scales,
        num_quantized_modules=sum(m.scheme is not Scheme.PLAIN for m in manifest.modules),
        num_mtp_tensors=manifest.num_mtp_tensors,
        mtp_bytes=manifest.mtp_bytes,
        roles=roles,
        modules=tuple(
            ModuleLine(m.name, m.role.value, m.shape, _form(m), _form_in_run(m), m.stored_bytes)
            for m in manifest.modules
        ),
        stored_bytes=sum(line.stored_bytes for line in roles),
        resident_bytes=sum(line.resident_bytes for line in roles),
        kv_cache_declared=manifest.kv_cache_declared,
        kv_scales=tuple(KVScaleLine(i, *manifest.kv_scales(i)) for i in config.indices(LayerKind.ATTENTION)),
        state_bytes=state_bytes,
        kv_bytes_bf16=kv_bytes_per_token(config, 2),
        kv_bytes_fp8=kv_bytes_per_token(config, 1),
        token_bytes=token_bytes,
        token_time_us={name: token_bytes / bandwidth * 1e6 for name, bandwidth in PEAK_BANDWIDTHS.items()},
        reports=(*config.warnings, *manifest.reports),
    )


def to_json(report: Inspection) -> dict[str, Any]:
    """The report as plain dicts, lists and numbers."""
    return asdict(report)


def render(report: Inspection, console: Console, modules: bool = False) -> None:
    """Write the report for a person; `modules` adds a line per module, on disk and in the run."""
    counts = ", ".join(f"{number} {kind}" for kind, number in report.num_layers.items())
    console.print(f"[bold]{report.folder}[/]\n{report.pattern}  ({counts})", highlight=False)
    console.print(
        f"{report.num_tensors:,} tensors, {report.num_quantized_modules:,} quantised modules, "
        f"{report.num_scalar_scales:,} scalar scales, {report.num_mtp_tensors:,} of the draft head left unread",
        highlight=False,
    )
    console.print(_role_table(report))
    console.print(_run_table(report))
    if report.kv_scales:
        console.print(_kv_table(report))
    if modules:
        console.print(_module_table(report))
    for line in report.reports:
        console.print(f"note: {line}", style="yellow", highlight=False, markup=False)


def _table(title: str, *columns: str, text_columns: int = 1) -> tuple[Table, Callable[..., None]]:
    """An empty table whose first columns are text, the others numbers; and its add_row."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right")
    return table, table.add_row


def _role_table(report: Inspection) -> Table:
    columns = ("role", "on disk", "modules", "tensors", "resident bytes", "bytes per token, batch 1")
    table, add = _table("Weights by role (scalar scales not counted)", *columns, text_columns=2)
    for line in report.roles:
        forms = ", ".join(f"{form} x {number:,}" for form, number in line.forms.items())
        numbers = (line.num_modules, line.num_tensors, line.resident_bytes, line.token_bytes)
        add(line.role, forms, *(f"{number:,}" for number in numbers))
    add(_STATE, "", "", "", "", f"{2 * report.state_bytes:,}")
    table.add_section()
    add("total", "", "", "", f"{report.resident_bytes:,}", f"{report.token_bytes:,}")
    return table


def _run_table(report: Inspection) -> Table:
    table, add = _table("In a run", "quantity", "value")
    add("state bytes per request (fp32 SSM, bf16 conv)", f"{report.state_bytes:,}")
    add("KV bytes per token, bf16", f"{report.kv_bytes_bf16:,}")
    add("KV bytes per token, fp8", f"{report.kv_bytes_fp8:,}")
    add("KV cache that the checkpoint declares", report.kv_cache_declared or "none")
    for name, microseconds in report.token_time_us.items():
        quantity = f"time per token, batch 1, no context, {name} ({PEAK_BANDWIDTHS[name] / 1e12:g} TB/s vendor peak)"
        add(quantity, f"at least {microseconds:,.0f} us (at most {1e6 / microseconds:,.0f} tokens/s)")
    return table


def _kv_table(report: Inspection) -> Table:
    table, add = _table("KV-cache scales", "layer", "source", "k_scale", "v_scale", text_columns=2)
    for line in report.kv_scales:
        add(str(line.layer), line.source, f"{line.k_scale:g}", f"{line.v_scale:g}")
    return table


def _module_table(report: Inspection) -> Table:
    table, add = _table("Modules", "module", "on disk", "in the run", "shape", "bytes", text_columns=4)
    for line in report.modules:
        add(line.name, line.on_disk, line.in_run, " x ".join(map(str, line.shape)), f"{line.stored_bytes:,}")
    return table
