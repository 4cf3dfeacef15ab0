"""What a checkpoint's JSON files say about quantisation. A cross-check only: the stored dtypes decide (manifest.py).

Two places are read: config.json's quantization_config, and hf_quant_config.json's quantization; the first wins.
"""

from __future__ import annotations

import enum
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hemiola.errors import ConfigError
from hemiola.formats.layout import canonical
from hemiola.formats.quant import nvfp4
from hemiola.formats.weight import Scheme

SECOND_FILE = "hf_quant_config.json"


class Algorithm(enum.Enum):
    """A quant_algo of one module, by its name in the files."""

    PLAIN = "unquantised"
    FP8 = "FP8"
    NVFP4 = "NVFP4"
    W4A16_NVFP4 = "W4A16_NVFP4"

    @property
    def scheme(self) -> Scheme:
        """How such a module's weight is stored."""
        return {"PLAIN": Scheme.PLAIN, "FP8": Scheme.FP8}.get(self.name, Scheme.NVFP4)


_MIXED = "MIXED_PRECISION"
_MODULE_ALGORITHMS = {a.value: a for a in Algorithm if a is not Algorithm.PLAIN}
_INERT = {"quant_method", "producer", "config_groups", "version"}
_READ = {
    *("quant_algo", "group_size", "quantized_layers", "ignore", "exclude_modules"),
    *("kv_cache_scheme", "kv_cache_quant_algo"),
}


class NamePatterns:
    """Module names as the files write them: exact, an ancestor of the module, or with wildcards (fnmatch).

    Never a substring: "backbone.layers.1" is no part of layer 10. The roots "backbone." and "model." are the same, and
    an entry may leave the root out before "layers.".
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._literal: dict[str, list[str]] = {}  # spellings by canonical name
        self._wild: list[tuple[re.Pattern[str], str]] = []
        for entry in entries:
            name = canonical(f"model.{entry}" if entry.startswith("layers.") else entry)
            if any(letter in name for letter in "*?["):
                # The second form lets a wildcard entry name an ancestor.
                pattern = f"{fnmatch.translate(name)}|{fnmatch.translate(name + '.*')}"
                self._wild.append((re.compile(pattern), entry))
            else:
                self._literal.setdefault(name, []).append(entry)

    def matches(self, module: str) -> list[str]:
        """The entries (as written) that cover a module (canonical name), the most exact first."""
        parts = module.split(".")
        lineage = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        found = [entry for name in lineage for entry in self._literal.get(name, ())]
        return found + [entry for pattern, entry in self._wild if pattern.match(module)]


@dataclass(frozen=True, eq=False)
class Declaration:
    """One file's claim. `source` is None when no file claims anything."""

    source: str | None = None
    default: Algorithm = Algorithm.PLAIN
    layers: Mapping[str, Algorithm] | None = None
    exclusions: Sequence[str] = ()
    kv_cache: str | None = None  # "fp8", or None
    notes: tuple[str, ...] = ()

    def algorithms(self, modules: Iterable[str]) -> tuple[dict[str, Algorithm], list[str]]:
        """The claimed algorithm of each module (canonical name), and the entries that cover no module."""
        excluded, layers = NamePatterns(self.exclusions), NamePatterns(self.layers or ())
        unmatched = dict.fromkeys([*self.exclusions, *(self.layers or ())])
        claimed = {}
        for module in modules:
            exclusions, entries = excluded.matches(module), layers.matches(module)
            for entry in (*exclusions, *entries):
                unmatched.pop(entry, None)
            if exclusions:
                claimed[module] = Algorithm.PLAIN
            else:
                claimed[module] = self.layers[entries[0]] if self.layers and entries else self.default
        return claimed, list(unmatched)


