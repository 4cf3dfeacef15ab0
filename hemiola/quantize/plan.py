"""Which module gets which algorithm, what is stored for it under which name, and how the JSON files declare it.

The three schemes are the layouts of the public exports:

fp8        Nano-3-30B-A3B-FP8. Mamba projections, dense MLP, shared and routed experts FP8 W8A8; attention, the mamba
           layers directly before an attention layer, and lm_head BF16. hf_quant_config.json: quant_algo FP8,
           kv_cache_quant_algo FP8, no KV scales stored (1.0 is used). The published size agrees with this map; the
           export's own exclusion list and its KV declaration are unverified, and taken as in its NVFP4 sibling.
nvfp4      Nano-3-30B-A3B-NVFP4. The same modules NVFP4 with input_scale. hf_quant_config.json: quant_algo NVFP4,
           group_size 16, kv_cache_quant_algo FP8, no KV scales stored.
lightning  Nemotron-3.5-Lightning-30B-A3B-NVFP4. All mamba projections FP8 W8A8; dense MLP, shared and routed experts
           and lm_head W4A16_NVFP4; attention BF16 with k_scale and v_scale. config.json: MIXED_PRECISION.

In all of them latent projections, embeddings, norms, conv, A_log, D and dt_bias are BF16, the router is F32, and the
draft head (mtp.*) is left as it is. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.errors import ConfigError
from hemiola.formats.declaration import Algorithm
from hemiola.formats.layout import MTP_ROOT, Module, Role, expected_modules
from hemiola.formats.plan import kv_scale_names
from hemiola.formats.problems import Problems
from hemiola.formats.quant import nvfp4

SCHEMES = ("fp8", "nvfp4", "lightning")

_MLP_ROLES = (Role.ROUTED_EXPERTS, Role.SHARED_EXPERTS, Role.MLP)
# The name of the format, which readers look for; not a claim about who wrote the file.
_PRODUCER = {"name": "modelopt", "version": "hemiola"}
_KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


class StoredTensor(NamedTuple):
    """A tensor of the output: its dtype by its name in the file, "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def algorithm_of(module: Module, scheme: str, config: NemotronHConfig) -> Algorithm:
    """How `scheme` stores a module; PLAIN for everything that it leaves alone."""
    if not module.is_quantizable:
        return Algorithm.PLAIN
    if scheme == "lightning":
        if module.role is Role.MAMBA:
            return Algorithm.FP8
        return Algorithm.W4A16_NVFP4 if module.role in (*_MLP_ROLES, Role.LM_HEAD) else Algorithm.PLAIN
    algorithm = Algorithm.FP8 if scheme == "fp8" else Algorithm.NVFP4
    if module.role is Role.MAMBA:
        assert module.layer is not None, f"{module.name} is in no layer"
        following = config.layers[module.layer + 1 : module.layer + 2]
        return Algorithm.PLAIN if following == (LayerKind.ATTENTION,) else algorithm
    return algorithm if module.role in _MLP_ROLES else Algorithm.PLAIN


