"""LangChain's test suite for chat models, Instructor, and OpenAI's agents, with a scripted model.

LangChain's tests run with `pytest -W default -o asyncio_mode=auto`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers.http_server import Serving, scripted, serving

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'

#: Arguments for the tools of these tests.
ARGUMENTS = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "pirate"},
    "my_adder_tool": {"a": 3, "b": 4},
    "get_weather": {"location": "San Francisco, CA"},
    "unicode_customer": {"customer_name": "你好啊集团", "description": "a customer"},
    "add": {"a": 2, "b": 3},
}


def script(prompt: str) -> str:
    last = prompt.removesuffix("assistant:").rpartition("user: ")[2]
    tools = re.search(r"tools: (.*)", prompt)
    if "JSON" in last:
        return '{"setup": "a", "punchline": "b"}'
    if tools is None or "\ntool: " in last:
        return "It is " + last.rpartition("tool: ")[2].strip()
    name = tools[1].split()[0]
    if name not in ARGUMENTS:  # an example of its schema, for a forced call
        return "Well."
    if "株式会社" in last:
        return CALL % (name, json.dumps({"customer_name": "株式会社", "description": ""}, ensure_ascii=False))
    return CALL % (name, json.dumps(ARGUMENTS[name], ensure_ascii=False))


@pytest.fixture(scope="module")
def actor() -> Iterator[Serving]:
    with serving(scripted(script), names=("demo", "other")) as started:
        yield started


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """The same model without a server."""
    with scripted(script)(None, None) as llm:
        yield llm


@pytest.fixture(autouse=True, scope="module")
def no_tracing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield


# -- LangChain -----------------------------------------------------------------------------------------------------

if all(map(find_spec, ("langchain_tests", "langchain_openai", "langchain_anthropic", "langchain_ollama"))):
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI
    from langchain_tests.integration_tests import ChatModelIntegrationTests

    from localllm.integrations.langchain import ChatLocal

    class Standard(ChatModelIntegrationTests):
        """The tests for a model that reads only text."""

        @pytest.fixture(autouse=True)
        def _at(self, actor: Serving) -> None:
            type(self).url = actor.url

        url = ""
        supports_json_mode = True
        supports_model_override = True
        model_override_value = "other"
        has_tool_choice = True

    class TestOpenAI(Standard):
        chat_model_class = ChatOpenAI

        @property
        def chat_model_params(self) -> dict[str, Any]:
            return {"model": "demo", "base_url": self.url + "/v1", "api_key": "none", "stream_usage": True}

    class TestAnthropic(Standard):
        chat_model_class = ChatAnthropic
        supports_json_mode = False  # not supported

        @property
        def chat_model_params(self) -> dict[str, Any]:
            return {"model": "demo", "base_url": self.url, "api_key": "none", "max_tokens": 200}

    class TestLocal(Standard):
        """The model in the same process, without the server."""

        chat_model_class = ChatLocal
        supports_json_mode = supports_model_override = False  # not supported
        llm: Any = None

        @pytest.fixture(autouse=True)
        def _at(self, local: Any) -> None:
            type(self).llm = local

        @property
        def chat_model_params(self) -> dict[str, Any]:
            return {"llm": self.llm, "options": {"max_tokens": 200}}

    class TestOllama(Standard):
        chat_model_class = ChatOllama
        has_tool_choice = False  # not supported

        @property
        def chat_model_params(self) -> dict[str, Any]:
            return {"model": "demo", "base_url": self.url}


# -- Instructor and agents -----------------------------------------------------------------------------------------


def test_instructor_gets_an_object(actor: Serving) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    with openai.OpenAI(base_url=actor.url + "/v1", api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            asked = instructor.from_openai(client, mode=mode).chat.completions.create(
                model="demo", response_model=Person, messages=[{"role": "user", "content": "Who?"}], max_retries=0
            )
            assert asked.model_dump() == {"name": "some text", "age": 3}


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_an_agent_uses_a_tool(actor: Serving, api: str) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    seen = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        seen.append((a, b))
        return a + b

    client = openai.AsyncOpenAI(base_url=actor.url + "/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat_completions" else agents.OpenAIResponsesModel
    agent = agents.Agent(name="adder", model=kind(model="demo", openai_client=client), tools=[add])
    result = agents.Runner.run_sync(agent, "What is 2 + 3?")
    assert seen == [(2, 3)]
    assert result.final_output == "It is 5"
