"""Turn: the model's turn in a conversation, as chat completions and responses both ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.serve.answers import ChatAnswer
from hemiola.serve.errors import ApiError
from hemiola.serve.generation import Generation, Origin
from hemiola.serve.parameters import STRUCTURED_NAMES, sampling_params
from hemiola.serve.prompts import chat_prompt, effort_switches
from hemiola.serve.schemas import (
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    Tool,
)
from hemiola.serve.service import Service
from hemiola.text.chat_output import ChatParser
from hemiola.text.tokenizer import Tokenizer

_NAMES = {
    **STRUCTURED_NAMES,
    "thinking_budget": "thinking_token_budget",
    "structured.tools": "tools",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client wants of a turn.

    names: what the client calls things otherwise; SamplingParams' fields and those of this class.
    max_tokens: None is what is left of the context. logprobs: alternatives per token; None is none.
    """

    fields: SamplingFields
    messages: Sequence[Message]
    names: Mapping[str, str]
    tools: Sequence[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    switches: Mapping[str, Any] | None = None
    effort: str | None = None
    thinking_token_budget: int | None = None
    add_generation_prompt: bool = True
    max_tokens: int | None = None
    logprobs: int | None = None
    priority: int = 0
    with_paths: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn under way; one answer per choice."""

    tokenizer: Tokenizer
    generation: Generation
    answers: list[ChatAnswer]

    @classmethod
    async def start(cls, service: Service, wish: Wish, origin: Origin) -> Turn:
        """Raises: ApiError."""
        tokenizer = service.need_tokenizer()
        tools = _offered(wish)
        switches = effort_switches(tokenizer, wish.effort, wish.names.get("effort", "effort"))
        prompt = await chat_prompt(
            tokenizer, wish.messages, tools, {**switches, **(wish.switches or {})}, wish.add_generation_prompt
        )
        if wish.thinking_token_budget is not None and not prompt.format.reasoning:
            raise ApiError(400, "thinking_token_budget: this model does not think", param="thinking_token_budget")
        names = {**_NAMES, **_name_of_tool(wish), **wish.names}
        params = sampling_params(
            wish.fields,
            names=names,
            max_tokens=service.room_for_output(prompt.ids) if wish.max_tokens is None else wish.max_tokens,
            logprobs=wish.logprobs,
            structured=_structure(wish, tools),
            thinking_budget=wish.thinking_token_budget,
        )
        generation = await service.generate(
            [prompt.ids],
            [params],
            origin=origin,
            names=names,
            priority=wish.priority,
            with_paths=wish.with_paths,
        )
        try:
            plain_tools = [tool.model_dump(exclude_none=True) for tool in tools or []]
            answers = [
                ChatAnswer(
                    ChatParser(
                        prompt.format,
                        thinking=prompt.thinking,
                        tools=plain_tools,
                        tokenizer=tokenizer,
                        skip_special_tokens=params.skip_special_tokens,
                        force_nonempty_content=prompt.force_content,
                    ),
                    parallel=wish.parallel_tool_calls,
                )
                for _ in range(params.n)
            ]
        except BaseException:
            generation.close()
            raise
        return cls(tokenizer, generation, answers)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(answer.num_reasoning_tokens for answer in self.answers)


def _offered(wish: Wish) -> Sequence[Tool] | None:
    """The tools that the model is told of: none where it may call none.

    Raises: ApiError for a choice that the tools do not allow.
    """
    tools, choice = wish.tools, wish.tool_choice
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    if not tools:
        raise ApiError(400, "tool_choice: there are no tools to choose from", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise ApiError(400, f"tool_choice: there is no tool {choice.function.name}", param="tool_choice")
    return tools


def _name_of_tool(wish: Wish) -> dict[str, str]:
    """A tool that is called by name is the only one in a structure."""
    choice = wish.tool_choice
    if not isinstance(choice, NamedTool):
        return {}
    places = [i for i, tool in enumerate(wish.tools or []) if tool.function.name == choice.function.name]
    return {"structured.tools[0]": f"tools[{places[0]}]"} if places else {}


def _structure(wish: Wish, tools: Sequence[Tool] | None) -> dict[str, Any] | None:
    """Fields of StructuredSpec for what the answer has to be; None when that is anything.

    Raises: ApiError for wishes that exclude each other.
    """
    form, choice = wish.response_format, wish.tool_choice
    structure: dict[str, Any] | None = None
    if isinstance(form, JsonSchemaFormat):
        structure = {"json_schema": form.json_schema.schema_}
    elif isinstance(form, JsonObjectFormat):
        structure = {"json_object": True}
    if tools and choice not in (None, "none", "auto"):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        if structure is not None or wish.fields.structured_outputs is not None:
            raise ApiError(400, "tool_choice: a call and another form cannot both be required", param="tool_choice")
        offered = [tool.model_dump(exclude_none=True) for tool in tools if named in (None, tool.function.name)]
        return {"tools": offered, "parallel_tool_calls": wish.parallel_tool_calls and named is None}
    if structure is not None and wish.fields.structured_outputs is not None:
        name = wish.names.get("response_format", "response_format")
        raise ApiError(400, f"{name}: structured_outputs says the form already", param=name)
    return structure
