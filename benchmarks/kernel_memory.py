"""What a GPU's memory gives to kernels that share it out in different ways: reading alone, and states written in place.

    PYTHONPATH=. python3 -m benchmarks.kernel_memory [--gib 8]

A weight-streaming kernel can be held against what reading the same bytes takes, shared out among its blocks as it does:
even shares, several smaller ones one after the other, or pieces from a counter, which whoever is ready takes. Graphs of
launches, each over memory of its own. What is read is summed up, and the sum compared: every word is read once. The
second needs clusters of blocks, so Hopper or later.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_experts import graph_time
from hemiola.kernels import read
from hemiola.kernels.cuda import CudaFunction, CudaModule
from hemiola.kernels.launch import num_sms

LAUNCHES = 12
WORKERS = 16

# A kilobyte is what a warp reads at a time. Defined from outside: WARPS and RESIDENT blocks of a multiprocessor, DEPTH
# kilobytes that a warp has under way, IN_TURN (warps take a block's kilobytes in turn, else each has a part of them),
# PIECE (kilobytes that a block takes from the counter; 0: it has an even share, and that is all).
READ_SOURCE = r"""
struct alignas(16) u32x4 { unsigned x, y, z, w; };

__device__ __forceinline__ u32x4 load(const unsigned char *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) shared_read_kernel(
    const unsigned char *from, unsigned *sum, int *counter, int kilobytes) {
    __shared__ int taken;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned own = 0;
    int first = (long long)kilobytes * blockIdx.x / gridDim.x;
    int count = (int)((long long)kilobytes * (blockIdx.x + 1) / gridDim.x) - first;
    while (true) {
        if (PIECE) {
            __syncthreads();
            if (threadIdx.x == 0) taken = atomicAdd(counter, 1);
            __syncthreads();
            first = taken * PIECE;
            if (first >= kilobytes) break;
            count = min(PIECE, kilobytes - first);
        }
        const int begin = IN_TURN ? warp : (int)((long long)count * warp / WARPS);
        const int end = IN_TURN ? count : (int)((long long)count * (warp + 1) / WARPS);
        const int apart = IN_TURN ? WARPS : 1, steps = (end - begin + apart - 1) / apart;
        const unsigned char *at = from + (first + begin) * 1024ll + lane * 16;
        u32x4 ahead[DEPTH][2] = {};
        const auto fetch = [&](int slot, int step) {
            ahead[slot][0] = load(at + step * apart * 1024ll);
            ahead[slot][1] = load(at + step * apart * 1024ll + 512);
        };
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (i < steps) fetch(i, i);
        for (int step = 0; step < steps; step += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (step + i >= steps) break;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    own ^= ahead[i][half].x ^ ahead[i][half].y ^ ahead[i][half].z ^ ahead[i][half].w;
                if (step + i + DEPTH < steps) fetch(i, step + i + DEPTH);
            }
        }
        if (!PIECE) break;
    }
    for (int i = 16; i > 0; i /= 2) own ^= __shfl_xor_sync(0xFFFFFFFFu, own, i);
    if (lane == 0) atomicXor(sum, own);
}
"""

# A warp has eight rows of 512 bytes under way, changes and writes them. STREAMS: what is written leaves the L2 cache
# first. CLUSTER: blocks that begin and end together.
UPDATE_SOURCE = r"""
struct alignas(16) f32x4 { float x, y, z, w; };

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, RESIDENT)
    update_kernel(float *states) {
    unsigned long long policy = 0;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *at = states + (blockIdx.x * (long long)WARPS + warp) * 8 * 128 + lane * 4;
    f32x4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[i].x), "=f"(v[i].y), "=f"(v[i].z), "=f"(v[i].w) : "l"(at + i * 128));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i].x += 1.f, v[i].y += 1.f, v[i].z += 1.f, v[i].w += 1.f;
        if (STREAMS)
            asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;"
                         :: "l"(at + i * 128), "f"(v[i].x), "f"(v[i].y), "f"(v[i].z), "f"(v[i].w), "l"(policy)
                         : "memory");
        else
            *(f32x4 *)(at + i * 128) = v[i];
    }
    if (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}
"""


class Reading(NamedTuple):
    """As the source's macros. shares: even ones, that each place of a multiprocessor takes one after the other."""

    warps: int
    resident: int
    depth: int
    in_turn: bool
    piece: int
    shares: int = 1


class Updating(NamedTuple):
    warps: int
    resident: int
    streams: bool
    cluster: int = 1


