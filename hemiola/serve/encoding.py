"""Bytes of answers: JSON, and server-sent events that end when the client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hemiola.serve.errors import ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def json_bytes(value: object) -> bytes:
    """Compact JSON. A lone surrogate, which UTF-8 lacks, becomes its JSON escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def event(value: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
    return prefix + b"data: " + json_bytes(value) + b"\n\n"


async def closing(events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """The events; an error among them becomes a clean last one. close is called at the end, however it comes."""
    try:
        async for data in events:
            if data:
                yield data
    except ApiError as error:
        yield event(error.body) + DONE
    finally:
        close()


class EventStream(Response):
    """Sends what an iterator of event bytes yields; when the client goes away first, the iterator is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns; None when the client went away first, and the work was cancelled."""
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
