"""How torch's CPU threads wait for each other. Has to be said before torch is imported."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let idle OpenMP threads sleep, unless the user's OMP_WAIT_POLICY says otherwise.

    Their default is to spin, which costs a decode step (many small products) most of its time as soon as the machine
    has anything else to do: on 2 cores of which 1 was busy, 18 tokens/s against 180 (shipped model, 2026-11-29).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
