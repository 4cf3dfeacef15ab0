from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import typer

from hemiola.cli.generate import generate
from hemiola.cli.settings import given, parse_arms, parse_biases, parse_bytes
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("2 GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("10kB", 10_000),
        ("3TiB", 3 << 40),
        ("7B", 7),
    ],
)
def test_bytes_have_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "5q", "1e9", "5 MiB extra", "0x10"])
def test_other_bytes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no number of bytes"):
        parse_bytes(text)


def test_arms_are_one_for_all_or_one_per_op() -> None:
    assert parse_arms("device") == "device"
    assert parse_arms("linear=device, ssd_scan=reference") == {"linear": "device", "ssd_scan": "reference"}


def test_a_bare_arm_is_for_all_ops_that_are_not_named() -> None:
    assert parse_arms("device, linear=reference") == {"*": "device", "linear": "reference"}


@pytest.mark.parametrize("text", ["linear=", "=device", "linear=device,", "linear=device,rms_norm"])
def test_malformed_arms_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="OP=ARM"):
        parse_arms(text)


def test_an_op_with_two_arms_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'linear' is given twice"):
        parse_arms("linear=device,linear=reference")


def test_biases() -> None:
    assert parse_biases([]) is None
    assert parse_biases(["3=1.5", "7=-100"]) == {3: 1.5, 7: -100.0}


@pytest.mark.parametrize("item", ["3", "3=", "a=1", "3=b", "1.5=1"])
def test_malformed_biases_are_refused(item: str) -> None:
    with pytest.raises(typer.BadParameter, match="ID=VALUE"):
        parse_biases([item])


def test_only_fields_that_are_given_are_passed_on() -> None:
    options = {"max_tokens": 3, "seed": None, "stop": [], "stop_token_ids": (), "top_p": 0.5, "dtype": "bf16"}
    assert given(SamplingParams, options) == {"max_tokens": 3, "top_p": 0.5}
    assert given(EngineConfig, options) == {"dtype": "bf16"}


@pytest.mark.parametrize("owner", [SamplingParams, EngineConfig])
def test_every_field_is_an_option(owner: type) -> None:
    off_switches = {
        "skip_special_tokens": "keep_special_tokens",
        "strict": "no_strict",
        "prefix_caching": "no_prefix_caching",
        "cuda_graphs": "no_cuda_graphs",
        "overlap": "no_overlap",
    }
    python_only = {"forced_output_ids", "structured", "thinking_budget"}
    names = {off_switches.get(field.name, field.name) for field in fields(owner)} - python_only
    assert names - inspect.signature(generate).parameters.keys() == set()
