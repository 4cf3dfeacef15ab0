"""What torch reads from the environment: how its CPU threads wait, and how many compiled products it keeps. Has to be
said before torch computes anything, the first before it is imported."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let idle OpenMP threads sleep, unless the user's OMP_WAIT_POLICY says otherwise.

    Their default is to spin, which costs a decode step (many small products) most of its time as soon as the machine
    has anything else to do: on 2 cores of which 1 was busy, 18 tokens/s against 180 (shipped model, 2026-11-29).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


KEPT_PRODUCTS = 256


def keep_fewer_products() -> None:
    """Bound what oneDNN keeps of bf16 products, unless the user's environment says otherwise.

    It compiles one for every number of rows and keeps the last 1,024 of them, and torch keeps as many on top, each in a
    cache that reads its size from the environment when it is first used. Prompts have all lengths, so that both fill
    up: by 6 MiB a minute under mixed traffic of the shipped model (one core of a Xeon with AMX, 2026-11-30). 256 of
    each still hold a steady batch's; with them memory is flat from the 18th minute on, at the same speed.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_PRODUCTS))
