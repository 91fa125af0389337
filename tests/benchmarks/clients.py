"""Check client programs of other servers against `localllm serve`, for the table in docs/serve.md.

    localllm serve -m SmolLM2-135M-Instruct.Q4_1.gguf -c 8192 --port 8080
    python -m tests.benchmarks.clients http://127.0.0.1:8080          # the installed clients
    python clients.py http://127.0.0.1:8080 --only litellm,aider      # or from an environment without localllm

Each check sends the requests that the client is made for, and examines the answer.  Small models rarely call tools on
their own, so calls are forced, and the server restricts them to their schemas.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Check = Callable[[str, str], None]

#: Checks by client and by the tested feature; the name of a client is the name of its distribution.
CHECKS: dict[str, dict[str, Check]] = {}

#: Folder of a Hugging Face tokenizer of the model, for lm_eval.
TOKENIZER = {"folder": ""}

HELLO = [{"role": "user", "content": "Hello! Say something short."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city", "days"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check(client: str, shows: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS.setdefault(client, {})[shows] = function
        return function

    return add


def weather_call(arguments: str | dict[str, Any]) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(given["city"], str), given
    assert given["days"] >= 1, given


def person(value: str | dict[str, Any]) -> None:
    given = json.loads(value) if isinstance(value, str) else value
    assert isinstance(given["name"], str), given
    assert given["age"] <= 120, given


def _person_class() -> Any:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(le=120, ge=0)

    return Person


# litellm: one program with four APIs ------------------------------------------------------------------------------

_LITELLM = {
    "openai": ("openai/{model}", "/v1"),
    "vllm": ("hosted_vllm/{model}", "/v1"),
    "anthropic": ("anthropic/{model}", ""),
    "ollama": ("ollama_chat/{model}", ""),
}


def _litellm(route: str, base: str, model: str, **options: Any) -> Any:
    import litellm

    name, path = _LITELLM[route]
    return litellm.completion(
        model=name.format(model=model), api_base=base + path, api_key="none", max_tokens=60, temperature=0, **options
    )


def _litellm_checks(route: str) -> None:
    @check("litellm", f"{route}: chat")
    def chat(base: str, model: str) -> None:
        reply = _litellm(route, base, model, messages=HELLO)
        assert reply.choices[0].message.content.strip()
        assert reply.usage.completion_tokens > 0

    @check("litellm", f"{route}: stream")
    def stream(base: str, model: str) -> None:
        whole = _litellm(route, base, model, messages=HELLO).choices[0].message.content
        chunks = list(_litellm(route, base, model, messages=HELLO, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks).strip() == whole.strip()
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")

    @check("litellm", f"{route}: forced call")
    def call(base: str, model: str) -> None:
        if route == "ollama":  # Ollama's API cannot force a call
            reply = _litellm(route, base, model, messages=HELLO, tools=[WEATHER])
            assert reply.choices[0].message.content or reply.choices[0].message.tool_calls
            return
        reply = _litellm(route, base, model, messages=HELLO, tools=[WEATHER], tool_choice="required")
        found = reply.choices[0].message.tool_calls[0].function
        assert found.name == "get_weather"
        weather_call(found.arguments)

    @check("litellm", f"{route}: JSON schema")
    def schema(base: str, model: str) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        reply = _litellm(route, base, model, messages=HELLO, response_format=wanted)
        person(reply.choices[0].message.content)


for _route in _LITELLM:
    _litellm_checks(_route)


# LangChain and LangGraph --------------------------------------------------------------------------------------


def _tool() -> Any:
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str, days: int) -> str:
        """The weather in a city."""
        return "sunny"

    return get_weather


def _langchain(client: str, make: Callable[..., Any], *, forces: bool = True) -> None:
    @check(client, "chat and stream")
    def chat(base: str, model: str) -> None:
        llm = make(base, model)
        whole = llm.invoke("Hello!")
        assert whole.text.strip()
        assert whole.usage_metadata["output_tokens"] > 0
        assert "".join(c.text for c in llm.stream("Hello!")) == whole.text

    if forces:

        @check(client, "forced call")
        def call(base: str, model: str) -> None:
            llm = make(base, model).bind_tools([_tool()], tool_choice="get_weather")
            reply = llm.invoke("Hello!")
            assert reply.tool_calls[0]["name"] == "get_weather"
            assert "city" in reply.tool_calls[0]["args"]
            chunks = list(llm.stream("Hello!"))
            total = chunks[0]
            for chunk in chunks[1:]:
                total += chunk
            assert total.tool_calls[0]["args"] == reply.tool_calls[0]["args"]

    @check(client, "structured output")
    def structured(base: str, model: str) -> None:
        method = "json_schema" if client != "langchain-anthropic" else "function_calling"
        found = (
            make(base, model).with_structured_output({"title": "person", **PERSON}, method=method).invoke("Hello!")
        )
        person(found)


def _openai_chat(base: str, model: str, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=model, base_url=base + "/v1", api_key="none", max_completion_tokens=80, temperature=0, **more
    )


def _anthropic_chat(base: str, model: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model=model, base_url=base, api_key="none", max_tokens=80, temperature=0)


def _ollama_chat(base: str, model: str) -> Any:
    from langchain_ollama import ChatOllama

    return ChatOllama(model=model, base_url=base, num_predict=80, temperature=0)


_langchain("langchain-openai", _openai_chat)
_langchain("langchain-anthropic", _anthropic_chat)
_langchain("langchain-ollama", _ollama_chat, forces=False)


@check("langchain-openai", "responses API")
def langchain_responses(base: str, model: str) -> None:
    llm = _openai_chat(base, model, use_responses_api=True)
    whole = llm.invoke("Hello!")
    assert whole.text.strip()
    assert "".join(c.text for c in llm.stream("Hello!")) == whole.text
    called = llm.bind_tools([_tool()], tool_choice="get_weather").invoke("Hello!")
    assert called.tool_calls[0]["name"] == "get_weather"


@check("langchain-openai", "log-probabilities")
def langchain_logprobs(base: str, model: str) -> None:
    reply = _openai_chat(base, model, logprobs=True, top_logprobs=3).invoke("Hello!")
    assert len(reply.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 3


@check("langgraph", "an agent calls a tool and gets its result")
def langgraph_agent(base: str, model: str) -> None:
    from langchain_core.messages import ToolMessage
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    tool = _tool()
    llm = _openai_chat(base, model)

    def ask(state: MessagesState) -> dict[str, Any]:
        had = any(isinstance(m, ToolMessage) for m in state["messages"])
        bound = llm if had else llm.bind_tools([tool], tool_choice="required")
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda s: "tools" if s["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "ask")
    messages = graph.compile().invoke({"messages": [("user", "What is the weather?")]})["messages"]
    assert [m.type for m in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text.strip()


# Pydantic AI --------------------------------------------------------------------------------------------------


def _pydantic_models(base: str, model: str) -> dict[str, Any]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=base + "/v1", api_key="none")
    return {
        "chat": OpenAIChatModel(model, provider=openai),
        "responses": OpenAIResponsesModel(model, provider=openai),
        "anthropic": AnthropicModel(model, provider=AnthropicProvider(base_url=base, api_key="none")),
    }


def _pydantic_checks(api: str) -> None:
    @check("pydantic-ai-slim", f"{api}: text, stream, output by a tool")
    def run(base: str, model: str) -> None:
        from pydantic_ai import Agent

        found = _pydantic_models(base, model)[api]
        settings: Any = {"max_tokens": 80, "temperature": 0.0}
        agent = Agent(found, model_settings=settings)
        whole = agent.run_sync("Hello!").output
        assert whole.strip()

        async def streamed() -> str:
            async with agent.run_stream("Hello!") as result:
                return str(await result.get_output())

        assert asyncio.run(streamed()) == whole
        if api == "chat":  # with other APIs, some versions do not force the call of the output tool
            made = Agent(found, output_type=_person_class(), model_settings=settings).run_sync("Who is it?").output
            assert made.age <= 120


for _api in ("chat", "responses", "anthropic"):
    _pydantic_checks(_api)


# Other Python packages --------------------------------------------------------------------------------------------


@check("smolagents", "a model's reply, stream and required call")
def smolagents_model(base: str, model: str) -> None:
    from smolagents import ChatMessage, OpenAIServerModel, tool

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: the city
        """
        return "sunny"

    llm = OpenAIServerModel(model_id=model, api_base=base + "/v1", api_key="none", max_tokens=80, temperature=0)
    asked = [ChatMessage(role="user", content=[{"type": "text", "text": "Hello!"}])]
    assert llm.generate(asked).content.strip()
    assert "".join(d.content or "" for d in llm.generate_stream(asked)).strip()
    called = llm.generate(asked, tools_to_call_from=[get_weather])
    assert called.tool_calls[0].function.name == "get_weather"


