"""What the GPU ran in a few decode steps, from the kernels' own timestamps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def trace(step: Callable[[], object], steps: int, synchronize: Callable[[], None]) -> dict[str, Any]:
    """busy: the part of the time from the first kernel's start to the last one's end in which any kernel ran. Kernels
    by time, each with its microseconds and launches per step; tracing itself slows the host. A kernel that is launched
    early waits for the one before it, which counts as its time; `own_us_per_step` is what comes after that one's end.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    spans = []
    by_name: dict[str, list[float]] = defaultdict(list)
    own: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA"):
            spans.append((event.time_range.start, event.time_range.end, event.name))
            by_name[event.name].append(event.time_range.end - event.time_range.start)
    if not spans:
        return {"busy": None, "why": "the profiler saw no kernel"}
    window = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    running = covered([(start, end) for start, end, _ in spans], window)
    reached = 0.0
    for begin, end, name in sorted(spans, key=lambda span: span[1]):
        own[name] += end - max(begin, reached)
        reached = end
    kernels = sorted(by_name.items(), key=lambda item: -own[item[0]])
    return {
        "busy": running / (window[1] - window[0]),
        "window_us": window[1] - window[0],
        "steps": steps,
        "launches_per_step": len(spans) / steps,
        "kernels": [
            {
                "name": name,
                "own_us_per_step": own[name] / steps,
                "us_per_step": sum(times) / steps,
                "launches_per_step": len(times) / steps,
            }
            for name, times in kernels
        ],
    }


def covered(spans: list[tuple[float, float]], window: tuple[float, float]) -> float:
    """Length of the union of the spans, which may overlap, inside the window."""
    running, reached = 0.0, window[0]
    for start, end in sorted(spans):
        running += max(0.0, min(end, window[1]) - max(start, reached))
        reached = max(reached, end)
    return running
