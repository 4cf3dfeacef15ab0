"""What every launcher needs to know about the machine: its compute capability, and programmatic dependent launch.

With programmatic dependent launch a kernel may start while the one before it in the stream still runs. It waits
(`gdc_wait`) before it reads what earlier kernels wrote and before it writes anything; what it does before that, such as
loading weights, overlaps. Every kernel that is launched so has to wait: a kernel's end vouches for all before it. And
it calls `gdc_launch_dependents` behind its wait, not before: so a kernel that starts finds all ended but the two before
it, of which mamba2_update.cu makes use. And what the kernel before it waited for has ended: a kernel that reads nothing
else need not wait first (`early`, in nvfp4_wgmma.cu, dense_wgmma.cu and align.cu), and align.cu writes what nobody else
uses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

__all__ = [
    "capability",
    "compiling",
    "gdc_launch_dependents",
    "gdc_wait",
    "is_interpreted",
    "launch_options",
    "num_sms",
    "shared_memory",
    "uses_pdl",
]


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def capability() -> int:
    """Compute capability of the GPU that kernels are compiled for, such as 90; 0 in the interpreter."""
    if is_interpreted():
        return 0
    if torch.cuda.is_available():
        return _device_capability()
    return int(triton.runtime.driver.active.get_current_target().arch)


@cache
def _device_capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@cache
def num_sms() -> int:
    """Multiprocessors of the GPU; an H200's 132 where there is none (a compilation without a GPU)."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132


def shared_memory() -> int:
    """Bytes of shared memory that a block may ask for."""
    if torch.cuda.is_available():
        return _device_shared_memory()
    by_capability = {0: 227, 80: 163, 86: 99, 89: 99, 120: 99, 121: 99}
    return by_capability.get(capability(), 227) << 10


@cache
def _device_shared_memory() -> int:
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)


def uses_pdl() -> bool:
    """Whether kernels are launched with programmatic dependent launch: from Hopper on."""
    return capability() >= 90


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch."""
    return {"launch_pdl": True} if pdl else {}


class _Compiling:
    """What is being compiled now, and for which thread: see `compiling`."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.thread = get_ident()
        self.threads = threads
        self.modules: set[object] = set()


_compiling: _Compiling | None = None
_one_at_a_time = Lock()


@contextmanager
def compiling() -> Iterator[None]:
    """Within, a kernel that this thread launches is compiled, beside others, and does not run; in the end all are.

    Other threads' launches run as ever. Results are whatever memory held. What is no kernel of this package, such as
    torch's products, runs. What does not compile says so when it is launched for good.
    """
    global _compiling
    with _one_at_a_time, ThreadPoolExecutor() as threads:
        run, own = JITFunction.run, _Compiling(threads)

        def run_or_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or get_ident() == own.thread, **kwargs)

        JITFunction.run, _compiling = run_or_compile, own
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                yield
        finally:
            JITFunction.run, _compiling = run, None


def compiles_only(module: object, compile_: Callable[[], object]) -> bool:
    """Whether a launch has to be left out; `compile_` is then called in a thread, once for each module."""
    now = _compiling
    if now is None or now.thread != get_ident():
        return False
    if module not in now.modules:
        now.modules.add(module)
        now.threads.submit(compile_)
    return True
