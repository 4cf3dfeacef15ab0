"""The compiler of CUDA sources, the cache of what they become, and that each source is launched in a case of cases/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton

from hemiola.kernels import cuda
from hemiola.kernels.cuda import CudaCompileError, CudaError, CudaModule, compile_source
from tests.support.cuda_sources import ADD, ECHO, REVERSE
from tests.support.offline import ARCHITECTURES, SHARED_LIMIT, compile_cuda, compile_launches

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason=str(cuda.missing()))
HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "hemiola" / "kernels"


def test_every_source_has_cases() -> None:
    assert {path.stem for path in KERNELS.glob("*.cu")} <= {path.stem for path in (HERE / "cases").glob("*.py")}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_plain_kernel_is_described_for_each_architecture(arch: int) -> None:
    kernel = compile_cuda(ADD + ECHO, "add", arch, ("-DSHARED=256",), 100)
    assert (kernel.kernel, kernel.arch, kernel.num_warps, kernel.stack, kernel.shared) == ("add", arch, 8, 0, 1124)
    assert 8 <= kernel.registers <= 32
    assert kernel.problems() == []
    assert compile_cuda(ADD + ECHO, "echo", arch, ("-DSHARED=256",)).num_warps == 1


def test_too_much_of_anything_is_a_problem() -> None:
    assert compile_cuda(REVERSE, "reverse", 90, (), SHARED_LIMIT[90]).problems() == []
    (problem,) = compile_cuda(REVERSE, "reverse", 90, (), SHARED_LIMIT[90] + 1).problems()
    assert "shared memory" in problem
    each = "for (int i = 0; i < 256; i++)"
    body = f"float x[256]; {each} x[i] = p[i]; {each} p[i] = x[i] + x[255 - i];"
    large = f'extern "C" __global__ void __launch_bounds__(THREADS) large(float* p) {{ {body} }}'
    assert any("spills" in problem for problem in compile_cuda(large, "large", 90, ("-DTHREADS=1024",)).problems())
    (problem,) = compile_cuda(large, "large", 90, ("-DTHREADS=64",), threads=1024).problems(2048)
    assert "registers" in problem


def test_launches_in_a_launcher_are_compiled() -> None:
    function = CudaModule(ADD, ("-DSHARED=512",)).function("add", "PPPi")
    x = torch.empty(1000, device="meta")

    def launcher() -> None:
        for threads in (256, 256, 128):
            function.launch((4, 1, 1), (threads, 1, 1), (x, x, None, 1000), shared_bytes=16)

    described = [(k.kernel, k.arch, k.num_warps, k.shared) for k in compile_launches(launcher, 89)]
    assert described == [("add", 89, 8, 2064), ("add", 89, 4, 2064)]
    with pytest.raises(AssertionError, match="before sm_90"):
        compile_launches(lambda: function.launch((4, 1, 1), (256, 1, 1), (x, x, x, 9), pdl=True), 89)


@pytest.mark.parametrize("signature", ["PPPl", "PPP", "PPPii", "iPPi"])
def test_a_signature_is_held_to_the_kernels_parameters(signature: str) -> None:
    function = CudaModule(ADD, ("-DSHARED=512",)).function("add", signature)
    args = [1 if letter in "il" else None for letter in signature]
    with pytest.raises(AssertionError, match=rf"add \({signature}\) has parameters \[\(0, 8\)"):
        compile_launches(lambda: function.launch((4, 1, 1), (256, 1, 1), args), 89)


@pytest.mark.parametrize("args", [(1, None, 0.5, 2), (1, 0.5, 0.5, 2, 3, None), (2**31, None, 0.5, 2, 3, None)])
def test_arguments_that_do_not_fit_the_signature(args: tuple[float | None, ...]) -> None:
    function = CudaModule(ECHO).function("echo", "iPfliP")
    function.marshal((1, None, 0.5, 2**40, 3, torch.empty(1)))
    with pytest.raises(TypeError, match=r"echo \(iPfliP\)"):
        function.marshal(args)


def test_errors_of_compilation_name_the_source_line() -> None:
    with pytest.raises(CudaCompileError, match=r'kernel.cu\(2\): error: identifier "y" is undefined'):
        compile_source("\nint x = y;", 90)


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[Path]:
    with mock.patch.object(triton.knobs.cache, "dir", str(tmp_path)):
        yield tmp_path


def test_compiled_code_is_kept_and_damage_is_noticed(empty_cache: Path) -> None:
    cubin = compile_source(ECHO, 90)
    (path,) = empty_cache.glob("*/cubin")
    whole = path.read_bytes()
    with mock.patch.object(cuda, "_compile", return_value=b"another") as compiler:
        assert compile_source(ECHO, 90) == cubin
        assert compiler.call_count == 0
        for damaged in (whole[:-1], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
            path.write_bytes(damaged)
            assert compile_source(ECHO, 90) == b"another"
            assert compile_source(ECHO, 90) == b"another"
        assert compiler.call_count == 3
        for source, arch, options in ((REVERSE, 90, ()), (ECHO, 80, ()), (ECHO, 90, ("-DX=1",))):
            compile_source(source, arch, options)
        assert compiler.call_count == 6


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_nvrtc_paths", lambda: iter([Path("libnvrtc.so.of-no-version")]))
    cuda._nvrtc.cache_clear()
    try:
        assert "nvidia-cuda-nvrtc" in str(cuda.missing())
        with pytest.raises(CudaError, match="nvidia-cuda-nvrtc"):
            compile_source("", 90)
    finally:
        cuda._nvrtc.cache_clear()
