"""Options that are fields of SamplingParams or EngineConfig: their declaration, and their way back to the field.

Such an option is named after its field and has no default of its own: what is not given is not passed on. Help shows
the field's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import typer

from hemiola.config.engine import OTHERS, EngineConfig
from hemiola.config.sampling import SamplingParams

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def sampling_option(field: str, help: str, *names: str, **more: Any) -> Any:
    """Declare the option of a SamplingParams field. names: where they differ from --field."""
    return field_option(SamplingParams, field, help, names, rich_help_panel="Sampling", **more)


def engine_option(field: str, help: str, *names: str, **more: Any) -> Any:
    """Declare the option of an EngineConfig field."""
    return field_option(EngineConfig, field, help, names, rich_help_panel="Engine", **more)


def field_option(owner: type, field: str, help: str, names: tuple[str, ...], **more: Any) -> Any:
    """Declare the option of a field of `owner`, a dataclass."""
    default = {f.name: f.default for f in fields(owner)}[field]
    names = names or (f"--{field.replace('_', '-')}",)  # said, since typer 0.27 takes a metavar for a parsed one's name
    shown = str(default) if isinstance(default, str | int | float) and not isinstance(default, bool) else False
    return typer.Option(*names, help=help, show_default=shown, **more)


def given(owner: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of `owner` and that the command line gives."""
    names = {field.name for field in fields(owner)}
    return {name: value for name, value in options.items() if name in names and value not in (None, (), [])}


def parse_bytes(text: str) -> int:
    """Bytes of "512MiB", "2GB", "1.5 GiB" or a plain number. kB, MB, GB, TB are powers of 1000; KiB .. of 1024."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no number of bytes such as 512MiB, 2GB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_arms(text: str) -> str | dict[str, str]:
    """An arm for every op, or the arms of single ops as "op=arm,op=arm"; a bare arm before them is for all others."""
    if "=" not in text:
        return text
    first, *others = text.split(",")
    if "=" in first:
        return _pairs([first, *others], "OP=ARM")
    return {OTHERS: first.strip()} | _pairs(others, "OP=ARM")


def parse_biases(items: Sequence[str]) -> dict[int, float] | None:
    """Token ids and what is added to their logits, from "ID=VALUE" each; None for no items."""
    try:
        biases = {int(token): float(value) for token, value in _pairs(items, "ID=VALUE").items()}
    except ValueError:
        raise typer.BadParameter("a logit bias is ID=VALUE, a whole number and a number") from None
    return biases or None


def _pairs(items: Sequence[str], form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        left, equals, right = (part.strip() for part in item.partition("="))
        if not (left and equals and right):
            raise typer.BadParameter(f"{item!r} is not of the form {form}")
        if left in pairs:
            raise typer.BadParameter(f"{left!r} is given twice")
        pairs[left] = right
    return pairs
