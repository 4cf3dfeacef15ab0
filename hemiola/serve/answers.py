"""One choice of a chat answer while it comes: updates in, deltas of reasoning, content and tool calls out."""

from __future__ import annotations

from hemiola.engine.request import TokenLogprobs
from hemiola.serve.errors import of_engine
from hemiola.serve.loop import Finish, Update
from hemiola.text.chat_output import ChatDelta, ChatParser


class ToolCallText:
    """A tool call as far as it has come."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id, self.name, self.arguments = call_id, name, ""


class ChatAnswer:
    """parallel: whether more than one tool call may be in it; later ones are dropped otherwise.

    finish: how the engine ended it, once it has. num_reasoning_tokens: ids up to the end of the thought.
    """

    def __init__(self, parser: ChatParser, *, parallel: bool = True) -> None:
        self._parser, self._parallel = parser, parallel
        self.reasoning = self.content = ""
        self.calls: dict[int, ToolCallText] = {}
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_reasoning_tokens = 0
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, update: Update) -> list[ChatDelta]:
        """What the update adds. Raises: ApiError when the engine could not go on with this choice."""
        self.ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        deltas = self._parser.push(update.text, update.token_ids)
        if update.finish is not None:
            self.finish = update.finish
            if update.finish.reason == "error":
                raise of_engine(update.finish.error or "the request failed")
            deltas = deltas + self._parser.finish(cut=update.finish.reason != "stop")
        kept = [delta for delta in deltas if self._take(delta)]
        if self.reasoning and not self.content and not self.calls:
            self.num_reasoning_tokens = len(self.ids)
        return kept

    @property
    def finish_reason(self) -> str:
        """OpenAI's: stop, length or tool_calls."""
        assert self.finish is not None, "not finished"
        if self.finish.reason == "stop" and self.calls and self._parser.cut_off_call is None:
            return "tool_calls"
        return self.finish.reason

    def _take(self, delta: ChatDelta) -> bool:
        self.reasoning += delta.reasoning
        self.content += delta.content
        if (call := delta.tool_call) is not None:
            if call.index > 0 and not self._parallel:
                return False
            if call.index not in self.calls:
                self.calls[call.index] = ToolCallText(call.id or "", call.name or "")
            self.calls[call.index].arguments += call.arguments
        return True
