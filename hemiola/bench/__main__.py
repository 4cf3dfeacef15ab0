"""The measured process: `python -m hemiola.bench OPTIONS`, the options as JSON; `hemiola bench` starts and observes it.

Its stdout is for events alone (see observe.py); what else is written goes to stderr.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from hemiola.bench.cells import Cell
from hemiola.bench.run import BenchOptions, run_bench
from hemiola.errors import HemiolaError

REFUSED = 2  # as the command line ends for what a user can mend


def main() -> int:
    begun_s = time.monotonic()
    events, sys.stdout = sys.stdout, sys.stderr
    values = json.loads(sys.argv[1])
    imports_s = begun_s - values.pop("spawned_s")
    options = BenchOptions(**{**values, "cells": tuple(Cell(**cell) for cell in values["cells"])})

    def emit(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event, allow_nan=False) + "\n")
        events.flush()

    try:
        document = run_bench(options, imports_s, emit, settle)
    except HemiolaError as error:
        sys.stderr.write(f"error: {error}\n")
        return REFUSED
    emit({"event": "document", "document": document})
    return 0


def settle() -> None:
    """As a server does: what is loaded stays, and looking through it again would stop a step for some 200 ms."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
