"""What begins before the kernel ahead of it has ended: only where its inputs are there, and in memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hemiola.formats.weight import Scheme, SharedExpert, Weight
from hemiola.kernels import align, grouped_wgmma, linear_fp8, router, rows_mma
from hemiola.kernels.experts import NVFP4, ExpertWeights, SharedLinears
from hemiola.ops.device import moe_experts
from hemiola.ops.resident import ResidentWeights

HIDDEN, INTER, NUM_EXPERTS, TOP_K, TOKENS = 128, 64, 4, 2, 8


@pytest.mark.parametrize("shared", ["none", "before", "beside"])
def test_pairs_are_grouped_into_memory_from_before_the_shared_part(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing that the kernels beside the grouping use is written by it. Of the shared part the second linear begins
    early only behind a kernel that makes nothing for it."""
    events: list[str] = []

    def noted(module: Any, name: str, result: Any = None) -> None:
        real = getattr(module, name)

        def call(*args: Any, early: bool = False, **kwargs: Any) -> Any:
            events.append(f"{name}, early" if early else name)
            return real(*args, **kwargs) if result is None else result

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(grouped_wgmma, "capability", lambda: 80)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    noted(rows_mma, "empty_groups")
    noted(align, "empty_rows")
    for name in ("fill_groups", "project_groups", "combine"):
        noted(rows_mma, name, x)

    def first() -> torch.Tensor:
        events.append("first")
        return x

    def second(hidden: torch.Tensor, early: bool) -> torch.Tensor:
        assert hidden is x
        events.append("second, early" if early else "second")
        return x

    def bank(rows: int, columns: int) -> ExpertWeights:
        codes = torch.zeros(NUM_EXPERTS, rows, columns // 8, dtype=torch.int32)
        return ExpertWeights(codes, codes[..., : columns // 64], torch.ones(NUM_EXPERTS), None)

    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    weights = torch.ones(TOKENS, TOP_K)
    banks = bank(INTER, HIDDEN), bank(HIDDEN, INTER)
    assert banks[0].scheme == NVFP4
    linears = None if shared == "none" else SharedLinears(first, second, beside=shared == "beside")
    rows_mma.experts(x, ids, weights, *banks, 1.0, linears)
    projections = {
        "none": ["fill_groups", "project_groups", "project_groups"],
        "before": ["first", "second", "fill_groups, early", "project_groups", "project_groups"],
        "beside": ["first", "fill_groups, early", "project_groups", "second, early", "project_groups"],
    }
    assert events == ["empty_groups", "empty_rows", *projections[shared], "combine"]


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
    """The router's kernel for a few numbers of tokens norms x itself, and FP8's x is quantised. Down obeys."""
    monkeypatch.setattr(moe_experts, "capability", lambda: 90)
    seen: list[bool] = []

    def run(x: torch.Tensor, *args: Any, early: bool = False, **kwargs: Any) -> torch.Tensor:
        seen.append(early)
        return x

    monkeypatch.setattr(moe_experts._LINEAR[scheme], "run", run)
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
    weight = Weight("w", (HIDDEN, HIDDEN), scheme, torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8))
    linears = moe_experts._shared_linears(x, SharedExpert(weight, weight), ResidentWeights(x.device), invariant=False)
    is_early = scheme is not Scheme.FP8 and num_tokens not in router.NORM_TOKENS
    linears.part()
    linears.down(linears.up(), True)
    assert seen == [is_early, False, is_early, True]


@pytest.mark.parametrize("scheme", Scheme, ids=[scheme.value for scheme in Scheme])
def test_the_second_shared_linear_runs_beside_up_where_it_is_one_of_wgmma(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = Weight("w", (HIDDEN, HIDDEN), scheme, torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8))

    def is_beside(num_tokens: int) -> bool:
        x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
        linears = moe_experts._shared_linears(
            x, SharedExpert(weight, weight), ResidentWeights(x.device), invariant=False
        )
        return linears.beside

    most = moe_experts.BESIDE_TOKENS[scheme]
    monkeypatch.setattr(moe_experts, "capability", lambda: 90)
    assert [is_beside(count) for count in (1, most, most + 1)] == [most > 0, True, False]
    monkeypatch.setattr(moe_experts, "capability", lambda: 100)
    assert not is_beside(1)


def test_codes_that_a_kernel_of_its_own_makes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8's linear quantises bfloat16 in a kernel right before its own."""
    seen: list[bool] = []
    monkeypatch.setattr(linear_fp8.dense_wgmma, "takes", lambda x, weight: True)
    monkeypatch.setattr(linear_fp8.dense_wgmma, "linear", lambda *args, early: seen.append(early))
    codes = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(linear_fp8, "quantize", lambda x, scale: codes[: len(x)])
    weight = linear_fp8.Fp8Weight(codes, 1.0, 1.0, torch.ones(1))
    for x in (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), codes[:TOKENS]):
        for early in (False, True):
            linear_fp8.linear_fp8(x, weight, early=early)
    assert seen == [False, False, False, True]
