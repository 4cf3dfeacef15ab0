"""What clients may send: every field by name and type, nothing else. Ranges are the engine's to check (SamplingParams);
a field that is null is as good as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_STOPS = 64
MAX_IDS = 1024  # in stop_token_ids or logit_bias


def refused(why: str) -> BeforeValidator:
    """A known field that this server does not take, unless it is null."""

    def check(value: object) -> None:
        if value is not None:
            raise PydanticCustomError("refused", "not supported: {why}", {"why": why})

    return BeforeValidator(check)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# Messages


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(Strict):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """What the server sent before, given back; the fields that its answers leave null may come back as null."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Annotated[None, refused("text only")] = None
    function_call: Annotated[None, refused("use tool_calls")] = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# Tools and formats


class Function(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


# Requests


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Strict):
    """vLLM's field for outputs of a given form; exactly one of them."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    json_object: Literal[True] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """As fields of StructuredSpec."""
        fields = self.model_dump(exclude_none=True)
        return fields | ({"json_schema": fields.pop("json_")} if self.json_ is not None else {})


class SamplingFields(Strict):
    """Fields that mean a SamplingParams field of the same name, and what all generating endpoints share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_IDS)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_IDS)
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationFields(SamplingFields):
    """model: may be left out. priority: lower runs first. return_metrics: add the timing of this request and the paths
    that the engine took meanwhile. return_token_ids: add the ids. return_tokens_as_token_ids: log-probabilities name
    tokens by their ids."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    return_metrics: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    best_of: Annotated[None, refused("every choice is returned; use n")] = None


class ThinkingFields(Strict):
    """chat_template_kwargs: the template's own switches; an unknown one is an error. reasoning_effort: "none" turns
    thinking off. thinking_token_budget: after so many tokens of thought, its end is forced."""

    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)


class ChatRequest(GenerationFields, ThinkingFields):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    functions: Annotated[None, refused("use tools")] = None
    function_call: Annotated[None, refused("use tool_choice")] = None
    audio: Annotated[None, refused("text only")] = None
    modalities: list[Literal["text"]] | None = None
    prediction: Annotated[None, refused("predicted outputs")] = None
    web_search_options: Annotated[None, refused("no hosted tools")] = None


class CompletionRequest(GenerationFields):
    """prompt: a text or token ids, or several of either. logprobs: alternatives per token."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[None, refused("the model continues text, it does not fill in")] = None


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Strict):
    """A message, also one of the model's own given back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    status: str | None = None
    encrypted_content: Annotated[None, refused("reasoning is given back as text")] = None


def _item_type(item: Any) -> str:
    """A message may leave its type out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FlatTool(Function):
    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    type: Literal["function"]


class FlatJsonSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[None, refused("the model has no such setting")] = None


class ReasoningOptions(Strict):
    effort: Effort | None = None
    summary: Annotated[None, refused("reasoning is given whole")] = None


class ResponsesRequest(SamplingFields, ThinkingFields):
    """Nothing is stored: a conversation comes whole, in `input`."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: int | None = None
    return_metrics: bool | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    n: Annotated[None, refused("a response is one answer")] = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    previous_response_id: Annotated[None, refused("nothing is stored; send the conversation")] = None
    conversation: Annotated[None, refused("nothing is stored; send the conversation")] = None
    background: Literal[False] | None = None
    prompt: Annotated[None, refused("nothing is stored; send the prompt itself")] = None
    prompt_logprobs: Annotated[None, refused("use /v1/completions")] = None
    top_logprobs: Annotated[None, refused("use /v1/chat/completions")] = None


class TokenizeRequest(Strict):
    """Either prompt, or messages with what shapes a chat prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int]
