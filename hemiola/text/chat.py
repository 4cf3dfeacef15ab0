"""Chat templates: from messages and tools to the text of a prompt, with the template that the checkpoint ships.

Templates are programs of whoever made the checkpoint, so they run in jinja2's immutable sandbox, with the names and
filters that Hugging Face templates expect.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hemiola.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

# What rendering can raise when a template meets a message of a shape that it does not expect.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template.

    source: its text. where: the file it came from, for errors.
    special_tokens: names such as bos_token with their text.
    switches: the names that the template reads beyond the standard ones; `render` takes these and no others.
    """

    def __init__(self, source: str, where: Path, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                "not a usable chat template", found=f"{error.message} (line {error.lineno})", where=where
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._reads_tools = "tools" in names
        self.switches = frozenset(names) - {"messages", "tools", "add_generation_prompt"} - special_tokens.keys()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        switches: Mapping[str, object],
    ) -> str:
        """The prompt text.

        messages: OpenAI's form. Lists of text parts are joined by newlines, and the arguments of tool calls are parsed
            where they are JSON strings, because templates expect mappings.
        switches: the template's own variables, such as enable_thinking.
        Raises: RequestError for messages that are malformed, a switch or tools that the template does not read, and
        whatever the template itself refuses.
        """
        for name in switches:
            if name not in self.switches:
                raise RequestError(
                    "the chat template has no such switch",
                    found=repr(name),
                    expected=", ".join(sorted(self.switches)) or "no switch at all",
                    where=f"chat_template_kwargs.{name}",
                )
        if tools and not self._reads_tools:
            raise RequestError("the chat template of this model takes no tools", where="tools")
        if not messages:
            raise RequestError("a conversation without messages", expected="at least one message", where="messages")
        context = {
            **self._special_tokens,
            **switches,
            "messages": [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except _RENDER_ERRORS as error:
            raise RequestError(
                "the chat template refuses this conversation",
                found=f"{type(error).__name__}: {error}",
                where="messages",
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the model saw it in training: non-ASCII text as it is, nothing escaped for HTML (jinja2's own does)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _plain_message(message: object, where: str) -> dict[str, Any]:
    """A copy of a message with its content as plain text and the arguments of its tool calls as mappings."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("not a message", found=repr(message)[:80], expected="an object with a role", where=where)
    plain = dict(message)
    if isinstance(content := message.get("content"), list | tuple):
        plain["content"] = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise RequestError("not a list", found=repr(calls)[:80], where=f"{where}.tool_calls")
        plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _part_text(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise RequestError("not a text part", found=repr(part)[:80], expected="a part of type text", where=where)


def _plain_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError("not a tool call", found=repr(call)[:80], expected="an object", where=where)
    if isinstance(call.get("function"), Mapping):
        return dict(call) | {"function": _plain_call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError("not valid JSON", found=error, where=f"{where}.arguments") from error
    if arguments is not None and not isinstance(arguments, Mapping):
        raise RequestError(
            "not the arguments of a tool call",
            found=repr(arguments)[:80],
            expected="an object",
            where=f"{where}.arguments",
        )
    return dict(call) | {"arguments": arguments}
