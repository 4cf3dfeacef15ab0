"""The op table: which variants an op has, which one a call takes, and how often each was taken.

Registration happens when `hemiola.ops` is imported and fills one registry. An `Ops` object binds that registry to a
policy (which arm each op runs on), belongs to one engine, and counts every call by (op, arm, variant, reason), so two
engines with different arms can run side by side in one process. The table knows nothing of models or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from hemiola.errors import ConfigError, UnsupportedPath
from hemiola.ops.kept import KeptForms

Arm = Literal["reference", "device"]
ARMS: tuple[Arm, ...] = ("reference", "device")


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of an op.

    `unsupported` is a pure predicate over the call's arguments: a reason why this variant cannot take the call, or
    None. `keeps` variants are called with `kept=`, the engine's store of expanded weights. `mutates` names the
    arguments that are written in place.
    """

    op: str
    arm: Arm
    name: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] | None
    keeps: bool
    mutates: tuple[str, ...]


class Path(NamedTuple):
    """What a call took: the counters' key. `reason` is empty when the policy's own arm ran."""

    op: str
    arm: Arm
    variant: str
    reason: str


_registry: dict[str, dict[Arm, list[Variant]]] = {}


def register(
    *,
    op: str,
    arm: Arm,
    variant: str,
    run: Callable[..., Any],
    unsupported: Callable[..., str | None] | None = None,
    keeps: bool = False,
    mutates: tuple[str, ...] = (),
) -> None:
    """Add a variant to the registry; a second one of the same op, arm and name is a programming error."""
    variants = _registry.setdefault(op, {a: [] for a in ARMS})[arm]
    if any(v.name == variant for v in variants):
        raise ValueError(f"op {op!r} already has a {arm} variant {variant!r}")
    variants.append(Variant(op, arm, variant, run, unsupported, keeps, mutates))


def registered_ops() -> Mapping[str, Mapping[Arm, list[Variant]]]:
    """All registered variants by op and arm."""
    return _registry


class Ops:
    """The ops of one engine: `ops.rms_norm(...)` runs the variant that the policy selects, and counts it.

    policy: the arm of every op, or a mapping from op name to arm (ops not named run on the reference arm).
    strict: a call that no variant of the policy's arm supports raises UnsupportedPath; otherwise it runs on the
        reference arm and is counted there with the reason.
    """

    def __init__(self, policy: str | Mapping[str, str], kept: KeptForms, *, strict: bool = True) -> None:
        if isinstance(policy, str):
            policy = dict.fromkeys(_registry, policy)
        for op, arm in policy.items():
            if op not in _registry or arm not in ARMS:
                raise ConfigError(
                    "no such op or arm",
                    found=f"{op}={arm}",
                    expected=f"an op of {', '.join(sorted(_registry))} and an arm of {', '.join(ARMS)}",
                    where="arms",
                )
        self.kept = kept
        self.strict = strict
        self._counts: dict[Path, list[int]] = {}  # one number each, in a list so that a bound op counts in place
        for op in _registry:
            setattr(self, op, self._bind(op, cast(Arm, policy.get(op, "reference"))))

    def __getattr__(self, op: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {op!r} is registered; registered are {', '.join(sorted(_registry))}")

    def snapshot(self) -> dict[Path, int]:
        """Calls so far by path."""
        return {path: count[0] for path, count in self._counts.items() if count[0]}

    def _bind(self, op: str, arm: Arm) -> Callable[..., Any]:
        """The callable behind one op. An arm of a single variant without a predicate needs no selection per call."""
        variants = _registry[op][arm]
        if len(variants) == 1 and variants[0].unsupported is None:
            run, count = self._runner(variants[0]), self._count(Path(op, arm, variants[0].name, ""))

            def call(*args: Any, **kwargs: Any) -> Any:
                count[0] += 1
                return run(*args, **kwargs)

            return call

        def select(*args: Any, **kwargs: Any) -> Any:
            variant, reason = self._select(op, arm, args, kwargs)
            self._count(Path(op, variant.arm, variant.name, reason))[0] += 1
            return self._runner(variant)(*args, **kwargs)

        return select

    def _runner(self, variant: Variant) -> Callable[..., Any]:
        return partial(variant.run, kept=self.kept) if variant.keeps else variant.run

    def _count(self, path: Path) -> list[int]:
        return self._counts.setdefault(path, [0])

    def _select(self, op: str, arm: Arm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, str]:
        """The first variant of the arm that supports the call, and why the policy's arm did not run, if so."""
        reasons = []
        for variant in _registry[op][arm]:
            reason = variant.unsupported(*args, **kwargs) if variant.unsupported else None
            if reason is None:
                return variant, ""
            reasons.append(f"{variant.name}: {reason}")
        report = "; ".join(reasons) or f"no {arm} variant is registered"
        if self.strict or arm == "reference":
            raise UnsupportedPath(
                f"no {arm} variant of {op} supports this call",
                found=report,
                where=op,
                remedy=None
                if arm == "reference"
                else f"Move this op to the reference arm ({op}=reference) or allow counted fallbacks.",
            )
        return self._select(op, "reference", args, kwargs)[0], report
