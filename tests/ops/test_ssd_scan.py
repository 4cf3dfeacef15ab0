"""The chunked SSD scan against the float64 recurrence: lengths, splits, the chunk grid, padding, and its roundings."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hemiola.ops.ssd_scan import ssd_scan
from hemiola.ops.ssd_update import ssd_update
from tests.support.numerics import INF, assert_close, assert_ledger, bf16, generator, randn, relative_error
from tests.support.ssd import SSDInputs, recurrence

SLOTS, CHUNK = 4, 16
NO_LIMIT = (0.0, INF)
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 48, 53, 65]


def run(
    inputs: SSDInputs,
    ssm_state: Tensor,
    slots: list[int],
    counts: list[int],
    computed: list[int],
    chunk_size: int = CHUNK,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    i = inputs
    rows = [torch.tensor(v, dtype=torch.int32) for v in (slots, [0, *accumulate(counts)], computed)]
    return ssd_scan(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, ssm_state, *rows, chunk_size, dt_limit)


def states(inputs: SSDInputs, fill: float = float("nan")) -> Tensor:
    _, heads, head_dim = inputs.x.shape
    return torch.full((SLOTS, heads, head_dim, inputs.B.shape[2]), fill)


def piecewise(inputs: SSDInputs, cuts: list[int], *, one_token_form: bool = False) -> tuple[Tensor, Tensor]:
    """Slot 1 of a pool of NaN, fed piece by piece. Returns y and the last state."""
    length, state, parts = inputs.x.shape[0], states(inputs), []
    for low, high in pairwise([0, *cuts, length]):
        i = inputs.rows(slice(low, high))
        if one_token_form and high - low == 1 and low:
            index = torch.tensor([1])
            parts.append(ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, i.dt_bias, state, index, NO_LIMIT))
        else:
            parts.append(run(i, state, [1], [high - low], [low]))
    return torch.cat(parts), state[1]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("dt_limit", [NO_LIMIT, (0.01, 0.1)])
@pytest.mark.parametrize("computed", [0, 5, 16])
def test_float32_equals_the_recurrence(num_tokens: int, dt_limit: tuple[float, float], computed: int) -> None:
    """B2: all lengths around the chunk size, more than two chunks, with and without a state before them."""
    g = generator(num_tokens)
    inputs = SSDInputs.random(g, num_tokens)
    state = states(inputs)
    if computed:
        state[2] = randn(g, *state.shape[1:])
    initial = state[2].clone() if computed else None
    y = run(inputs, state, [2], [num_tokens], [computed], dt_limit=dt_limit)
    expected, new_state = recurrence(inputs, initial, dt_limit)
    assert_close(y, expected, 2e-6)
    assert_close(state[2], new_state, 2e-6)
    assert state[[0, 1, 3]].isnan().all(), "neighbours' slots are untouched"
    if dt_limit != NO_LIMIT:
        assert relative_error(state[2], recurrence(inputs, initial)[1]) > 1e-2, "the limit bites"


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (4, 4, 1, 7), (8, 3, 8, 2), (6, 1, 2, 16), (4, 8, 4, 1)])
@pytest.mark.parametrize("chunk_size", [1, 2, 64])
def test_any_shape(shape: tuple[int, int, int, int], chunk_size: int) -> None:
    heads, head_dim, groups, state_size = shape
    inputs = SSDInputs.random(
        generator(heads), 21, heads=heads, head_dim=head_dim, groups=groups, state_size=state_size
    )
    state = states(inputs)
    y = run(inputs, state, [0], [21], [0], chunk_size)
    expected, new_state = recurrence(inputs)
    assert_close(y, expected, 2e-6)
    assert_close(state[0], new_state, 2e-6)


def test_large_steps_do_not_overflow() -> None:
    """Decays over a chunk of exp(-300) and less: the scan must not form their inverses."""
    inputs = SSDInputs.random(generator(0), 40)
    inputs = replace(inputs, dt=inputs.dt.abs() + 20, A=torch.full((4,), -3.0))
    state = states(inputs)
    y = run(inputs, state, [0], [40], [0])
    expected, new_state = recurrence(inputs)
    assert_close(y, expected, 2e-6)
    assert_close(state[0], new_state, 2e-6)


def test_every_split_of_48_tokens_gives_the_same() -> None:
    """B3 and B8: one cut anywhere, several cuts, pieces of one token in either form."""
    inputs = SSDInputs.random(generator(1), 48)
    whole, whole_state = piecewise(inputs, [])
    for cuts in [*([cut] for cut in range(1, 48)), [13, 40], list(range(4, 48, 4)), list(range(1, 48))]:
        for one_token_form in (False, True):
            y, state = piecewise(inputs, cuts, one_token_form=one_token_form)
            assert_close(state, whole_state, 1e-5)
            assert_close(y, whole, 1e-5)


@pytest.mark.parametrize("budget", [10, 24, 25, 40])
def test_a_token_budget_off_the_chunk_grid_gives_the_same(budget: int) -> None:
    """B8: 100 tokens."""
    inputs = SSDInputs.random(generator(2), 100)
    y, state = piecewise(inputs, list(range(budget, 100, budget)))
    expected, new_state = recurrence(inputs)
    assert_close(y, expected, 2e-6)
    assert_close(state, new_state, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_requests_are_as_alone(dtype: torch.dtype) -> None:
    """B8: 37, 5 and 58 tokens in one batch, the second at position 21 of its own prompt: the same bits as alone."""
    g = generator(3)
    inputs = SSDInputs.random(g, 100, dtype=dtype)
    state = states(inputs)
    state[0] = randn(g, *state.shape[1:])
    start_state = state.clone()
    y = run(inputs, state, [3, 0, 1], [37, 5, 58], [0, 21, 0])
    for low, high, slot, computed in ((0, 37, 3, 0), (37, 42, 0, 21), (42, 100, 1, 0)):
        alone_state = start_state.clone()
        alone = run(inputs.rows(slice(low, high)), alone_state, [slot], [high - low], [computed])
        # torch's vectorised softplus and its scalar one, which takes the tail of a tensor, differ in the last bit.
        assert_close(y[low:high], alone, 4e-3 if dtype == torch.bfloat16 else 1e-6)
        assert_close(state[slot], alone_state[slot], 1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert state[2].isnan().all()


def test_neighbours_of_the_same_lengths_change_no_bit() -> None:
    """B27."""
    g = generator(4)
    for dtype in (torch.float32, torch.bfloat16):
        inputs, others = (SSDInputs.random(g, 60, dtype=dtype) for _ in range(2))
        changed = replace(
            others,
            **{n: torch.cat([getattr(inputs, n)[:21], getattr(others, n)[21:]]) for n in ("x", "dt", "B", "C")},
            D=inputs.D,
            dt_bias=inputs.dt_bias,
        )
        results = []
        for batch in (inputs, changed):
            state = states(batch)
            results.append((run(batch, state, [2, 0], [21, 39], [0, 0])[:21], state[2]))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_a_first_chunk_never_reads_its_slot() -> None:
    """B18: nothing computed yet means a zero state, whatever the old tenant left."""
    inputs = SSDInputs.random(generator(5), 20)
    dirty, clean = states(inputs), states(inputs, 0.0)
    assert torch.equal(run(inputs, dirty, [1], [20], [0]), run(inputs, clean, [1], [20], [16]))
    assert torch.equal(dirty[1], clean[1])


def test_padded_rows_touch_nothing_and_return_zeros() -> None:
    g = generator(6)
    inputs = SSDInputs.random(g, 10)
    state = states(inputs, 1.0)
    y = run(inputs, state, [-1, 2, -1, 3], [3, 5, 1, 0], [0, 0, 7, 4])
    assert y[:3].eq(0).all()
    assert y[8:].eq(0).all(), "a padded row and a token that no row owns"
    assert_close(y[3:8], recurrence(inputs.rows(slice(3, 8)))[0], 2e-6)
    assert state[[0, 1, 3]].eq(1).all()


def ledger(
    inputs: SSDInputs, state: Tensor, edges: list[int], *, change: str = "", rounds: bool = True
) -> tuple[Tensor, Tensor]:
    """The scan chunk by chunk and head by head in float64, with each bf16 rounding but the one that `change` names."""

    def rounded(name: str, value: Tensor) -> Tensor:
        return bf16(value) if rounds and name != change else value

    x, A, B, C, D = (t.double() for t in (inputs.x, inputs.A, inputs.B, inputs.C, inputs.D))
    steps, state, y = inputs.step_sizes(), state.double().clone(), torch.zeros_like(x)
    for low, high in pairwise(edges):
        for head in range(x.shape[1]):
            b, c = B[low:high, inputs.group(head)], C[low:high, inputs.group(head)]
            step, xs, before = steps[low:high, head], x[low:high, head], state[head].clone()
            total = torch.cumsum(A[head] * step, 0)
            weighted_b = rounded("weighted B", b * (torch.exp(total[-1] - total) * step)[:, None])
            state[head] = torch.exp(total[-1]) * before + xs.T @ weighted_b
            if change == "a bf16 state between chunks":
                state[head] = bf16(state[head])
            y[low:high, head] = (c @ rounded("carried state", before).T) * torch.exp(total)[:, None]
            products = bf16(c @ b.T) if change == "rounded C B" else c @ b.T
            decay = torch.exp(torch.clamp(total[:, None] - total[None], max=0)) * step
            decay = bf16(decay) if change == "rounded decays" else decay
            y[low:high, head] += rounded("scores", products * decay).tril() @ xs
            if change == "a rounding before D x":
                y[low:high, head] = bf16(y[low:high, head])
            y[low:high, head] += D[head] * xs
    return y, state


@pytest.mark.parametrize(
    ("computed", "edges"), [(0, [0, 16, 32, 48, 53]), (5, [0, 11, 27, 43, 53]), (31, [0, 1, 17, 33, 49, 53])]
)
def test_bf16_ledger_on_the_requests_own_grid(computed: int, edges: list[int]) -> None:
    """What enters a product is rounded, nothing else; chunks start at multiples of 16 of the request's position."""
    g = generator(7)
    inputs = SSDInputs.random(g, 53, heads=8, head_dim=16, groups=2, state_size=16, dtype=torch.bfloat16)
    state = states(inputs)
    state[0] = randn(g, *state.shape[1:]) * 2 if computed else state[0]
    initial = state[0].clone() if computed else torch.zeros(state.shape[1:])
    y = run(inputs, state, [0], [53], [computed])
    right, right_state = ledger(inputs, initial, edges)

    changes = ["carried state", "scores", "rounded C B", "rounded decays", "a rounding before D x"]
    changes.append("a bf16 state between chunks")
    wrong = {change: ledger(inputs, initial, edges, change=change)[0] for change in changes}
    wrong["nothing rounded, as in the one-token form"] = ledger(inputs, initial, edges, rounds=False)[0]
    other_grid = [0, 16, 32, 48, 53] if computed else [0, 11, 27, 43, 53]
    wrong["the grid of another position"] = ledger(inputs, initial, other_grid)[0]
    assert_ledger(y, right, wrong)

    assert state.dtype == torch.float32
    assert_close(state[0], right_state, 5e-5)
    for change in ("weighted B", "a bf16 state between chunks"):
        assert relative_error(state[0], ledger(inputs, initial, edges, change=change)[1]) > 5e-4


def test_a_split_on_the_grid_keeps_every_bit() -> None:
    """And one off the grid need not: that is why the scheduler cuts prompts at multiples of the chunk size."""
    inputs = SSDInputs.random(generator(8), 64, heads=8, head_dim=8, state_size=16, dtype=torch.bfloat16)
    whole, whole_state = piecewise(inputs, [])
    for cuts in ([16], [32], [48], [16, 32, 48]):
        y, state = piecewise(inputs, cuts)
        assert torch.equal(y, whole)
        assert torch.equal(state, whole_state)
    y, state = piecewise(inputs, [20])
    assert not torch.equal(state, whole_state)
    assert_close(state, whole_state, 1e-2)
