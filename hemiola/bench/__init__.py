"""`hemiola bench`: what an engine does on this machine, in one document: speed, memory, start, bytes, paths.

It drives the ordinary Engine, greedy and past the end of text, and adds nothing to what a step does.
"""

from hemiola.bench.cells import LONG_CELLS, STANDARD_CELLS, Cell, cell
from hemiola.bench.run import BenchOptions, run_bench

__all__ = ["LONG_CELLS", "STANDARD_CELLS", "BenchOptions", "Cell", "cell", "run_bench"]
