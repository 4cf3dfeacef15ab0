"""The offline compiler itself: what it must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from hemiola.kernels.launch import capability, gdc_wait, launch_options, uses_pdl
from tests.support.offline import SHARED_LIMIT, compile_launches

bf16 = torch.bfloat16


@triton.jit
def copied(x_ptr, out_ptr, n, N: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def copy(numel: int, arch: list[int] | None = None) -> Callable[[], None]:
    def run() -> None:
        if arch is not None:
            arch.append(capability())
        x = torch.empty(numel, dtype=bf16, device="meta")
        pdl = uses_pdl()
        copied[(triton.cdiv(numel, 128),)](x, torch.empty_like(x), numel, 128, pdl, **launch_options(pdl))

    return run


@triton.jit
def multiplied(a_ptr, b_ptr, out_ptr, n, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, N), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((N, N), tl.float32)
    for start in range(0, n, K):
        a = tl.load(a_ptr + rows[:, None] * n + start + inner[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * n + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], total)


def multiply(tile: int, inner: int, stages: int, warps: int) -> Callable[[], None]:
    def run() -> None:
        a = torch.empty(4096, 4096, dtype=bf16, device="meta")
        out = torch.empty(tile, tile, device="meta")
        multiplied[(1,)](a, a, out, 4096, tile, inner, num_stages=stages, num_warps=warps)

    return run


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_a_plain_kernel_is_described_for_each_architecture(arch: int) -> None:
    seen: list[int] = []
    (kernel,) = compile_launches(copy(1000, seen), arch)
    assert seen == [arch]
    assert (kernel.kernel, kernel.arch, kernel.stack, kernel.shared) == ("copied", arch, 0, 0)
    assert 8 <= kernel.registers <= 64
    assert kernel.problems() == []


def test_specialisations_are_counted_once_each() -> None:
    kernels = compile_launches(lambda: [copy(numel)() for numel in (1024, 2048, 1000, 1000)], 90)
    assert len(kernels) == 2, "multiples of 16, and others"


def test_too_much_shared_memory_is_a_problem() -> None:
    (kernel,) = compile_launches(multiply(128, 64, stages=4, warps=8), 90)
    assert kernel.problems() == []
    (kernel,) = compile_launches(multiply(128, 64, stages=5, warps=8), 120)
    assert kernel.shared > SHARED_LIMIT[120]
    assert any("shared memory" in problem for problem in kernel.problems())


def test_spilling_is_a_problem_unless_allowed() -> None:
    (kernel,) = compile_launches(multiply(256, 32, stages=2, warps=4), 80)
    assert kernel.stack > 0
    assert [problem for problem in kernel.problems() if "spills" in problem]
    assert not [problem for problem in kernel.problems(kernel.stack) if "spills" in problem]


def test_errors_of_compilation_are_raised() -> None:
    @triton.jit
    def wrong(out_ptr):
        tl.store(out_ptr + tl.arange(0, 3), 0)

    with pytest.raises(triton.CompilationError, match="power of 2"):
        compile_launches(lambda: wrong[(1,)](torch.empty(4, device="meta")), 90)
