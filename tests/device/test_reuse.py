"""B23 with replayed graphs: a two-turn conversation under other block tables and state slots, states compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.model.specs import StateTensors

PATTERN = "MEM*M-MEM*MM"  # seven mamba layers, two attention layers


def conversation(llm: LLM, first: list[int], more: list[int]) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Both turns' ids, and every mamba layer's states after them."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    said = llm.generate(first, params)[0].outputs[0].token_ids
    answer = llm.front.add(first + said + more, params)
    slot = -1
    while not answer.finished:
        llm.front.step()
        slot = max(slot, answer.choices[0].request.state_slot)
    torch.cuda.synchronize()
    states = [t[slot].clone() for cache in llm.loaded.engine.caches if isinstance(cache, StateTensors) for t in cache]
    return said, answer.choices[0].request.output_ids, states


@pytest.mark.parametrize("scheme", ["bf16", "lightning"])
def test_b23_replayed_graphs_read_the_tables_of_their_own_step(tiny_folder: Callable[..., Path], scheme: str) -> None:
    folder = tiny_folder(PATTERN, scheme)
    settings = {"arms": "device", "dtype": "bf16", "cache_bytes": 64 << 20, "max_num_seqs": 6, "invariant": True}
    generator = torch.Generator().manual_seed(3)
    first, more = (torch.randint(3, 90, (n,), generator=generator).tolist() for n in (150, 23))
    eager = LLM(folder, cuda_graphs=False, overlap=False, max_model_len=512, **settings)
    expected = conversation(eager, first, more)
    llm = LLM(folder, max_model_len=512, **settings)
    assert llm.loaded.engine.runner.uses_graphs
    for others in range(3):
        # Others take the blocks and slots that the conversation had before.
        for length in range(others):
            llm.front.add([5 + length] * (70 + 40 * length), SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(3 * others):
            llm.front.step()
        said, answered, states = conversation(llm, first, more)
        assert (said, answered) == expected[:2]
        for state, wanted in zip(states, expected[2], strict=True):
            assert not state.isnan().any()
            assert torch.equal(state, wanted)
        while llm.front.has_unfinished:
            llm.front.step()
    assert {path.arm for path in llm.path_counts()} == {"device"}
