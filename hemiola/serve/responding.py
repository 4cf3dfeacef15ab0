"""How every generating endpoint answers: whole or as events, and not at all once the client is gone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from hemiola.serve.encoding import EventStream, closing, json_response, while_connected
from hemiola.serve.generation import Generation, Origin

CLIENT_GONE = 499  # nobody reads it


class Answering(Protocol):
    """A request under way: its answer whole, or as events; one of the two is asked for, once."""

    @property
    def generation(self) -> Generation: ...
    async def result(self) -> dict[str, Any]: ...
    def events(self) -> AsyncGenerator[bytes, None]: ...


async def respond(request: Request, origin: Origin, start: Coroutine[Any, Any, Answering], stream: bool) -> Response:
    """The client's leaving ends the generation at once, in whatever stage it is.

    Raises: ApiError, when it comes before a stream has begun.
    """
    answering = await while_connected(request, start)
    if answering is None:
        return Response(status_code=CLIENT_GONE)
    generation = answering.generation
    if stream:
        return EventStream(closing(answering.events(), generation.close), origin.headers)
    try:
        result = await while_connected(request, answering.result())
    finally:
        generation.close()
    return Response(status_code=CLIENT_GONE) if result is None else json_response(result, headers=origin.headers)
