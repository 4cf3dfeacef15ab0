"""Compile the kernels that a launcher launches, for any architecture and without a GPU, and say what each one needs.

`compile_launches(run, arch)` calls `run`, which calls launchers on meta tensors. Every `kernel[grid](...)` in it is
specialised and compiled for sm_<arch> as on such a device, and not launched. Not in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Shared memory that one block may use, in bytes, by architecture (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
ARCHITECTURES = tuple(SHARED_LIMIT)
TENSOR_MEMORY_COLUMNS = 512
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one specialisation of a kernel needs. stack: bytes of local memory a thread, which is where spills go."""

    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    shared: int
    tensor_memory: int

    def problems(self, allowed_stack: int = 0) -> list[str]:
        """Why it cannot be launched, or would crawl."""
        limit = SHARED_LIMIT[self.arch]
        found = []
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory of {limit}")
        if self.stack > allowed_stack:
            found.append(f"spills: {self.stack} bytes of stack, allowed are {allowed_stack}")
        if self.tensor_memory > TENSOR_MEMORY_COLUMNS:
            found.append(f"{self.tensor_memory} columns of tensor memory of {TENSOR_MEMORY_COLUMNS}")
        return found

    def __str__(self) -> str:
        return (
            f"sm_{self.arch} {self.kernel}: {self.registers} registers, stack {self.stack}, shared {self.shared}, "
            f"{self.num_warps} warps, {self.num_stages} stages"
        )


class StandIn:
    """What compilation asks of a driver. Each architecture is a device of its own: kernels are cached by device."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread of a cubin's one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, check=True, text=True, capture_output=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert found, listing
    return int(found[1]), int(found[2])


@contextmanager
def _standing_in(arch: int, launched: Callable[[Any], None]) -> Iterator[None]:
    """Kernels are compiled for `arch` and handed to `launched`; nothing finds a GPU, even where there is one."""
    original = JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        launched(kernel)
        return kernel

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(driver, "_active", StandIn(arch)),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        yield


def compile_launches(run: Callable[[], object], arch: int) -> list[Compiled]:
    """What each kernel needs that `run` launches, once per specialisation, in order. Compilation errors are raised."""
    kernels: dict[str, Any] = {}
    with _standing_in(arch, lambda kernel: kernels.setdefault(kernel.hash, kernel)):
        run()
    return [_describe(kernel, arch) for kernel in kernels.values()]


def _describe(kernel: Any, arch: int) -> Compiled:
    metadata = kernel.metadata
    registers, stack = resources(kernel.asm["cubin"])
    return Compiled(
        metadata.name,
        arch,
        metadata.num_warps,
        metadata.num_stages,
        registers,
        stack,
        metadata.shared,
        getattr(metadata, "tmem_size", 0) or 0,
    )
