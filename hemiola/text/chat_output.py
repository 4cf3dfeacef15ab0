"""A chat model's output as it arrives, split into what the client's fields hold: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to one tool call. id and name come once, with the call's first delta; `arguments` are pieces of
    JSON text that joined are one object."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What was added to an answer; exactly one of the three is there."""

    reasoning: str = ""
    content: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a checkpoint writes its answers. reasoning: whether thoughts stand in <think> marks.

    tools: "qwen3_coder" (XML), "toolcall_json" (v2), or None when its template takes no tools.
    """

    reasoning: bool = False
    tools: str | None = None


def chat_format(template: str | None) -> ChatFormat:
    """The format that a chat template's text implies."""
    text = template or ""
    tools = "qwen3_coder" if "<function=" in text else "toolcall_json" if "<TOOLCALL>" in text else None
    return ChatFormat("<think>" in text, tools)


def thinking_is_open(prompt: str) -> bool:
    """Whether a rendered prompt ends inside of a thought, so that the answer begins there."""
    return prompt.rfind("<think>") > prompt.rfind("</think>")


class ChatParser:
    """One answer's parser. What `push` and `finish` return, joined, does not depend on how the text is cut.

    thinking: whether the answer begins inside of a thought; see `thinking_is_open`.
    tools: the request's tools in OpenAI's form; without any, tool calls are ordinary text.
    tokenizer: given, marks that are tokens of their own count only where their id was said (then every id has to be
        pushed, no later than its text); None matches marks by their text.
    skip_special_tokens: the request's.
    force_nonempty_content: an answer without content gets its reasoning as content.
    """

    def __init__(
        self,
        format: ChatFormat,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        tokenizer: Tokenizer | None = None,
        skip_special_tokens: bool = True,
        force_nonempty_content: bool = False,
    ) -> None:
        self._in_reasoning = thinking and format.reasoning
        self._held = ""

    @property
    def cut_off_call(self) -> int | None:
        """After `finish`: the index of the tool call that the answer's end cut off; it is not to be carried out."""
        return None

    def push(self, text_delta: str, token_ids: Sequence[int] = ()) -> list[ChatDelta]:
        if not self._in_reasoning:
            return [ChatDelta(content=text_delta)] if text_delta else []
        self._held += text_delta
        before, mark, after = self._held.partition("</think>")
        if not mark:
            return []
        self._in_reasoning = False
        deltas = [ChatDelta(reasoning=before.strip()), ChatDelta(content=after.lstrip("\n"))]
        return [delta for delta in deltas if delta.reasoning or delta.content]

    def finish(self, cut: bool = False) -> list[ChatDelta]:
        """cut: the answer ended by its token limit, or was withdrawn."""
        return [ChatDelta(reasoning=self._held.strip())] if self._in_reasoning and self._held.strip() else []
