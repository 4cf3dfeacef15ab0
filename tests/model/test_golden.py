"""The bf16 mode against what vLLM 0.25.0 answered on an H200, by the verdict that came with its answers; and, at the
30B-A3B models' size of Mamba-2 layers, against transformers by the same verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hemiola import LLM
from hemiola.model.mixers.moe import MoEMixer
from tests.support.golden import MODES, SCHEMES, WIDE, read_golden, run
from tests.support.golden_process import verdict


@pytest.mark.parametrize("scheme", [*SCHEMES, WIDE])
def test_verdict_against_the_oracle(
    seeded_checkpoint: Callable[[str], Path], scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = verdict(scheme, seeded_checkpoint(scheme))
    assert list(document["modes"]) == list(MODES)
    for mode, found in document["modes"].items():
        with capsys.disabled():
            print(f"\n{scheme} {mode}: {found['figures']}", end="")
        assert all(found["verdict"].values()), f"{mode}: {found['figures']}"
    assert document["arms"] == ["reference"]


def test_the_verdict_sees_a_defect(seeded_checkpoint: Callable[[str], Path]) -> None:
    """With the routed experts' scale left out, the mean and the share of differing tokens leave the noise."""
    golden, noise = read_golden("bf16")
    golden["items"] = golden["items"][:6]
    llm = LLM(seeded_checkpoint("bf16"), arms="reference", dtype="bf16")
    for layer in llm.loaded.engine.model.layers:
        if isinstance(layer.mixer, MoEMixer):
            layer.mixer.routed_scaling_factor = 1.0
    clauses = run(llm, golden, "prefill").verdict(noise)
    assert not clauses["mean"]
    assert not clauses["share"]
