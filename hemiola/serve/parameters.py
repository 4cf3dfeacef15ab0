"""From the sampling fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hemiola.config.sampling import SamplingParams
from hemiola.errors import RequestError
from hemiola.serve.errors import of_request
from hemiola.serve.schemas import SamplingFields


def sampling_params(
    fields: SamplingFields, *, names: Mapping[str, str] | None = None, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """names: what the client calls fields of SamplingParams. max_tokens: None is SamplingParams' own default.

    Raises: ApiError that names the client's field.
    """
    values: dict[str, Any] = {
        name: value for name in SamplingFields.model_fields if (value := getattr(fields, name)) is not None
    }
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    try:
        return SamplingParams(logprobs=logprobs, **values)
    except RequestError as error:
        raise of_request(error, names) from error