@check("smolagents", "an agent's steps")
def smolagents_agent(base: str, model: str) -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent

    llm = OpenAIServerModel(model_id=model, api_base=base + "/v1", api_key="none", max_tokens=60, temperature=0)
    agent = ToolCallingAgent(tools=[], model=llm, max_steps=2, verbosity_level=0)
    assert agent.run("What is 2 + 2? Use final_answer.") is not None


@check("instructor", "tools, JSON and JSON schema")
def instructor_modes(base: str, model: str) -> None:
    import instructor
    from openai import OpenAI

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=base + "/v1", api_key="none"), mode=mode)
        found = client.chat.completions.create(
            model=model, messages=HELLO, response_model=_person_class(), max_tokens=80, temperature=0, max_retries=0
        )
        assert found.age <= 120


@check("openai-agents", "chat completions and responses: a tool is called, and its result is used")
def openai_agents(base: str, model: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    calls = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        calls.append(city)
        return "sunny"

    client = AsyncOpenAI(base_url=base + "/v1", api_key="none")
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        calls.clear()
        agent = agents.Agent(
            name="helper",
            model=kind(model=model, openai_client=client),
            tools=[get_weather],
            model_settings=agents.ModelSettings(tool_choice="required", max_tokens=80, temperature=0),
            tool_use_behavior="stop_on_first_tool",  # small models repeat the call as text
        )
        result = asyncio.run(agents.Runner.run(agent, "What is the weather in Rome?"))
        assert calls
        assert str(result.final_output).strip()

        async def streamed(agent: Any = agent) -> str:
            running = agents.Runner.run_streamed(agent, "What is the weather in Rome?")
            async for _event in running.stream_events():
                pass
            return str(running.final_output)

        assert asyncio.run(streamed()).strip()


@check("outlines", "OpenAI and vLLM: a choice, a pattern, a class")
def outlines_models(base: str, model: str) -> None:
    import openai
    import outlines

    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    made = outlines.from_openai(client, model)
    person_class = _person_class()
    person_class.model_validate_json(made("Who is it?", person_class, max_tokens=80, temperature=0))
    vllm = outlines.from_vllm(client, model)
    assert vllm("Good or bad?", Literal["good", "bad"], max_tokens=10) in ("good", "bad")
    assert len(vllm("A number:", outlines.types.Regex("[0-9]{3}"), max_tokens=10)) == 3
    person_class.model_validate_json(vllm("Who is it?", person_class, max_tokens=80, temperature=0))


@check("llm", "prompt, stream, schema, tools")
def llm_command(base: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        Path(home, "extra-openai-models.yaml").write_text(
            f"- model_id: local\n  model_name: {model}\n  api_base: {base}/v1\n  supports_schema: true\n"
            "  supports_tools: true\n",
            encoding="utf-8",
        )
        env = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}

        def llm(*words: str) -> str:
            made = subprocess.run(
                [_program("llm"), *words],
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                stdin=subprocess.DEVNULL,
            )
            assert made.returncode == 0, made.stderr[-500:]
            return made.stdout

        assert llm("-m", "local", "Hello!", "-o", "max_tokens", "30").strip()
        assert llm("-m", "local", "--no-stream", "Hello!", "-o", "max_tokens", "30").strip()
        person(llm("-m", "local", "--schema", json.dumps(PERSON), "Who is it?"))
        assert llm("-m", "local", "-T", "llm_version", "Which version?", "-o", "max_tokens", "40").strip()


@check("lm_eval", "local-completions: log-likelihoods; local-chat-completions: texts")
def lm_eval_tasks(base: str, model: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    completions = LocalCompletionsAPI(
        base_url=base + "/v1/completions", model=model, tokenizer=TOKENIZER["folder"], num_concurrent=1
    )

    def asked(kind: str, *arguments: Any) -> Instance:
        return Instance(kind, {}, arguments, 0)

    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " xylophone")]
    likely, unlikely = completions.loglikelihood([asked("loglikelihood", *p) for p in pairs], disable_tqdm=True)
    assert likely[0] > unlikely[0]
    until = {"until": ["\n"], "max_gen_toks": 20}
    (text,) = completions.generate_until([asked("generate_until", "Once upon a time", until)], disable_tqdm=True)
    assert text.strip()
    chat = LocalChatCompletion(base_url=base + "/v1/chat/completions", model=model)
    prompt = chat.apply_chat_template(HELLO)
    (text,) = chat.generate_until([asked("generate_until", prompt, until)], disable_tqdm=True)
    assert isinstance(text, str)


