"""One model, every way to feed it: whole, in pieces, one by one, in company, padded, on poisoned caches.

The reference is a separate token-by-token recurrence in float64. Logits of every token and both states are compared, in
float32 to 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.engine.engine import Engine
from hemiola.model.batch import BatchRow, ForwardBatch
from hemiola.model.specs import KVTensors, StateTensors
from tests.support.recurrence import Recurrence, Weights
from tests.support.witness import Seen, Witness, poison, widest

Folder = Callable[..., Path]
BOUND = 1e-4
ALL_KINDS = "MEM*E-"
BLOCK_SIZE = 16


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(folder: Path, kv: str = "model") -> Engine:
    engine = LLM(folder, dtype="float32", kv_cache_dtype=kv, max_num_seqs=8, max_model_len=128).loaded.engine
    poison(engine)
    return engine


def reference_of(folder: Path, kv: str) -> Recurrence:
    weights = Weights(folder)
    layers = [i for i, letter in enumerate(weights.pattern) if letter == "*"]
    return Recurrence(weights, kv_scales=dict.fromkeys(layers, (1.0, 1.0)) if kv == "fp8" else None)


def assert_equals(seen: Seen, folder: Path, kv: str = "model") -> None:
    """Logits of every token, conv and SSM state, against the recurrence over the same tokens."""
    reference = reference_of(folder, kv)
    assert widest(seen, reference.read(seen.ids)) < BOUND
    assert seen.ssm
    for layer, state in reference.ssm.items():
        for got, want in ((seen.ssm[layer], state), (seen.conv[layer], reference.conv[layer])):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@dataclass
class Stepper:
    """Feeds requests to a model by hand. Slot i owns blocks that lie far apart and out of order."""

    engine: Engine
    seen: dict[int, Seen] = field(default_factory=dict)

    def blocks(self, slot: int) -> list[int]:
        return [slot + 8 * i for i in (3, 0, 5, 2, 1, 4)]

    def step(self, rows: Sequence[tuple[int, Sequence[int]]], pad_decodes_to: int = 0) -> None:
        """rows: (state slot, tokens), decodes first."""
        batch_rows = []
        for slot, tokens in rows:
            num_computed = len(self.seen.setdefault(slot, Seen()).ids)
            used = -(-(num_computed + len(tokens)) // BLOCK_SIZE)
            batch_rows.append(BatchRow(tokens, num_computed, self.blocks(slot)[:used], slot))
        batch = ForwardBatch.build(batch_rows, BLOCK_SIZE, pad_decodes_to=pad_decodes_to)
        num_live_decodes = sum(row.is_decode for row in batch_rows)
        with torch.inference_mode():
            logits = self.engine.model.logits(self.engine.model.forward(batch, self.engine.caches))
        start = 0
        for index, (slot, tokens) in enumerate(rows):
            if index == num_live_decodes:
                start = batch.num_decodes  # after the padded rows
            seen = self.seen[slot]
            seen.ids += tokens
            seen.logits += logits[start : start + len(tokens)].unbind()
            seen.pieces.append(len(tokens))
            start += len(tokens)
            for layer, cache in enumerate(self.engine.caches):
                if isinstance(cache, StateTensors):
                    seen.conv[layer], seen.ssm[layer] = cache.conv[slot].clone(), cache.ssm[slot].clone()
        assert start == batch.num_tokens or num_live_decodes == len(rows)

    def untouched(self, slots: Sequence[int]) -> bool:
        """Whether only these slots, and no other's blocks, have ever been written."""
        others = [slot for slot in range(8) if slot not in slots]
        blocks = [block for slot in others for block in self.blocks(slot)]
        return all(
            tensor[blocks if isinstance(cache, KVTensors) else others].float().isnan().all()
            for cache in self.engine.caches
            if cache is not None
            for tensor in cache
        )


kv_forms = pytest.mark.parametrize("kv", ["model", "fp8"])


@kv_forms
@pytest.mark.parametrize("pad", [0, 8])
def test_a_batch_of_everything(tiny_folder: Folder, kv: str, pad: int) -> None:
    """Decodes, a short extend of one token, a later chunk, a first chunk and a first prefill of one token, in one step;
    with padded decode rows, too."""
    folder = tiny_folder(ALL_KINDS, conv_gain=30.0)
    stepper = Stepper(engine_of(folder, kv))
    steps = [
        {0: 9, 1: 33, 2: 16, 3: 21},
        {0: 1, 1: 1, 2: 1, 3: 18, 5: 1, 6: 17},
        {5: 1, 0: 1, 2: 1, 1: 2, 6: 16},
        {6: 1, 3: 1, 7: 1},
    ]
    for number, counts in enumerate(steps):
        stepper.step([(slot, ids(count, 10 * number + slot)) for slot, count in counts.items()], pad)
    for seen in stepper.seen.values():
        assert_equals(seen, folder, kv)
    assert stepper.untouched([0, 1, 2, 3, 5, 6, 7])


