"""LangChain's chat model over a model in this process: ``ChatLocal(llm=localllm.load())``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
    message_chunk_to_message,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, InstanceOf

from localllm.chat.conversation import ToolCall
from localllm.chat.tool_choice import choose_tools
from localllm.llm import LLM


class ChatLocal(BaseChatModel):
    """A `localllm.LLM` as a chat model.

    Attributes:
        llm: the model, which other code may use at the same time.
        options: options of every call (`localllm.Options`). Options of a call or of `bind` override them.
    """

    llm: InstanceOf[LLM]
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "localllm"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        model: LLM = self.llm
        return {**super()._get_ls_params(stop, **kwargs), "ls_model_name": model.info.path.stem}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        whole: Any = AIMessageChunk(content="")
        for chunk in self._stream(messages, stop, None, **kwargs):
            whole += chunk.message
        message = message_chunk_to_message(whole)
        assert isinstance(message, AIMessage)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self.options | kwargs | ({} if stop is None else {"stop": stop})
        chosen = choose_tools(options.pop("tools", None), options.pop("tool_choice", None))
        n_calls, model = 0, self.llm
        more: dict[str, Any] = {"tools": chosen.offered or None, "parse": chosen}
        with model.stream_chat(_as_openai(messages), **more, **options) as reply:
            for chunk in reply:
                calls = []
                if isinstance(call := chunk.call, ToolCall):
                    id_ = call.id or f"call-{uuid4()}"
                    calls = [tool_call_chunk(name=call.name, args=call.arguments, id=id_, index=n_calls)]
                    n_calls += 1
                message = AIMessageChunk(content=chunk.text, tool_call_chunks=calls)
                if chunk.reasoning:
                    message.additional_kwargs["reasoning_content"] = chunk.reasoning
                if (usage := chunk.usage) is not None:
                    n_in, n_out = usage.prompt_tokens, usage.completion_tokens
                    message.usage_metadata = UsageMetadata(
                        input_tokens=n_in, output_tokens=n_out, total_tokens=n_in + n_out
                    )
                if chunk.finish_reason is not None:
                    name = model.info.path.stem
                    message.response_metadata = {"finish_reason": chunk.finish_reason, "model_name": name}
                generated = ChatGenerationChunk(message=message)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=generated)
                yield generated

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools. ``tool_choice``: "auto", "any", "none", or the name of a tool."""
        converted: list[dict[str, Any]] = [convert_to_openai_tool(tool) for tool in tools]
        choice: Any = "any" if tool_choice is True else tool_choice or None
        if any(choice == tool["function"]["name"] for tool in converted):
            choice = {"type": "function", "function": {"name": choice}}
        return self.bind(tools=converted, tool_choice=choice, **kwargs)


def _as_openai(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages for `LLM.chat`. Calls and reasoning among the parts of a message become its fields."""
    converted: Any = convert_to_openai_messages(messages)
    for message in converted:
        if isinstance(parts := message.get("content"), list):
            reasoning = [part.get("reasoning", "") for part in parts if part.get("type") == "reasoning"]
            message["content"] = [part for part in parts if part.get("type") not in ("reasoning", "tool_call")]
            message |= {"reasoning": "".join(reasoning)} if reasoning else {}
    return list(converted)
