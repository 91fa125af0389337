"""Types of llama-cpp-python's result dicts, which have OpenAI's format."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CreateCompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[CompletionUsage]  # not in a stream


class ChatCompletionFunctionCall(TypedDict):
    name: str
    arguments: str


class ChatCompletionMessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatCompletionFunctionCall


class ChatCompletionMessageToolCallChunk(ChatCompletionMessageToolCall):
    index: int


class ChatCompletionResponseMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatCompletionMessageToolCall]]


class ChatCompletionTopLogprobToken(TypedDict):
    token: str
    bytes: list[int] | None
    logprob: float


class ChatCompletionLogprobToken(ChatCompletionTopLogprobToken):
    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


class ChatCompletionResponseChoice(TypedDict):
    index: int
    message: ChatCompletionResponseMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class CreateChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


class ChatCompletionStreamResponseDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ChatCompletionMessageToolCallChunk]


class ChatCompletionStreamResponseChoice(TypedDict):
    index: int
    delta: ChatCompletionStreamResponseDelta
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class CreateChatCompletionStreamResponse(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatCompletionStreamResponseChoice]


class Embedding(TypedDict):
    object: Literal["embedding"]
    embedding: list[float]
    index: int


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


CreateCompletionStreamResponse = CreateCompletionResponse

#: Messages, tools and formats are parsed by the same code as the server's requests.
ChatCompletionRequestMessage = ChatCompletionTool = ChatCompletionFunction = dict[str, Any]
ChatCompletionRequestResponseFormat = ChatCompletionToolChoiceOption = dict[str, Any]

# Older names.
Completion = CompletionChunk = CreateCompletionResponse
ChatCompletion, ChatCompletionChunk = CreateChatCompletionResponse, CreateChatCompletionStreamResponse
ChatCompletionMessage = ChatCompletionResponseMessage