@kv_forms
def test_padded_decode_rows_change_nothing(tiny_folder: Folder, kv: str) -> None:
    """They move no bit of a prefill row, keep live decodes, and write to no cache; all caches are NaN before."""
    folder = tiny_folder(ALL_KINDS, conv_gain=30.0)
    plain, padded = Stepper(engine_of(folder, kv)), Stepper(engine_of(folder, kv))
    for rows in ([(2, ids(20, 0)), (5, ids(7, 1))], [(2, ids(1, 2)), (5, ids(1, 3))], [(2, ids(1, 4)), (0, ids(5, 5))]):
        plain.step(rows)
        padded.step(rows, pad_decodes_to=8)
    for slot, seen in plain.seen.items():
        other = padded.seen[slot]
        torch.testing.assert_close(torch.stack(other.logits), torch.stack(seen.logits), rtol=0, atol=2e-5)
        assert not any(t.isnan().any() for t in (*other.logits, *other.conv.values(), *other.ssm.values()))
        assert_equals(other, folder, kv)
    assert padded.untouched([0, 2, 5])


def test_a_batch_of_nothing_but_padding_beside_prefills(tiny_folder: Folder) -> None:
    """No live decode at all: the padded rows stand before the prompts and nothing moves."""
    folder = tiny_folder(ALL_KINDS)
    stepper = Stepper(engine_of(folder))
    stepper.step([(1, ids(18, 0)), (6, ids(1, 1))], pad_decodes_to=8)
    for seen in stepper.seen.values():
        assert_equals(seen, folder)
    assert stepper.untouched([1, 6])


@kv_forms
def test_every_split_in_two(tiny_folder: Folder, kv: str) -> None:
    folder = tiny_folder(ALL_KINDS, conv_gain=30.0)
    prompt, want = ids(37), reference_of(folder, kv)
    logits = want.read(prompt)
    engine = engine_of(folder, kv)
    for cut in range(1, 37):
        stepper = Stepper(engine)
        stepper.step([(3, prompt[:cut])])
        stepper.step([(3, prompt[cut:])])
        seen = stepper.seen[3]
        assert widest(seen, logits) < BOUND, f"cut at {cut}"
        for layer, state in want.ssm.items():
            torch.testing.assert_close(seen.ssm[layer].double(), state, rtol=1e-5, atol=1e-5 * float(state.abs().max()))


@kv_forms
@pytest.mark.parametrize("budget", [1, 3, 7, 15, 16, 17, 23, 64])
def test_every_budget_and_its_mixes(tiny_folder: Folder, kv: str, budget: int) -> None:
    """Through the engine: prompts of many lengths, which decode, extend and prefill in the same steps."""
    folder = tiny_folder(ALL_KINDS, conv_gain=30.0)
    llm = LLM(folder, dtype="float32", kv_cache_dtype=kv, max_num_batched_tokens=budget, max_num_seqs=4)
    poison(llm.loaded.engine)
    witness = Witness(llm.loaded.engine)
    prompts = [ids(n, n) for n in (1, 33, 16, 2, 47, 1)]
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 4, 6, 12, 3, 5)]
    outputs = llm.generate(prompts, each)
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        seen = witness.seen[f"{output.request_id}.0"]
        assert seen.ids == prompt + output.outputs[0].token_ids[: params.max_tokens - 1]
        assert_equals(seen, folder, kv)
        best = torch.stack(seen.logits)[len(prompt) - 1 :].argmax(-1)
        assert output.outputs[0].token_ids == best.tolist()
    assert max(witness.num_rows) > 1 or budget == 1


def test_the_comparison_sees_a_shifted_state(tiny_folder: Folder) -> None:
    """One head's state off by a thousandth is beyond the bound in the logits."""
    folder = tiny_folder(ALL_KINDS, conv_gain=30.0)
    stepper = Stepper(engine_of(folder))
    prompt = ids(37)
    stepper.step([(3, prompt[:20])])
    cache = stepper.engine.caches[0]
    assert isinstance(cache, StateTensors)
    cache.ssm[3, 0] *= 1.001
    stepper.step([(3, prompt[20:])])
    assert widest(stepper.seen[3], reference_of(folder, "model").read(prompt)) > BOUND