def stored_tensors(module: Module, algorithm: Algorithm) -> list[StoredTensor]:
    """What the public exports store for a module, the weight first."""
    name, shape = module.name, module.shape
    if algorithm is Algorithm.PLAIN:
        return [StoredTensor(module.tensor_name, "F32" if module.role is Role.ROUTER else "BF16", shape)]
    if algorithm is Algorithm.FP8:
        tensors = [StoredTensor(f"{name}.weight", "F8_E4M3", shape), StoredTensor(f"{name}.weight_scale", "F32", ())]
    else:
        tensors = [
            StoredTensor(f"{name}.weight", "U8", (shape[0], shape[1] // 2)),
            StoredTensor(f"{name}.weight_scale", "F8_E4M3", (shape[0], shape[1] // nvfp4.BLOCK)),
            StoredTensor(f"{name}.weight_scale_2", "F32", ()),
        ]
    return tensors + ([StoredTensor(f"{name}.input_scale", "F32", ())] if has_input_scale(algorithm) else [])


def has_input_scale(algorithm: Algorithm) -> bool:
    """Whether activations are quantised too, statically."""
    return algorithm in (Algorithm.FP8, Algorithm.NVFP4)


@dataclass(frozen=True, eq=False)
class QuantPlan:
    """One scheme for one model. modules: all of the model's, by tensor name. algorithms: of each, by module name."""

    scheme: str
    config: NemotronHConfig
    modules: Mapping[str, Module]
    algorithms: Mapping[str, Algorithm]

    @classmethod
    def build(cls, config: NemotronHConfig, scheme: str) -> QuantPlan:
        """Raises: ConfigError for an unknown scheme; CheckpointError naming weights whose shape forbids NVFP4."""
        if scheme not in SCHEMES:
            raise ConfigError("unknown scheme", found=repr(scheme), expected=", ".join(SCHEMES), where="scheme")
        modules = {module.tensor_name: module for module in expected_modules(config)}
        algorithms = {module.name: algorithm_of(module, scheme, config) for module in modules.values()}
        problems = Problems()
        for module in modules.values():
            if algorithms[module.name] in (Algorithm.NVFP4, Algorithm.W4A16_NVFP4) and module.shape[1] % nvfp4.BLOCK:
                item = f"{module.name} has {module.shape[1]} inputs"
                problems.add(f"input size that is no multiple of {nvfp4.BLOCK}, as NVFP4 needs", item)
        problems.raise_if_any(f"scheme {scheme}", "Use the fp8 scheme for this model.")
        return cls(scheme, config, modules, algorithms)

    def quantized(self) -> list[Module]:
        """The modules that change their form, in the order of a forward pass."""
        return [module for module in self.modules.values() if not self._is_plain(module)]

    def kv_scales(self) -> list[str]:
        """Names of the KV scales that the scheme stores, k and v of each attention layer."""
        layers = self.config.indices(LayerKind.ATTENTION) if self.scheme == "lightning" else ()
        return [name for layer in layers for name in kv_scale_names(layer)]

    def tensors(self, source_name: str) -> list[StoredTensor]:
        """What is stored in place of one of the model's tensors (canonical name), its own successor first."""
        module = self.modules[source_name]
        companions = [f"{module.name}.{letter}_scale" for letter in "kv"]
        kv_scales = [StoredTensor(name, "F32", (1,)) for name in self.kv_scales() if name in companions]
        return stored_tensors(module, self.algorithms[module.name]) + kv_scales

    def declaration(self, has_mtp: bool) -> dict[str, Any]:
        """quantization_config of config.json for lightning, else the content of hf_quant_config.json."""
        exclusions = sorted(
            name.removesuffix(".weight")
            for name, module in self.modules.items()
            if name.endswith("conv1d.weight") or (module.is_linear and self._is_plain(module))
            if module.role is not Role.EMBEDDING
        )
        exclusions += [f"{MTP_ROOT.rstrip('.')}*"] if has_mtp else []
        if self.scheme == "lightning":
            return {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "producer": _PRODUCER,
                "kv_cache_scheme": _KV_SCHEME,
                "ignore": exclusions,
                "quantized_layers": {module.name: self._entry(module) for module in self.quantized()},
            }
        quantization: dict[str, Any] = {"quant_algo": self.scheme.upper(), "kv_cache_quant_algo": "FP8"}
        quantization |= {"group_size": nvfp4.BLOCK} if self.scheme == "nvfp4" else {}
        return {"producer": _PRODUCER, "quantization": {**quantization, "exclude_modules": exclusions}}

    def _is_plain(self, module: Module) -> bool:
        return self.algorithms[module.name] is Algorithm.PLAIN

    def _entry(self, module: Module) -> dict[str, Any]:
        algorithm = self.algorithms[module.name]
        return {"quant_algo": algorithm.value} | ({} if algorithm is Algorithm.FP8 else {"group_size": nvfp4.BLOCK})
