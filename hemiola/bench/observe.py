"""The other half of a benchmark: watches, from a process of its own, the one that is measured.

The measured process writes one JSON object per line: `gpu` (the address of its GPU), `begin` and `end` of each phase
(load, prefill, decode; in seconds of the machine's monotonic clock), and at its end `document`. Meanwhile the GPU is
sampled all the time; only what lies in a decode window is used, and only from a look-back after its beginning on,
because a reading is about the time before it. A process that ends without a document gives no figure.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hemiola.bench.machine import Sample
from hemiola.bench.window import Span, WindowError, check_window
from hemiola.errors import HemiolaError

POLL_S = 0.02
LOOK_BACK_S = 0.2  # NVML's utilisation is of a period before the query, a sixth of a second on data-centre GPUs
CLOCK_DROP = 0.05  # of the highest clock in a window; more is another state of the machine
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h); those that only say what is always so are left out.
SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class MeasuredProcessError(HemiolaError):
    """The measured process ended without a document. status: its own, a signal's number plus 128."""

    def __init__(self, status: int, phase: str) -> None:
        self.status, self.phase = status, phase
        super().__init__("NO FIGURE: the measured process ended", found=f"status {status}, in {phase}")


class Gpu(Protocol):
    """What is sampled, as `Nvml`."""

    problem: str | None

    def sample(self) -> Sample | None: ...


@dataclass(slots=True)
class Observation:
    """What was seen of a measured process: phases that have ended, in order, and all samples."""

    document: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    problem: str | None = None

    def busy(self, window: int) -> dict[str, Any]:
        """How busy the GPU was in the decode window of this number: see `busy_in`. Raises: WindowError."""
        windows = [span for span in self.spans if span.phase == "decode"]
        others = [span for span in self.spans if span.phase != "decode"]
        if window >= len(windows):
            raise WindowError("no such decode window", found=window, expected=f"below {len(windows)}")
        return busy_in(windows[window], others, self.samples, self.problem)


def observe(
    command: Sequence[str], open_gpu: Callable[[str | None], Gpu], progress: Callable[[str], None] = lambda what: None
) -> Observation:
    """Run a measured process to its end and watch it. open_gpu: of the address that the process gives.

    Raises: MeasuredProcessError.
    """
    seen = Observation()
    begun: dict[str, float] = {}
    done = threading.Event()
    sampler: threading.Thread | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe was asked for"
        try:
            for line in process.stdout:
                if not line.startswith('{"event"'):
                    sys.stderr.write(line)  # of a library that writes to its stdout
                    continue
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue  # it died while it wrote; its status says how
                match event["event"]:
                    case "gpu":
                        gpu = open_gpu(event["address"])
                        seen.problem = gpu.problem
                        sampler = threading.Thread(target=_sample, args=(gpu, seen.samples, done), daemon=True)
                        sampler.start()
                    case "begin":
                        begun[event["phase"]] = event["at_s"]
                    case "end":
                        seen.spans.append(Span(event["phase"], begun.pop(event["phase"]), event["at_s"]))
                    case "next":
                        progress(event["what"])
                    case "document":
                        seen.document = event["document"]
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            done.set()
            if sampler is not None:
                sampler.join()
    if status or not seen.document:
        raise MeasuredProcessError(status if status >= 0 else 128 - status, _where(begun, seen.spans))
    return seen


def _where(begun: Iterable[str], ended: Sequence[Span]) -> str:
    return next(iter(begun), f"what comes after {ended[-1].phase}" if ended else "what comes before its first phase")


def _sample(gpu: Gpu, samples: list[Sample], done: threading.Event) -> None:
    while not done.wait(POLL_S):
        if (sample := gpu.sample()) is not None:
            samples.append(sample)


def busy_in(
    window: Span, others: Sequence[Span], samples: Sequence[Sample], problem: str | None = None
) -> dict[str, Any]:
    """What the samples in a window say. busy: mean fraction of the time with a kernel running; None where nothing was
    sampled, with the reason. unsteady: why the window is not of one state of the machine, "" where it is.

    others: the parts of the run that must not be in it. Raises: WindowError.
    """
    check_window(window, others)
    inside = [sample for sample in samples if window.start_s + LOOK_BACK_S <= sample.at_s <= window.end_s]
    seen = {"window_s": window.seconds, "look_back_s": LOOK_BACK_S, "samples": len(inside)}
    if not inside:
        return {"busy": None, "why": problem or "the window was shorter than a sample", **seen, "unsteady": ""}
    clocks = [sample.clock_mhz for sample in inside if sample.clock_mhz is not None]
    watts = [sample.power_w for sample in inside if sample.power_w is not None]
    throttles = [sample.throttle for sample in inside if sample.throttle is not None]
    reasons = Counter(reason for bits in throttles for bit, reason in SLOWED.items() if bits & bit)
    return {
        "busy": statistics.mean(sample.busy for sample in inside) / 100,
        "busy_min": min(sample.busy for sample in inside) / 100,
        **seen,
        "clock_mhz": _clocks(clocks),
        "power_w": {"mean": statistics.mean(watts), "max": max(watts)} if watts else None,
        "throttle": dict(reasons) if throttles else None,
        "unsteady": _unsteady(clocks, reasons, len(inside)),
    }


def _clocks(clocks: Sequence[int]) -> dict[str, float] | None:
    if not clocks:
        return None
    return {"start": clocks[0], "min": min(clocks), "median": statistics.median(clocks), "max": max(clocks)}


def _unsteady(clocks: Sequence[int], reasons: Counter[str], count: int) -> str:
    told = []
    if clocks and min(clocks) < (1 - CLOCK_DROP) * max(clocks):
        told.append(f"the SM clock was between {min(clocks)} and {max(clocks)} MHz")
    told += [f"{reason} in {times} of {count} samples" for reason, times in reasons.items()]
    return "; ".join(told)
