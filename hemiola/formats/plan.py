"""Matches a checkpoint's headers with a model: every tensor is taken exactly once or named in an error.

The scheme of each linear is what is stored; the declaration in the JSON files is only compared with it. Reads no
payload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hemiola.config.model import LayerKind, NemotronHConfig
from hemiola.formats.checkpoint import Checkpoint
from hemiola.formats.declaration import Algorithm, Declaration
from hemiola.formats.layout import MTP_ROOT, OTHER_ROOTS, ROOT, Module, Role, canonical, expected_modules
from hemiola.formats.problems import Problems, listed
from hemiola.formats.quant import nvfp4
from hemiola.formats.safetensors import TensorHeader
from hemiola.formats.weight import Scheme

_PLAIN_DTYPES = ("BF16", "F16", "F32")
_SCHEMES = {**dict.fromkeys(_PLAIN_DTYPES, Scheme.PLAIN), "F8_E4M3": Scheme.FP8, "U8": Scheme.NVFP4}
_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
_IGNORED = ("inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_REMEDY = "Use a complete checkpoint of the model that config.json describes."


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module as it is on disk. Bytes count codes, block scales and vectors, not scalar scales.

    dtype: of the weight or vector, by its name in the file. resident_bytes: the same with A_log, D and dt_bias in fp32,
    as they are kept in memory. num_tensors counts all tensors of the module, num_scalars the scalar scales among them.
    """

    name: str
    role: Role
    layer: int | None
    shape: tuple[int, ...]
    is_linear: bool
    scheme: Scheme
    dtype: str
    stored_bytes: int
    resident_bytes: int
    num_tensors: int
    num_scalars: int
    has_input_scale: bool


def kv_scale_names(layer: int) -> tuple[str, str]:
    """Canonical names of k_scale and v_scale of an attention layer."""
    mixer = f"{ROOT}layers.{layer}.mixer"
    return f"{mixer}.k_proj.k_scale", f"{mixer}.v_proj.v_scale"