# Programs -----------------------------------------------------------------------------------------------------


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def _ran(words: list[str], folder: str, env: dict[str, str], limit: float = 300) -> str:
    """Return the output of a program; raise with the output if it fails."""
    made = subprocess.run(
        words, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=limit,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert made.returncode == 0, (made.stdout + made.stderr)[-1500:]
    return made.stdout + made.stderr


def _replies(base: str) -> float:
    with urllib.request.urlopen(base + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total"))


def _program_check(client: str, words: Callable[[str, str, str], list[str]], env: Callable[[str, str], Any]) -> None:
    @check(client, "a question in a folder, answered to the end")
    def run(base: str, model: str) -> None:
        before = _replies(base)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "hello.py").write_text("print('hello')\n", encoding="utf-8")
            said = _ran(words(base, model, folder), folder, {"HOME": folder, **env(base, model)})
        assert _replies(base) > before, said[-1500:]


_program_check(
    "aider-chat",
    lambda base, model, folder: [
        _program("aider"), "--model", f"openai/{model}", "--message", "What does hello.py print?", "--no-git",
        "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--edit-format", "ask",
        "--map-tokens", "0", "hello.py",
    ],
    lambda base, model: {"OPENAI_API_BASE": base + "/v1", "OPENAI_API_KEY": "none"},
)  # fmt: skip
_program_check(
    "@qwen-code/qwen-code",
    lambda base, model, folder: ["qwen", "--auth-type", "openai", "-m", model, "-p", "What does hello.py print?"],
    lambda base, model: {"OPENAI_BASE_URL": base + "/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model},
)


def _opencode(base: str, model: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": base + "/v1", "apiKey": "none"},
        "models": {model: {"name": model}},
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"local": provider}, "autoupdate": False})}


