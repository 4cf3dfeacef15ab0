"""The device arm as a whole: its tokens, its paths, its graphs, its weights."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola import LLM, SamplingParams
from hemiola.ops import registered_ops
from tests.support.golden import MODES, SCHEMES, WIDE, read_golden, run

Folder = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(folder, **({"arms": "device", "dtype": "bf16", "cache_bytes": 1 << 30, "max_num_seqs": 24} | settings))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(1000), k=rng.choice([1, 2, 5, 17, 40, 129, 257, 300])) for _ in range(count)]


def tokens(llm: LLM, batch: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(batch, params)]


def arms_of(llm: LLM) -> set[str]:
    return {path.arm for path in llm.path_counts()}


@pytest.mark.parametrize("scheme", [*SCHEMES, WIDE])
def test_verdict_against_the_oracle(seeded_checkpoint: Folder, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    golden, noise = read_golden(scheme)
    llm = open_llm(seeded_checkpoint(scheme))
    verdicts = {}
    for mode in MODES:
        figures = run(llm, golden, mode)
        verdicts[mode] = figures.verdict(noise)
        with capsys.disabled():
            print(f"\n{scheme} {mode}: {figures.describe(noise)}", end="")
    assert arms_of(llm) == {"device"}
    assert all(all(verdict.values()) for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_device_against_reference(seeded_checkpoint: Folder, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference arm takes vLLM's place: its log-probabilities at the golden's positions, by the same verdict."""
    golden, noise = read_golden(scheme)
    golden["items"] = golden["items"][:12]
    reference = LLM(seeded_checkpoint(scheme), arms="reference", device="cuda", dtype="bf16", max_num_seqs=12)
    for item in golden["items"]:
        sequence = item["prompt_ids"] + item["output_ids"]
        ends = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=5)
        rows = reference.generate(sequence, ends)[0].prompt_logprobs[-48:]
        item["prefill_top"] = [row[:5] for row in rows if row is not None]
    llm = open_llm(seeded_checkpoint(scheme))
    figures = run(llm, golden, "prefill")
    with capsys.disabled():
        print(f"\n{scheme} against the reference arm: {figures.describe(noise)}", end="")
    assert all(figures.verdict(noise).values())


@pytest.mark.parametrize("op", sorted(registered_ops()))
def test_any_op_moves_to_the_other_arm(seeded_checkpoint: Folder, op: str) -> None:
    """In one process and one checkpoint: the op runs on the reference arm, everything else on the device. An op that
    joins others is not taken then: its parts run."""
    golden, noise = read_golden("lightning")
    golden["items"] = golden["items"][:4]
    arms = dict.fromkeys(registered_ops(), "device") | {op: "reference"}
    llm = open_llm(seeded_checkpoint("lightning"), arms=arms)
    figures = run(llm, golden, "decode")
    assert figures.verdict(noise)["mean"], figures.describe(noise)
    paths = llm.path_counts()
    assert {path.op for path in paths if path.arm == "reference"} <= {op}
    if op in ("norm_route", "norm_linears", "experts_norm"):
        assert op not in {path.op for path in paths}
    else:
        assert op in ("linear_fp8",) or any(path.op == op and path.arm == "reference" for path in paths)


@pytest.mark.parametrize("scheme", [*SCHEMES, WIDE])
def test_graphs_change_nothing_and_are_counted(seeded_checkpoint: Folder, scheme: str) -> None:
    batch = prompts(5)
    without = open_llm(seeded_checkpoint(scheme), cuda_graphs=False, overlap=False, invariant=True)
    expected = tokens(without, batch)
    llm = open_llm(seeded_checkpoint(scheme), invariant=True)
    assert llm.loaded.engine.runner.uses_graphs
    assert tokens(llm, batch) == expected
    assert llm.loaded.engine.runner.capture_seconds > 0
    decode = {path: count for path, count in llm.path_counts().items() if "update" in path.op}
    assert decode == {path: count for path, count in without.path_counts().items() if "update" in path.op}


