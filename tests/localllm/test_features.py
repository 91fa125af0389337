"""Every feature of generation in every front end: the result equals the library's.

To test a new feature or front end, add an entry to `FEATURES` or `FRONT_ENDS`.  The tests of the server compare how
APIs pass options (test_dialects.py), and their streams (test_streams.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

import localllm
from localllm import LLM
from localllm.compat import Llama
from localllm.errors import LocalLLMError
from tests.helpers.command_line import run_main

httpx = pytest.importorskip("httpx")
http_server = pytest.importorskip("tests.helpers.http_server", reason="needs the extra 'serve'")

QUESTION, CONTEXT, STOP = "What is localllm?", 128, "calll"
HOT: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
#: Options with the library's names.
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seed": {**HOT, "seed": 7, "max_tokens": 12},
    "another seed": {**HOT, "seed": 8, "max_tokens": 12},
    "stop string": {"temperature": 0, "max_tokens": 40, "stop": ["absent", STOP]},
    "log-probabilities": {"temperature": 0, "max_tokens": 4, "logprobs": 2},
}


class Reply(NamedTuple):
    text: str
    reason: str  # "length" or "stop"
    logprobs: list[float] | None = None


class RefusedError(Exception):
    """The error message of a server or a command."""


@dataclass
class Models:
    """The demo model in the library, in llama-cpp-python's API and on a server; and captured output."""

    llm: LLM
    llama: Llama
    url: str
    capture: Any = None

    def ids(self, text: str) -> list[int]:
        return self.llm.tokenize_chat(chat(text))


FrontEnd = Callable[[Models, str, dict[str, Any]], Reply]


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def completion(done: Any) -> Reply:
    return Reply(done.text, done.finish_reason, done.logprobs and [choice.logprob for choice in done.logprobs])


def streamed(models: Models, text: str, options: dict[str, Any]) -> Reply:
    chunks = list(models.llm.stream_chat(chat(text), **options))
    logprobs = [choice.logprob for chunk in chunks for choice in chunk.logprobs or ()]
    return Reply("".join(chunk.text for chunk in chunks), str(chunks[-1].finish_reason), logprobs)


def openai(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, **({"logprobs": True, "top_logprobs": 2} if "logprobs" in options else {})}


def openai_choice(answer: Any) -> Reply:
    (choice,) = answer["choices"]
    if "message" in choice:
        rows = (choice["logprobs"] or {"content": []})["content"]
        return Reply(choice["message"]["content"], choice["finish_reason"], [row["logprob"] for row in rows])
    return Reply(choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("token_logprobs"))


def openai_response(answer: Any) -> Reply:
    (part,) = answer["output"][-1]["content"]
    reason = "length" if answer["status"] == "incomplete" else "stop"
    return Reply(part["text"], reason, [row["logprob"] for row in part.get("logprobs", ())])


def anthropic_message(answer: Any) -> Reply:
    return Reply(answer["content"][-1]["text"], "length" if answer["stop_reason"] == "max_tokens" else "stop")


def llama_completion(answer: Any) -> Reply:
    rows = answer.get("completion_probabilities", ())
    reason = "length" if answer["stop_type"] == "limit" else "stop"
    return Reply(answer["content"], reason, [row["logprob"] for row in rows])


def ollama_reply(answer: Any) -> Reply:
    return Reply(answer.get("response") or answer["message"]["content"], answer["done_reason"])


def renamed(options: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in options.items()}


def api(
    path: str, body: Callable[[Models, str, dict[str, Any]], dict[str, Any]], read: Callable[[Any], Reply]
) -> FrontEnd:
    def post(models: Models, text: str, options: dict[str, Any]) -> Reply:
        answer = httpx.post(models.url + path, json=body(models, text, options), timeout=120)
        if answer.status_code != 200:
            assert answer.status_code == 400
            raise RefusedError(answer.text)
        return read(answer.json())

    return post


