"""SamplingParams: what is taken, how it is normalised, and that each refusal names its field."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hemiola.config.sampling import SamplingParams
from hemiola.errors import RequestError

INTEGER_FIELDS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
FLAG_FIELDS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def refused(field: str, value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value.where).startswith(field), caught.value
    return caught.value


def test_defaults_are_greedy_and_valid() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.max_tokens == 128
    assert params.seed is None
    assert params.logit_bias is None
    params.validate_for(1)
    assert not SamplingParams(temperature=1e-9).is_greedy


@pytest.mark.parametrize("field", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [True, 1.0, "1", [1], math.nan, b"1", np.bool_(True), np.float32(1)])
def test_integer_fields_refuse_other_types(field: str, value: Any) -> None:
    assert "not a whole number" in str(refused(field, value))


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", [True, "0.5", None, [0.5], 1j, np.bool_(True)])
def test_number_fields_refuse_other_types(field: str, value: Any) -> None:
    assert "not a number" in str(refused(field, value))


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, np.float64("nan")])
def test_number_fields_refuse_what_is_not_finite(field: str, value: Any) -> None:
    assert "finite" in str(refused(field, value))


@pytest.mark.parametrize("field", FLAG_FIELDS)
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_flags_refuse_other_types(field: str, value: Any) -> None:
    refused(field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -1e-9),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.0000001),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 3]),
        ("stop", None),
        ("stop", b"a"),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("forced_output_ids", [-1]),
        ("forced_output_ids", 3),
        ("logit_bias", [(1, 2.0)]),
    ],
)
def test_out_of_range_and_malformed(field: str, value: Any) -> None:
    error = refused(field, value)
    assert error.expected is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 0),
        ("min_p", 1),
        ("top_k", -1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("logprobs", 0),
        ("prompt_logprobs", -1),
        ("max_tokens", 1),
    ],
)
def test_bounds_are_inside(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int32(7),  # type: ignore[arg-type]
        seed=np.uint64(2**63 - 1),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int64(5): 1, "6": np.float64(2)},  # type: ignore[dict-item]
    )
    assert type(params.max_tokens) is int
    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert params.top_p == 0.5
    assert params.stop_token_ids == (3, 4)
    assert all(type(i) is int for i in params.stop_token_ids)
    assert params.logit_bias == {5: 1.0, 6: 2.0}
    assert {type(i) for i in params.logit_bias} == {int}
    assert pickle.loads(pickle.dumps(params)) == params


def test_one_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


def test_min_tokens_within_max_tokens() -> None:
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(RequestError) as error:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert error.value.where == "min_tokens"
    assert "max_tokens = 3" in str(error.value)


@pytest.mark.parametrize(
    "key", [-1, 100, 2**31, "abc", 1e9, math.nan, "-1", "100", "²", "", None, True, 1.0, "9" * 5000]
)
def test_bad_logit_bias_ids_are_named(key: Any) -> None:
    """B30: each of these once stopped an engine."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias={key: 1.0}).validate_for(100)
    where = str(caught.value.where)
    assert where.startswith("logit_bias[")
    assert str(key) in where


@pytest.mark.parametrize("bias", [1e9, 100.1, -101, math.nan, math.inf, "1", None, True])
def test_bad_logit_bias_values_are_named(bias: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias={7: bias})
    assert caught.value.where == "logit_bias[7]"


def test_the_same_id_in_two_spellings_is_refused() -> None:
    with pytest.raises(RequestError, match="twice"):
        SamplingParams(logit_bias={7: 1.0, "7": 2.0})  # type: ignore[dict-item]


def test_last_id_of_the_vocabulary_works() -> None:
    params = SamplingParams(logit_bias={99: -100.0}, stop_token_ids=[99], forced_output_ids=[99], logprobs=100)
    params.validate_for(100)
    with pytest.raises(RequestError):
        params.validate_for(99)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"stop_token_ids": [5, 100]}, "stop_token_ids[1]"),
        ({"forced_output_ids": [100]}, "forced_output_ids[0]"),
        ({"logprobs": 101}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ],
)
def test_vocabulary_checks_name_the_field(fields: dict[str, Any], where: str) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(RequestError) as error:
        params.validate_for(100)
    assert error.value.where == where
