"""Doctor: what of the device arm works on this machine for a given checkpoint, found by running it.

It takes as many of the checkpoint's layers as it needs to meet each kind of layer in each scheme, and sends prompts
through them with an op table that tries every device variant on every new combination of shapes: preparing weights
(packing, plans), then the call itself, on copies of what it writes. Then a strict engine runs the same layers with CUDA
graphs. What a variant computes is the tests' business; here it only has to run and be finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from torch import Tensor

from hemiola.bench.cells import Driver
from hemiola.bench.machine import Nvml, gpu_address
from hemiola.config.engine import EngineConfig
from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.config.sampling import SamplingParams
from hemiola.engine.engine import Engine
from hemiola.errors import HemiolaError
from hemiola.formats.layout import ROOT
from hemiola.formats.manifest import Manifest
from hemiola.formats.weight import ExpertBank, Scheme, Weight
from hemiola.inspect import kv_bytes_per_token, state_bytes_per_request
from hemiola.loading import activation_dtype, kv_is_fp8, open_manifest
from hemiola.model.load import load_model
from hemiola.ops import KeptForms, Ops, ResidentWeights, Variant, load_device_variants, registered_ops
from hemiola.ops.table import Arm
from hemiola.synthetic import SyntheticManifest, open_synthetic

PROMPT_TOKENS = 300  # more than one SSD chunk and one KV block, and no multiple of either
DECODE_BATCHES = (1, 8, 64)
RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One variant at one combination of shapes.

    what: "prepare" (a weight), "predicate" or "call". status: "runs", or why not. is_refusal: its own predicate says
    so, which is no defect where another variant takes the call.
    """

    op: str
    variant: str
    what: str
    at: str
    status: str
    is_refusal: bool = False


