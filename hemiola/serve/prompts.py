"""From messages to the ids of a chat prompt, by the model's own template; runs beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.errors import HemiolaError
from hemiola.serve.errors import ApiError, of_request
from hemiola.serve.schemas import AssistantMessage, Message, SystemMessage, Tool, ToolMessage, UserMessage
from hemiola.text.chat_output import ChatFormat, chat_format, thinking_is_open
from hemiola.text.tokenizer import Tokenizer

THINKING_SWITCH = "enable_thinking"
FORCE_CONTENT = "force_nonempty_content"  # told with the template's switches, but meant for the parser, as in vLLM


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """thinking: the answer begins inside of a thought. format: how the model writes answers. force_content: an answer
    without content has its reasoning as content."""

    ids: list[int]
    thinking: bool
    format: ChatFormat
    force_content: bool


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    switches: dict[str, Any],
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """Raises: ApiError for what the template refuses, an unknown switch included."""
    plain = [_plain(message) for message in messages]
    plain_tools = [tool.model_dump(exclude_none=True) for tool in tools or []]
    force_content = switches.get(FORCE_CONTENT, False)
    switches = {name: value for name, value in switches.items() if name != FORCE_CONTENT}

    def render() -> ChatPrompt:
        text = tokenizer.apply_chat_template(plain, plain_tools or None, add_generation_prompt, **switches)
        source = tokenizer.chat_template_source(with_tools=bool(plain_tools))
        return ChatPrompt(
            tokenizer.encode(text, add_special_tokens=False),
            add_generation_prompt and thinking_is_open(text),
            chat_format(source),
            force_content,
        )

    if not isinstance(force_content, bool):
        where = f"chat_template_kwargs.{FORCE_CONTENT}"
        raise ApiError(400, f"{where}: not true or false", param=where)
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in switches:
            raise ApiError(
                400, f"chat_template_kwargs.{name}: has a field of its own", param=f"chat_template_kwargs.{name}"
            )
    try:
        return await asyncio.to_thread(render)
    except HemiolaError as error:
        raise of_request(error) from error


def effort_switches(tokenizer: Tokenizer, effort: str | None, field: str) -> dict[str, Any]:
    """The template's switches for an effort: "none" is no thinking at all; others have to be known to the template,
    except those that mean what it does anyway.

    Raises: ApiError naming `field` when the template has no switch for it.
    """
    known = tokenizer.chat_switches()
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    switches: dict[str, Any] = {}
    if effort in ("minimal", "low"):
        switches["low_effort"] = True
    if THINKING_SWITCH in known or effort == "none":
        switches[THINKING_SWITCH] = effort != "none"
    if missing := switches.keys() - known:
        raise ApiError(
            400, f"{field}: the chat template of this model has no {', '.join(sorted(missing))} switch", param=field
        )
    return switches


def _plain(message: Message) -> dict[str, Any]:
    """As templates know it: roles system, user, assistant and tool, reasoning in `reasoning_content`."""
    match message:
        case SystemMessage():
            plain: dict[str, Any] = {"role": "system", "content": _content(message.content)}
        case UserMessage():
            plain = {"role": "user", "content": _content(message.content)}
        case ToolMessage():
            plain = {"role": "tool", "content": _content(message.content), "tool_call_id": message.tool_call_id}
        case AssistantMessage():
            plain = {"role": "assistant", "content": _content(message.content) or ""}
            if reasoning := message.reasoning_content or message.reasoning:
                plain["reasoning_content"] = reasoning
            if message.tool_calls:
                plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    return plain


def _content(content: Any) -> str | list[dict[str, str]] | None:
    return [part.model_dump() for part in content] if isinstance(content, list) else content
