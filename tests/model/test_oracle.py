"""The float32 mode against transformers' own Nemotron-H, through the real loader, engine and caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hemiola import LLM, SamplingParams
from tests.support import oracle

CHUNK = 16
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
NUM_GREEDY = 8
BOUND = 1e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "MEM*EM-E": {},
    "M-M*-": {"n_groups": 1},
    "MEM*E": {"n_groups": 8, "num_key_value_heads": 1},
    "*EM-ME": {"moe_latent_size": 32, "n_shared_experts": 1},
    "ME*M": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "MM--**EE": {"moe_latent_size": 48, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "M*": {"num_key_value_heads": 4, "use_conv_bias": False},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The transformers model of a pattern and the folder it was saved to."""

    @cache
    def make(pattern: str) -> tuple[Any, Path]:
        model = oracle.build(oracle.config(pattern, **VARIANTS[pattern]), seed=len(pattern))
        return model, oracle.save(model, tmp_path_factory.mktemp("oracle") / "model")

    return make


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def widest_difference(model: Any, prompt: list[int], output: Any) -> float:
    """Largest |log-probability difference| over every position and every token of the vocabulary."""
    completion = output.outputs[0]
    want = oracle.logits(model, prompt + completion.token_ids).log_softmax(-1)
    rows = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
    assert len(rows) == len(prompt) - 1 + NUM_GREEDY
    widest = 0.0
    for position, row in enumerate(rows):
        ids, values = zip(*row, strict=True)
        assert len(ids) == model.config.vocab_size
        widest = max(widest, (want[position, list(ids)] - torch.tensor(values)).abs().max().item())
    return widest


@pytest.mark.parametrize("pattern", VARIANTS)
@pytest.mark.parametrize("budget", [2048, 7], ids=["whole prompts", "chunks of at most 7 tokens"])
def test_log_probabilities_and_greedy_tokens_equal_transformers(
    pair: Callable[[str], tuple[Any, Path]], pattern: str, budget: int
) -> None:
    """All six prompt lengths in one batch: prefill chunks, first chunks of one token and decodes mixed."""
    model, folder = pair(pattern)
    llm = LLM(folder, dtype="float32", max_num_batched_tokens=budget)
    params = SamplingParams(max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    for prompt, output in zip(prompts(), llm.generate(prompts(), params), strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(model, prompt, NUM_GREEDY)
        assert widest_difference(model, prompt, output) < BOUND


def test_every_split_of_a_prompt_equals_transformers(pair: Callable[[str], tuple[Any, Path]]) -> None:
    """Budgets from one token on cut the longest prompt everywhere, on and off the SSD chunk grid."""
    model, folder = pair("MEM*EM-E")
    prompt = prompts()[-1]
    params = SamplingParams(max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    want = oracle.greedy(model, prompt, NUM_GREEDY)
    for budget in range(1, len(prompt)):
        (output,) = LLM(folder, dtype="float32", max_num_batched_tokens=budget).generate([prompt], params)
        assert output.outputs[0].token_ids == want, f"budget {budget}"
        assert widest_difference(model, prompt, output) < BOUND, f"budget {budget}"


def test_the_oracle_sees_a_clamped_dt(pair: Callable[[str], tuple[Any, Path]]) -> None:
    """The comparison can fail: a dt clamped at 0.3 in the oracle moves its logits far beyond the bound."""
    model, folder = pair("M-M*-")
    prompt = prompts()[-1]
    params = SamplingParams(max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    (output,) = LLM(folder, dtype="float32").generate([prompt], params)
    mixers = [layer.mixer for layer in model.model.layers if layer.block_type == "linear_attention"]
    for mixer in mixers:
        mixer.time_step_limit = (0.3, float("inf"))
    try:
        assert widest_difference(model, prompt, output) > 100 * BOUND
    finally:
        for mixer in mixers:
            mixer.time_step_limit = (0.0, float("inf"))
