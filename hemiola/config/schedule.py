"""The layer schedule: which mixer each layer is, of the model and of its draft head (MTP), in every spelling met."""

from __future__ import annotations

import enum

from hemiola.config.reading import ABSENT, Reading, integer, shown
from hemiola.errors import ConfigError


class LayerKind(enum.Enum):
    """The mixer of one layer; the value is its letter in a pattern string."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    MOE = "E"


LIST_WORDS = {
    "mamba": LayerKind.MAMBA,
    "linear_attention": LayerKind.MAMBA,
    "attention": LayerKind.ATTENTION,
    "full_attention": LayerKind.ATTENTION,
    "mlp": LayerKind.MLP,
    "moe": LayerKind.MOE,
}
_LISTS, _STRINGS = ("layers_block_type", "layer_types"), ("hybrid_override_pattern", "hybrid_layer_pattern")
_DEFAULT_MTP = (LayerKind.ATTENTION, LayerKind.MOE)
_LETTERS = {kind.value: kind for kind in LayerKind}
_LETTERS_EXPECTED = "one of " + ", ".join(f"{kind.value!r} ({kind.name.lower()})" for kind in LayerKind)


def parse_schedule(spelled: object, where: str) -> tuple[LayerKind, ...]:
    """Read a schedule given as a pattern string (letters) or as a list of words; position i is layer i.

    Raises: ConfigError naming the letter or word that is unknown and its position (counted from 0), or the wrong type.
    """
    if isinstance(spelled, str):
        names, known, noun, expected = list(spelled), _LETTERS, "letter", _LETTERS_EXPECTED
    elif isinstance(spelled, list):
        names, known, noun, expected = list(spelled), LIST_WORDS, "word", "one of " + ", ".join(LIST_WORDS)
    else:
        raise ConfigError(
            "wrong type", found=repr(spelled), expected="a pattern string or a list of layer words", where=where
        )
    if not names:
        raise ConfigError(
            "the layer schedule is empty", found=repr(spelled), expected="at least one layer", where=where
        )
    for position, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                f"unknown layer {noun} {name!r}",
                found=f"{name!r} at position {position}",
                expected=expected,
                where=where,
            )
    return tuple(known[name] for name in names)


def _require_type(value: object, accepted: type, expected: str, where: str) -> None:
    if not isinstance(value, accepted):
        raise ConfigError("wrong type", found=shown(value), expected=expected, where=where)


def _is_same(value: object, layers: tuple[LayerKind, ...]) -> bool:
    """Whether an overruled spelling says the same as the one that is used; it may be anything."""
    try:
        return parse_schedule(value.partition("/")[0] if isinstance(value, str) else value, "") == layers
    except ConfigError:
        return False


def read_layers(reading: Reading) -> tuple[tuple[LayerKind, ...], str]:
    """The schedule (a list wins over a string), checked against num_hidden_layers, and the string's MTP suffix.

    Raises: ConfigError, also when the number of layers contradicts num_hidden_layers.
    """
    present = [name for name in (*_LISTS, *_STRINGS) if name in reading.raw]
    given = [name for name in present if reading.raw[name] is not None]
    if not given:
        raise ConfigError(
            "the layer schedule is missing", expected="one of " + ", ".join((*_LISTS, *_STRINGS)), where=reading.file
        )
    winner, suffix = given[0], ""
    for name in given:
        if name in _LISTS:
            _require_type(reading.raw[name], list, "a list of layer words", reading.at(name))
        else:
            _require_type(reading.raw[name], str, "a pattern string of layer letters", reading.at(name))
            suffix = suffix or str(reading.raw[name]).partition("/")[2]
    spelled = reading.raw[winner]
    layers = parse_schedule(spelled.partition("/")[0] if isinstance(spelled, str) else spelled, reading.at(winner))
    reading.used["layers"] = winner
    for name in present:
        if name not in given or (name != winner and _is_same(reading.raw[name], layers)):
            reading.inert.append(name)
        elif name != winner:
            reading.overrule(name, winner)
    declared = reading.take("num_hidden_layers", ("num_hidden_layers",), nullable=True)
    if declared is not ABSENT and integer(1)(declared, reading.where("num_hidden_layers")) != len(layers):
        raise ConfigError(
            f"contradicts the layer schedule in {winner}",
            found=f"{declared} layers here and {len(layers)} in {winner}",
            expected="the same number",
            where=reading.where("num_hidden_layers"),
        )
    return layers, suffix


def read_mtp(reading: Reading, suffix: str) -> tuple[tuple[LayerKind, ...], int]:
    """The layers of one step of the draft head and the number of steps; ((), 0) without one.

    A list wins over a string unless it equals the default; the suffix of the main pattern (one part per step) comes
    last. The count is num_nextn_predict_layers where given, else the number of parts of the suffix.
    Raises: ConfigError.
    """
    list_key, string_key = "mtp_layers_block_type", "mtp_hybrid_override_pattern"
    parts = suffix.split("/") if suffix else []
    declared = reading.take("num_mtp_steps", ("num_nextn_predict_layers",), nullable=True)
    steps = len(parts) if declared is ABSENT else integer(0)(declared, reading.where("num_mtp_steps"))
    if parts and steps != len(parts):
        reading.warnings.append(
            f"{reading.where('num_mtp_steps')}: {steps} overrules the {len(parts)} parts after '/' in the pattern"
        )
    spelled = {key: reading.raw[key] for key in (list_key, string_key) if reading.raw.get(key) is not None}
    reading.inert += [key for key in (list_key, string_key) if key in reading.raw and (not steps or key not in spelled)]
    if not steps:
        return (), 0
    for key, value in spelled.items():
        _require_type(value, list if key == list_key else str, "a list of layer words or a pattern", reading.at(key))
        reading.used[key] = key
    parsed = {key: parse_schedule(value, reading.at(key)) for key, value in spelled.items()}
    if len(parsed) == 2 and parsed[list_key] != parsed[string_key]:
        loser, winner = (list_key, string_key) if parsed[list_key] == _DEFAULT_MTP else (string_key, list_key)
        reading.overrule(loser, winner)
        del parsed[loser]
    if not parsed and parts:
        if len(set(parts)) > 1:
            raise ConfigError(
                "the steps of the draft head differ", found=shown(suffix), expected="equal parts", where=reading.file
            )
        parsed["the pattern's suffix"] = parse_schedule(parts[0], reading.at("the pattern's suffix"))
    origin, layers = next(iter(parsed.items()), ("", _DEFAULT_MTP))
    if not set(layers) <= set(_DEFAULT_MTP):
        raise ConfigError(
            "the draft head has layers that it cannot have",
            found=repr("".join(kind.value for kind in layers)),
            expected="only '*' (attention) and 'E' (moe)",
            where=reading.at(origin),
        )
    return layers, steps