@dataclass(slots=True)
class Diagnosis:
    """machine, checkpoint: facts by name. uses: what a run with these settings would be. problems: why a strict device
    engine could not start; empty where one did, on the layers in `layers`."""

    machine: dict[str, Any]
    checkpoint: dict[str, Any]
    uses: dict[str, Any]
    layers: tuple[int, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def can_start_strict(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "can_start_strict": self.can_start_strict}


def examine(model: str | None, synthetic: str | None, config: EngineConfig) -> Diagnosis:
    """Examine this machine for a checkpoint (None: the shipped model) or a synthetic model, which wins if it is given.

    Raises: ConfigError, CheckpointError for a checkpoint that cannot be opened.
    """
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    manifest: Manifest
    if synthetic is not None:
        manifest = drawn = open_synthetic(synthetic, device)
        name, model_config = synthetic, drawn.geometry.config
    else:
        folder, model_config, manifest = open_manifest(model)
        name = str(folder)
    diagnosis = Diagnosis(describe_machine(device), describe_checkpoint(name, manifest, model_config), {})
    diagnosis.uses = describe_run(manifest, model_config, config, device)
    if not has_gpu:
        diagnosis.problems.append("there is no GPU that torch can use")
    try:
        load_device_variants()
    except HemiolaError as error:
        diagnosis.problems.append(str(error))
    if diagnosis.problems:
        diagnosis.findings += [
            Finding(op, variant.name, "call", "", diagnosis.problems[0])
            for op, arms in registered_ops().items()
            for variant in arms["device"]
        ]
        return diagnosis
    needed, free = diagnosis.checkpoint["weight_bytes"], diagnosis.machine["memory_free"]
    if needed > free:
        diagnosis.problems.append(f"the weights take {needed:,} bytes, and {free:,} of device memory are free")
    probe(diagnosis, manifest, model_config, config, device)
    return diagnosis


def describe_machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        facts["triton"] = version("triton")
    except PackageNotFoundError:
        facts["triton"] = None
    if device.type != "cuda":
        return {**facts, "device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        **facts,
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_free": free,
        "memory_total": total,
        **Nvml(gpu_address(device)).describe(),
    }


def describe_checkpoint(name: str, manifest: Manifest, config: NemotronHConfig) -> dict[str, Any]:
    schemes: dict[str, dict[str, int]] = {}
    for module in manifest.modules:
        if module.is_linear:
            forms = schemes.setdefault(module.role.value, {})
            forms[module.scheme.value] = forms.get(module.scheme.value, 0) + 1
    return {
        "name": name,
        "pattern": config.pattern,
        "weight_bytes": sum(module.resident_bytes for module in manifest.modules),
        "schemes": schemes,
    }


def describe_run(
    manifest: Manifest, model_config: NemotronHConfig, config: EngineConfig, device: torch.device
) -> dict[str, Any]:
    """What an engine with these settings would choose."""
    dtype = activation_dtype(config, model_config)
    kv_dtype = torch.float8_e4m3fn if kv_is_fp8(config, manifest) else dtype
    arms = config.arms if config.arms != "auto" else "device" if device.type == "cuda" else "reference"
    return {
        "arms": arms if isinstance(arms, str) else dict(arms),
        "dtype": str(dtype).removeprefix("torch."),
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "kv_bytes_per_token": kv_bytes_per_token(model_config, kv_dtype.itemsize),
        "state_bytes_per_request": state_bytes_per_request(model_config),
    }


# Probing


class ProbingOps(Ops):
    """An op table that tries every device variant on what it is called with, and goes on with the first that runs."""

    def __init__(self, kept: KeptForms, resident: ResidentWeights, findings: list[Finding], invariant: bool) -> None:
        self._findings = findings
        self._working: dict[tuple[str, str], Variant | None] = {}
        self._prepared: set[tuple[str, str, str]] = set()
        super().__init__("device", kept, resident, strict=False, invariant=invariant)

    def prepare(self, op: str, weight: Any) -> None:
        form = _shown(weight)
        for variant in registered_ops()[op]["device"]:
            if variant.prepare is None:
                continue
            status, _ = _attempt(variant.prepare, weight, self.resident)
            if status != RUNS or (op, variant.name, form) not in self._prepared:
                self._prepared.add((op, variant.name, form))
                self._findings.append(Finding(op, variant.name, "prepare", form, status))

    def takes(self, op: str, instead_of: tuple[str, ...], *args: Any) -> bool:
        """Tries the variants of `op`, and says no, so that the ops in whose place it is are tried, too."""
        self._tried(op, args, {})
        return False

    def _bind(self, op: str, arm: Arm) -> Callable[..., Any]:
        (reference,) = registered_ops()[op]["reference"]

        def probing(*args: Any, **kwargs: Any) -> Any:
            return self._runner(self._tried(op, args, kwargs) or reference)(*args, **kwargs)

        return probing

    def _tried(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant | None:
        """The first device variant that takes the call and runs it; all are tried at the first call of such shapes."""
        key = (op, _call_shown(args, kwargs))
        if key not in self._working:
            self._working[key] = self._try_all(op, key[1], args, kwargs)
        return self._working[key]

    def _try_all(self, op: str, at: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Variant | None:
        working = None
        signature = inspect.signature(registered_ops()[op]["reference"][0].run)
        for variant in registered_ops()[op]["device"]:
            if variant.unsupported is not None:
                status, refusal = _attempt(variant.unsupported, *args, **kwargs)
                if status != RUNS:
                    self._findings.append(Finding(op, variant.name, "predicate", at, status))
                    continue
                if refusal is not None:
                    self._findings.append(Finding(op, variant.name, "call", at, refusal, is_refusal=True))
                    continue
            new_args, new_kwargs = _with_copies(variant.mutates, signature, args, kwargs)
            status, result = _attempt(self._runner(variant), *new_args, **new_kwargs)
            if status == RUNS and not _is_finite(result):
                status = "runs, but its result is not finite"
            self._findings.append(Finding(op, variant.name, "call", at, status))
            if status == RUNS and working is None:
                working = variant
        return working


def probe(
    diagnosis: Diagnosis,
    manifest: Manifest,
    model_config: NemotronHConfig,
    config: EngineConfig,
    device: torch.device,
) -> None:
    """Fill in `layers`, `findings` and `problems`."""
    diagnosis.layers = covering_layers(manifest)
    part = _Part(manifest, diagnosis.layers)
    part_config = _config_of(model_config, diagnosis.layers)
    resident = ResidentWeights(device)
    kept = KeptForms(config.expanded_bytes, device)
    dtype = activation_dtype(config, model_config)
    kv_dtype = torch.float8_e4m3fn if kv_is_fp8(config, manifest) else dtype

    def engine(ops: Ops, cuda_graphs: bool) -> Engine:
        router_dtype = {"auto": dtype, "bf16": torch.bfloat16, "float32": torch.float32}[config.router_dtype]
        nemotron_h = load_model(cast(Manifest, part), part_config, ops, dtype, router_dtype, device)
        nemotron_h.warm()
        if isinstance(manifest, SyntheticManifest):
            manifest.forget()
        return Engine(
            nemotron_h, _small(config, part_config, cuda_graphs), eos_token_ids=(), kv_dtype=kv_dtype,
            available_bytes=1 << 60,
        )  # fmt: skip

    def run(ops: Ops, cuda_graphs: bool) -> Engine:
        made = engine(ops, cuda_graphs)
        _exercise(made, device)
        return made

    status, _ = _attempt(run, ProbingOps(kept, resident, diagnosis.findings, config.invariant), cuda_graphs=False)
    if status != RUNS:
        diagnosis.problems.append(f"probing ended early: {status}")
    arms = config.arms if config.arms != "auto" else "device"
    ops = Ops(arms, kept, resident, strict=True, invariant=config.invariant)
    status, strict = _attempt(run, ops, cuda_graphs=config.cuda_graphs)
    if status != RUNS:
        diagnosis.problems.append(f"a strict engine did not run: {status}")
    else:
        runner = strict.runner
        captured = f"captured in {runner.capture_seconds:.1f} s"
        diagnosis.uses["cuda_graphs"] = captured if runner.uses_graphs else "not used"
        diagnosis.uses["notes"] = [*strict.notes]
        diagnosis.uses["paths"] = sorted({(path.op, path.arm, path.variant) for path in strict.model.ops.snapshot()})


def _exercise(engine: Engine, device: torch.device) -> None:
    """Prefill alone and beside decodes, decodes of several batch sizes, greedy and sampled."""
    driver = Driver(engine, lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None)
    for batch in DECODE_BATCHES:
        driver.run(driver.prompts(batch, PROMPT_TOKENS if batch == 1 else 20), 3)
    sampled = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8, top_k=50, top_p=0.9, seed=1)
    engine.add_request("doctor-sampled", driver.prompts(1, 20)[0], sampled)
    driver.run(driver.prompts(2, 20), 3)


def _small(config: EngineConfig, part_config: NemotronHConfig, cuda_graphs: bool) -> EngineConfig:
    """The settings, for a handful of short requests."""
    batch, tokens = max(DECODE_BATCHES), PROMPT_TOKENS + 16
    states = batch * 2 * state_bytes_per_request(part_config)
    return replace(
        config,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        max_model_len=min(tokens, part_config.max_position_embeddings),
        cache_bytes=2 * states + batch * 64 * kv_bytes_per_token(part_config, 4) + (64 << 20),
        prefix_caching=False,
        snapshot_bytes=0,
        cuda_graphs=cuda_graphs,
    )


def covering_layers(manifest: Manifest) -> tuple[int, ...]:
    """Layers, ascending, among which every kind of linear occurs in every scheme that it has in the checkpoint."""
    forms: dict[int, set[tuple[str, str, Scheme]]] = {}
    for module in manifest.modules:
        if module.layer is not None:
            leaf = module.name.rpartition(".")[2]
            forms.setdefault(module.layer, set()).add((module.role.value, leaf, module.scheme))
    missing: set[tuple[str, str, Scheme]] = set().union(*forms.values())
    chosen = []
    while missing:
        best = max(sorted(forms), key=lambda layer: len(forms[layer] & missing))
        chosen.append(best)
        missing -= forms[best]
    return tuple(sorted(chosen))


class _Part:
    """Some layers of a manifest, counted from 0."""

    def __init__(self, manifest: Manifest, layers: Sequence[int]) -> None:
        self._manifest, self._layers = manifest, layers

    def _name(self, name: str) -> str:
        prefix = f"{ROOT}layers."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{self._layers[int(index)]}.{rest}"

    def weight(self, name: str) -> Weight:
        return self._manifest.weight(self._name(name))

    def tensor(self, name: str) -> Tensor:
        return self._manifest.tensor(self._name(name))

    def kv_scales(self, layer: int) -> tuple[float, float, str]:
        return self._manifest.kv_scales(self._layers[layer])


def _config_of(config: NemotronHConfig, layers: Sequence[int]) -> NemotronHConfig:
    mlp = dict(zip(config.indices(LayerKind.MLP), config.mlp_intermediate_sizes, strict=True))
    return replace(
        config,
        layers=tuple(config.layers[layer] for layer in layers),
        mlp_intermediate_sizes=tuple(mlp[layer] for layer in layers if layer in mlp),
    )


def _faults() -> tuple[type[Exception], ...]:
    """What a variant may raise that does not work here: torch's and CUDA's errors, and Triton's."""
    from triton.errors import TritonError

    return (
        *(HemiolaError, RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError),
        *(ArithmeticError, OSError, TritonError),
    )


def _attempt(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """ "runs" and the result, or what was raised and None."""
    try:
        result = run(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except _faults() as fault:
        first_line = str(fault).strip().partition("\n")[0]
        return f"{type(fault).__name__}: {first_line}", None
    return RUNS, result


def _with_copies(
    names: Iterable[str], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with copies of the arguments `names`."""
    positions = {name: index for index, name in enumerate(signature.parameters)}
    new_args, new_kwargs = list(args), dict(kwargs)
    for name in names:
        if name in new_kwargs:
            new_kwargs[name] = new_kwargs[name].clone()
        elif positions[name] < len(new_args):
            new_args[positions[name]] = new_args[positions[name]].clone()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # states are older than the launch before: see `ops.mamba2_update`
    return tuple(new_args), new_kwargs


def _is_finite(result: Any) -> bool:
    tensors = result if isinstance(result, tuple | list) else (result,)
    return all(
        bool(tensor.float().isfinite().all())
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    )


def _call_shown(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    shown = [text for value in args if (text := _shown(value))]
    return ", ".join(shown + [f"{name} {text}" for name, value in kwargs.items() if (text := _shown(value))])


def _shown(value: Any) -> str:
    """A tensor's or weight's shape and type; nothing for numbers, which select no kernel."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Weight):
        return f"{value.scheme.value}{list(value.shape)}"
    if isinstance(value, ExpertBank):
        return f"{len(value)} x {value.scheme.value}{list(value.shape)}"
    if isinstance(value, tuple):
        return " + ".join(text for item in value if (text := _shown(item)))
    return ""
