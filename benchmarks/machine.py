"""What a record of measurements says about where they were taken."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from hemiola import __version__


def conditions() -> dict[str, Any]:
    """The CPU, how many of it there are and are used, and versions. Call it when the engine is made."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": len(names) or None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "hemiola": __version__,
        "torch": torch.__version__,
    }
