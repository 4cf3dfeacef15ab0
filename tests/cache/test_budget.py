"""From a byte budget to blocks and slots: the arithmetic, the clamp and the refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.cache.budget import CachePlan, plan_caches
from hemiola.cache.tensors import allocate_caches
from hemiola.errors import CapacityError
from hemiola.model.specs import KVSpec, KVTensors, StateSpec, StateTensors

# Nemotron-3 Nano 30B: 23 mamba2 layers, 6 attention layers.
NANO_STATE = StateSpec(0, conv_dim=6144, conv_history=3, num_heads=64, head_dim=64, state_size=128)
NANO_KV = KVSpec(0, kv_heads=2, head_dim=128)
NANO = [NANO_STATE] * 23 + [NANO_KV] * 6 + [None] * 23
STATE = StateSpec(0, conv_dim=10, conv_history=3, num_heads=2, head_dim=4, state_size=5)  # 60 + 160 bytes in bf16
KV = KVSpec(1, kv_heads=1, head_dim=8)  # 32 bytes a token in bf16


def plan(specs: list[Any], budget_bytes: int, **changes: Any) -> CachePlan:
    values = {
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": 1024,
        "activation_bytes": 2,
        "kv_element_bytes": 2,
        "prefix_caching": False,
        "snapshot_bytes": 0,
        "host_snapshot_bytes": 0,
        "max_snapshots": None,
    }
    return plan_caches(specs, budget_bytes=budget_bytes, **(values | changes))


def test_public_sizes() -> None:
    """49.08 MB of recurrent state per request, 6,144 bytes of bf16 KV per token, half of that in fp8."""
    p = plan(NANO, 16 << 30)
    assert p.slot_bytes == 49_082_368
    assert p.block_bytes == 16 * 6_144
    assert plan(NANO, 16 << 30, kv_element_bytes=1).block_bytes == 16 * 3_072
    assert plan(NANO, 16 << 30, activation_bytes=4).slot_bytes == 49_082_368 + 23 * 36_864


@pytest.mark.parametrize("specs", [[STATE], [STATE, KV]])
def test_more_sequences_than_states_are_clamped_and_said(specs: list[Any]) -> None:
    """B24: 64 sequences asked for, memory for 10 states."""
    budget = 10 * 220 * len(specs)  # with attention present, half of the budget is for states
    p = plan(specs, budget + 219)
    assert p.num_slots == 10
    (note,) = p.notes
    for part in ("64", "10", "220", f"{budget + 219:,}"):
        assert part in note
    assert p.total_bytes <= budget + 219
    assert plan(specs, budget - 1).num_slots == 9


def test_no_note_when_nothing_is_clamped() -> None:
    p = plan([STATE, KV], 1 << 30)
    assert (p.num_slots, p.notes) == (64, ())


def test_blocks_are_bounded_by_what_requests_can_use() -> None:
    """64 requests of 1,000 tokens need 63 blocks of 16 each, whatever the budget."""
    assert plan([STATE, KV], 1 << 30, max_model_len=1000).num_blocks == 64 * 63
    p = plan([STATE, KV], 64 * 220 + 64 * 220 + 100)
    assert p.num_blocks == (64 * 220 + 100) // (32 * 16)


def test_patterns_without_a_cache() -> None:
    p = plan([None, STATE], 1 << 20)
    assert (p.num_blocks, p.block_bytes, p.num_slots) == (0, 0, 64)
    assert p.blocks_for(10**6) == 0
    p = plan([KV, None], 1 << 20)
    assert (p.slot_bytes, p.num_slots, p.notes) == (0, 64, ())
    assert p.num_blocks == (1 << 20) // 512
    p = plan([None], 1)
    assert (p.num_slots, p.total_bytes) == (64, 0)


def test_blocks_for() -> None:
    p = plan([KV], 1 << 20)
    assert [p.blocks_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_budget_for_not_even_one_request_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(CapacityError) as refusal:
        plan([STATE, KV], 731)
    for part in ("cache_bytes", "220", "512", "731", "732", "16 tokens"):
        assert part in str(refusal.value)
    smallest = plan([STATE, KV], 732)
    assert (smallest.num_slots, smallest.num_blocks) == (1, 1)


def test_the_smallest_budget_still_has_a_block_when_states_take_more_than_half() -> None:
    big = StateSpec(0, conv_dim=10, conv_history=3, num_heads=20, head_dim=10, state_size=50)
    p = plan([big, KV], 60 + 40_000 + 512)
    assert (p.num_slots, p.num_blocks) == (1, 1)


def test_states_leave_room_for_a_block_that_is_larger_than_half_of_the_budget() -> None:
    """Slots of 220 bytes would fit the half three times; then the block of 1,536 bytes would not fit."""
    p = plan([STATE, KV, KV, KV], 1_536 + 2 * 220 + 219)
    assert (p.num_slots, p.num_blocks) == (2, 1)


@given(
    budget=st.integers(1, 100_000),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.integers(1, 80),
    max_model_len=st.integers(1, 500),
    specs=st.lists(st.sampled_from([STATE, KV, None]), max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_never_exceeds_its_budget(
    budget: int, block_size: int, max_num_seqs: int, max_model_len: int, specs: list[Any]
) -> None:
    settings_ = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    try:
        p = plan(specs, budget, **settings_)
    except CapacityError:
        assert budget < specs.count(STATE) * 220 + specs.count(KV) * 32 * block_size
        return
    assert p.total_bytes <= budget
    assert 1 <= p.num_slots <= max_num_seqs
    assert (p.num_blocks >= 1) == (KV in specs)
    assert bool(p.notes) == (p.num_slots < max_num_seqs)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float32)])
def test_tensors_take_the_planned_bytes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    sizes = {"activation_bytes": dtype.itemsize, "kv_element_bytes": kv_dtype.itemsize, "max_num_seqs": 3}
    p = plan([STATE, None, KV], 40_000, **sizes)
    state, nothing, kv = allocate_caches([STATE, None, KV], p, dtype, kv_dtype)
    assert isinstance(state, StateTensors)
    assert isinstance(kv, KVTensors)
    assert nothing is None
    assert (state.conv.shape, state.conv.dtype) == ((3, 10, 3), dtype)
    assert (state.ssm.shape, state.ssm.dtype) == ((3, 2, 4, 5), torch.float32)
    assert kv.k.shape == kv.v.shape == (p.num_blocks, 16, 1, 8)
    assert kv.k.dtype == kv.v.dtype == kv_dtype
    assert sum(t.nbytes for t in (*state, *kv)) == p.total_bytes
