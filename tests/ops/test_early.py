"""What begins before the kernel ahead of it has ended: only where its inputs are there, and in memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hemiola.formats.weight import Scheme, SharedExpert, Weight
from hemiola.kernels import align, router, rows_mma
from hemiola.kernels.experts import NVFP4, ExpertWeights
from hemiola.ops.device import moe_experts
from hemiola.ops.resident import ResidentWeights

HIDDEN, INTER, NUM_EXPERTS, TOP_K, TOKENS = 128, 64, 4, 2, 8


@pytest.mark.parametrize("has_shared", [True, False])
def test_pairs_are_grouped_into_memory_from_before_the_shared_part(
    has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing that the kernels beside the grouping use is written by it."""
    events: list[str] = []

    def noted(module: Any, name: str, result: Any = None) -> None:
        real = getattr(module, name)

        def call(*args: Any, early: bool = False, **kwargs: Any) -> Any:
            events.append(f"{name}, early" if early else name)
            return real(*args, **kwargs) if result is None else result

        monkeypatch.setattr(module, name, call)

    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    noted(rows_mma, "empty_groups")
    noted(align, "empty_rows")
    for name in ("fill_groups", "project_groups", "combine"):
        noted(rows_mma, name, x)

    def shared() -> torch.Tensor:
        events.append("shared")
        return x

    def bank(rows: int, columns: int) -> ExpertWeights:
        codes = torch.zeros(NUM_EXPERTS, rows, columns // 8, dtype=torch.int32)
        return ExpertWeights(codes, codes[..., : columns // 64], torch.ones(NUM_EXPERTS), None)

    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    weights = torch.ones(TOKENS, TOP_K)
    banks = bank(INTER, HIDDEN), bank(HIDDEN, INTER)
    assert banks[0].scheme == NVFP4
    rows_mma.experts(x, ids, weights, *banks, 1.0, shared if has_shared else None)
    grouping = ["shared", "fill_groups, early"] if has_shared else ["fill_groups"]
    assert events == ["empty_groups", "empty_rows", *grouping, "project_groups", "project_groups", "combine"]


def test_down_which_begins_beside_up_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    launched = SimpleNamespace(launch=lambda grid, block, args, **kwargs: given.append(args[-1]))
    monkeypatch.setattr(rows_mma, "_group_function", lambda options: launched)
    monkeypatch.setattr(rows_mma, "uses_pdl", lambda: True)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    bank = ExpertWeights(torch.zeros(NUM_EXPERTS, HIDDEN, HIDDEN, dtype=torch.bfloat16), None, None, None)
    for tile in (rows_mma.GroupTile(8, 8, 3, 3, 50, 2), rows_mma.GroupTile(8, 8, 3, 3)):
        for pair_weights in (None, x, None, x):
            rows_mma.project_groups(x, 1, bank, TOP_K, x, x, x, x, tile, pair_weights=pair_weights)
    up, down = given[:2]
    assert up is not down
    assert given[2] is up
    assert given[3] is down
    assert [counter.tolist() for counter in (up, down)] == [[0, 0]] * 2
    assert given[4:] == [None] * 4, "nothing is left to be counted"


@pytest.mark.parametrize("scheme", Scheme, ids=[scheme.value for scheme in Scheme])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 64])
def test_the_shared_part_begins_early_behind_a_router_that_does_not_make_its_input(
    num_tokens: int, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's kernel for a few numbers of tokens norms x itself, and FP8's x is quantised. Down always waits."""
    seen: list[bool] = []

    def run(x: torch.Tensor, *args: Any, early: bool = False, **kwargs: Any) -> torch.Tensor:
        seen.append(early)
        return x

    monkeypatch.setattr(moe_experts._LINEAR[scheme], "run", run)
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
    weight = Weight("w", (HIDDEN, HIDDEN), scheme, torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8))
    moe_experts._shared_part(x, SharedExpert(weight, weight), ResidentWeights(x.device), invariant=False)
    assert seen == [scheme is not Scheme.FP8 and num_tokens not in router.NORM_TOKENS, False]
