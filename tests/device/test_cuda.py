"""CUDA kernels on the GPU: arguments, large shared memory, graphs, dependent launches, threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hemiola.kernels.cuda import CudaError, CudaModule
from hemiola.kernels.launch import uses_pdl
from tests.support.cuda_sources import ADD, ECHO, REVERSE

add = CudaModule(ADD, ("-DSHARED=256",)).function("add", "PPPi")


def blocks(n: int) -> tuple[int, int, int]:
    return (n + 255) // 256, 1, 1


def test_arguments_arrive() -> None:
    echo = CudaModule(ECHO).function("echo", "iPfliP")
    out = torch.full((5,), float("nan"), dtype=torch.float64, device="cuda")
    echo.launch((1, 1, 1), (1, 1, 1), (-7, None, 0.5, -(2**40) - 1, 9, out))
    assert out.tolist() == [-7, 1, 0.5, -(2**40) - 1, 9]
    echo.launch((1, 1, 1), (1, 1, 1), (2, out, -0.25, 2**33, -1, out))
    assert out.tolist() == [2, 0, -0.25, 2**33, -1]


@pytest.mark.parametrize("n", [1, 255, 100_003])
def test_add(n: int) -> None:
    a, b = torch.randn(2, n, device="cuda")
    out = torch.full((n + 1,), float("nan"), device="cuda")
    add.launch(blocks(n), (256, 1, 1), (a, b, out, n))
    assert torch.equal(out[:n], a + b)
    assert out[n].isnan()


def test_large_shared_memory() -> None:
    reverse = CudaModule(REVERSE).function("reverse", "PPi")
    most = torch.cuda.get_device_properties().shared_memory_per_block_optin
    for shared_bytes in (4096, most, 65_536):
        n = shared_bytes // 4
        rows = torch.randint(0, 2**31 - 1, (3, n), dtype=torch.int32, device="cuda")
        out = torch.zeros_like(rows)
        reverse.launch((3, 1, 1), (256, 1, 1), (rows, out, n), shared_bytes=shared_bytes)
        assert torch.equal(out, rows.flip(1))
    with pytest.raises(CudaError, match="shared memory"):
        reverse.launch((3, 1, 1), (256, 1, 1), (rows, out, 1), shared_bytes=most + 1)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_chain_in_a_graph(pdl: bool) -> None:
    """Each of 200 launches needs the whole result of the one before."""
    if pdl and not uses_pdl():
        pytest.skip("needs sm_90")
    n = 1_000_003
    x, one = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
    y = torch.empty_like(x)

    def chain() -> None:
        for source, to in [(x, y), (y, x)] * 100:
            add.launch(blocks(n), (256, 1, 1), (source, one, to, n), pdl=pdl)

    add.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    assert x.count_nonzero() == 0, "a capture runs nothing"
    for _ in range(3):
        graph.replay()
    chain()
    assert torch.equal(x, one * 800)


def test_the_current_stream_is_used() -> None:
    n = 1000
    a, b = torch.zeros(n, device="cuda"), torch.ones(n, device="cuda")
    out = torch.zeros(n, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        a += 4
        add.launch(blocks(n), (256, 1, 1), (a, b, out, n))
    stream.synchronize()
    assert torch.equal(out, b * 5)


def test_loading_in_a_capture_is_refused() -> None:
    fresh = CudaModule(ADD, ("-DSHARED=257",)).function("add", "PPPi")
    x = torch.zeros(256, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        with pytest.raises(CudaError, match="captured"):
            fresh.launch((1, 1, 1), (256, 1, 1), (x, x, x, 256))
    with pytest.raises(CudaError, match="absent"):
        fresh.module.function("absent", "").load()


def test_a_thread_that_has_used_no_gpu() -> None:
    n = 256
    a, b, out = torch.ones(3, n, device="cuda")
    add.load()
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def launch() -> None:
        try:
            add.launch(blocks(n), (256, 1, 1), (a, b, out, n))
        except CudaError as error:
            failed.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert failed == []
    torch.cuda.synchronize()
    assert torch.equal(out, a + b)


def test_a_launch_is_cheap() -> None:
    a, b, out = torch.ones(3, 256, device="cuda")
    add.load()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            add.launch((1, 1, 1), (256, 1, 1), (a, b, out, 256))
        times.append((time.perf_counter() - start) / 100)
    print(f"{min(times) * 1e6:.1f} us a launch")
    assert min(times) < 30e-6
