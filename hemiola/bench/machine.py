"""What a benchmark says about its machine: versions, clocks, copy bandwidth, and how busy the GPU was.

The GPU's own counters come through NVML (the `nvml` extra); without it the document says so.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import hemiola

COPY_BYTES = 2 << 30
POLL_S = 0.02
# The GPU's utilisation is that of a sample period before the query, up to a sixth of a second.
SETTLE_S = 0.2


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
    """Bytes read and written per second by the fastest of torch's ways to copy: what memory gives at best."""
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


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call."""
    times: list[float] = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


class Nvml:
    """NVML's view of one CUDA device. `problem` says why there is none; then everything is None."""

    def __init__(self, device: torch.device) -> None:
        self.problem: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            self.problem = "no GPU"
            return
        try:
            self._nvml = import_module("pynvml")
        except ModuleNotFoundError:
            self.problem = "NVML's Python package is not installed (hemiola[nvml])"
            return
        try:
            self._nvml.nvmlInit()
            bus: Any = torch.cuda.get_device_properties(device)
            address = f"{bus.pci_domain_id:08x}:{bus.pci_bus_id:02x}:{bus.pci_device_id:02x}.0"
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

    def sample(self) -> tuple[int, int, float] | None:
        """Percent of the last sample period with a kernel running, SM clock in MHz, power in watts."""
        rates = self._read("nvmlDeviceGetUtilizationRates", self._handle)
        if rates is None:
            return None
        clock = self._read("nvmlDeviceGetClockInfo", self._handle, 1)
        power = self._read("nvmlDeviceGetPowerUsage", self._handle)
        return int(rates.gpu), int(clock or 0), (power or 0) / 1000


class BusyWindow:
    """Samples a GPU from a thread while the body runs, but for the time that the first sample would look back to."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._samples: list[tuple[int, int, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._start = self._seconds = 0.0

    def __enter__(self) -> BusyWindow:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._start
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        self._done.wait(SETTLE_S)
        while not self._done.wait(POLL_S):
            if (sample := self._nvml.sample()) is not None:
                self._samples.append(sample)

    def result(self) -> dict[str, Any]:
        """busy: mean fraction; None where nothing was sampled, with the reason."""
        if not self._samples:
            return {"busy": None, "why": self._nvml.problem or "the window was shorter than a sample"}
        busy, clocks, watts = zip(*self._samples, strict=True)
        return {
            "busy": statistics.mean(busy) / 100,
            "busy_min": min(busy) / 100,
            "samples": len(busy),
            "window_s": self._seconds,
            "sm_clock_mhz": [min(clocks), max(clocks)],
            "power_w": statistics.mean(watts),
        }
