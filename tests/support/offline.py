"""Compile the kernels that a launcher launches, for any architecture and without a GPU, and say what each one needs.

`compile_launches(run, arch)` calls `run`, which calls launchers on meta tensors. Every `kernel[grid](...)` in it is
specialised and compiled for sm_<arch> as on such a device, and not launched; so is every `CudaFunction.launch(...)`.
Not in a process with TRITON_INTERPRET=1. `compile_cuda` describes a kernel of a CUDA source by itself.
"""

from __future__ import annotations

import math
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

from hemiola.kernels.cuda import CudaFunction, compile_source

# Shared memory that one block may use, in bytes, by architecture (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
ARCHITECTURES = tuple(SHARED_LIMIT)
TENSOR_MEMORY_COLUMNS = 512
RESERVED_SHARED = 1024  # that every block has beyond the limit, and cuobjdump counts from sm_90 on
REGISTERS = 65_536  # of a multiprocessor, the most of one block
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one specialisation of a kernel needs. stack: bytes of local memory a thread, which is where spills go.

    num_stages is 0 for a kernel in CUDA."""

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
        if self.num_warps * 32 * self.registers > REGISTERS:
            found.append(f"{self.num_warps} warps of {self.registers} registers a thread of {REGISTERS}")
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


def resources(cubin: bytes, name: str) -> tuple[int, int, int]:
    """Registers and bytes of stack a thread, and bytes of static shared memory, of a cubin's kernel."""
    found = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", _dump(cubin, "--dump-resource-usage"))
    assert found, f"no kernel {name}"
    return int(found[1]), int(found[2]), int(found[3])


def assembly(cubin: bytes) -> str:
    """A cubin's instructions."""
    return _dump(cubin, "--dump-sass")


def launch_bounds(cubin: bytes, name: str) -> int:
    """Threads of a block that a cubin's kernel is compiled for: 1024 without __launch_bounds__."""
    found = re.search(
        r"EIATTR_MAX_THREADS\s+Format:\s+EIFMT_SVAL\s+Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", _attributes(cubin, name)
    )
    return math.prod(int(number, 16) for number in found.groups()) if found else 1024


def parameters(cubin: bytes, name: str) -> list[tuple[int, int]]:
    """Offset from the first one, and size, in bytes, of each parameter of a cubin's kernel, in order."""
    pattern = r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)"
    found = sorted(tuple(int(n, 16) for n in texts) for texts in re.findall(pattern, _attributes(cubin, name)))
    return [(offset - found[0][1], size) for _, offset, size in found]


def _attributes(cubin: bytes, name: str) -> str:
    section = re.search(rf"^\.nv\.info\.{name}$.*?(?=^\.|\Z)", _dump(cubin, "--dump-elf"), re.M | re.S)
    assert section, f"no kernel {name}"
    return section[0]


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(CUOBJDUMP), option, file.name], check=True, text=True, capture_output=True).stdout


@contextmanager
def _standing_in(arch: int, launched: dict[Any, Compiled]) -> Iterator[None]:
    """Kernels are compiled for `arch` and described in `launched`; nothing finds a GPU, even where there is one."""
    original = JITFunction.run

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in launched:
            launched[kernel.hash] = _describe(kernel, arch)
        return kernel

    def launch(
        self: CudaFunction, grid: Any, block: tuple[int, int, int], args: Any, shared_bytes: int = 0, pdl: bool = False
    ) -> None:
        assert not pdl or arch >= 90, "dependent launch before sm_90"
        self.marshal(args)
        module = self.module
        key = (module.source, module.options, self.name, block, shared_bytes)
        if key not in launched:
            launched[key] = compile_cuda(module.source, self.name, arch, module.options, shared_bytes, math.prod(block))
            # The driver reads from each pointer what the kernel declares, whatever the launcher put there.
            declared = parameters(compile_source(module.source, arch, module.options), self.name)
            assert self.parameters == declared, f"{self.name} ({self.signature}) has parameters {declared}"

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(CudaFunction, "launch", launch),
        mock.patch.object(driver, "_active", StandIn(arch)),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        yield


def compile_launches(run: Callable[[], object], arch: int) -> list[Compiled]:
    """What each kernel needs that `run` launches, once per specialisation, in order. Compilation errors are raised."""
    kernels: dict[Any, Compiled] = {}
    with _standing_in(arch, kernels):
        run()
    return list(kernels.values())


def compile_cuda(
    source: str,
    name: str,
    arch: int,
    options: tuple[str, ...] = (),
    shared_bytes: int = 0,
    threads: int | None = None,
) -> Compiled:
    """What a kernel of a CUDA source needs. shared_bytes: dynamic shared memory. threads of a block: or its bounds."""
    cubin = compile_source(source, arch, options)
    registers, stack, shared = resources(cubin, name)
    if shared and arch >= 90:
        shared -= RESERVED_SHARED
    warps = -(-(threads or launch_bounds(cubin, name)) // 32)
    return Compiled(name, arch, warps, 0, registers, stack, shared + shared_bytes, 0)


def _describe(kernel: Any, arch: int) -> Compiled:
    metadata = kernel.metadata
    registers, stack, _ = resources(kernel.asm["cubin"], metadata.name)
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
