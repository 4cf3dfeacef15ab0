"""Answers of chat models, parsed whole and in pieces, for the tests of reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.text.chat_output import ChatDelta, ChatFormat, ChatMessage, ChatParser

V3 = ChatFormat(reasoning=True, tools="qwen3_coder")
V2 = ChatFormat(reasoning=True, tools="toolcall_json")


def tool(name: str, **properties: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TOOLS = [
    tool("write", path=TEXT, content=TEXT, mode=INTEGER),
    tool("ask", question={"anyOf": [{"type": "string"}, {"type": "null"}]}, options={"type": "array"}),
    tool("now"),
]


@dataclass
class Parsed:
    """reasoning, content; calls: (name, arguments) with the arguments read from their JSON."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    cut_off: int | None
    doubtful: int | None
    deltas: list[ChatDelta]

    @property
    def shown(self) -> tuple[str, str, list[tuple[str, Any]]]:
        return self.reasoning, self.content, self.calls

    @property
    def all(self) -> tuple[Any, ...]:
        return *self.shown, self.cut_off, self.doubtful


def parse(
    pieces: Sequence[tuple[str, Sequence[int]] | str],
    *,
    format: ChatFormat = V3,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
    thinking: bool = True,
    cut: bool = False,
    **options: Any,
) -> Parsed:
    parser = ChatParser(format, thinking=thinking, tools=tools, **options)
    deltas = []
    for piece in pieces:
        text, ids = (piece, ()) if isinstance(piece, str) else piece
        deltas += parser.push(text, ids)
    deltas += parser.finish(cut)
    message = ChatMessage()
    message.add(deltas)
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids), "ids are unique"
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return Parsed(message.reasoning, message.content, calls, parser.cut_off_call, parser.doubtful_call, deltas)


def parse_every_way(text: str, **options: Any) -> Parsed:
    """The parse of the whole text, after checking that every split in two and single characters give the same."""
    whole = parse([text], **options)
    for i in range(1, len(text)):
        assert parse([text[:i], text[i:]], **options).all == whole.all, f"split at {i}"
    assert parse(list(text), **options).all == whole.all, "character by character"
    return whole


def xml_call(name: str, **values: str) -> str:
    """A call as the templates write it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n"
