"""Goldens: what an oracle answered greedily to given prompts, with its best log-probabilities at every position.

One JSON object:

engine, device, mode, date     the oracle with its version, what it ran on, how, and when: text
dtype, kv_dtype                of its activations and its KV cache, "bf16", "float32", "fp8"; null where not known
checkpoint_sha256, config      which checkpoint (see identity.py); config is null where not known
self_noise_decode_vs_prefill   the oracle's decode against its own prefill, same tokens forced; null where not measured
items                          per prompt: prompt_ids, output_ids, and per output position the best [id,
                               log-probability] in nats, best first, as decoding saw them (decode_top) and with the
                               whole sequence given as a prompt (prefill_top); either may be null

Files without dtype, kv_dtype and config are read as they are; other keys are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hemiola.engine.request import TokenLogprobs
from hemiola.errors import HemiolaError


class EvidenceError(HemiolaError):
    """There can be no verdict: something that it would rest on is missing, differs, or did not run."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far an oracle is from itself. Log-probability differences in nats over its best tokens; argmax_differs: the
    part of the positions whose best token differs; the widest margin among those, by its decode (0 without any).

    Raises: EvidenceError for a figure that no measurement gives: a verdict would rest on it."""

    mean_abs_dlogp: float
    p99_abs_dlogp: float
    argmax_differs: float
    widest_margin_of_a_differing_argmax: float
    positions: int

    def __post_init__(self) -> None:
        bounds = {"argmax_differs": (0, 1), "positions": (1, math.inf)}
        for name, value in asdict(self).items():
            low, high = bounds.get(name, (0, math.inf))
            if not (math.isfinite(value) and low <= value <= high):
                expected = f"at least {low}, finite" if high == math.inf else f"{low} to {high}"
                raise EvidenceError("an oracle's noise out of range", found=value, expected=expected, where=name)


@dataclass(frozen=True, slots=True)
class GoldenItem:
    """One prompt. Raises: EvidenceError when an output id is not the best one of its decode_top."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    decode_top: Sequence[TokenLogprobs] | None
    prefill_top: Sequence[TokenLogprobs] | None

    def __post_init__(self) -> None:
        for position, (token, top) in enumerate(zip(self.output_ids, self.decode_top or (), strict=False)):
            if top[0][0] != token:
                raise EvidenceError(
                    "the oracle did not decode greedily", found=token, expected=top[0][0], where=f"position {position}"
                )


@dataclass(frozen=True, slots=True)
class Golden:
    """The file, field for field; `more` holds the keys that are none of these."""

    engine: str
    device: str
    mode: str
    date: str
    checkpoint_sha256: str
    items: Sequence[GoldenItem]
    dtype: str | None = None
    kv_dtype: str | None = None
    config: Mapping[str, Any] | None = None
    noise: Noise | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Golden:
        """Raises: EvidenceError naming what the file lacks or has in another form."""
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EvidenceError("cannot be read as a golden", found=error, where=file) from error
        return cls.from_json(document, str(file))

    @classmethod
    def from_json(cls, document: Any, where: str = "golden") -> Golden:
        """Raises: EvidenceError."""
        if not isinstance(document, dict):
            raise EvidenceError("not a golden", found=type(document).__name__, expected="an object", where=where)
        rest = dict(document)
        try:
            texts = {name: str(rest.pop(name)) for name in ("engine", "device", "mode", "date", "checkpoint_sha256")}
            noise = rest.pop("self_noise_decode_vs_prefill", None)
            return cls(
                **texts,
                items=[_item(entry) for entry in rest.pop("items")],
                dtype=rest.pop("dtype", None),
                kv_dtype=rest.pop("kv_dtype", None),
                config=rest.pop("config", None),
                noise=None if noise is None else Noise(**noise),
                more=rest,
            )
        except KeyError as missing:
            raise EvidenceError("a golden without a part that it needs", found=f"no {missing}", where=where) from None
        except (TypeError, ValueError) as error:
            raise EvidenceError("a golden of another form", found=error, where=where) from error

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "device": self.device,
            "mode": self.mode,
            "date": self.date,
            **self.more,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "checkpoint_sha256": self.checkpoint_sha256,
            "config": self.config,
            "self_noise_decode_vs_prefill": None if self.noise is None else asdict(self.noise),
            "items": [asdict(item) for item in self.items],
        }

    @property
    def sha256(self) -> str:
        """Of its content, whatever the order of keys and the white space in a file."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False), encoding="utf-8")


def _item(entry: Mapping[str, Any]) -> GoldenItem:
    """Raises: KeyError, TypeError, ValueError."""
    outputs = [int(token) for token in entry["output_ids"]]
    tops = {}
    for name in ("decode_top", "prefill_top"):
        rows = entry.get(name)
        tops[name] = None if rows is None else [_row(row) for row in rows]
        if rows is not None and len(rows) != len(outputs):
            raise ValueError(f"{name} has {len(rows)} positions for {len(outputs)} output ids")
    return GoldenItem([int(token) for token in entry["prompt_ids"]], outputs, **tops)


def _row(row: Iterable[Any]) -> TokenLogprobs:
    pairs = [(int(token), float(value)) for token, value in row]
    if not pairs:
        raise ValueError("a position without log-probabilities")
    return pairs
