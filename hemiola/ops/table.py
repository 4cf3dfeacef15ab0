"""The op table: which variants an op has, which one a call takes, and how often each was taken.

Registration happens when `hemiola.ops` is imported and fills one registry. An `Ops` object binds that registry to a
policy (which arm each op runs on), belongs to one engine, and counts every call by (op, arm, variant, reason), so two
engines with different arms can run side by side in one process. The table knows nothing of models or batches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from hemiola.errors import ConfigError, UnsupportedPath
from hemiola.ops.kept import KeptForms
from hemiola.ops.resident import ResidentWeights

Arm = Literal["reference", "device"]
ARMS: tuple[Arm, ...] = ("reference", "device")
OTHERS = "*"  # in a policy, in place of an op's name: all ops that are not named


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of an op.

    `unsupported` is a pure predicate over the call's arguments: a reason why this variant cannot take the call, or
    None. `keeps` variants are called with `kept=`, the engine's store of expanded weights; `resident` ones with
    `resident=`, its weights on the device, and `prepare(weight, resident)` builds what a call would build; `invariant`
    ones with `invariant=`, whether a row's bits must not depend on its neighbours. `mutates` names the arguments that
    are written in place. `varies`: a row's bits depend on how many there are, so no invariant engine runs it.
    """

    op: str
    arm: Arm
    name: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] | None
    keeps: bool
    resident: bool
    invariant: bool
    prepare: Callable[..., Any] | None
    mutates: tuple[str, ...]
    varies: bool


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
    resident: bool = False,
    invariant: bool = False,
    prepare: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
    varies: bool = False,
) -> None:
    """Add a variant to the registry; a second one of the same op, arm and name is a programming error."""
    variants = _registry.setdefault(op, {a: [] for a in ARMS})[arm]
    if any(v.name == variant for v in variants):
        raise ValueError(f"op {op!r} already has a {arm} variant {variant!r}")
    variants.append(Variant(op, arm, variant, run, unsupported, keeps, resident, invariant, prepare, mutates, varies))


def load_device_variants() -> None:
    """Register the device arm's variants. Raises: UnsupportedPath where Triton is not installed."""
    try:
        importlib.import_module("hemiola.ops.device")
    except ModuleNotFoundError as missing:
        raise UnsupportedPath(
            "the device arm cannot be loaded",
            found=str(missing),
            expected="the triton package and an NVIDIA GPU",
            where="arms",
            remedy="Run with arms=reference.",
        ) from missing


def registered_ops() -> Mapping[str, Mapping[Arm, list[Variant]]]:
    """All registered variants by op and arm."""
    return _registry


class Ops:
    """The ops of one engine: `ops.rms_norm(...)` runs the variant that the policy selects, and counts it.

    policy: the arm of every op, or a mapping from op name to arm; ops not named run on the arm of "*", or else on the
        reference arm.
    resident: the engine's weights on the device; None for an engine without a device.
    strict: a call that no variant of the policy's arm supports raises UnsupportedPath; otherwise it runs on the
        reference arm and is counted there with the reason.
    invariant: device variants compute a row with the same bits whatever its neighbours are.
    """

    def __init__(
        self,
        policy: str | Mapping[str, str],
        kept: KeptForms,
        resident: ResidentWeights | None = None,
        *,
        strict: bool = True,
        invariant: bool = False,
    ) -> None:
        if isinstance(policy, str):
            policy = dict.fromkeys(_registry, policy)
        others = policy.get(OTHERS, "reference")
        for op, arm in policy.items():
            if (op not in _registry and op != OTHERS) or arm not in ARMS:
                raise ConfigError(
                    "no such op or arm",
                    found=f"{op}={arm}",
                    expected=f"an op of {', '.join(sorted(_registry))} and an arm of {', '.join(ARMS)}",
                    where="arms",
                )
        self.policy: dict[str, Arm] = {op: cast(Arm, policy.get(op, others)) for op in _registry}
        if "device" in self.policy.values():
            load_device_variants()
        self.kept, self.resident, self.strict, self.invariant = kept, resident, strict, invariant
        self._counts: dict[Path, list[int]] = {}  # one number each, in a list so that a bound op counts in place
        for op, arm in self.policy.items():
            setattr(self, op, self._bind(op, arm))

    def __getattr__(self, op: str) -> Callable[..., Any]:
        raise AttributeError(f"no op {op!r} is registered; registered are {', '.join(sorted(_registry))}")

    def takes(self, op: str, instead_of: tuple[str, ...], *args: Any) -> bool:
        """Whether to call `op`, which is some ops one after the other, instead of these: where all are to run on the
        device arm and a variant of `op` supports the call. Elsewhere they run one by one, each on its own arm."""
        if any(self.policy[each] != "device" for each in (op, *instead_of)):
            return False
        return any(self._refusal(variant, args, {}) is None for variant in _registry[op]["device"])

    def snapshot(self) -> dict[Path, int]:
        """Calls so far by path."""
        return {path: count[0] for path, count in self._counts.items() if count[0]}

    @contextmanager
    def recorded(self) -> Iterator[dict[Path, int]]:
        """Collect the calls made inside, instead of counting them: a graph's capture runs nothing. Each replay of the
        graph counts them, with `count`."""
        before = self.snapshot()
        calls: dict[Path, int] = {}
        yield calls
        for path, now in self.snapshot().items():
            if added := now - before.get(path, 0):
                calls[path] = added
                self._counts[path][0] -= added

    def count(self, calls: Mapping[Path, int]) -> None:
        """Calls that a graph's replay has made."""
        for path, number in calls.items():
            self._counts[path][0] += number

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within, device variants compile their kernels, side by side, and run none of them; nothing is counted."""
        launch = importlib.import_module("hemiola.kernels.launch")
        with self.recorded(), launch.compiling():
            yield

    def prepare(self, op: str, weight: Any) -> None:
        """Build what the device variants of `op` keep of a weight, ahead of the first call."""
        if self.policy[op] == "device":
            for variant in _registry[op]["device"]:
                if variant.prepare is not None:
                    variant.prepare(weight, self.resident)

    def _bind(self, op: str, arm: Arm) -> Callable[..., Any]:
        """The callable behind one op. An arm of a single variant without a predicate needs no selection per call."""
        variants = _registry[op][arm]
        if len(variants) == 1 and variants[0].unsupported is None and not variants[0].varies:
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
        bound: dict[str, Any] = {}
        if variant.keeps:
            bound["kept"] = self.kept
        if variant.resident:
            bound["resident"] = self.resident
        if variant.invariant:
            bound["invariant"] = self.invariant
        return partial(variant.run, **bound) if bound else variant.run

    def _count(self, path: Path) -> list[int]:
        return self._counts.setdefault(path, [0])

    def _refusal(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self.invariant and variant.varies:
            return "a row's bits would depend on how many there are"
        return variant.unsupported(*args, **kwargs) if variant.unsupported else None

    def _select(self, op: str, arm: Arm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, str]:
        """The first variant of the arm that supports the call, and why the policy's arm did not run, if so."""
        reasons = []
        for variant in _registry[op][arm]:
            reason = self._refusal(variant, args, kwargs)
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
