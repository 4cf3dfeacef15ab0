"""ForwardBatch: the layout of a step, which rows are decodes, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.model.batch import PAD, BatchRow, ForwardBatch

DECODE = BatchRow([7], 5, [3, 9], 2)
FIRST_CHUNK = BatchRow([1, 2, 3], 0, [4], 0)
LATER_CHUNK = BatchRow([5, 6], 3, [8, 1], 1)
ONE_TOKEN_PROMPT = BatchRow([9], 0, [0], 3)
ONE_TOKEN_CHUNK = BatchRow([8], 4, [5, 6], 4)


def test_a_mixed_batch() -> None:
    batch = ForwardBatch.build([DECODE, ONE_TOKEN_CHUNK, FIRST_CHUNK, LATER_CHUNK, ONE_TOKEN_PROMPT], block_size=4)
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 3, 5, 6, 9]
    assert batch.num_decodes == 2, "one token with earlier ones behind it, whether or not the prompt is over"
    assert batch.query_start_loc.tolist() == [0, 1, 2, 5, 7, 8]
    assert batch.seq_lens.tolist() == [6, 5, 3, 5, 1]
    assert batch.num_computed.tolist() == [5, 4, 0, 3, 0]
    # Position 5 is offset 1 of the second block, 9; position 3 is offset 3 of block 8, 4 the start of block 1.
    assert batch.slot_mapping.tolist() == [37, 24, 16, 17, 18, 35, 4, 0]
    assert batch.block_table.tolist() == [[3, 9], [5, 6], [4, 0], [8, 1], [0, 0]]
    assert batch.state_indices.tolist() == [2, 4, 0, 1, 3]
    assert batch.has_initial_state.tolist() == [True, True, False, True, False]
    assert batch.prefill_start_loc.tolist() == [0, 3, 5, 6]
    counts = batch.num_tokens, batch.num_requests, batch.num_prefills, batch.num_prefill_tokens
    assert counts == (8, 5, 3, 6)
    assert batch.token_ids.dtype == batch.slot_mapping.dtype == torch.int64
    for name in ("query_start_loc", "seq_lens", "num_computed", "block_table", "state_indices"):
        assert getattr(batch, name).dtype == torch.int32, name


def test_padded_decodes_are_inert_and_stand_between_decodes_and_prefills() -> None:
    batch = ForwardBatch.build([DECODE, FIRST_CHUNK], block_size=4, pad_decodes_to=3)
    assert batch.num_decodes == 3
    assert batch.token_ids.tolist() == [7, 0, 0, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [37, PAD, PAD, 16, 17, 18]
    assert batch.state_indices.tolist() == [2, PAD, PAD, 0]
    assert batch.seq_lens.tolist() == [6, 0, 0, 3]
    assert batch.num_computed.tolist() == [5, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 6]
    assert batch.prefill_start_loc.tolist() == [0, 3]
    assert ForwardBatch.build([DECODE], 4, pad_decodes_to=1).num_decodes == 1
    assert PAD == -1


def test_a_model_without_attention_has_no_kv_slots() -> None:
    batch = ForwardBatch.build([BatchRow([7], 5, [], 2), BatchRow([1, 2], 0, [], 0)], block_size=4)
    assert batch.slot_mapping.tolist() == [PAD] * 3
    assert batch.block_table.tolist() == [[0], [0]]


def test_decodes_come_first() -> None:
    with pytest.raises(AssertionError, match="decode rows come first"):
        ForwardBatch.build([FIRST_CHUNK, DECODE], block_size=4)


def test_too_few_blocks_do_not_pass() -> None:
    with pytest.raises(IndexError):
        ForwardBatch.build([BatchRow([1] * 5, 0, [2], 0)], block_size=4)


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 8]),
    padding=st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_slots_follow_the_block_table(rows: list[tuple[int, int]], block_size: int, padding: int) -> None:
    """Every token's slot is where its position lies in its own row's blocks; nothing is shared."""
    next_block, built = 0, []
    for number, (count, computed) in enumerate(sorted(rows, key=lambda r: not (r[0] == 1 and r[1] > 0))):
        blocks = list(range(next_block, next_block + -(-(count + computed) // block_size)))[::-1]
        next_block += len(blocks)
        built.append(BatchRow(list(range(count)), computed, blocks, number))
    batch = ForwardBatch.build(built, block_size, pad_decodes_to=padding)
    assert batch.num_tokens == batch.query_start_loc[-1]
    assert batch.num_prefill_tokens == batch.prefill_start_loc[-1]
    starts = batch.query_start_loc.tolist()
    live = [slot for slot in batch.slot_mapping.tolist() if slot != PAD]
    assert len(set(live)) == len(live) == sum(count for count, _ in rows)
    for row in range(batch.num_requests):
        for token in range(starts[row], starts[row + 1]):
            slot = int(batch.slot_mapping[token])
            if int(batch.seq_lens[row]) == 0:
                assert slot == PAD
                continue
            position = int(batch.num_computed[row]) + token - starts[row]
            assert slot // block_size == int(batch.block_table[row, position // block_size])
            assert slot % block_size == position % block_size


def test_marks_lie_in_the_prefill_rows() -> None:
    """After a decode and between rows: token indices count from the first prefill token."""
    rows = [
        BatchRow([7], 5, [0], 0),
        BatchRow([1, 2, 3], 0, [1], 1),
        BatchRow([4, 5, 6, 7], 8, [2, 3], 2, marks=[(1, 9), (3, 8)]),
    ]
    marks = ForwardBatch.build(rows, 16).marks
    assert marks is not None
    assert marks.tokens.tolist() == [3, 3, 4, 5]
    assert marks.start_loc.tolist() == [0, 1, 4]
    assert (marks.sources.tolist(), marks.slots.tolist(), marks.num_computed.tolist()) == ([2, 2], [9, 8], [8, 8])
    assert marks.has_initial_state.tolist() == [True, True]
    assert ForwardBatch.build(rows[:2], 16).marks is None
    with pytest.raises(AssertionError, match="a mark lies inside of its row"):
        ForwardBatch.build([BatchRow([1, 2], 0, [0], 0, marks=[(2, 1)])], 16)
