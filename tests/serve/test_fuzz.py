"""Bodies that nobody would send: whatever one field holds, the answer is the client's error or an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hemiola.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    Strict,
    TokenizeRequest,
)
from tests.serve.conftest import Live

MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[type[Strict], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/v1/completions": (CompletionRequest, {"prompt": "bada", "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "bada"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [20]}),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["text", "json_object", "auto", "required", "user", "function", "low", "\ud800", "\x00"]),
)
KEYS = st.sampled_from(["type", "role", "content", "text", "name", "function", "json", "regex", "schema", "20", "-1"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@pytest.mark.parametrize("path", ENDPOINTS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_breaks_the_server(text_server: Live, path: str, data: st.DataObject) -> None:
    model, base = ENDPOINTS[path]
    names = st.sampled_from([field.alias or name for name, field in model.model_fields.items()])
    body = base | data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    answer = text_server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_nothing_is_left_behind(text_server: Live) -> None:
    text_server.settle()
    assert text_server.http.get("/health").status_code == 200