def command(models: Models, text: str, options: dict[str, Any]) -> Reply:
    flags = {"temperature": "--temp", "max_tokens": "-n", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p"}
    flags |= {"seed": "-s", "logprobs": "--logprobs", "stop": "--stop"}
    words = [
        word
        for name, value in options.items()
        for each in (value if isinstance(value, list) else [value])
        for word in (flags[name], each)
    ]
    common = ("-m", "demo", "--device", "cpu", "-t", 1, "-c", CONTEXT, "--chat", "--json", "-q")
    outcome = run_main(models.capture, "generate", *common, "-p", text, *words)
    if outcome.code:
        raise RefusedError(outcome.error())
    answer = json.loads(outcome.out)
    rows = answer["logprobs"]
    return Reply(answer["text"], answer["finish_reason"], rows and [row["logprob"] for row in rows])


FRONT_ENDS: dict[str, FrontEnd] = {
    "chat": lambda m, text, options: completion(m.llm.chat(chat(text), **options)),
    "generate": lambda m, text, options: completion(m.llm.generate(m.ids(text), **options)),
    "stream_chat": streamed,
    "achat": lambda m, text, options: completion(asyncio.run(m.llm.achat(chat(text), **options))),
    "generate_many": lambda m, text, options: completion(next(m.llm.generate_many([chat(text)], **options))),
    "compat": lambda m, text, options: openai_choice(m.llama(m.ids(text), **options)),
    "compat, chat": lambda m, text, options: openai_choice(
        m.llama.create_chat_completion(chat(text), **openai(options))
    ),
    "command line": command,
    "OpenAI": api("/v1/chat/completions", lambda m, text, o: {"messages": chat(text), **openai(o)}, openai_choice),
    "OpenAI, completions": api("/v1/completions", lambda m, text, o: {"prompt": m.ids(text), **o}, openai_choice),
    "OpenAI, responses": api(
        "/v1/responses",
        lambda m, text, o: {"input": text, **renamed(o, max_tokens="max_output_tokens", logprobs="top_logprobs")},
        openai_response,
    ),
    "Anthropic": api(
        "/v1/messages",
        lambda m, text, o: {"messages": chat(text), **renamed(o, stop="stop_sequences")},
        anthropic_message,
    ),
    "Ollama": api(
        "/api/chat",
        lambda m, text, o: {"messages": chat(text), "stream": False, "options": renamed(o, max_tokens="num_predict")},
        ollama_reply,
    ),
    "Ollama, generate": api(
        "/api/generate",
        lambda m, text, o: {"prompt": text, "stream": False, "options": renamed(o, max_tokens="num_predict")},
        ollama_reply,
    ),
    "llama.cpp": api(
        "/completion",
        lambda m, text, o: {"prompt": m.ids(text), **renamed(o, max_tokens="n_predict", logprobs="n_probs")},
        llama_completion,
    ),
}
WITHOUT_LOGPROBS = {"Anthropic", "Ollama", "Ollama, generate"}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Models]:
    with (
        localllm.load(device="cpu", threads=1, context=CONTEXT) as llm,
        Llama(str(llm.info.path), n_ctx=CONTEXT, n_threads=1, verbose=False) as llama,
        http_server.serving(http_server.demo(context=CONTEXT)) as server,
    ):
        yield Models(llm, llama, server.url)


@pytest.fixture
def models(loaded: Models, capfdbinary: pytest.CaptureFixture[bytes]) -> Models:
    loaded.capture = capfdbinary
    return loaded


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_feature_has_the_same_result(front_end: str, feature: str, models: Models) -> None:
    options = FEATURES[feature]
    if "logprobs" in options and front_end in WITHOUT_LOGPROBS:
        pytest.skip("the API has no log-probabilities")
    expected = FRONT_ENDS["chat"](models, QUESTION, options)
    reply = FRONT_ENDS[front_end](models, QUESTION, options)
    assert (reply.text.strip(), reply.reason) == (expected.text.strip(), expected.reason)
    if "logprobs" in options:
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_the_features_have_an_effect(models: Models) -> None:
    replies = {name: FRONT_ENDS["chat"](models, QUESTION, options) for name, options in FEATURES.items()}
    assert len({reply.text for reply in replies.values()}) == len(FEATURES)
    stopped = models.llm.chat(chat(QUESTION), temperature=0, max_tokens=40).text.partition(STOP)
    assert replies["stop string"][:2] == (stopped[0], "stop")
    assert stopped[1]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("word " * 300, {"max_tokens": 1}, "exceeds the available context size"),
        (QUESTION, {"top_p": 7.0, "max_tokens": 1}, "top.p"),
        (QUESTION, {"stop": [5], "max_tokens": 1}, "stop"),
    ],
    ids=["a long prompt", "top_p", "stop"],
)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_bad_input_is_refused(
    front_end: str, text: str, options: dict[str, Any], message: str, models: Models
) -> None:
    if options == {"max_tokens": 1} and front_end == "Anthropic":
        n_tokens = len(models.ids(text))
        message = f"prompt is too long: {n_tokens} tokens > {CONTEXT} maximum"  # its clients read these words
    elif options == {"max_tokens": 1} and front_end not in (
        "OpenAI, completions",
        "llama.cpp",
    ):  # which name no option
        library = ("chat", "generate", "stream_chat", "achat", "generate_many", "Ollama", "Ollama, generate")
        larger = "context" if front_end in library else "n_ctx" if front_end.startswith("compat") else "-c"
        message += f" of {CONTEXT}: .* larger {larger}"
    if front_end == "command line" and options.get("stop"):
        pytest.skip("arguments are strings")
    with pytest.raises((LocalLLMError, RefusedError), match=message):
        FRONT_ENDS[front_end](models, text, options)
