"""Declared quantisation: both files, both forms, how names match (never by substring), and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hemiola.errors import ConfigError
from hemiola.formats.declaration import Algorithm, Declaration, NamePatterns, read_declaration

PLAIN, FP8, NVFP4, W4A16 = Algorithm.PLAIN, Algorithm.FP8, Algorithm.NVFP4, Algorithm.W4A16_NVFP4
KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def write_second(folder: Path, **quantization: Any) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))


def module(layer: int, leaf: str = "in_proj") -> str:
    return f"backbone.layers.{layer}.mixer.{leaf}"


MODULES = [module(layer, leaf) for layer in range(21) for leaf in ("in_proj", "out_proj")] + ["lm_head"]

# Entry -> the modules that it keeps unquantised.
EXCLUSIONS: dict[str, set[str]] = {
    "backbone.layers.5": {module(5), module(5, "out_proj")},
    "backbone.layers.1": {module(1), module(1, "out_proj")},
    "backbone.layers.1*": {module(n, leaf) for n in (1, *range(10, 20)) for leaf in ("in_proj", "out_proj")},
    "layers.1*": {module(n, leaf) for n in (1, *range(10, 20)) for leaf in ("in_proj", "out_proj")},
    "layers.1": {module(1), module(1, "out_proj")},
    "*.mixer.out_proj": {module(n, "out_proj") for n in range(21)},
    "*layers.2.*": {module(2), module(2, "out_proj")},
    "backbone.layers.?.mixer": {module(n, leaf) for n in range(10) for leaf in ("in_proj", "out_proj")},
    "backbone.layers.?": {module(n, leaf) for n in range(10) for leaf in ("in_proj", "out_proj")},
    "backbone.layers.[34].mixer.in_proj": {module(3), module(4)},
    "lm_head": {"lm_head"},
    "model.layers.2.mixer": {module(2), module(2, "out_proj")},
    "model.layers.3.mixer.in_proj": {module(3)},
    "backbone": set(MODULES) - {"lm_head"},
    "in_proj": set(),
    "backbone.layers.1.mixer.in_pro": set(),
    "backbone.layers.0.mixer.in_proj.weight": set(),
}


@pytest.mark.parametrize("entry", EXCLUSIONS)
def test_what_an_exclusion_keeps(entry: str) -> None:
    claimed, unmatched = Declaration("here", NVFP4, exclusions=[entry]).algorithms(MODULES)
    assert {name for name, algorithm in claimed.items() if algorithm is PLAIN} == EXCLUSIONS[entry]
    assert {algorithm for name, algorithm in claimed.items() if name not in EXCLUSIONS[entry]} <= {NVFP4}
    assert unmatched == ([] if EXCLUSIONS[entry] else [entry])


def test_all_exclusions_together() -> None:
    claimed, unmatched = Declaration("here", FP8, exclusions=list(EXCLUSIONS)).algorithms(MODULES)
    assert set(claimed.values()) == {PLAIN}
    assert unmatched == [entry for entry, kept in EXCLUSIONS.items() if not kept]


def test_the_most_exact_entry_comes_first() -> None:
    patterns = NamePatterns(["*in_proj", "backbone.layers.3", "model.layers.3.mixer.in_proj"])
    assert patterns.matches(module(3)) == ["model.layers.3.mixer.in_proj", "backbone.layers.3", "*in_proj"]
    assert patterns.matches(module(30)) == ["*in_proj"]
    assert patterns.matches("lm_head") == []


def test_mixed_precision_in_config_json(tmp_path: Path) -> None:
    layers = {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "model.layers.1": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "backbone.layers.1.mixer.out_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "backbone.layers.77.mixer.in_proj": {"quant_algo": "FP8"},
    }
    raw = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "producer": {"name": "modelopt"},
        "quantized_layers": layers,
        "ignore": ["lm_head"],
        "kv_cache_scheme": KV_FP8,
    }
    declaration = read_declaration(tmp_path, raw)
    claimed, unmatched = declaration.algorithms(MODULES)
    quantised = {name: algorithm for name, algorithm in claimed.items() if algorithm is not PLAIN}
    assert quantised == {module(0): FP8, module(1): W4A16, module(1, "out_proj"): NVFP4}
    assert unmatched == ["backbone.layers.77.mixer.in_proj"]
    assert declaration.kv_cache == "fp8"
    assert declaration.notes == ()


def test_a_single_scheme_in_the_second_file(tmp_path: Path) -> None:
    write_second(tmp_path, quant_algo="NVFP4", group_size=16, kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])
    declaration = read_declaration(tmp_path, None)
    claimed, _ = declaration.algorithms(MODULES)
    assert claimed["lm_head"] is PLAIN
    assert claimed[module(0)] is NVFP4
    assert declaration.kv_cache == "fp8"
    assert "hf_quant_config.json" in (declaration.source or "")


def test_no_declaration(tmp_path: Path) -> None:
    declaration = read_declaration(tmp_path, None)
    assert declaration.source is None
    assert set(declaration.algorithms(MODULES)[0].values()) == {PLAIN}
    assert declaration.kv_cache is None


def test_config_json_wins_and_a_difference_is_noted(tmp_path: Path) -> None:
    first = {"quant_algo": "FP8", "ignore": ["model.layers.1"]}
    write_second(tmp_path, quant_algo="FP8", exclude_modules=["backbone.layers.1"])
    assert read_declaration(tmp_path, first).notes == ()
    write_second(tmp_path, quant_algo="NVFP4")
    declaration = read_declaration(tmp_path, first)
    assert declaration.default is FP8
    assert len(declaration.notes) == 1
    assert "declare different quantisation" in declaration.notes[0]


def test_an_unknown_key_is_noted(tmp_path: Path) -> None:
    declaration = read_declaration(tmp_path, {"quant_algo": "FP8", "rotation": "hadamard"})
    assert declaration.notes == (
        f"{tmp_path / 'config.json'}: quantization_config: key 'rotation' is unknown and ignored",
    )


@pytest.mark.parametrize(
    ("raw", "found", "expected"),
    [
        ({"quant_algo": "MXFP8"}, "'MXFP8'", "FP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION"),
        ({"quant_algo": "fp8"}, "'fp8'", "FP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION"),
        ({"quant_algo": ["FP8"]}, "['FP8']", "FP8, NVFP4"),
        ({"quant_method": "gptq"}, "'gptq'", "'modelopt'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "32", "16"),
        ({"quant_algo": "MIXED_PRECISION"}, "NoneType", "an object of module names"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            "'INT4'",
            "FP8, NVFP4",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}}, "None", "FP8, NVFP4"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "'INT8'", "'FP8' or null"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {**KV_FP8, "num_bits": 4}}, "'num_bits': 4", "num_bits 8"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {**KV_FP8, "dynamic": True}}, "'dynamic': True", "dynamic false"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_declaration(tmp_path, raw)
    assert "config.json: quantization_config" in str(error.value)
    assert found in str(error.value.found)
    assert expected in str(error.value.expected)
    write_second(tmp_path, **raw)
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization"):
        read_declaration(tmp_path, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"producer": {}}', '{"quantization": 3}'])
def test_a_damaged_second_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json"):
        read_declaration(tmp_path, None)
