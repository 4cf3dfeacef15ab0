"""From the sampling fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hemiola.config.sampling import SamplingParams, StructuredSpec
from hemiola.errors import RequestError
from hemiola.serve.errors import of_request
from hemiola.serve.schemas import SamplingFields

# StructuredSpec's fields as `structured_outputs` has them.
STRUCTURED_NAMES = {"structured.json_schema": "structured_outputs.json", "structured": "structured_outputs"}


def sampling_params(
    fields: SamplingFields,
    *,
    names: Mapping[str, str] | None = None,
    max_tokens: int | None,
    logprobs: int | None,
    structured: Mapping[str, Any] | None = None,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """structured: fields of StructuredSpec; by default what the request's own `structured_outputs` says.

    names: what the client calls fields of SamplingParams. max_tokens: None is SamplingParams' own default.

    Raises: ApiError that names the client's field.
    """
    values: dict[str, Any] = {
        name: value
        for name in SamplingFields.model_fields
        if name != "structured_outputs" and (value := getattr(fields, name)) is not None
    }
    if structured is None and fields.structured_outputs is not None:
        structured = fields.structured_outputs.spec
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    try:
        if structured is not None:
            values["structured"] = StructuredSpec(**structured)
        return SamplingParams(logprobs=logprobs, thinking_budget=thinking_budget, **values)
    except RequestError as error:
        raise of_request(error, {**STRUCTURED_NAMES, **(names or {})}) from error
