"""A program: loads a checkpoint in bf16, reads every weight, and writes figures in bytes as JSON.

A process of its own, so that nothing but the loading moves its resident set. A small checkpoint of the same kind is
loaded and run first, so that the libraries' code and buffers are there. Then the growth of the peak resident set
(mapped file pages included) is taken: `peak_loading` to the engine's being ready, `peak` to after a forward pass and a
read of every page of every weight.

    python -m tests.support.measure_loading SMALL_FOLDER FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.loading import Loaded, load
from hemiola.model.mixers.moe import MoEMixer


def status(key: str) -> int:
    """A memory figure of this process in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def run(folder: str) -> tuple[Loaded, int]:
    """Load and use a checkpoint; also returns the peak resident set when it was loaded."""
    loaded = load(folder, EngineConfig(dtype="bf16", cache_bytes=1 << 22, max_model_len=64))
    peak = status("VmHWM")
    loaded.engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
    while loaded.engine.has_unfinished:
        loaded.engine.step()
    # A forward pass reads every linear; of the embedding it takes rows, and of the experts some.
    model = loaded.engine.model
    moe = [layer.mixer for layer in model.layers if isinstance(layer.mixer, MoEMixer)]
    for weight in (model.embeddings, *(weight for mixer in moe for weight in (*mixer.up, *mixer.down))):
        weight.data.flatten().view(torch.uint8)[::512].sum()
    return loaded, peak


def main(small_folder: str, folder: str) -> None:
    small, _ = run(small_folder)
    before = status("VmRSS")
    loaded, peak_loading = run(folder)
    figures = {
        "weights": sum(module.resident_bytes for module in loaded.manifest.modules),
        "kept": loaded.engine.model.ops.kept.kept_bytes,
        "peak_loading": peak_loading - before,
        "peak": status("VmHWM") - before,
    }
    sys.stdout.write(json.dumps(figures))
    del small  # held until here, so that its memory is not taken for the other's


if __name__ == "__main__":
    main(*sys.argv[1:])
