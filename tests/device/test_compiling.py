"""Kernels compiled ahead: they do not run, they are not counted, and afterwards an engine has nothing to compile."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hemiola import LLM, SamplingParams
from hemiola.engine.engine import Engine
from hemiola.kernels.cuda import CudaFunction, CudaModule
from hemiola.kernels.launch import compiling

SOURCE = 'extern "C" __global__ void __launch_bounds__(32) fill(int *x, int value) { x[threadIdx.x] = value; }'


@triton.jit
def add_one(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + 1)


def fill(value: int) -> CudaFunction:
    return CudaModule(SOURCE + f" // {value}").function("fill", "Pi")


def test_a_launch_compiles_and_does_not_run() -> None:
    x = torch.zeros(32, dtype=torch.int32, device="cuda")
    own = fill(7)
    with compiling():
        add_one[(1,)](x, N=32)
        own.launch((1, 1, 1), (32, 1, 1), (x, 7))
    torch.cuda.synchronize()
    assert not x.any()
    add_one[(1,)](x, N=32)
    assert (x == 1).all()
    own.launch((1, 1, 1), (32, 1, 1), (x, 7))
    assert (x == 7).all()


def test_what_does_not_compile_says_so() -> None:
    broken = CudaModule('extern "C" __global__ void nothing() { no such thing; }').function("nothing", "")
    with compiling():
        broken.launch((1, 1, 1), (1, 1, 1), ())
    with pytest.raises(RuntimeError, match="identifier"):
        broken.launch((1, 1, 1), (1, 1, 1), ())
    x = torch.zeros(32, dtype=torch.int32, device="cuda")
    add_one[(1,)](x, N=32)
    assert (x == 1).all(), "kernels run again"


def test_an_engine_compiled_ahead_counts_nothing_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[5 + i % 90 for i in range(64)]]
    llm = LLM(arms="device", cache_bytes=1 << 30, max_num_seqs=4)
    assert not llm.path_counts()
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["fn"].name)
    )
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert not compiled, compiled
    monkeypatch.setattr(Engine, "compile", lambda _: None)
    lazy = LLM(arms="device", cache_bytes=1 << 30, max_num_seqs=4)
    assert [output.outputs[0].token_ids for output in lazy.generate(prompts, params)] == outputs
