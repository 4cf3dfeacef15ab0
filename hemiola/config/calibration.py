"""How much text a quantisation is calibrated on. All defaults of calibration live here."""

from __future__ import annotations

from dataclasses import dataclass

from hemiola.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """num_tokens: tokens to run at most; from a longer text, windows are taken at even distances over all of it.

    window: tokens per request; each window starts from an empty state. Cut to what the model can hold.
    """

    num_tokens: int = 65_536
    window: int = 512

    def __post_init__(self) -> None:
        for name in ("num_tokens", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError("not a positive count", found=repr(value), expected="an integer >= 1", where=name)
