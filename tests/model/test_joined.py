"""A layer's norm and its first op as one op: the same tokens, every op counted, and apart for whoever looks between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola import loading
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.ops import KeptForms, Ops, table

PATTERN = "ME*-ME*"
FEW = 2
JOINED = ("norm_route", "norm_linears")
NUM_OUTPUT = 6
Run = tuple[list[list[int]], Counter[str]]


def _few(x: Tensor, *args: Any) -> str | None:
    return None if len(x) <= FEW else "too many"


@pytest.fixture
def generated(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Any, bool, loading.Tap | None], Run]:
    """Tokens of two requests, and calls by op. Every op's reference is a device variant, too; the joined ones for few
    tokens."""
    registry: dict[str, dict[table.Arm, list[table.Variant]]] = {}
    for op, arms in table.registered_ops().items():
        own = arms["reference"][0]
        few, varies = _few if op in JOINED else None, op == "norm_linears"
        device = replace(own, arm="device", name="same", unsupported=few, varies=varies)
        registry[op] = {"reference": [own], "device": [device]}
    monkeypatch.setattr(table, "_registry", registry)
    monkeypatch.setattr(table, "load_device_variants", lambda: None)

    def run(scheme: str, arms: Any, invariant: bool = False, tap: loading.Tap | None = None) -> Run:
        ops = Ops(arms, KeptForms(1 << 30), invariant=invariant)
        monkeypatch.setattr(loading, "bind_ops", lambda config: (ops, torch.device("cpu")))
        config = EngineConfig(arms="reference", cache_bytes=16 << 20, max_model_len=256, dtype="bf16")
        engine = loading.load(tiny_folder(PATTERN, scheme), config, tap=tap).engine
        params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
        prompts = ([5, 7, 11, *range(20, 40)], [3, 4, 5])
        requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        while engine.has_unfinished:
            engine.step()
        calls: Counter[str] = Counter()
        for path, count in ops.snapshot().items():
            assert (path.arm, path.reason) == ("device" if ops.policy[path.op] == "device" else "reference", "")
            calls[path.op] += count
        return [request.output_ids for request in requests], calls

    return run


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "nvfp4"])
def test_steps_of_few_tokens_take_joined_ops_with_the_same_tokens(generated: Any, scheme: str) -> None:
    tokens, calls = generated(scheme, "reference")
    assert not set(JOINED) & set(calls)
    joined_tokens, joined = generated(scheme, "device")
    assert joined_tokens == tokens
    steps = NUM_OUTPUT - 1
    begun = {op: joined[op] for op in JOINED}
    attention_is_one = scheme != "fp8" or joined["linears"] > 0
    assert begun["norm_route"] == 2 * steps
    assert begun["norm_linears"] == (4 if attention_is_one else 2) * steps
    assert joined["moe_route"] == calls["moe_route"] - begun["norm_route"]
    assert joined["rms_norm"] == calls["rms_norm"] - sum(begun.values())


def test_where_a_part_is_on_the_reference_arm_each_runs_on_its_own(generated: Any) -> None:
    for op in ("rms_norm", "moe_route", "norm_route"):
        _, calls = generated("bf16", {"*": "device", op: "reference"})
        assert calls["norm_route"] == 0
        assert (calls["norm_linears"] > 0) == (op != "rms_norm")


def test_an_invariant_engine_joins_what_does_not_vary(generated: Any) -> None:
    tokens, calls = generated("bf16", "device", True)
    assert calls["norm_linears"] == 0
    assert calls["norm_route"] > 0
    assert tokens == generated("bf16", "reference")[0]


def test_a_tap_sees_what_lies_between(generated: Any) -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def tap(name: str, tensor: Tensor, /) -> None:
        seen[name] = tuple(tensor.shape)

    tokens, calls = generated("bf16", "device", False, tap)
    assert not set(JOINED) & set(calls)
    assert tokens == generated("bf16", "device")[0]
    assert {seen[f"backbone.layers.{linear}.input"][1] for linear in ("0.mixer.in_proj", "2.mixer.k_proj")} == {64}
