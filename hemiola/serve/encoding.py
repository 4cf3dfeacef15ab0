"""Bytes of answers: JSON, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from starlette.responses import Response

K = TypeVar("K", bound=Hashable)
DONE = b"data: [DONE]\n\n"
_PLACE = "\0"  # of a text that is not known yet

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: object) -> bytes:
    """Compact JSON. A lone surrogate, which UTF-8 lacks, becomes its JSON escape."""
    return _encode(value).encode("utf-8", "backslashreplace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def event(value: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + json_bytes(value) + b"\n\n"


class TextEvents(Generic[K]):
    """A stream's events that differ in one text alone: of each kind, everything else is encoded once.

    make: the value of an event, by its kind and its text. The text has to stand in it as it is, as often as you like,
    and no other string of the value may be a single NUL, which holds the text's place.
    """

    def __init__(self, make: Callable[[K, str], object]) -> None:
        self._make = make
        self._around: dict[K, list[bytes]] = {}  # by kind, the bytes before, between and after the places of the text

    def event(self, kind: K, text: str) -> bytes:
        """What `event` makes of the value of this kind with this text."""
        around = self._around.get(kind)
        if around is None:
            around = self._around[kind] = event(self._make(kind, _PLACE)).split(json_bytes(_PLACE))
        return json_bytes(text).join(around)
