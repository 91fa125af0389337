"""Scripted replies: the stream of every API, of the library and of compat contains the same as the whole reply.

A scripted engine returns the tokens of a text at once; the streams, the parser, the server and all APIs are real.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest

from localllm import compat
from localllm.chat.conversation import ToolCall
from localllm.engine.request import Request
from localllm.generation.completion import Chunk, Stream
from localllm.llm import LLM
from localllm.loading.load import load_file
from localllm.options.declared import LoadOptions
from localllm.sampling import Choice
from localllm.server.app import App
from localllm.server.models import Models
from localllm.tokenizer.stream import StreamDecoder
from tests.helpers.http_server import Serving, serving

N_CASES = 200
TEMPLATE = "{% if tools %}tools {% endif %}{{ messages[-1].content }}"
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}, "note": {"type": "string"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]

# -- Replies -------------------------------------------------------------------------------------------------------

WORDS = ["so", "Łódź", "日本語", "naïve", "🙂", "👩‍👧", "{x}", "<b>", "a < b", "[1]", "```", '"q"', "\n", "e\u0301"]
CLOSING = ["</tool_call>", "</parameter>", "</function>", "</arg_value>", "\\", "\n", "}", '"']


def tagged(arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=add>\n{values}</function>\n</tool_call>"


def glm(arguments: dict[str, Any]) -> str:
    pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in arguments.items())
    return f"<tool_call>add\n{''.join(pairs)}</tool_call>"


FORMATS: list[Callable[[dict[str, Any]], str]] = [
    lambda arguments: f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
    lambda arguments: f"<function=add>{json.dumps(arguments, ensure_ascii=False)}</function>",
    lambda arguments: f"[TOOL_CALLS]add[ARGS]{json.dumps(arguments, ensure_ascii=False)}",
    lambda arguments: (
        '<minimax:tool_call>\n<invoke name="add">\n'
        + "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in arguments.items())
        + "</invoke>\n</minimax:tool_call>"
    ),
    lambda arguments: f'<|tool_call>call:add{{n:{arguments["n"]},note:<|"|>{arguments["note"]}<|"|>}}<tool_call|>',
    tagged,
    glm,
]


@dataclass
class Case:
    """A reply; ``said`` is its reasoning, text and calls, or None if it is cut, stopped or malformed."""

    text: str
    said: tuple[str, str, list[dict[str, Any]]] | None
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> list[Case]:
    source = random.Random(31)

    def words(most: int, more: list[str] | None = None) -> str:
        return " ".join(source.choice(WORDS + (more or [])) for _ in range(source.randint(1, most))).strip()

    made = []
    for _ in range(N_CASES):
        thinking = words(3) if source.random() < 0.4 else ""
        text = words(5) if source.random() < 0.8 else ""
        form, calls = source.choice(FORMATS), []
        for _ in range(source.choice([0, 0, 1, 1, 2])):
            more = CLOSING if form not in (tagged, glm) else CLOSING[:1]
            # Text between tags has no line breaks at its ends, and never ends Gemma's calls.
            calls.append({"n": source.randint(0, 999), "note": f"a {words(2, more)} z"})
        if text.startswith(("{", "[")) or (not text and not calls):
            text = "Hm " + text
        whole = (
            (f"<think>{thinking}</think>" if thinking else "") + text + "".join(f"\n{form(each)}" for each in calls)
        )
        said, options = (thinking, text, calls), {}
        kind = source.choice(["whole"] * 5 + ["cut"] * 2 + ["stop", "malformed"])
        if kind == "cut":
            options = {"max_tokens": source.randint(1, max(2, len(whole)))}
        elif kind == "stop":
            at = source.randrange(len(whole))
            options = {"stop": [whole[at : at + source.randint(1, 4)]]}
        elif kind == "malformed" and calls:
            at = whole.rindex("add") + source.randint(0, 20)
            whole = whole[:at] + source.choice(["}", '"', "<", ""]) + whole[at + source.randint(0, 2) :]
        made.append(Case(whole, said if kind == "whole" else None, options))
    return made


CASES = cases()


class ScriptedEngine:
    """Delivers the tokens of a text to a request."""

    def __init__(self, ids: list[int], max_tokens: int | None) -> None:
        self._ids, self._max_tokens = ids, max_tokens

    def submit(self, request: Request) -> None:
        request.finish_reason = "stop"
        output: Any = request.output
        for id_ in self._ids:
            if request.n_chosen == self._max_tokens:
                request.finish_reason = "length"
                break
            request.tokens.append(id_)
            request.n_chosen += 1
            if output.token(Choice(id_, -0.5, ((id_, -0.5), (5, -1.5)))):
                break
        output.end(None)

    def wait_for(self, items: Any) -> Any:
        return items.get_nowait()

    def check_may_wait(self) -> None:
        """Do nothing, because no method waits."""

    wake = check_may_wait

    def cancel(self, request: Request) -> None:
        """Do nothing, because the request has ended."""


class ScriptedLLM(LLM):
    """Replies to "case 7" with the text of that case."""

    def _start(self, ids: list[int], given: Any, **more: Any) -> Stream:
        tokenizer = self.tokenizer
        found = re.search(r"case (\d+)", tokenizer.decode(ids, special=True))
        assert found is not None
        script = tokenizer.encode(CASES[int(found[1])].text, add_special=False, continuation=True)
        engine: Any = ScriptedEngine(script, given.max_tokens)
        return Stream(
            engine,
            StreamDecoder(tokenizer, given.stop, continuation=True),
            lambda output: Request(ids, output),
            logprobs=given.sampling.logprobs is not None,
            progress=None,
            parser=more.get("parser"),
        )


def load(*_: Any, **__: Any) -> ScriptedLLM:
    return ScriptedLLM(load_file(LoadOptions(device="reference", threads=1, chat_template=TEMPLATE)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load() as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(load) as started:
        yield started


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., bytes]]:
    app = App(Models({"demo": "demo"}, load))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://127.0.0.1")

    async def post(path: str, body: dict[str, Any]) -> bytes:
        response = await client.post(path, json={"model": "demo", **body})
        assert response.status_code == 200, response.text
        return response.content

    with asyncio.Runner() as runner:
        life = app._lifespan(app.asgi)
        runner.run(life.__aenter__())
        yield lambda path, **body: runner.run(post(path, body))
        runner.run(client.aclose())
        runner.run(life.__aexit__(None, None, None))


# -- Reading replies ----------------------------------------------------------------------------------------------


@dataclass
class Read:
    """A client's view of a reply; arguments are JSON, or values if the API uses values."""

    text: str = ""
    thinking: str = ""
    calls: list[Any] = field(default_factory=list)
    reason: str = ""
    logprobs: list[Any] = field(default_factory=list)
    n_tokens: int = 0


