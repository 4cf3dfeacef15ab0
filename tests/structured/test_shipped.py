"""Structured output of the model that comes with the package, drawn at temperature 1."""

from __future__ import annotations

import json

import jsonschema
import pytest

from hemiola import LLM, SamplingParams
from hemiola.config.sampling import StructuredSpec
from tests.structured.random_schema import random_object_schema

MAX_TOKENS = 200


@pytest.mark.slow
def test_200_random_schemas_are_kept_or_cut_off_and_said_so() -> None:
    schemas = [random_object_schema(seed) for seed in range(200)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, structured=StructuredSpec(json_schema=schema))
        for seed, schema in enumerate(schemas)
    ]
    outputs = LLM(max_num_seqs=64).generate(["The record in JSON: "] * len(schemas), params)
    num_cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (choice,) = output.outputs
        assert choice.error is None
        if choice.finish_reason == "length":
            assert len(choice.token_ids) == MAX_TOKENS
            num_cut += 1
        else:
            jsonschema.validate(json.loads(choice.text), schema)
    print(f"{num_cut} of {len(schemas)} cut off")
    assert num_cut < len(schemas) // 4, "nearly all end by themselves"
