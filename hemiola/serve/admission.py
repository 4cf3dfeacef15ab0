"""Who may come in: API keys, the size of a body, and how much may be under way at once."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hemiola.serve.encoding import json_response
from hemiola.serve.errors import ApiError

# What tells no more than that a server is here and how it fares: the page has to load before it can ask for a key.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})


class KeyCheck:
    """ASGI middleware: a bearer token (or `x-api-key`) that is one of the keys, on all paths but the open ones.

    Every key is compared, each in constant time, whatever the outcome.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_known(Headers(scope=scope)):
            error = ApiError(401, "no valid API key", code="invalid_api_key")
            await json_response(error.body, error.status, error.headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


class BodyLimit:
    """ASGI middleware: a body of more than max_bytes is answered with 413, by its declared length where it has one. The
    application gets the body in one piece."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        is_large = declared.isdecimal() and int(declared) > self._max_bytes
        first = None if is_large else await self._read(receive)
        if first is None:
            error = ApiError(413, f"the body is larger than {self._max_bytes:,} bytes", code="body_too_large")
            await json_response(error.body, error.status)(scope, receive, send)
            return
        messages = [first]

        async def read_already() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, read_already, send)

    async def _read(self, receive: Receive) -> Message | None:
        """The whole body as one message; None when it is too large. A client that leaves is passed on."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}