@pytest.mark.parametrize("scheme", [*SCHEMES, WIDE])
def test_invariant_tokens_do_not_depend_on_neighbours(seeded_checkpoint: Folder, scheme: str) -> None:
    """Alone, together, in a larger graph, in other pieces: the same tokens and log-probabilities, to the bit."""
    batch = prompts(9, seed=1)
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2)

    def answers(llm: LLM, some: list[list[int]]) -> list[object]:
        return [output.outputs[0].logprobs for output in llm.generate(some, params)]

    folder = seeded_checkpoint(scheme)
    alone_llm = open_llm(folder, invariant=True, prefix_caching=False)
    alone = [answers(alone_llm, [prompt])[0] for prompt in batch]
    assert answers(alone_llm, batch) == alone
    assert answers(open_llm(folder, invariant=True, prefix_caching=False, max_num_batched_tokens=256), batch) == alone
    assert answers(open_llm(folder, invariant=True, max_num_seqs=3), batch[::-1])[::-1] == alone
    reuse = open_llm(folder, invariant=True)
    assert answers(reuse, batch) == alone
    assert answers(reuse, batch) == alone, "with a reused prefix"


def test_overlap_changes_nothing(seeded_checkpoint: Folder) -> None:
    batch = prompts(12, seed=2)
    params = [
        SamplingParams(max_tokens=5 + i, temperature=0.9 * (i % 2), seed=i, top_p=0.9, min_tokens=i % 4)
        for i in range(len(batch))
    ]
    params[3] = SamplingParams(max_tokens=9, repetition_penalty=1.2)
    params[4] = SamplingParams(max_tokens=9, logprobs=2)

    def answers(overlap: bool) -> list[list[int]]:
        llm = open_llm(seeded_checkpoint("nvfp4"), overlap=overlap, invariant=True)
        return [output.outputs[0].token_ids for output in llm.generate(batch, params)]

    assert answers(True) == answers(False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_uploaded_once_and_leave_with_their_engine(seeded_checkpoint: Folder, scheme: str) -> None:
    tokens(open_llm(seeded_checkpoint(scheme)), prompts(8))  # what libraries keep, such as workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = open_llm(seeded_checkpoint(scheme))
    resident = llm.loaded.engine.model.ops.resident
    assert resident is not None
    uploaded, built = resident.uploaded_bytes, dict(resident.built)
    stored = sum(module.resident_bytes for module in llm.loaded.manifest.modules)
    vectors = sum(module.resident_bytes for module in llm.loaded.manifest.modules if len(module.shape) != 2)
    assert stored - vectors - 4096 <= uploaded <= stored, "every matrix goes over the bus once, and nothing else"
    tokens(llm, prompts(8))
    assert (resident.uploaded_bytes, resident.built) == (uploaded, built)
    assert set(built.values()) == {1}
    second = open_llm(seeded_checkpoint(scheme))
    other = second.loaded.engine.model.ops.resident
    assert other is not None
    assert (other.uploaded_bytes, other.built) == (uploaded, built)
    assert other.resident_bytes == resident.resident_bytes
    del llm, second, resident, other
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_memory_stays_flat(seeded_checkpoint: Folder) -> None:
    llm = open_llm(seeded_checkpoint("lightning"), max_num_batched_tokens=512)
    seen = []
    for round_ in range(6):
        tokens(llm, prompts(20, seed=round_ % 2))
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert max(seen[2:]) - min(seen[2:]) < 1 << 20, seen


def test_the_shipped_model_speaks() -> None:
    llm = LLM(arms="device", cache_bytes=1 << 30)
    output = llm.generate('"I am very glad to see you," said', SamplingParams(max_tokens=40))[0].outputs[0]
    reference = LLM(arms="reference").generate('"I am very glad to see you," said', SamplingParams(max_tokens=40))[0]
    shared = [a == b for a, b in zip(output.token_ids, reference.outputs[0].token_ids, strict=False)]
    assert sum(shared[:8]) == 8, (output.text, reference.outputs[0].text)


def test_a_part_of_the_gpus_memory_is_filled(seeded_checkpoint: Folder) -> None:
    llm = open_llm(seeded_checkpoint("bf16"), gpu_memory_utilization=0.5, max_num_seqs=4096, max_model_len=32768)
    total = torch.cuda.mem_get_info()[1]
    assert 0.3 * total < torch.cuda.memory_reserved() <= 0.5 * total
    assert len(tokens(llm, prompts(3))) == 3
