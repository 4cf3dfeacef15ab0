"""A chat model's output as it arrives, split into what the client's fields hold: reasoning, content and tool calls.

One state machine over marked text, for answers that stream and answers that do not. The rules, which follow vLLM 0.25's
nemotron_v3 parser in what ends a thought:
  - In a thought, <think> is dropped, </think> ends it, and so does <tool_call> with a function after it.
  - Reasoning has no white space around it.
  - Outside, </think> is dropped; <think> begins a thought as long as there is no content or call, and is prose
    afterwards, with the </think> that belongs to it.
  - After a thought or a call, newlines before content are the format's. White space before a call is dropped.
  - Without tools in the request, the words of tool calls are prose.
  - Swap: when thinking is off, or force_nonempty_content is set, and neither content nor a call came, the reasoning is
    the content. Reasoning is withheld for that until content begins, because what was sent cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hemiola.text.marks import Ending, MarkedText, Match, Open, find_word
from hemiola.text.reasoning import END_THINK, THINK, Thought, thinking_is_open
from hemiola.text.tokenizer import Tokenizer
from hemiola.text.tools import (
    FUNCTION,
    JSON_CALLS,
    Call,
    JsonFormat,
    ToolCallDelta,
    ToolFormat,
    Tools,
    XmlFormat,
)

__all__ = [
    "ChatDelta",
    "ChatFormat",
    "ChatMessage",
    "ChatParser",
    "ToolCall",
    "ToolCallDelta",
    "chat_format",
    "thinking_is_open",
]


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
    """The format that the text of a checkpoint's chat template implies; a model without one has none of both."""
    text = template or ""
    tools = "qwen3_coder" if FUNCTION in text else "toolcall_json" if JSON_CALLS in text else None
    return ChatFormat(THINK in text, tools)


