"""What a benchmark says about its machine: versions, clocks, memory bandwidth, and what NVML reads of its GPU.

The GPU's own counters come through NVML (the `nvml` extra); without it the document says so.
"""

from __future__ import annotations

import hashlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hemiola

COPY_BYTES = 2 << 30
AT_ONCE = 8  # reads, or copies, that are timed together on a GPU
SOURCES = (".py", ".cu", ".cuh")  # of the package, that decide what it computes


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"hemiola": hemiola.__version__, "commit": commit(), "python": platform.python_version()}
    for package in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """Of the source tree that runs, "-dirty" where tracked files differ; None where there is no tree."""
    command = ["git", "-C", str(Path(hemiola.__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, text=True, capture_output=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def copy_bandwidth(device: torch.device, num_bytes: int = COPY_BYTES, repeats: int = 10) -> dict[str, Any]:
    """Bytes read and written per second by the fastest of torch's ways to copy."""
    source = torch.zeros(num_bytes // 16, dtype=torch.complex128, device=device)
    target = torch.empty_like(source)
    words, other = source.view(torch.float32), target.view(torch.float32)
    ways: dict[str, Callable[[], object]] = {
        "copy_": lambda: target.copy_(source),
        "neg of float32": lambda: torch.neg(words, out=other),
    }
    rates = {name: 2 * num_bytes / _seconds(way, device, repeats) for name, way in ways.items()}
    best = max(rates, key=lambda name: rates[name])
    return {"bytes_per_s": rates[best], "way": best, "bytes": num_bytes, "all": rates}


def read_bandwidth(device: torch.device, num_bytes: int = COPY_BYTES, repeats: int = 10) -> dict[str, Any]:
    """Bytes read per second where nothing is written: what weights could be streamed at, faster than a copy. On a GPU
    by `kernels.read`, elsewhere by torch's sum."""
    words = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    if device.type == "cuda":
        from hemiola.kernels.read import read  # Triton is not everywhere

        way, run = "read_kernel", partial(read, words)
    else:
        way, run = "sum of int32", partial(torch.sum, words)
    return {"bytes_per_s": num_bytes / _seconds(run, device, repeats), "way": way, "bytes": num_bytes}


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call; on a GPU of AT_ONCE on end, since it waits for the host's launch of the first alone."""
    times: list[float] = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(AT_ONCE):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / AT_ONCE)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


class Nvml:
    """NVML's view of one GPU. `problem` says why there is none; then everything is None.

    address: the GPU's on the PCI bus, "00000000:3b:00.0"; None where there is no GPU. module: NVML's Python package.
    """

    def __init__(self, address: str | None, module: str = "pynvml") -> None:
        self.problem: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        if address is None:
            self.problem = "no GPU"
            return
        try:
            self._nvml = import_module(module)
        except ModuleNotFoundError:
            self.problem = "NVML's Python package is not installed (hemiola[nvml])"
            return
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        except self._nvml.NVMLError as error:
            self.problem = f"NVML: {error}"

    def _read(self, function: str, *args: Any) -> Any:
        if self.problem is not None:
            return None
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError:
            return None

    def describe(self) -> dict[str, Any]:
        """Driver, clocks in MHz and power limit in watts."""
        limit = self._read("nvmlDeviceGetEnforcedPowerLimit", self._handle)
        return {
            "driver": self._read("nvmlSystemGetDriverVersion"),
            "sm_clock_mhz": self._read("nvmlDeviceGetClockInfo", self._handle, 1),
            "sm_clock_max_mhz": self._read("nvmlDeviceGetMaxClockInfo", self._handle, 1),
            "memory_clock_mhz": self._read("nvmlDeviceGetClockInfo", self._handle, 2),
            "power_limit_w": None if limit is None else limit / 1000,
            "nvml": self.problem or "read",
        }

    def sample(self) -> Sample | None:
        at_s = time.monotonic()
        rates = self._read("nvmlDeviceGetUtilizationRates", self._handle)
        if rates is None:
            return None
        power = self._read("nvmlDeviceGetPowerUsage", self._handle)
        return Sample(
            at_s,
            int(rates.gpu),
            self._read("nvmlDeviceGetClockInfo", self._handle, 1),
            None if power is None else power / 1000,
            self._read("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle),
        )


class Sample(NamedTuple):
    """at_s: of `time.monotonic`. busy: percent of the sample period before it in which a kernel ran. SM clock in MHz,
    power in watts, the bits of what slows the clocks; None where NVML does not say."""

    at_s: float
    busy: int
    clock_mhz: int | None
    power_w: float | None
    throttle: int | None


def gpu_address(device: torch.device) -> str | None:
    """On the PCI bus, as NVML takes it."""
    if device.type != "cuda":
        return None
    bus: Any = torch.cuda.get_device_properties(device)
    return f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name and size of what runs; of a GPU also driver, clocks and power limit."""
    if device.type != "cuda":
        return {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        **Nvml(gpu_address(device)).describe(),
    }


def cpu_name() -> str:
    """As Linux has it, "CPU" where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "CPU"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "CPU"


def machine_facts(device: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of a machine. device: of `describe_device`."""
    number = device.get("threads")
    threads = f", {number} thread{'s' if number > 1 else ''}" if number else ""
    return {"device": f"{device['name']}{threads}", "driver": device.get("driver"), "versions": versions()}


def source_facts() -> dict[str, Any]:
    """What runs: the commit of its source tree and whether tracked files differ from it, both None where there is no
    repository, and in any case a digest of the package's sources."""
    described, root = commit(), Path(hemiola.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(file for suffix in SOURCES for file in root.rglob(f"*{suffix}")):
        digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return {
        "commit": None if described is None else described.removesuffix("-dirty"),
        "is_dirty": None if described is None else described.endswith("-dirty"),
        "sha256": digest.hexdigest(),
    }
