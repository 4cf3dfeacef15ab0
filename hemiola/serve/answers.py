"""One choice of a chat answer while it comes: updates in, deltas of reasoning, content and tool calls out."""

from __future__ import annotations

from hemiola.engine.request import TokenLogprobs
from hemiola.serve.errors import of_engine
from hemiola.serve.loop import Finish, Update
from hemiola.text.chat_output import ChatDelta, ChatMessage, ChatParser, ToolCall


class ChatAnswer:
    """parallel: whether more than one tool call may be in it; later ones are dropped otherwise.

    message: the answer so far. finish: how the engine ended it, once it has. num_reasoning_tokens: ids up to the end of
    the thought.
    """

    def __init__(self, parser: ChatParser, *, parallel: bool = True) -> None:
        self._parser, self._parallel = parser, parallel
        self.message = ChatMessage()
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_reasoning_tokens = 0
        self.finish: Finish | None = None

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
        if not self._parallel:
            deltas = [delta for delta in deltas if delta.tool_call is None or delta.tool_call.index == 0]
        self.message.add(deltas)
        if self.message.reasoning and not self.message.content and not self.message.tool_calls:
            self.num_reasoning_tokens = len(self.ids)
        return deltas

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that may be carried out: one that the end cut off is not among them."""
        cut_off = self._shown(self._parser.cut_off_call)
        return [call for index, call in enumerate(self.message.tool_calls) if index != cut_off]

    @property
    def doubtful_call(self) -> int | None:
        """The index of a call whose arguments the model's own text has probably cut short; see ChatParser."""
        return self._shown(self._parser.doubtful_call)

    @property
    def finish_reason(self) -> str:
        """OpenAI's: stop, length or tool_calls."""
        assert self.finish is not None, "not finished"
        if self.finish.reason != "stop" or not self.message.tool_calls:
            return self.finish.reason
        return "tool_calls" if self._shown(self._parser.cut_off_call) is None else "length"

    def _shown(self, call: int | None) -> int | None:
        """The index of a call, unless it was dropped."""
        return call if self._parallel or call == 0 else None
