"""Turn: the model's turn in a conversation, as chat completions and responses both ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hemiola.serve.answers import ChatAnswer
from hemiola.serve.errors import ApiError
from hemiola.serve.loop import THOUGHT_END, ThinkingBudget
from hemiola.serve.parameters import sampling_params
from hemiola.serve.prompts import ChatPrompt, chat_prompt, effort_switches
from hemiola.serve.schemas import Message, NamedTool, ResponseFormat, SamplingFields, TextFormat, Tool
from hemiola.serve.service import Generation, Origin, Service
from hemiola.text.chat_output import ChatParser
from hemiola.text.tokenizer import Tokenizer


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
        _refuse_constraints(wish)
        switches = effort_switches(tokenizer, wish.effort, wish.names.get("effort", "effort"))
        prompt = await chat_prompt(
            tokenizer, wish.messages, tools, {**switches, **(wish.switches or {})}, wish.add_generation_prompt
        )
        params = sampling_params(
            wish.fields,
            names=wish.names,
            max_tokens=service.room_for_output(prompt.ids) if wish.max_tokens is None else wish.max_tokens,
            logprobs=wish.logprobs,
        )
        generation = await service.generate(
            [prompt.ids],
            [params],
            origin=origin,
            names=wish.names,
            priority=wish.priority,
            thinking_budget=_thinking_budget(tokenizer, prompt, wish.thinking_token_budget),
            with_paths=wish.with_paths,
        )
        plain_tools = [tool.model_dump(exclude_none=True) for tool in tools or []]
        answers = [
            ChatAnswer(
                ChatParser(
                    prompt.format,
                    thinking=prompt.thinking,
                    tools=plain_tools,
                    tokenizer=tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                ),
                parallel=wish.parallel_tool_calls,
            )
            for _ in range(params.n)
        ]
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


def _refuse_constraints(wish: Wish) -> None:
    """Raises: ApiError for what would need the output to be constrained."""
    if wish.response_format is not None and not isinstance(wish.response_format, TextFormat):
        name = wish.names.get("response_format", "response_format")
        raise ApiError(400, f"{name}: only text is supported", param=name)
    if wish.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice: only none and auto are supported", param="tool_choice")


def _thinking_budget(tokenizer: Tokenizer, prompt: ChatPrompt, num_tokens: int | None) -> ThinkingBudget | None:
    """Nothing to limit where the answer does not begin with a thought.

    Raises: ApiError when the model's format has no thoughts.
    """
    if num_tokens is None:
        return None
    if not prompt.format.reasoning:
        raise ApiError(400, "thinking_token_budget: this model does not think", param="thinking_token_budget")
    end_ids = tokenizer.encode(f"\n{THOUGHT_END}\n", add_special_tokens=False)
    return ThinkingBudget(num_tokens, tuple(end_ids)) if prompt.thinking else None
