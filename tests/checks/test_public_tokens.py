"""What Lightning-NVFP4 itself answers, for whoever holds the checkpoint (19 GB; the reference arm is slow on it).

The golden: Nemotron-3.5-Lightning-30B-A3B-NVFP4, revision 29f2d174, greedy, 32 tokens, plain completion without a
template and without BOS, vLLM 0.23.1rc1.dev on a GB10, as published by the vllm.cpp project. The third prompt is known
to stand near a tie late in its answer, where valid configurations part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from hemiola import LLM, SamplingParams

VARIABLE = "HEMIOLA_LIGHTNING_NVFP4"
NEAR_TIE = 0.25  # nats between the two best tokens


@dataclass(frozen=True)
class Golden:
    text: str
    prompt_ids: list[int]
    output_ids: list[int]


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


GOLDENS = [
    Golden(
        "The capital of France is",
        ids("1784 8961 1307 5498 1395"),
        ids(
            "6993 1046 1256 1010 1784 8961 1307 10787 1395 10874 1046 1256 1010 1784 8961 1307 16507 1395 15512 1046 "
            "1256 1010 1784 8961 1307 18940 1395 14288 1046 1256 1010 1784"
        ),
    ),
    Golden(
        "Write the first five Fibonacci numbers:",
        ids("18746 1278 2158 6184 61634 87539 8091 1058"),
        ids(
            "1032 1048 1044 1032 1049 1044 1032 1049 1044 1032 1050 1044 1032 1051 1044 1032 1053 1044 1032 1056 1044 "
            "1032 1049 1051 1044 1032 1050 1049 1044 1032 1051 1052"
        ),
    ),
    Golden(
        "Explain what a state space model is, in one sentence:",
        ids("2763 44122 2549 1261 3468 5702 3244 1395 1044 1294 1925 19286 1058"),
        ids(
            "1349 3468 5702 3244 1395 1261 30622 13406 1455 19591 1261 2663 1681 14717 2136 2142 2645 1261 2016 1307 "
            "16052 8164 1321 5802 25675 1044 12837 2505 1261 9943 1307 3468"
        ),
    ),
]


def assert_equal_up_to_a_near_tie(
    golden: list[int], output: list[int], logprobs: list[list[tuple[int, float]]]
) -> None:
    """Equal tokens, or a first difference at which the golden's token is a near-tie with the best."""
    for position, (wanted, found) in enumerate(zip(golden, output, strict=True)):
        if wanted != found:
            row = dict(logprobs[position])
            margin = row[found] - row.get(wanted, float("-inf"))
            assert margin <= NEAR_TIE, f"position {position}: {found} for {wanted}, {margin:.3f} nats ahead of it"
            return


@pytest.mark.checkpoint
def test_lightning_answers_as_published() -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder")
    llm = LLM(folder, dtype="bf16", max_model_len=64, max_num_seqs=len(GOLDENS))
    tokenizer = llm.loaded.tokenizer
    assert tokenizer is not None, "the checkpoint has a tokenizer"
    assert [tokenizer.encode(golden.text) for golden in GOLDENS] == [golden.prompt_ids for golden in GOLDENS]
    params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=20)
    for golden, output in zip(GOLDENS, llm.generate([golden.text for golden in GOLDENS], params), strict=True):
        (choice,) = output.outputs
        assert choice.logprobs is not None
        assert_equal_up_to_a_near_tie(golden.output_ids, choice.token_ids, choice.logprobs)


def test_the_comparison_tells_a_tie_from_a_fork() -> None:
    golden, output = [5, 6, 7], [5, 9, 1]
    tie = [[(5, -0.1)], [(9, -1.0), (6, -1.2)], [(1, -0.1)]]
    assert_equal_up_to_a_near_tie(golden, output, tie)
    assert_equal_up_to_a_near_tie(golden, golden, tie)
    for fork in ([(9, -1.0), (6, -1.3)], [(9, -1.0)]):
        with pytest.raises(AssertionError, match="position 1: 9 for 6"):
            assert_equal_up_to_a_near_tie(golden, output, [tie[0], fork, tie[2]])


def test_the_goldens_are_whole() -> None:
    assert [(len(golden.prompt_ids), len(golden.output_ids)) for golden in GOLDENS] == [(5, 32), (8, 32), (13, 32)]
