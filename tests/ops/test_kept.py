"""The store of expanded weights: built once, counted in bytes, bounded, and loud about what did not fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hemiola.formats.weight import Scheme
from hemiola.ops import KeptForms, Ops
from tests.support.numerics import generator, randn
from tests.support.weights import plain_weight, random_weight


def builder(values: torch.Tensor, calls: list[int]) -> Callable[[], torch.Tensor]:
    def build() -> torch.Tensor:
        calls.append(values.numel())
        return values.clone()

    return build


def test_a_form_is_built_once() -> None:
    kept, calls = KeptForms(1000), list[int]()
    weight, values = plain_weight("w", torch.ones(2, 3)), torch.ones(5, 10)
    first = kept.get(weight, "wide", builder(values, calls))
    assert kept.get(weight, "wide", builder(values, calls)) is first
    assert len(calls) == 1
    assert (kept.kept_bytes, kept.transient_builds, kept.transient_bytes) == (200, 0, 0)


def test_weights_and_forms_are_kept_apart() -> None:
    kept, calls = KeptForms(1000), list[int]()
    one, other = plain_weight("one", torch.ones(2, 3)), plain_weight("other", torch.ones(2, 3))
    for weight, form, value in ((one, "a", 1.0), (one, "b", 2.0), (other, "a", 3.0)):
        assert kept.get(weight, form, builder(torch.full((4,), value), calls)).eq(value).all()
    assert kept.get(one, "b", builder(torch.zeros(4), calls)).eq(2).all()
    assert len(calls) == 3
    assert kept.kept_bytes == 3 * 16


def test_what_does_not_fit_is_rebuilt_and_counted() -> None:
    """The budget holds the first of two equal forms exactly; a smaller one may still fit later."""
    kept, calls = KeptForms(64), list[int]()
    big, second, small = (plain_weight(n, torch.ones(1, 1)) for n in ("big", "second", "small"))
    kept.get(big, "f", builder(torch.ones(12), calls))  # 48 bytes
    for _ in range(3):
        assert kept.get(second, "f", builder(torch.ones(12), calls)).eq(1).all()
    assert (kept.kept_bytes, kept.transient_builds, kept.transient_bytes) == (48, 3, 144)
    kept.get(small, "f", builder(torch.ones(4), calls))  # 16 bytes: exactly the rest
    kept.get(small, "f", builder(torch.ones(4), calls))
    assert (kept.kept_bytes, kept.transient_builds) == (64, 3)
    assert calls == [12, 12, 12, 12, 4]


def test_a_product_beyond_the_budget_has_the_same_bits() -> None:
    g = generator(0)
    weight, x = random_weight(g, "w", Scheme.NVFP4, 32, 64), randn(g, 3, 64)
    roomy, empty = Ops("reference", KeptForms(1 << 20)), Ops("reference", KeptForms(0))
    for _ in range(2):
        assert torch.equal(roomy.linear_nvfp4(x, weight, x.dtype), empty.linear_nvfp4(x, weight, x.dtype))
    assert (roomy.kept.transient_builds, empty.kept.transient_builds) == (0, 2)
    assert (roomy.kept.kept_bytes, empty.kept.kept_bytes) == (32 * 64 * 4, 0)
    assert empty.kept.transient_bytes == 2 * 32 * 64 * 4
