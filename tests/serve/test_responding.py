"""EventStream alone: what is sent in which piece, and when the generation is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from hemiola.serve.errors import ApiError
from hemiola.serve.responding import EventStream


class Steps:
    """A generation that brings the given steps, and what happened around it: bodies that were sent, and its end.

    A step that is an error is raised; None never comes.
    """

    def __init__(self, steps: Sequence[str | ApiError | None]) -> None:
        self.steps = steps
        self.happened: list[str] = []
        self.arrived = asyncio.Event()  # at a None

    async def __aiter__(self) -> AsyncIterator[str]:
        for step in self.steps:
            if step is None:
                self.arrived.set()
                await asyncio.Event().wait()
            elif isinstance(step, ApiError):
                raise step
            else:
                yield step

    def close(self) -> None:
        if "closed" not in self.happened:
            self.happened.append("closed")

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            more = "" if message["more_body"] else "."
            self.happened.append(message["body"].decode() + more)


class Telling:
    def begin(self) -> bytes:
        return b"begin"

    def add(self, updates: Any) -> bytes:
        if updates == "bad":
            raise ApiError(500, "bad")
        return str(updates).encode()

    def end(self) -> bytes:
        return b"end"

    def fail(self, error: ApiError) -> bytes:
        return error.message.encode()


def happened(steps: Sequence[str | ApiError | None], leaves: bool = False) -> list[str]:
    async def stream() -> list[str]:
        generation: Any = Steps(steps)

        async def receive() -> dict[str, str]:
            await (generation.arrived if leaves else asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        await EventStream(generation, Telling())({}, receive, generation.send)
        return list(generation.happened)

    return asyncio.run(stream())


def test_a_step_is_one_piece_and_nothing_is_none() -> None:
    assert happened(["one", "", "two"]) == ["begin", "one", "two", "closed", "end."]


@pytest.mark.parametrize("steps", [["one", "bad", "two"], ["one", ApiError(500, "bad")]])
def test_an_error_is_the_last_piece(steps: list[Any]) -> None:
    assert happened(steps) == ["begin", "one", "closed", "bad."]


def test_a_client_that_leaves_is_the_end() -> None:
    assert happened(["one", None, "two"], leaves=True) == ["begin", "one", "closed"]


def test_it_is_closed_also_where_nothing_can_be_sent() -> None:
    async def stream() -> list[str]:
        generation: Any = Steps(["one"])

        async def broken(message: Any) -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await EventStream(generation, Telling())({}, generation.send, broken)
        return list(generation.happened)

    assert asyncio.run(stream()) == ["closed"]