READINGS = [
    Reading(*shape, in_turn, piece, shares)
    for shape in ((8, 3, 3), (8, 2, 6), (20, 1, 3))
    for in_turn in (False, True)
    for piece, shares in ((0, 1), (0, 6), (0, 24), (84, 1), (336, 1))
]
UPDATINGS = [
    Updating(*shape, streams, cluster)
    for shape, cluster in (((16, 2), 1), ((8, 4), 1), ((16, 2), 4))
    for streams in (False, True)
]


@cache
def read_function(way: Reading) -> CudaFunction:
    macros = {
        "WARPS": way.warps, "RESIDENT": way.resident, "DEPTH": way.depth, "IN_TURN": int(way.in_turn),
        "PIECE": way.piece,
    }  # fmt: skip
    options = tuple(f"-D{name}={value}" for name, value in macros.items())
    return CudaModule(READ_SOURCE, options).function("shared_read_kernel", "PPPi")


@cache
def update_function(way: Updating) -> CudaFunction:
    macros = {"WARPS": way.warps, "RESIDENT": way.resident, "STREAMS": int(way.streams), "CLUSTER": way.cluster}
    options = tuple(f"-D{name}={value}" for name, value in macros.items())
    return CudaModule(UPDATE_SOURCE, options).function("update_kernel", "P")


def start_reading(way: Reading, words: Tensor, out: Tensor, counter: Tensor) -> None:
    """The exclusive or of words, int32 in whole kilobytes, into out (1,), which is 0 before, as counter (1,) is."""
    blocks = num_sms() * way.resident * way.shares
    arguments = (words, out, counter, words.numel() // 256)
    read_function(way).launch((blocks, 1, 1), (32 * way.warps, 1, 1), arguments)


def start_updating(way: Updating, states: Tensor) -> None:
    """Adds 1 to each of states, float32, a multiple of what a cluster has."""
    blocks, rest = divmod(states.numel(), way.warps * 8 * 128)
    assert not rest, f"{states.numel()} floats are no whole blocks of {way}"
    update_function(way).launch((blocks, 1, 1), (32 * way.warps, 1, 1), (states,))


def exclusive_or(words: Tensor) -> int:
    """Of all of them, by the package's own kernel; as int32."""
    parts = read.read(words)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = torch.cat((parts[:half] ^ parts[half : 2 * half], parts[2 * half :]))
    return int(parts)


def time_reading(memory: Tensor, mebibytes: int) -> None:
    size = mebibytes << 18
    parts = memory[: memory.numel() // size * size].view(-1, size)
    expected = exclusive_or(parts[0])
    for way in READINGS:
        out, counters = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, LAUNCHES + 1))
        start_reading(way, parts[0], out, counters[LAUNCHES:])
        assert int(out) == expected, f"{way} does not read every word once"
        calls: list[Callable[[], object]] = [counters.zero_]
        calls += [partial(start_reading, way, parts[i % len(parts)], out, counters[i : i + 1]) for i in range(LAUNCHES)]
        seconds = graph_time(calls) * len(calls) / LAUNCHES
        print(f"read {mebibytes} MiB {way}: {4 * size / seconds / 1e12:.3f} TB/s", flush=True)


def time_updating(memory: Tensor, rows: int) -> None:
    size = rows << 19  # two mebibytes of states a row, as Nano's Mamba-2 layers have
    parts = memory.view(torch.float32)[: memory.numel() // size * size].view(-1, size)
    for way in UPDATINGS:
        parts[0].zero_()
        start_updating(way, parts[0])
        assert bool(parts[0].eq(1).all()), f"{way} does not change every number once"
        calls = [partial(start_updating, way, parts[i % len(parts)]) for i in range(LAUNCHES)]
        seconds = graph_time(calls)
        print(f"update {rows} rows {way}: {8 * size / seconds / 1e12:.3f} TB/s, read and written", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=int, default=8, help="of memory to read")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this times kernels on a GPU, and there is none")
    with ThreadPoolExecutor(WORKERS) as pool:
        for job in [
            *(pool.submit(read_function(way).module.compile) for way in READINGS),
            *(pool.submit(update_function(way).module.compile) for way in UPDATINGS),
        ]:
            job.result()
    memory = torch.randint(-(1 << 31), 1 << 31, (arguments.gib << 28,), dtype=torch.int32, device="cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for mebibytes in (512, 1024, 2048):
        time_reading(memory, mebibytes)
    for rows in (64, 256):
        time_updating(memory, rows)


if __name__ == "__main__":
    main()
