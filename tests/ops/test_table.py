"""The op table: selection, refusals, counters, policies. Toy ops live in a registry of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hemiola.errors import ConfigError, UnsupportedPath
from hemiola.ops import KeptForms, Ops, Path, register, registered_ops, table
from tests.support.weights import plain_weight


def too_wide(x: int) -> str | None:
    return f"{x} is above 10" if x > 10 else None


def odd(x: int) -> str | None:
    return f"{x} is odd" if x % 2 else None


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """`double` on both arms, with two device variants of limited taste; `negate` on the reference arm only."""
    table.load_device_variants()  # once in a process: not into the toys' registry
    monkeypatch.setattr(table, "_registry", {})
    register(op="double", arm="reference", variant="torch", run=lambda x: ("torch", 2 * x))
    register(op="double", arm="device", variant="narrow", run=lambda x: ("narrow", 2 * x), unsupported=too_wide)
    register(op="double", arm="device", variant="even", run=lambda x: ("even", 2 * x), unsupported=odd)
    register(op="negate", arm="reference", variant="torch", run=lambda x: -x)


def ops(policy: Any, **kwargs: Any) -> Ops:
    return Ops(policy, KeptForms(0), **kwargs)


@pytest.mark.usefixtures("toys")
def test_calls_are_counted_by_path() -> None:
    bound = ops({"double": "device"})
    assert bound.snapshot() == {}
    results = [bound.double(x) for x in (3, 4, 12, 12)]
    assert results == [("narrow", 6), ("narrow", 8), ("even", 24), ("even", 24)]
    assert bound.negate(5) == -5
    assert bound.snapshot() == {
        Path("double", "device", "narrow", ""): 2,
        Path("double", "device", "even", ""): 2,
        Path("negate", "reference", "torch", ""): 1,
    }
    before = bound.snapshot()
    bound.negate(1)
    assert before[Path("negate", "reference", "torch", "")] == 1, "a snapshot does not move"


@pytest.mark.usefixtures("toys")
def test_strict_refuses_with_every_variants_reason() -> None:
    bound = ops({"double": "device"})
    with pytest.raises(UnsupportedPath) as refusal:
        bound.double(13)
    for part in ("double", "narrow: 13 is above 10", "even: 13 is odd", "double=reference"):
        assert part in str(refusal.value)
    assert bound.snapshot() == {}, "a refused call took no path"


@pytest.mark.usefixtures("toys")
def test_permissive_runs_the_reference_and_counts_the_reason() -> None:
    bound = ops({"double": "device", "negate": "device"}, strict=False)
    assert bound.double(13) == ("torch", 26)
    assert bound.double(15) == ("torch", 30)
    assert bound.double(4) == ("narrow", 8)
    assert bound.negate(5) == -5
    assert bound.snapshot() == {
        Path("double", "reference", "torch", "narrow: 13 is above 10; even: 13 is odd"): 1,
        Path("double", "reference", "torch", "narrow: 15 is above 10; even: 15 is odd"): 1,
        Path("double", "device", "narrow", ""): 1,
        Path("negate", "reference", "torch", "no device variant is registered"): 1,
    }


@pytest.mark.usefixtures("toys")
def test_an_arm_without_variants_is_refused_when_called() -> None:
    bound = ops("device")
    assert bound.double(2) == ("narrow", 4)
    with pytest.raises(UnsupportedPath, match="no device variant is registered"):
        bound.negate(1)


@pytest.mark.usefixtures("toys")
def test_a_reference_that_refuses_is_a_refusal_even_when_permissive() -> None:
    register(op="halve", arm="reference", variant="torch", run=lambda x: x // 2, unsupported=odd)
    bound = ops("reference", strict=False)
    assert bound.halve(4) == 2
    with pytest.raises(UnsupportedPath, match="torch: 3 is odd"):
        bound.halve(3)
    register(op="halve", arm="device", variant="never", run=lambda x: x // 2, unsupported=lambda x: "never")
    with pytest.raises(UnsupportedPath, match="3 is odd"):
        ops("device", strict=False).halve(3)


@pytest.mark.usefixtures("toys")
def test_exceptions_of_a_variant_propagate() -> None:
    def fail(x: int) -> int:
        raise ZeroDivisionError("in the kernel")

    register(op="fails", arm="device", variant="boom", run=fail)
    register(op="fails", arm="reference", variant="torch", run=lambda x: x)
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        ops("device", strict=False).fails(1)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("policy", ["fast", {"double": "fast"}, {"triple": "device"}])
def test_an_unknown_op_or_arm_is_named(policy: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ops(policy)
    named = "fast" if "fast" in str(policy) else "triple"
    for part in (named, "double, negate", "reference, device"):
        assert part in str(error.value)


@pytest.mark.usefixtures("toys")
def test_ops_not_named_run_on_the_reference_arm() -> None:
    assert ops({}).double(2) == ("torch", 4)
    assert ops("reference").double(2) == ("torch", 4)


@pytest.mark.usefixtures("toys")
def test_two_tables_side_by_side_count_for_themselves() -> None:
    one, other = ops("reference"), ops({"double": "device"})
    assert [one.double(2), other.double(2), other.double(2)] == [("torch", 4), ("narrow", 4), ("narrow", 4)]
    assert one.snapshot() == {Path("double", "reference", "torch", ""): 1}
    assert other.snapshot() == {Path("double", "device", "narrow", ""): 2}


@pytest.mark.usefixtures("toys")
def test_a_variant_that_keeps_forms_is_given_the_engines_store() -> None:
    register(op="store", arm="reference", variant="torch", run=lambda *, kept: kept, keeps=True)
    register(op="store", arm="device", variant="maybe", run=lambda *, kept: kept, keeps=True, unsupported=lambda: None)
    for policy in ("reference", "device"):
        kept = KeptForms(0)
        assert Ops(policy, kept).store() is kept


@pytest.mark.usefixtures("toys")
def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'double' already has a device variant 'even'"):
        register(op="double", arm="device", variant="even", run=lambda x: x)
    register(op="double", arm="reference", variant="even", run=lambda x: x)


@pytest.mark.usefixtures("toys")
def test_an_op_that_does_not_exist_is_named() -> None:
    with pytest.raises(AttributeError, match="no op 'tripel' is registered; registered are double, negate"):
        _ = ops("reference").tripel


def test_the_real_ops_are_counted_too() -> None:
    bound = ops("reference")
    x = torch.ones(2, 3)
    bound.linear(x, plain_weight("w", torch.ones(4, 3)), x.dtype)
    bound.linear(x, plain_weight("w", torch.ones(4, 3)), x.dtype)
    bound.rms_norm(x, None, torch.ones(3), 1e-5)
    assert bound.snapshot() == {
        Path("linear", "reference", "torch", ""): 2,
        Path("rms_norm", "reference", "torch", ""): 1,
    }
    assert {"ssd_scan", "mamba2_update", "moe_experts", "sample"} <= set(registered_ops())


def test_ops_that_write_state_say_so() -> None:
    writers = {
        op: variant.mutates
        for op, arms in registered_ops().items()
        for variants in arms.values()
        for variant in variants
        if variant.mutates
    }
    assert writers == {
        "causal_conv1d": ("conv_state",),
        "kv_write": ("k_cache", "v_cache"),
        "mamba2_update": ("conv_state", "ssm_state"),
        "ssd_scan": ("ssm_state",),
    }


@pytest.mark.usefixtures("toys")
def test_a_star_is_for_all_ops_that_are_not_named() -> None:
    assert ops({"*": "device", "negate": "reference"}).policy == {"double": "device", "negate": "reference"}
    assert ops({"double": "device"}).policy == {"double": "device", "negate": "reference"}
    with pytest.raises(ConfigError, match=r"\*=gpu"):
        ops({"*": "gpu"})


@pytest.fixture
def joined(toys: None) -> None:
    """`twice`, which is `double` and `double` again, for small numbers; and one whose result depends on neighbours."""
    register(op="twice", arm="reference", variant="torch", run=lambda x: 4 * x)
    register(op="twice", arm="device", variant="one", run=lambda x: 4 * x, unsupported=too_wide)
    register(op="varying", arm="reference", variant="torch", run=lambda x: 4 * x)
    register(op="varying", arm="device", variant="one", run=lambda x: 4 * x, varies=True)


@pytest.mark.usefixtures("joined")
def test_an_op_is_called_instead_of_others_where_all_are_on_the_device_and_a_variant_takes_it() -> None:
    device = {"double": "device", "twice": "device"}
    bound = ops(device)
    assert bound.takes("twice", ("double",), 3)
    assert not bound.takes("twice", ("double",), 11), "its variant refuses"
    assert not bound.takes("twice", ("double", "negate"), 3), "negate is on the reference arm"
    assert not ops("reference").takes("twice", ("double",), 3)
    assert not ops({**device, "double": "reference"}).takes("twice", ("double",), 3)
    assert not ops({**device, "twice": "reference"}).takes("twice", ("double",), 3)
    assert bound.snapshot() == {}, "asking is no call"
    assert bound.twice(3) == 12
    assert bound.snapshot() == {Path("twice", "device", "one", ""): 1}


@pytest.mark.usefixtures("joined")
def test_an_invariant_engine_runs_no_variant_that_varies() -> None:
    device = {"double": "device", "varying": "device"}
    assert ops(device).takes("varying", ("double",), 3)
    bound = ops(device, invariant=True)
    assert not bound.takes("varying", ("double",), 3)
    with pytest.raises(UnsupportedPath, match="depend on how many"):
        bound.varying(3)
