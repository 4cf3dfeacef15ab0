"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hemiola.errors import CapacityError, HemiolaError

_REQUEST_ID = re.compile(r"^request-\d+(\.\d+)?(: )?")


class ApiError(Exception):
    """What a client gets in the place of an answer. param: the field at fault. retry_after_s: sent as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code},
        }

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def of_request(error: HemiolaError, names: Mapping[str, str] | None = None) -> ApiError:
    """The client's fault. names: what the client calls a field that the engine calls otherwise; also paths."""
    where = _REQUEST_ID.sub("", str(error.where or ""))
    message = _REQUEST_ID.sub("", str(error))
    for own, theirs in sorted((names or {}).items(), key=lambda pair: -len(pair[0])):
        if re.match(rf"{re.escape(own)}(?![\w])", where):
            message = theirs + message.removeprefix(own)
            where = theirs + where.removeprefix(own)
            break
    is_field = re.fullmatch(r"[A-Za-z_][^\s/]*", where) is not None
    code = "context_length_exceeded" if isinstance(error, CapacityError) else None
    return ApiError(400, message, param=where if is_field else None, code=code)


def of_engine(message: str) -> ApiError:
    """The server's fault."""
    return ApiError(500, message, code="engine_error")


def of_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """Of pydantic's errors, the one that is deepest in the body: with alternatives, it is about the one meant. Of
    several, the one about a wrong type of thing, from which the others follow."""
    paths = [_path(tuple(error["loc"]), body, str(error["type"])) for error in errors]
    best = max(range(len(errors)), key=lambda i: (len(paths[i]), errors[i]["type"] == "literal_error", -i))
    param = _spell(paths[best])
    message = str(errors[best]["msg"])
    if errors[best]["type"] == "extra_forbidden":
        message = "no such field"
    if errors[best]["type"] == "json_invalid":
        message = f"not valid JSON: {errors[best].get('ctx', {}).get('error', message)}"
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


def _path(loc: tuple[str | int, ...], body: object, kind: str) -> list[str | int]:
    """The part of a location that exists in the body; pydantic puts names of alternatives in between."""
    path: list[str | int] = []
    value = body
    for depth, step in enumerate(loc[1:] if loc[:1] in (("body",), ("query",)) else loc, start=1):
        is_last = depth == len(loc) - (loc[:1] in (("body",), ("query",)))
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path.append(step)
            value = value[step]
        elif isinstance(step, str) and isinstance(value, dict) and (step in value or (is_last and kind == "missing")):
            path.append(step)
            value = value.get(step)
    return path


def _spell(path: Sequence[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"
