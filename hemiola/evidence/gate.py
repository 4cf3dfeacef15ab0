"""The gate: does an engine give the oracle's tokens, and where not, is it the oracle's own noise?

STRICT PASS: every token equal. NOISE PASS: every figure inside the oracle's own noise, by stated factors. DIVERGENCE:
neither. Whatever leaves the question open is an EvidenceError.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hemiola.evidence.compare import MODES, Figures, Fork, Mode, is_wide, measure
from hemiola.evidence.facts import numeric_mode
from hemiola.evidence.golden import EvidenceError, Golden, Noise
from hemiola.evidence.identity import Identity, identify
from hemiola.evidence.paths import Counts, check_paths, counted, describe_paths
from hemiola.llm import LLM


class Verdict(enum.Enum):
    """Ordered from best to worst."""

    STRICT_PASS = "STRICT PASS"
    NOISE_PASS = "NOISE PASS"
    DIVERGENCE = "DIVERGENCE"


@dataclass(frozen=True, slots=True)
class ModeResult:
    mode: Mode
    figures: Figures
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GateResult:
    golden: Golden
    results: Sequence[ModeResult]
    paths: Counts
    dtype: str
    kv_dtype: str

    @property
    def verdict(self) -> Verdict:
        """The worst of all modes."""
        return max((result.verdict for result in self.results), key=list(Verdict).index)

    def lines(self) -> Iterator[str]:
        """The report, for people."""
        golden, noise = self.golden, self.golden.noise
        yield f"oracle: {golden.engine}, {golden.device}, {golden.mode}, {golden.date}"
        yield f"oracle dtype {golden.dtype or 'not stated'}, KV {golden.kv_dtype or 'not stated'}; checkpoint " + (
            f"{golden.checkpoint_sha256[:16]}, config {'the same' if golden.config else 'not stated'}"
        )
        for result in self.results:
            figures = result.figures
            for index, prompt in enumerate(figures.prompts):
                word = "equal"
                if prompt.forks:
                    wide = sum(noise is None or is_wide(fork.margin, noise) for fork in prompt.forks)
                    word = f"{wide} wide forks" if wide else "near ties"
                yield f"prompt {index}: TOKEN MATCH {prompt.num_matches}/{prompt.num_positions}, {result.mode}, {word}"
                yield from (f"  {_fork_line(fork, noise)}" for fork in prompt.forks)
            total = f"TOKEN MATCH {figures.num_matches}/{figures.num_positions}, {result.mode}: {result.verdict.value}"
            if noise is None:
                yield f"{total}; mean {figures.mean:.4f}, 99th percentile {figures.percentile_99:.3f}, no noise known"
                continue
            outside = [name for name, inside in figures.verdict(noise).items() if not inside]
            yield f"{total}; {figures.describe(noise)}" + (f"; OUTSIDE: {', '.join(outside)}" if outside else "")
        yield f"ran: {self.dtype}, KV {self.kv_dtype}; {describe_paths(self.paths)}"
        yield f"verdict: {self.verdict.value}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types; a figure that is no number is null."""
        golden, noise = self.golden, self.golden.noise
        return {
            "verdict": self.verdict.value,
            "oracle": {
                name: getattr(golden, name) for name in ("engine", "device", "mode", "date", "dtype", "kv_dtype")
            },
            "checkpoint_sha256": golden.checkpoint_sha256,
            "noise": None if noise is None else asdict(noise),
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "paths": [{**path._asdict(), "calls": calls} for path, calls in sorted(self.paths.items())],
            "modes": [
                {
                    "mode": result.mode,
                    "verdict": result.verdict.value,
                    "matches": result.figures.num_matches,
                    "positions": result.figures.num_positions,
                    "mean_abs_dlogp": _finite(result.figures.mean),
                    "p99_abs_dlogp": _finite(result.figures.percentile_99),
                    "inside": None if noise is None else result.figures.verdict(noise),
                    "prompts": [
                        {
                            "matches": prompt.num_matches,
                            "positions": prompt.num_positions,
                            "forks": [asdict(fork) | {"margin": _finite(fork.margin)} for fork in prompt.forks],
                        }
                        for prompt in result.figures.prompts
                    ],
                }
                for result in self.results
            ],
        }


def gate(llm: LLM, golden: Golden, modes: Sequence[Mode] = MODES, identity: Identity | None = None) -> GateResult:
    """Hold an engine to a golden. identity: of its checkpoint, where it is known; else the checkpoint is read for it.

    Raises: EvidenceError for another checkpoint, configuration or dtype than the golden's, a missing term, zero tokens,
    a path that fell back or ran on another arm than asked, and forks that no noise is known for.
    """
    loaded = llm.loaded
    check_identity(golden, identity or identify(loaded.manifest, loaded.config))
    dtype, kv_dtype = numeric_mode(loaded.engine, loaded.manifest)
    for name, own, theirs in (("dtype", dtype, golden.dtype), ("kv_dtype", kv_dtype, golden.kv_dtype)):
        if theirs is not None and own != theirs:
            raise EvidenceError(f"another {name} than the golden's", found=own, expected=theirs, where=name)
    with counted(llm) as paths:
        figures = {mode: measure(llm, golden.items, mode) for mode in modes}
    if not figures:
        raise EvidenceError("zero tokens to compare", found="no mode")
    check_paths(paths, loaded.engine.config.arms)
    results = [ModeResult(mode, of_mode, judge(of_mode, golden.noise)) for mode, of_mode in figures.items()]
    return GateResult(golden, results, paths, dtype, kv_dtype)


def check_identity(golden: Golden, identity: Identity) -> None:
    """Raises: EvidenceError naming every field of the configuration that differs, or both digests."""
    if golden.config is not None:
        names = sorted(golden.config.keys() | identity.config.keys())
        differing = [name for name in names if golden.config.get(name) != identity.config.get(name)]
        if differing:
            raise EvidenceError(
                "the golden is of another configuration",
                found=", ".join(f"{name} {identity.config.get(name)}" for name in differing),
                expected=", ".join(f"{name} {golden.config.get(name)}" for name in differing),
                where="config",
            )
    if golden.checkpoint_sha256 != identity.checkpoint_sha256:
        raise EvidenceError(
            "the golden is of another checkpoint",
            found=identity.checkpoint_sha256,
            expected=golden.checkpoint_sha256,
            where="checkpoint_sha256",
        )


def judge(figures: Figures, noise: Noise | None) -> Verdict:
    """Raises: EvidenceError when there are forks and no noise to judge them by."""
    if figures.num_matches == figures.num_positions and math.isfinite(figures.mean):
        return Verdict.STRICT_PASS
    if noise is None:
        raise EvidenceError(
            "tokens differ, and the golden does not say how far its oracle is from itself",
            found=f"{figures.num_positions - figures.num_matches} of {figures.num_positions} best tokens differ",
            expected="self_noise_decode_vs_prefill",
            where="golden",
        )
    return Verdict.NOISE_PASS if all(figures.verdict(noise).values()) else Verdict.DIVERGENCE


def _fork_line(fork: Fork, noise: Noise | None) -> str:
    bound = "at least " if fork.is_at_least else ""
    kind = "" if noise is None else ", wide" if is_wide(fork.margin, noise) else ", near tie"
    return f"fork at {fork.position}: {fork.token} for {fork.oracle_token}, margin {bound}{fork.margin:.4f}{kind}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
