"""Structured output on a GPU: the form is kept, and requests beside it get what they get alone."""

from __future__ import annotations

import json

import pytest

from hemiola import LLM, SamplingParams
from hemiola.config.sampling import StructuredSpec

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_form_is_kept_beside_free_requests() -> None:
    llm = LLM(arms="device", invariant=True, cache_bytes=1 << 30)
    free = [SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=30, temperature=0.8, seed=5)]
    prompts = ["It was a fine morning, and", "The king of"]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in zip(prompts, free, strict=True)]
    formed = [
        SamplingParams(max_tokens=80, temperature=1.0, seed=seed, structured=StructuredSpec(json_schema=SCHEMA))
        for seed in range(6)
    ]
    outputs = llm.generate([*prompts, *["A person: "] * 6], [*free, *formed])
    assert [output.outputs[0].token_ids for output in outputs[:2]] == alone
    for output in outputs[2:]:
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            assert set(value) == {"name", "age"}
            assert isinstance(value["age"], int)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs[2:]) >= 3
    assert {path.arm for path in llm.path_counts()} == {"device"}