class ChatParser:
    """One answer's parser. What `push` and `finish` return, joined, does not depend on how the text is cut.

    thinking: whether the answer begins inside of a thought; see `thinking_is_open`.
    tools: the request's tools in OpenAI's form; none when it may call none.
    tokenizer: given, marks that are tokens of their own count only where their id was said (then every id has to be
        pushed, no later than its text); None matches marks by their text.
    skip_special_tokens: the request's. With a tokenizer, marks are known also where decoding drops them.
    force_nonempty_content: an answer without content gets its reasoning as content.

    cut_off_call: after `finish`, the index of the tool call that the answer's end cut off, or None. Such a call is not
        to be carried out: finish_reason is "length", and an answer that does not stream leaves it out. What was
        streamed of it is valid JSON all the same. An XML call has its deltas out by then, a JSON call none.
    doubtful_call: the index of the last call before an orphan </tool_call>, or None: one of its values probably held
        the tags that end a call, and was cut there. The rest is in the content.
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
        self.cut_off_call: int | None = None
        self.doubtful_call: int | None = None
        self._format = _tool_format(format, tools)
        self._thinks = format.reasoning
        thinking = thinking and format.reasoning
        self._reasoning = Thought()
        self._call: Call | None = None
        self._num_calls = 0
        self._withheld: str | None = "" if format.reasoning and (force_nonempty_content or not thinking) else None
        self._has_content = False  # more than white space
        self._is_first = True  # nothing of the format came before content
        self._quotes_think = False
        self._space = ""  # of content, shown if more content follows
        self._line_is_blank = True  # what stands before the tape, in its line
        think_marks = (THINK, END_THINK) if format.reasoning else ()
        call_marks = self._format.marks if self._format else ()
        self._tape = MarkedText([*think_marks, *call_marks], tokenizer, skip_special_tokens)
        openers = self._format.openers if self._format else ()
        self._words_in_thought = (*think_marks, *openers)
        self._words_outside = (*think_marks, *openers, *call_marks[-1:])
        self._state: Callable[[Ending], Iterator[ChatDelta]] = self._in_thought if thinking else self._in_content

    def push(self, text_delta: str, token_ids: Sequence[int] = ()) -> list[ChatDelta]:
        """Take new text and the ids that were said since the last push."""
        self._tape.push(text_delta, token_ids)
        return list(self._run(Ending()))

    def finish(self, cut: bool = False) -> list[ChatDelta]:
        """The rest. cut: the answer ended by its token limit, or was withdrawn."""
        deltas = list(self._run(Ending(final=True, cut=cut)))
        if self._withheld:
            deltas.append(ChatDelta(content=self._withheld))
        elif self._space and not self._num_calls:
            deltas.append(ChatDelta(content=self._space))
        return deltas

    def _run(self, ending: Ending) -> Iterator[ChatDelta]:
        while True:
            before = self._tape.text, self._state
            yield from self._state(ending)
            if (self._tape.text, self._state) == before:
                return

    def _in_thought(self, ending: Ending) -> Iterator[ChatDelta]:
        position, word, found = self._find(self._words_in_thought, ending, in_thought=True)
        yield from self._show_reasoning(self._tape.take(position))
        if isinstance(found, Match) and self._format is not None:
            self._reasoning.pause()
            yield from self._begin_call(self._format, found, position)
        elif word is not None:
            self._tape.take(len(word))
            if word == END_THINK:
                self._reasoning.pause()
                self._begin_content()

    def _in_content(self, ending: Ending) -> Iterator[ChatDelta]:
        position, word, found = self._find(self._words_outside, ending, in_thought=False)
        yield from self._show_content(self._tape.take(position))
        if isinstance(found, Match) and self._format is not None:
            yield from self._begin_call(self._format, found, position)
        elif word == THINK and not self._has_content and not self._num_calls:
            self._tape.take(len(word))
            self._space = ""
            self._state = self._in_thought
        elif word == THINK:
            self._quotes_think = True
            yield from self._show_content(self._tape.take(len(word)))
        elif word == END_THINK and self._quotes_think:
            self._quotes_think = False
            yield from self._show_content(self._tape.take(len(word)))
        elif word == END_THINK:
            self._tape.take(len(word))
            self._is_first = False
        elif word is not None:  # the end of a call that there is not
            self.doubtful_call = self._num_calls - 1 if self._num_calls else None
            yield from self._show_content(self._tape.take(len(word)))

    def _in_call(self, ending: Ending) -> Iterator[ChatDelta]:
        assert self._call is not None, "this state has a call"
        yield from (ChatDelta(tool_call=delta) for delta in self._call.read(self._tape, ending))
        if self._call.is_done:
            self._num_calls += self._call.num_calls
            self.cut_off_call, refused = self._call.cut_off, self._call.refused
            self._call = None
            self._begin_content()
            yield from self._show_content(refused)

    def _find(self, words: Sequence[str], ending: Ending, in_thought: bool) -> tuple[int, str | None, Match | None]:
        """Up to where the tape is plain text, the mark that stands there, and the call that begins there, if any."""
        start = 0
        while True:
            position, word = find_word(self._tape.text, start, words, ending.final)
            if word is None:
                return position, None, None
            start = position + 1
            if self._format is not None and word in self._format.openers:
                found = self._opener(self._format, position, word, in_thought, ending)
                if found is Open.OPEN:
                    return position, None, None
                if isinstance(found, Match):
                    return position, word, found
            elif self._tape.is_mark(position, word):
                return position, word, None

    def _opener(
        self, format: ToolFormat, position: int, word: str, in_thought: bool, ending: Ending
    ) -> Match | Open | None:
        if word == FUNCTION and not self._begins_line(position):
            return None
        return format.begins(self._tape, position, in_thought, ending)

    def _begins_line(self, position: int) -> bool:
        _, newline, line = self._tape.text[:position].rpartition("\n")
        return not line.strip() and (bool(newline) or self._line_is_blank)

    def _begin_call(self, format: ToolFormat, found: Match, position: int) -> Iterator[ChatDelta]:
        """The tape is at `found`, which was found `position` characters later."""
        yield from self._release()
        self._space = ""
        self._call = format.call(self._tape, Match(found.end - position, found.name), self._num_calls)
        self._state = self._in_call

    def _begin_content(self) -> None:
        self._is_first, self._line_is_blank = False, True
        self._state = self._in_content

    def _show_reasoning(self, text: str) -> Iterator[ChatDelta]:
        shown = self._reasoning.push(text)
        if self._withheld is not None:
            self._withheld += shown
        elif shown:
            yield ChatDelta(reasoning=shown)

    def _show_content(self, text: str) -> Iterator[ChatDelta]:
        if not text:
            return
        _, newline, line = text.rpartition("\n")
        self._line_is_blank = not line.strip() and (bool(newline) or self._line_is_blank)
        text = self._space + text
        if not self._has_content and not self._is_first:
            text = text.lstrip("\n")
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_content = True
            yield from self._release()
            yield ChatDelta(content=shown)

    def _release(self) -> Iterator[ChatDelta]:
        """Content or a call has begun: reasoning stays what it is."""
        reasoning, self._withheld = self._withheld, None
        if reasoning:
            yield ChatDelta(reasoning=reasoning)


@dataclass(slots=True)
class ToolCall:
    """A tool call as far as it is known. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """An answer, joined from its deltas."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[ChatDelta]) -> None:
        for delta in deltas:
            self.reasoning += delta.reasoning
            self.content += delta.content
            if (call := delta.tool_call) is None:
                continue
            if call.id is not None and call.name is not None:
                self.tool_calls.append(ToolCall(call.id, call.name))
            self.tool_calls[call.index].arguments += call.arguments


def _tool_format(format: ChatFormat, tools: Sequence[Mapping[str, Any]]) -> ToolFormat | None:
    if not tools or format.tools is None:
        return None
    return XmlFormat(Tools(tools)) if format.tools == "qwen3_coder" else JsonFormat()