_program_check(
    "opencode-ai",
    lambda base, model, folder: ["opencode", "run", "-m", f"local/{model}", "What does hello.py print?"],
    _opencode,
)

PROGRAMS = {"@qwen-code/qwen-code": "qwen", "opencode-ai": "opencode"}


def version(client: str) -> str | None:
    """Return the version of a client, or None if it is not installed."""
    if client in PROGRAMS:
        found = shutil.which(PROGRAMS[client])
        if found is None:
            return None
        said = subprocess.run([found, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return said.stdout.strip().splitlines()[-1]
    try:
        return importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", help="its name at the server (default: the first that it lists)")
    parser.add_argument("--only", help="comma-separated names of clients")
    parser.add_argument("--tokenizer", default="", help="folder of the model's Hugging Face tokenizer, for lm_eval")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks of failed checks")
    given = parser.parse_args()
    base = given.url.rstrip("/")
    TOKENIZER["folder"] = given.tokenizer
    with urllib.request.urlopen(base + "/v1/models") as answer:
        model = given.model or json.load(answer)["data"][0]["id"]
    only = given.only.split(",") if given.only else list(CHECKS)
    failed = 0
    for client, checks in CHECKS.items():
        found = version(client) if client in only else None
        if found is None:
            continue
        for shows, run in checks.items():
            try:
                run(base, model)
                result = "works"
            except Exception as error:
                failed += 1
                result = f"FAILS: {type(error).__name__}: {error}".replace("\n", " ")[:600]
                if given.verbose:
                    traceback.print_exc()
            print(f"| {client} {found} | {shows} | {result} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
