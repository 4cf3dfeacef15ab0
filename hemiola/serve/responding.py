"""How every generating endpoint answers: whole or as events, and not at all once the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hemiola.serve.encoding import json_response
from hemiola.serve.errors import ApiError
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.loop import Update

T = TypeVar("T")
CLIENT_GONE = 499  # nobody reads it


class Telling(Protocol):
    """An answer told as server-sent events, in bytes: those that it begins with, those for what one step brought (none
    where that shows nothing), and those that it ends with, well or with an error.

    add may raise ApiError; then fail is asked, and nothing after it.
    """

    def begin(self) -> bytes: ...
    def add(self, updates: Sequence[tuple[int, Update]]) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, error: ApiError) -> bytes: ...


class Answering(Protocol):
    """A request under way: its answer whole, or as events; one of the two is asked for, once."""

    @property
    def generation(self) -> Generation: ...
    async def result(self) -> dict[str, Any]: ...
    def tell(self) -> Telling: ...


async def respond(request: Request, origin: Origin, start: Coroutine[Any, Any, Answering], stream: bool) -> Response:
    """The client's leaving ends the generation at once, in whatever stage it is.

    Raises: ApiError, when it comes before a stream has begun.
    """
    answering = await _while_connected(request.receive, start)
    if answering is None:
        return Response(status_code=CLIENT_GONE)
    generation = answering.generation
    if stream:
        return EventStream(generation, answering.tell(), origin.headers)
    try:
        result = await _while_connected(request.receive, answering.result())
    finally:
        generation.close()
    return Response(status_code=CLIENT_GONE) if result is None else json_response(result, headers=origin.headers)


class EventStream(Response):
    """Sends what a generation brings as it is told, in one piece per step, and closes the generation: when it has
    ended, and at once when the client goes away first. An error becomes a clean last event."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, telling: Telling, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._generation, self._telling = generation, telling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _while_connected(receive, self._send_all(send))
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        telling, data = self._telling, self._telling.begin()
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        try:
            async for updates in self._generation:
                if data := telling.add(updates):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = telling.end()
        except ApiError as error:
            data = telling.fail(error)
        self._generation.close()  # before its end is seen
        await send({"type": "http.response.body", "body": data, "more_body": False})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns; None when the client went away first, and the work was cancelled."""
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
