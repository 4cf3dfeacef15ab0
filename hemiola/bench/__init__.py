"""`hemiola bench`: what an engine does on this machine, in one document: speed, memory, start, bytes, paths.

One process runs the ordinary Engine, greedy and past the end of text, and adds nothing to what a step does; another one
observes it.
"""

from hemiola.bench.cells import LONG_CELLS, STANDARD_CELLS, Cell, cell
from hemiola.bench.machine import Nvml, machine_facts, source_facts
from hemiola.bench.observe import MeasuredProcessError, Observation, observe
from hemiola.bench.run import BenchOptions, command_of, run_bench
from hemiola.bench.window import WindowError

__all__ = [
    "LONG_CELLS",
    "STANDARD_CELLS",
    "BenchOptions",
    "Cell",
    "MeasuredProcessError",
    "Nvml",
    "Observation",
    "WindowError",
    "cell",
    "command_of",
    "machine_facts",
    "observe",
    "run_bench",
    "source_facts",
]
