"""The repaired interpreter: what a kernel computes on bfloat16 and fp8 is what torch computes, rounding by rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.support.numerics import generator, randn

N = 256
bf16 = torch.bfloat16
e4m3 = torch.float8_e4m3fn


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "div":
        out = x / y
    elif OP == "max":
        out = tl.maximum(x, y)
    elif OP == "where":
        out = tl.where(x < y, x, y)
    elif OP == "scalar":
        out = x * 0.3
    elif OP == "negative":
        out = -x
    else:
        out = tl.abs(x)
    tl.store(out_ptr + i, out)


ARITHMETIC = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "where": torch.minimum,
    "negative": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
}


@pytest.mark.parametrize("op", ARITHMETIC)
def test_bfloat16_arithmetic_is_torchs(op: str) -> None:
    g = generator(1)
    x, y, out = randn(g, N, dtype=bf16), randn(g, N, dtype=bf16), torch.empty(N, dtype=bf16)
    arithmetic[(1,)](x, y, out, op, N)
    assert torch.equal(out, ARITHMETIC[op](x, y))


def test_bfloat16_division_rounds_once() -> None:
    g = generator(2)
    x, y, out = randn(g, N, dtype=bf16), randn(g, N, dtype=bf16) + 2, torch.empty(N, dtype=bf16)
    arithmetic[(1,)](x, y, out, "div", N)
    assert torch.equal(out, (x.float() / y.float()).to(bf16))


def test_a_constant_is_rounded_to_the_operands_type() -> None:
    x, out = randn(generator(3), N, dtype=bf16), torch.empty(N, dtype=bf16)
    arithmetic[(1,)](x, x, out, "scalar", N)
    assert torch.equal(out, x * torch.tensor(0.3, dtype=bf16))


def test_the_larger_of_nan_and_a_number_is_the_number() -> None:
    x = torch.full((N,), float("nan"))
    y, out = torch.ones(N), torch.empty(N)
    arithmetic[(1,)](x, y, out, "max", N)
    assert torch.equal(out, y)


@triton.jit
def convert(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    convert[(1,)](x, out, x.numel())
    return out


@pytest.mark.parametrize("source", [torch.float32, bf16])
@pytest.mark.parametrize("target", [bf16, e4m3, torch.float8_e5m2, torch.float16])
def test_conversions_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    g = generator(4)
    x = torch.cat([randn(g, 4 * N) * 2.0**e for e in (-8, -2, 1, 6)]).to(source)
    assert torch.equal(converted(x, target).float(), x.to(target).float())


@pytest.mark.parametrize(("target", "largest"), [(e4m3, 448.0), (torch.float8_e5m2, 57344.0)])
def test_conversions_to_fp8_saturate_and_keep_nan(target: torch.dtype, largest: float) -> None:
    x = torch.tensor([1.98, 464.0, 1e6, -1e6, float("inf"), -float("inf"), float("nan"), -0.0])
    out = converted(x, target).float()
    assert out[:6].tolist() == [2.0, 448.0, largest, -largest, largest, -largest]
    assert out[6].isnan()
    assert torch.signbit(out[7])


@pytest.mark.parametrize("source", [bf16, e4m3, torch.float8_e5m2])
def test_every_code_widens_exactly(source: torch.dtype) -> None:
    codes = torch.arange(2 ** (8 * source.itemsize), dtype=torch.int32)
    x = codes.to(torch.int16 if source.itemsize == 2 else torch.uint8).view(source)
    torch.testing.assert_close(converted(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    out = tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square), input_precision=PRECISION)
    tl.store(out_ptr + square, out)


@pytest.mark.parametrize("dtype", [bf16, e4m3, torch.float16])
def test_dot_sums_exact_products_in_float32(dtype: torch.dtype) -> None:
    g = generator(5)
    a, b, out = randn(g, 32, 32).to(dtype), randn(g, 32, 32).to(dtype), torch.empty(32, 32)
    product[(1,)](a, b, out, 32, None)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_dot_of_float32_says_its_precision() -> None:
    a, out = torch.ones(32, 32), torch.empty(32, 32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="TF32"):
        product[(1,)](a, a, out, 32, None)
    product[(1,)](a, a, out, 32, "ieee")
    assert torch.equal(out, torch.full((32, 32), 32.0))


@triton.jit
def larger(value_a, index_a, value_b, index_b):
    take_b = value_b > value_a
    return tl.where(take_b, value_b, value_a), tl.where(take_b, index_b, index_a)


@triton.jit
def decayed(gain_a, sum_a, gain_b, sum_b):
    return gain_a * gain_b, sum_a * gain_b + sum_b


@triton.jit
def combine(x_ptr, gain_ptr, most_ptr, where_ptr, scan_ptr, R: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i)
    index = tl.broadcast_to(tl.arange(0, N)[None, :], (R, N))
    most, where = tl.reduce((x, index), 1, larger)
    tl.store(most_ptr + tl.arange(0, R), most)
    tl.store(where_ptr + tl.arange(0, R), where)
    _, scan = tl.associative_scan((tl.load(gain_ptr + i), x), 1, decayed)
    tl.store(scan_ptr + i, scan)


def test_reductions_and_scans_take_own_functions() -> None:
    g = generator(6)
    x, gain = randn(g, 4, 32), randn(g, 4, 32)
    most, where, scan = torch.empty(4), torch.empty(4, dtype=torch.int32), torch.empty(4, 32)
    combine[(1,)](x, gain, most, where, scan, 4, 32)
    assert torch.equal(most, x.max(1).values)
    assert torch.equal(where.long(), x.argmax(1))
    expected = [x[:, 0]]
    for i in range(1, 32):
        expected.append(expected[-1] * gain[:, i] + x[:, i])
    torch.testing.assert_close(scan, torch.stack(expected, 1))


@triton.jit
def whole(x_ptr, out_ptr, N: tl.constexpr):
    best, where = tl.reduce((tl.load(x_ptr + tl.arange(0, N)), tl.arange(0, N)), 0, larger)
    tl.store(out_ptr, best)
    tl.store(out_ptr + 1, where.to(tl.float32))


def test_a_vector_reduces_to_scalars() -> None:
    x, out = randn(generator(7), 64), torch.empty(2)
    whole[(1,)](x, out, 64)
    assert out.tolist() == [x.max().item(), x.argmax().item()]


@triton.jit
def clamped(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.clamp(tl.load(x_ptr + i), -1.0, 1.0))


def test_clamp_of_nan_is_a_bound_as_on_a_gpu() -> None:
    x, out = torch.tensor([float("nan"), 2.0, -2.0, 0.5]), torch.empty(4)
    clamped[(1,)](x, out, 4)
    assert out.tolist() == [-1.0, 1.0, -1.0, 0.5]


@triton.jit
def counted(out_ptr, n, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = 0.0
    for _ in range(n):
        total += 1e38
    tl.store(out_ptr, total)


def test_dependent_launch_run_time_loops_and_overflow_are_ordinary() -> None:
    out = torch.empty(1)
    counted[(1,)](out, 7, True, launch_pdl=True)
    assert out.item() == float("inf")


@triton.autotune([triton.Config({"VALUE": 5}), triton.Config({"VALUE": 6})], key=[])
@triton.jit
def tuned(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr, VALUE)


def test_autotuning_takes_the_first_configuration() -> None:
    out = torch.zeros(1)
    tuned[(1,)](out)
    assert out.item() == 5


def test_repairs_come_before_kernels_and_only_with_the_interpreter() -> None:
    def failure(code: str, interpret: str) -> str:
        environment = {**os.environ, "TRITON_INTERPRET": interpret}
        child = subprocess.run(
            [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False
        )
        return child.stderr

    start = "from tests.support.interpreter import repair\n"
    assert "before triton is imported" in failure(f"{start}repair()", "0")
    assert "before the interpreter was repaired" in failure(f"import hemiola.kernels.launch\n{start}repair()", "1")