def read_declaration(folder: Path, quantization: Mapping[str, Any] | None) -> Declaration:
    """The folder's claim; `quantization` is config.json's quantization_config, which wins over the second file.

    Raises: ConfigError for an algorithm, a KV-cache scheme, a group size or a method that hemiola does not know, naming
        the key, the value found and what is accepted.
    """
    first = None
    if quantization is not None:
        first = _parse(quantization, f"{folder / 'config.json'}: quantization_config")
    second_file = folder / SECOND_FILE
    if not second_file.is_file():
        return first or Declaration()
    try:
        raw = json.loads(second_file.read_text(encoding="utf-8"))["quantization"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "JSON with a quantization object"
        raise ConfigError("cannot be read", found=repr(error), expected=expected, where=second_file) from error
    second = _parse(raw, f"{second_file}: quantization")
    if first is None:
        return second
    if _claims(first) != _claims(second):
        note = f"config.json and {SECOND_FILE} declare different quantisation; config.json's is used as the cross-check"
        first = replace(first, notes=(*first.notes, note))
    return first


def _claims(d: Declaration) -> tuple[object, ...]:
    return d.default, dict(d.layers or {}), {canonical(name) for name in d.exclusions}, d.kv_cache


def _parse(raw: object, where: str) -> Declaration:
    if not isinstance(raw, Mapping):
        raise ConfigError("wrong type", found=repr(raw), expected="an object", where=where)
    method = raw.get("quant_method", "modelopt")
    if method != "modelopt":
        raise ConfigError("unknown quant_method", found=repr(method), expected="'modelopt'", where=where)
    algorithm, default, layers = raw.get("quant_algo"), Algorithm.PLAIN, None
    if algorithm == _MIXED:
        layers = _parse_layers(raw.get("quantized_layers"), where)
    elif algorithm is not None:
        default = _algorithm(algorithm, f"{where}.quant_algo", (*_MODULE_ALGORITHMS, _MIXED))
        _check_group(default, raw.get("group_size"), where)
    exclusions = [name for key in ("ignore", "exclude_modules") for name in raw.get(key) or ()]
    unknown = sorted(raw.keys() - _READ - _INERT)
    notes = tuple(f"{where}: key {key!r} is unknown and ignored" for key in unknown)
    return Declaration(where, default, layers, tuple(dict.fromkeys(exclusions)), _parse_kv_cache(raw, where), notes)


def _algorithm(name: object, where: str, accepted: Iterable[str]) -> Algorithm:
    if not isinstance(name, str) or name not in _MODULE_ALGORITHMS:
        raise ConfigError(
            f"unknown quantisation algorithm {name!r}", found=repr(name), expected=", ".join(accepted), where=where
        )
    return _MODULE_ALGORITHMS[name]


def _check_group(algorithm: Algorithm, group_size: object, where: str) -> None:
    if algorithm.scheme is Scheme.NVFP4 and group_size not in (None, nvfp4.BLOCK):
        raise ConfigError(
            "unsupported NVFP4 group size", found=group_size, expected=nvfp4.BLOCK, where=f"{where}.group_size"
        )


def _parse_layers(raw: object, where: str) -> dict[str, Algorithm]:
    where = f"{where}.quantized_layers"
    if not isinstance(raw, Mapping) or not all(isinstance(entry, Mapping) for entry in raw.values()):
        expected = f"an object of module names, as {_MIXED} needs"
        raise ConfigError("wrong type or missing", found=type(raw).__name__, expected=expected, where=where)
    layers = {}
    for name, entry in raw.items():
        layers[name] = _algorithm(entry.get("quant_algo"), f"{where}.{name}", _MODULE_ALGORITHMS)
        _check_group(layers[name], entry.get("group_size"), f"{where}.{name}")
    return layers


def _parse_kv_cache(raw: Mapping[str, Any], where: str) -> str | None:
    scheme, algorithm = raw.get("kv_cache_scheme"), raw.get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        key = f"{where}.kv_cache_quant_algo"
        raise ConfigError("unknown KV-cache algorithm", found=repr(algorithm), expected="'FP8' or null", where=key)
    if scheme is None:
        return None if algorithm is None else "fp8"
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    if not is_fp8 or scheme.get("dynamic"):
        expected = "num_bits 8, type 'float', dynamic false; or null"
        raise ConfigError("unknown KV scheme", found=scheme, expected=expected, where=f"{where}.kv_cache_scheme")
    return "fp8"
