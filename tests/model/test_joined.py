"""A layer's norm as one op with its first op, or with the experts before it: the same tokens, every op counted, and
apart for whoever looks between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hemiola import loading
from hemiola.config.engine import EngineConfig
from hemiola.config.sampling import SamplingParams
from hemiola.ops import KeptForms, Ops, table
from hemiola.ops.experts_norm import experts_norm

PATTERN = "ME*-ME*"
FEW = 2
BEGUN = ("norm_route", "norm_linears")
JOINED = (*BEGUN, "experts_norm")
NUM_OUTPUT = 6
Run = tuple[list[list[int]], Counter[str]]


def _few(x: Tensor, *args: Any) -> str | None:
    return None if len(x) <= FEW else "too many"


def _many(experts: tuple[Any, ...], *args: Any) -> str | None:
    return None if len(experts[0]) > FEW else "too few"


@pytest.fixture
def scales() -> list[float | None]:
    """The last argument of each `experts_norm` on the device arm."""
    return []


@pytest.fixture
def generated(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, scales: list[float | None]
) -> Callable[..., Run]:
    """Tokens of two requests, and calls by op. Every op's reference is a device variant, too; those that begin with the
    norm for few tokens, the one that ends with it for more."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        scales.append(args[-1])
        return experts_norm(*args, **kwargs)

    registry: dict[str, dict[table.Arm, list[table.Variant]]] = {}
    for op, arms in table.registered_ops().items():
        own = arms["reference"][0]
        takes, varies = _few if op in BEGUN else _many if op in JOINED else None, op == "norm_linears"
        device = replace(own, arm="device", name="same", unsupported=takes, varies=varies)
        if op == "experts_norm":
            device = replace(device, run=noted)
        registry[op] = {"reference": [own], "device": [device]}
    monkeypatch.setattr(table, "_registry", registry)
    monkeypatch.setattr(table, "load_device_variants", lambda: None)

    def run(
        scheme: str, arms: Any, invariant: bool = False, tap: loading.Tap | None = None, pattern: str = PATTERN
    ) -> Run:
        ops = Ops(arms, KeptForms(1 << 30), invariant=invariant)
        monkeypatch.setattr(loading, "bind_ops", lambda config: (ops, torch.device("cpu")))
        config = EngineConfig(arms="reference", cache_bytes=16 << 20, max_model_len=256, dtype="bf16")
        engine = loading.load(tiny_folder(pattern, scheme), config, tap=tap).engine
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
    begun = {op: joined[op] for op in BEGUN}
    attention_is_one = scheme != "fp8" or joined["linears"] > 0
    assert begun["norm_route"] == 2 * steps
    assert begun["norm_linears"] == (4 if attention_is_one else 2) * steps
    assert joined["moe_route"] == calls["moe_route"] - begun["norm_route"]
    assert joined["experts_norm"] == 2 * (calls["embedding"] - steps) > 0
    assert joined["moe_experts"] == calls["moe_experts"] - joined["experts_norm"]
    assert joined["rms_norm"] == calls["rms_norm"] - sum(begun.values()) - joined["experts_norm"]


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("pattern", ["ME*E", "EEM-", "E-EME"])
def test_experts_end_with_any_norm_that_comes_after(
    generated: Any, scales: list[float | None], scheme: str, pattern: str
) -> None:
    """The final one, and that of a mixer of each kind, which quantises where the mixer's input is FP8."""
    tokens, calls = generated(scheme, "reference", pattern=pattern)
    joined_tokens, joined = generated(scheme, {"*": "device"} | dict.fromkeys(BEGUN, "reference"), pattern=pattern)
    assert joined_tokens == tokens
    prompts = calls["embedding"] - (NUM_OUTPUT - 1)
    ended = pattern.count("E") * prompts
    assert joined["experts_norm"] == ended > 0
    after = [kind for before, kind in pairwise(f"{pattern}.") if before == "E"]
    assert [scale is not None for scale in scales] == [scheme == "fp8" and kind in "M-" for kind in after] * prompts
    assert joined["moe_experts"] == calls["moe_experts"] - ended
    assert joined["rms_norm"] == calls["rms_norm"] - ended


def test_where_a_part_is_on_the_reference_arm_each_runs_on_its_own(generated: Any) -> None:
    for op in ("rms_norm", "moe_route", "norm_route"):
        _, calls = generated("bf16", {"*": "device", op: "reference"})
        assert calls["norm_route"] == 0
        assert (calls["norm_linears"] > 0) == (calls["experts_norm"] > 0) == (op != "rms_norm")
    for op in ("moe_experts", "experts_norm"):
        _, calls = generated("bf16", {"*": "device", op: "reference"})
        assert calls["experts_norm"] == 0
        assert calls["norm_route"] > 0


def test_an_invariant_engine_joins_what_does_not_vary(generated: Any) -> None:
    tokens, calls = generated("bf16", "device", True)
    assert calls["norm_linears"] == 0
    assert calls["norm_route"] > 0
    assert calls["experts_norm"] > 0
    assert tokens == generated("bf16", "reference")[0]


def test_a_tap_sees_what_lies_between(generated: Any) -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def tap(name: str, tensor: Tensor, /) -> None:
        seen[name] = tuple(tensor.shape)

    tokens, calls = generated("bf16", "device", False, tap)
    assert not set(JOINED) & set(calls)
    assert tokens == generated("bf16", "device")[0]
    assert {seen[f"backbone.layers.{linear}.input"][1] for linear in ("0.mixer.in_proj", "2.mixer.k_proj")} == {64}