class Plan:
    """Takes each header exactly once, and collects what does not fit.

    headers: by canonical name. modules: in forward order. reports: one sentence per thing that a user should know.
    mtp_headers: of the draft head, which stay unread.

    Raises: CheckpointError holding everything that does not fit at once.
    """

    def __init__(self, checkpoint: Checkpoint, config: NemotronHConfig, declaration: Declaration) -> None:
        self.headers = {canonical(name): header for name, header in checkpoint.headers.items()}
        self.reports = list(declaration.notes)
        self._config, self._declaration = config, declaration
        self._problems = Problems()
        self._left = dict(self.headers)
        roots = [root for root in (ROOT, *OTHER_ROOTS) if any(name.startswith(root) for name in checkpoint.headers)]
        if len(roots) > 1:
            self._problems.add("two roots in one checkpoint", " and ".join(roots))
        self._root = roots[0] if roots else ROOT

        expected = list(expected_modules(config))
        self.modules = tuple(stored for module in expected if (stored := self._take_module(module)) is not None)
        self.num_kv_scales = self._take_kv_scales()
        self.mtp_headers = [self._left.pop(name) for name in list(self._left) if name.startswith(MTP_ROOT)]
        ignored = [self._left.pop(name).name for name in list(self._left) if name.endswith(_IGNORED)]
        for header in self._left.values():
            self._problems.add("tensor that the model does not have", header.name)
        self._compare_with_declaration({module.name for module in expected if module.is_quantizable})
        self._problems.raise_if_any(checkpoint.folder, _REMEDY)

        if self.mtp_headers:
            num_bytes = sum(header.nbytes for header in self.mtp_headers)
            self.reports.append(
                f"{len(self.mtp_headers)} tensors of the draft head ({MTP_ROOT}*, {num_bytes} bytes) are left unread"
            )
        if ignored:
            self.reports.append(f"position buffers, of no use to this family, are left unread: {listed(ignored)}")
        if checkpoint.unread_files:
            self.reports.append(
                f"files that the index does not name are left unread: {listed(checkpoint.unread_files)}"
            )

    def _disk_name(self, name: str) -> str:
        return self._root + name.removeprefix(ROOT) if name.startswith(ROOT) else name

    def _take(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> TensorHeader | None:
        """Consume one tensor; shape None stands for a scalar, [] or [1]. None, and a problem noted, where it is bad."""
        header = self._left.pop(name, None)
        if header is None:
            is_scale = name.endswith(_SCALES)
            self._problems.add("missing scale" if is_scale else "missing tensor", self._disk_name(name))
            return None
        accepted = [shape] if shape is not None else [(), (1,)]
        if header.dtype not in dtypes:
            expected = " or ".join(dtypes)
            self._problems.add("wrong dtype", f"{header.name} is {header.dtype}, expected {expected}")
        elif header.shape not in accepted:
            expected = " or ".join(str(list(s)) for s in accepted)
            self._problems.add("wrong shape", f"{header.name} is {list(header.shape)}, expected {expected}")
        return header

    def _take_module(self, module: Module) -> StoredModule | None:
        if not module.is_linear:
            header = self._take(module.name, module.shape, _PLAIN_DTYPES)
            return self._stored(module, Scheme.PLAIN, [header]) if header else None
        weight = self.headers.get(module.tensor_name)
        scheme = _SCHEMES.get(weight.dtype) if weight else None
        if scheme is Scheme.PLAIN or weight is None:
            header = self._take(module.tensor_name, module.shape, _PLAIN_DTYPES)
            if weight is None:  # its scales would be named as unexpected, which says nothing more
                for suffix in _SCALES:
                    self._left.pop(f"{module.name}.{suffix}", None)
            return self._stored(module, Scheme.PLAIN, [header]) if header else None
        if not module.is_quantizable or scheme is None:
            expected = tuple(_SCHEMES) if module.is_quantizable else _PLAIN_DTYPES
            self._take(module.tensor_name, module.shape, expected)
            return None
        take = self._take_fp8 if scheme is Scheme.FP8 else self._take_nvfp4
        headers = take(module)
        return self._stored(module, scheme, [header for header in headers if header])

    def _take_fp8(self, module: Module) -> list[TensorHeader | None]:
        headers = [self._take(module.tensor_name, module.shape, ("F8_E4M3",))]
        scale = self._left.get(f"{module.name}.weight_scale")
        if scale is not None and math.prod(scale.shape) != 1:
            kind = "FP8 weight_scale that is not one number (per-channel and block-wise FP8 are not supported)"
            self._problems.add(kind, f"{scale.name} is {list(scale.shape)}")
            del self._left[f"{module.name}.weight_scale"]
        else:
            headers.append(self._take(f"{module.name}.weight_scale", None, ("F32",)))
        return [*headers, self._take(f"{module.name}.input_scale", None, ("F32",))]

    def _take_nvfp4(self, module: Module) -> list[TensorHeader | None]:
        rows, columns = module.shape
        if columns % nvfp4.BLOCK:
            item = f"{self._disk_name(module.name)} has {columns} inputs"
            self._problems.add(f"NVFP4 module whose input size is no multiple of {nvfp4.BLOCK}", item)
        has_input_scale = f"{module.name}.input_scale" in self._left
        return [
            self._take(module.tensor_name, (rows, columns // 2), ("U8",)),
            self._take(f"{module.name}.weight_scale", (rows, columns // nvfp4.BLOCK), ("F8_E4M3",)),
            self._take(f"{module.name}.weight_scale_2", None, ("F32",)),
            self._take(f"{module.name}.input_scale", None, ("F32",)) if has_input_scale else None,
        ]

    def _stored(self, module: Module, scheme: Scheme, headers: list[TensorHeader]) -> StoredModule:
        scalars = [header for header in headers if scheme is not Scheme.PLAIN and header.dtype == "F32"]
        stored_bytes = sum(header.nbytes for header in headers if header not in scalars)
        return StoredModule(
            name=module.name,
            role=module.role,
            layer=module.layer,
            shape=module.shape,
            is_linear=module.is_linear,
            scheme=scheme,
            dtype=headers[0].dtype if headers else "",
            stored_bytes=stored_bytes,
            resident_bytes=4 * math.prod(module.shape) if module.is_widened else stored_bytes,
            num_tensors=len(headers),
            num_scalars=len(scalars),
            has_input_scale=any(header.name.endswith(".input_scale") for header in headers),
        )

    def _take_kv_scales(self) -> int:
        """Consume the KV scales there are, report the others where they matter; the number consumed."""
        missing, num_stored = [], 0
        for layer in self._config.indices(LayerKind.ATTENTION):
            for name in kv_scale_names(layer):
                if name in self._left:
                    self._take(name, None, ("F32",))
                    num_stored += 1
                else:
                    missing.append(f"layer {layer} {name.rpartition('.')[2]}")
        if missing and (num_stored or self._declaration.kv_cache):
            self.reports.append(f"KV scales not in the checkpoint, 1.0 is used: {listed(missing)}")
        return num_stored

    def _compare_with_declaration(self, quantizable: set[str]) -> None:
        """Report disagreements, and apply the one rule that needs both sides: which NVFP4 modules want input_scale."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in self.headers)
        claimed, unmatched = self._declaration.algorithms(names)
        stored = {module.name: module for module in self.modules}
        # A scheme for all speaks of linears; a list of layers means each of its names, whatever it is.
        meant = quantizable | {canonical(name) for name in self._declaration.layers or ()}
        disagreements: dict[tuple[str, str], list[str]] = {}
        for name, algorithm in claimed.items():
            scheme = stored[name].scheme if name in stored else Scheme.PLAIN
            if name in meant and algorithm.scheme is not scheme:
                disagreements.setdefault((algorithm.value, scheme.value), []).append(self._disk_name(name))
        for (declared, on_disk), items in disagreements.items():
            self.reports.append(
                f"declared {declared} but stored {on_disk}, the stored scheme is used ({len(items)}): {listed(items)}"
            )
        if unmatched:
            self.reports.append(f"declared names that match no module ({len(unmatched)}): {listed(unmatched)}")
        self._check_input_scales(claimed)

    def _check_input_scales(self, claimed: Mapping[str, Algorithm]) -> None:
        """Within one role, NVFP4 modules have input_scale all or none, but for those declared weight-only."""
        nvfp4_modules = [module for module in self.modules if module.scheme is Scheme.NVFP4]
        modules = [module for module in nvfp4_modules if claimed.get(module.name) is not Algorithm.W4A16_NVFP4]
        for role in dict.fromkeys(module.role for module in modules):
            without = [m.name for m in modules if m.role is role and not m.has_input_scale]
            if len(without) < sum(m.role is role for m in modules):
                for name in without:
                    self._problems.add(
                        "missing input_scale that its neighbours have", self._disk_name(f"{name}.input_scale")
                    )
            elif any(claimed.get(name) is Algorithm.NVFP4 for name in without):
                self.reports.append(
                    f"{role.value}: declared NVFP4 with quantised activations, but no input_scale is stored; "
                    f"they run weight-only ({len(without)} modules)"
                )