def events(body: bytes) -> list[Any]:
    """Return the objects of server-sent events, or of lines."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith((b"data: ", b"{"))]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def body_of(case: int, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"case {case}"}], "tools": TOOLS, **options}


def openai_message(message: dict[str, Any], read: Read) -> None:
    read.text += message.get("content") or ""
    read.thinking += message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or []:
        if call.get("index", len(read.calls)) == len(read.calls):
            assert call["id"]
            read.calls.append([call["function"]["name"], ""])
        read.calls[call.get("index", -1)][1] += call["function"]["arguments"]


def openai_chat(post: Any, case: int, stream: bool) -> Read:
    options = dict(CASES[case].options)
    body = body_of(case, logprobs=True, top_logprobs=1, stream=stream, **options)
    answer = post("/v1/chat/completions", stream_options={"include_usage": True}, **body)
    read = Read()
    told = events(answer) if stream else [json.loads(answer)]
    assert len({each["id"] for each in told}) == 1
    for each in told:
        for choice in each["choices"]:
            openai_message(choice["delta"] if stream else choice["message"], read)
            read.reason = choice["finish_reason"] or read.reason
            read.logprobs += (choice["logprobs"] or {"content": []})["content"]
        read.n_tokens = (each.get("usage") or {"completion_tokens": 0})["completion_tokens"]
    return read


def openai_completion(post: Any, case: int, stream: bool) -> Read:
    options = {"max_tokens": -1, **CASES[case].options}
    answer = post("/v1/completions", prompt=f"case {case}", logprobs=1, stream=stream, **options)
    read = Read()
    for each in events(answer) if stream else [json.loads(answer)]:
        (choice,) = each["choices"]
        read.text += choice["text"]
        read.reason = choice["finish_reason"] or read.reason
        if choice["logprobs"]:
            read.logprobs += zip(*(choice["logprobs"][name] for name in sorted(choice["logprobs"])), strict=True)
    return read


def openai_response(post: Any, case: int, stream: bool) -> Read:
    options = dict(CASES[case].options)
    if "max_tokens" in options:
        options["max_output_tokens"] = options.pop("max_tokens")
    tools = [{"type": "function", **FUNCTION}]
    answer = post("/v1/responses", input=f"case {case}", tools=tools, top_logprobs=1, stream=stream, **options)
    read = Read()
    if not stream:
        items = json.loads(answer)["output"]
        read.reason = json.loads(answer)["status"]
    else:
        told = events(answer)
        assert [each["sequence_number"] for each in told] == list(range(len(told)))
        items = rebuilt(told)
        read.reason = told[-1]["response"]["status"]
        assert items == told[-1]["response"]["output"]
    for item in items:
        if item["type"] == "function_call":
            read.calls.append([item["name"], item["arguments"]])
            continue
        for part in item["content"]:
            if item["type"] == "reasoning":
                read.thinking += part["text"]
            else:
                read.text += part["text"]
                read.logprobs += part["logprobs"]
    return read


def rebuilt(told: list[Any]) -> list[Any]:
    """Return the items of a response, built from the deltas of its events."""
    items: list[Any] = []
    for each in told:
        kind = each["type"]
        if kind == "response.output_item.added":
            items.append(each["item"])
        elif kind == "response.content_part.added":
            items[-1]["content"].append(each["part"])
        elif kind.endswith("_text.delta"):
            part = items[each["output_index"]]["content"][0]
            part["text"] += each["delta"]
            if "logprobs" in part:
                part["logprobs"] += each["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            items[each["output_index"]]["arguments"] += each["delta"]
        elif kind == "response.output_item.done":
            items[-1]["status"] = each["item"]["status"]
            assert items[-1] == each["item"]
    return items


def anthropic_message(post: Any, case: int, stream: bool) -> Read:
    options = {"max_tokens": 10_000, **CASES[case].options}
    options["stop_sequences"] = options.pop("stop", [])
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    body = {**body_of(case), "tools": tools, "stream": stream, **options}
    answer = post("/v1/messages", **body)
    read = Read()
    if stream:
        told = events(answer)
        blocks: list[Any] = []
        for each in told:
            if each["type"] == "content_block_start":
                assert each["index"] == len(blocks)
                blocks.append({**each["content_block"], "json": ""})
            elif each["type"] == "content_block_delta":
                delta = each["delta"]
                name = "json" if "partial_json" in delta else delta["type"].removesuffix("_delta")
                blocks[each["index"]][name] += delta["partial_json" if name == "json" else name]
        for block in blocks:
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = ToolCall("add", written).values
        end = told[-2]
        message = {"content": blocks, "usage": end["usage"], **end["delta"]}
    else:
        message = json.loads(answer)
    for block in message["content"]:
        read.text += block.get("text", "")
        read.thinking += block.get("thinking", "")
        if block["type"] == "tool_use":
            read.calls.append([block["name"], block["input"]])
    read.reason = f"{message['stop_reason']} {message['stop_sequence']}"
    read.n_tokens = message["usage"]["output_tokens"]
    return read


def ollama(post: Any, case: int, stream: bool, path: str = "/api/chat") -> Read:
    options = dict(CASES[case].options)
    if "max_tokens" in options:
        options["num_predict"] = options.pop("max_tokens")
    said = body_of(case) if path == "/api/chat" else {"prompt": f"case {case}", "raw": True}
    answer = post(path, stream=stream, options=options, **said)
    read = Read()
    for each in events(answer):
        message = each.get("message") or {"content": each["response"]}
        read.text += message["content"]
        read.thinking += message.get("thinking", "")
        read.calls += [list(call["function"].values()) for call in message.get("tool_calls", ())]
        if each["done"]:
            read.reason, read.n_tokens = each["done_reason"], each["eval_count"]
    return read


def ollama_generate(post: Any, case: int, stream: bool) -> Read:
    return ollama(post, case, stream, "/api/generate")


def llama_cpp(post: Any, case: int, stream: bool) -> Read:
    options = dict(CASES[case].options)
    if "max_tokens" in options:
        options["n_predict"] = options.pop("max_tokens")
    answer = post("/completion", prompt=f"case {case}", n_probs=1, stream=stream, **options)
    read = Read()
    for each in events(answer) if stream else [json.loads(answer)]:
        read.text += each["content"]
        if each["stop"]:
            read.reason = f"{each['stop_type']} {each['stopping_word']}"
            read.n_tokens = each["tokens_predicted"]
        if not each["stop"] or not stream:
            read.logprobs += each.get("completion_probabilities", ())
    return read


CHATS = {"openai": openai_chat, "responses": openai_response, "anthropic": anthropic_message, "ollama": ollama}
TEXTS = {"completions": openai_completion, "llama.cpp": llama_cpp, "ollama's generate": ollama_generate}


@cache
def library(llm: LLM, case: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.llm.warn", lambda message: None)
        return llm.chat(**body_of(case), logprobs=1, **CASES[case].options)


# -- Agreement -----------------------------------------------------------------------------------------------------


def test_the_cases_have_everything(llm: LLM) -> None:
    done = [library(llm, case) for case in range(N_CASES)]
    assert sum(len(each.tool_calls) > 1 for each in done) > 20
    assert sum(not call.is_whole for each in done for call in each.tool_calls) > 10
    assert sum(each.finish_reason == "length" for each in done) > 20
    assert sum(len(each.text.encode()) > len(each.text) for each in done) > 50
    assert sum(case.said is not None for case in CASES) > 80


@pytest.mark.parametrize("dialect", CHATS)
def test_the_stream_of_a_chat_says_what_the_whole_reply_says(dialect: str, ask: Any, llm: LLM) -> None:
    for case in range(N_CASES):
        whole, streamed = (CHATS[dialect](ask, case, stream) for stream in (False, True))
        assert streamed == whole, CASES[case]
        expected = library(llm, case)
        assert (whole.text, whole.thinking) == (expected.text, expected.reasoning), CASES[case]
        has_values = dialect in ("anthropic", "ollama")
        calls = [[call.name, call.values if has_values else call.arguments] for call in expected.tool_calls]
        assert whole.calls == calls, CASES[case]
        is_cut = expected.finish_reason == "length"
        ends = {"openai": ("length",), "responses": ("incomplete",), "anthropic": ("max_tokens None",)}
        if dialect == "responses" and "stop" in CASES[case].options:  # which may cut a call
            is_cut |= bool(calls) and not expected.tool_calls[-1].is_whole
        assert (whole.reason in ends.get(dialect, ("length",))) == is_cut
        assert whole.n_tokens in (0, len(expected.ids))
        if dialect == "openai":
            assert len(whole.logprobs) == len(expected.ids)


@pytest.mark.parametrize("dialect", TEXTS)
def test_the_stream_of_a_text_says_what_the_whole_text_says(dialect: str, ask: Any, llm: LLM) -> None:
    for case in range(N_CASES):
        whole, streamed = (TEXTS[dialect](ask, case, stream) for stream in (False, True))
        assert streamed == whole, CASES[case]
        expected = llm.generate(f"case {case}", **CASES[case].options)
        assert whole.text == expected.text
        assert (whole.reason.strip() in ("length", "limit")) == (expected.finish_reason == "length")
        if dialect != "ollama's generate":
            assert len(whole.logprobs) == len(expected.ids)


def test_the_librarys_stream_says_what_the_whole_reply_says(llm: LLM) -> None:
    for number, case in enumerate(CASES):
        whole = library(llm, number)
        chunks: list[Chunk] = list(llm.stream_chat(**body_of(number), logprobs=1, **case.options))
        calls = [chunk.call for chunk in chunks if isinstance(chunk.call, ToolCall)]
        for chunk in chunks:
            assert bool(chunk.text) + bool(chunk.reasoning) + (chunk.call is not None) <= 1
        arguments = [(call.name, call.arguments) for call in whole.tool_calls]
        assert [(call.name, call.arguments) for call in calls] == arguments
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
        assert tuple(id_ for chunk in chunks for id_ in chunk.ids) == whole.ids
        assert tuple(each for chunk in chunks for each in chunk.logprobs or ()) == whole.logprobs
        assert chunks[-1].finish_reason == whole.finish_reason
        if case.said is not None:
            said = (whole.reasoning, whole.text, [call.values for call in whole.tool_calls])
            assert said == case.said, case


@pytest.mark.filterwarnings("ignore:a call of", "ignore:.* was left as text", "ignore:there is no tool")
def test_the_streams_of_compat_say_what_whole_replies_say(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.compat.load", load)
    with compat.Llama("demo") as llama:
        for case in range(N_CASES):
            body = body_of(case, logprobs=True, top_logprobs=1, **CASES[case].options)
            whole, streamed = Read(), Read()
            (choice,) = llama.create_chat_completion(**body)["choices"]
            openai_message(choice["message"], whole)
            whole.reason, whole.logprobs = choice["finish_reason"], choice["logprobs"]["content"]
            for chunk in llama.create_chat_completion(**body, stream=True):
                (choice,) = chunk["choices"]
                openai_message(choice["delta"], streamed)
                streamed.reason = choice["finish_reason"] or streamed.reason
                streamed.logprobs += (choice["logprobs"] or {"content": []})["content"]
            assert streamed == whole, CASES[case]
            expected = library(llm, case)
            assert (whole.text, whole.thinking) == (expected.text, expected.reasoning)
            assert whole.calls == [[call.name, call.arguments] for call in expected.tool_calls]
            text = "".join(
                chunk["choices"][0]["text"]
                for chunk in llama(f"case {case}", stream=True, **{"max_tokens": None, **CASES[case].options})
            )
            assert text == llama(f"case {case}", **{"max_tokens": None, **CASES[case].options})["choices"][0]["text"]


def test_a_named_function_gets_what_follows_the_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.compat.load", load)
    monkeypatch.setattr(sys.modules[__name__], "CASES", [Case('<think>hm</think>{"n": 1}', None)])
    body = body_of(0, tool_choice={"type": "function", "function": {"name": "add"}})
    whole, streamed = Read(), Read()
    with compat.Llama("demo") as llama:
        openai_message(llama.create_chat_completion(**body)["choices"][0]["message"], whole)
        for chunk in llama.create_chat_completion(**body, stream=True):
            openai_message(chunk["choices"][0]["delta"], streamed)
    assert streamed == whole == Read(thinking="hm", calls=[["add", '{"n": 1}']])


# -- Clients -------------------------------------------------------------------------------------------------------

SOME = range(0, N_CASES, 20)


def test_openais_client_reads_the_same(server: Serving, llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for case in SOME:
            expected = library(llm, case)
            body = body_of(case, model="demo", **CASES[case].options)
            whole = client.chat.completions.create(**body).choices[0]
            read = Read()
            for chunk in client.chat.completions.create(**body, stream=True):
                openai_message(chunk.choices[0].delta.model_dump(), read)
            assert (whole.message.content or "", read.text) == (expected.text, expected.text)
            calls = [[call.name, call.arguments] for call in expected.tool_calls]
            assert read.calls == calls
            made = whole.message.tool_calls or []
            assert [[call.function.name, call.function.arguments] for call in made] == calls
            if "stop" not in CASES[case].options:
                tools = [{"type": "function", **FUNCTION, "strict": False}]
                limit = CASES[case].options.get("max_tokens")
                with client.responses.stream(
                    model="demo", input=f"case {case}", tools=tools, max_output_tokens=limit
                ) as stream:
                    output = [
                        item for event in stream if hasattr(event, "response") for item in event.response.output
                    ]
                assert [[item.name, item.arguments] for item in output if item.type == "function_call"] == calls


def test_anthropics_client_reads_the_same(server: Serving, llm: LLM) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for case in SOME:
            expected = library(llm, case)
            options = {"max_tokens": 10_000, **CASES[case].options}
            options["stop_sequences"] = options.pop("stop", [])
            body = {
                **body_of(case),
                "model": "demo",
                "tools": [{"name": "add", "input_schema": PARAMETERS}],
                **options,
            }
            with client.messages.stream(**body) as stream:
                streamed = stream.get_final_message()
            whole = client.messages.create(**body)
            for message in (streamed, whole):
                text = "".join(block.text for block in message.content if block.type == "text")
                assert text == expected.text
                used = [block for block in message.content if block.type == "tool_use"]
                assert [block.name for block in used] == [call.name for call in expected.tool_calls]
                for block, call in zip(used, expected.tool_calls, strict=True):
                    assert not call.is_whole or block.input == call.values


def test_ollamas_client_reads_the_same(server: Serving, llm: LLM) -> None:
    with pytest.importorskip("ollama").Client(server.url) as client:
        for case in SOME:
            expected = library(llm, case)
            options = dict(CASES[case].options)
            if "max_tokens" in options:
                options["num_predict"] = options.pop("max_tokens")
            body = {**body_of(case), "model": "demo", "options": options}
            for parts in ([client.chat(**body)], list(client.chat(**body, stream=True))):
                assert "".join(part.message.content or "" for part in parts) == expected.text
                calls = [call.function for part in parts for call in part.message.tool_calls or ()]
                assert [(each.name, dict(each.arguments)) for each in calls] == [
                    (call.name, call.values) for call in expected.tool_calls
                ]
