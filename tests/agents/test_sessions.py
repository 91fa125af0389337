"""Sessions of ten turns in the request shapes of coding agents: every block arrives, and the cache is reused.

Codex, Claude Code and opencode send these shapes: tools, long system prompts, fields that only their providers know,
and concurrent requests for the chat's title.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.helpers.http_server import Serving, scripted, serving

RULES = "You are a coding agent. Read files before you change them, and keep your answers short. " * 2
N_TURNS = 10

#: Share of the earlier prompt's tokens that the next prompt finds in the cache.
MIN_REUSED = 0.98

READ = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def script(prompt: str) -> str:
    """Return a call for a step, then an answer; titles for other prompts."""
    if "Write a title" in prompt:
        return "A title"
    last = prompt.rpartition("user: ")[2]
    step = last.split("step ")[1].split()[0]
    if "tool: " in last:
        return f"Step {step} is done."
    return f'I read it.<tool_call>{{"name": "read", "arguments": {{"path": "file{step}.py"}}}}</tool_call>'


class Agent(ABC):
    """A client that keeps its history, as an agent does."""

    def __init__(self, server: Serving) -> None:
        self.url = server.url
        self.n_prompt = self.n_cached = 0  # tokens of the last request

    @abstractmethod
    def request(self) -> tuple[str, dict[str, Any]]:
        """Return path and body of the next request."""

    @abstractmethod
    def add_user(self, text: str) -> None: ...

    @abstractmethod
    def add_reply(self, events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        """Add a reply to the history, and return its text, and ids and arguments of its calls."""

    @abstractmethod
    def add_result(self, id_: str, text: str) -> None: ...

    def title(self) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Write a title"}], "max_tokens": 5}
        httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()

    def ask(self) -> tuple[str, list[tuple[str, Any]]]:
        path, body = self.request()
        with httpx.stream("POST", self.url + path, json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            assert "x-ignored-fields" not in answer.headers
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        assert "warnings" not in "".join(lines)
        return self.add_reply(events)

    def turn(self, text: str) -> str:
        self.add_user(text)
        said, calls = self.ask()
        assert said == "I read it."
        ((id_, arguments),) = calls
        self.add_result(id_, f"the contents of {arguments['path']}")
        return self.ask()[0]


class Codex(Agent):
    def __init__(self, server: Serving) -> None:
        super().__init__(server)
        self.items: list[dict[str, Any]] = []

    def request(self) -> tuple[str, dict[str, Any]]:
        patch = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
        read = {
            "type": "function",
            "name": "read",
            "description": "Reads a file.",
            "parameters": READ,
            "strict": False,
        }
        return "/v1/responses", {
            "model": "demo",
            "instructions": RULES,
            "input": self.items,
            "tools": [read, patch],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "a-session",
            "text": {"verbosity": "low"},
            "client_metadata": {"originator": "agent"},
        }

    def add_user(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.items.append({"type": "message", "role": "user", "content": content})

    def add_reply(self, events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        response = events[-1]["response"]
        assert response["status"] == "completed"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
        self.items += done
        usage = response["usage"]
        self.n_prompt, self.n_cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        text = "".join(item["content"][0]["text"] for item in done if item["type"] == "message")
        calls = [item for item in done if item["type"] == "function_call"]
        return text, [(call["call_id"], json.loads(call["arguments"])) for call in calls]

    def add_result(self, id_: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": id_, "output": text})


class ClaudeCode(Agent):
    def __init__(self, server: Serving) -> None:
        super().__init__(server)
        self.messages: list[dict[str, Any]] = []
        self.n_requests = 0

    def request(self) -> tuple[str, dict[str, Any]]:
        self.n_requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={self.n_requests:05x};"
        cache = {"cache_control": {"type": "ephemeral"}}
        return "/v1/messages?beta=true", {
            "model": "demo",
            "max_tokens": 100,
            "stream": True,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": RULES, **cache}],
            "messages": self.messages,
            "tools": [{"name": "read", "description": "Reads a file.", "input_schema": READ}],
            "metadata": {"user_id": "user"},
            "context_management": {"edits": []},
        }

    def add_user(self, text: str) -> None:
        reminder = {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"}
        self.messages.append({"role": "user", "content": [reminder, {"type": "text", "text": text}]})

    def add_reply(self, events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        blocks: list[dict[str, Any]] = []
        usage: dict[str, Any] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                key = {"text_delta": "text", "input_json_delta": "partial_json"}[delta["type"]]
                blocks[event["index"]][key] = blocks[event["index"]].get(key, "") + delta[key]
            elif event["type"] == "message_delta":
                usage = event["usage"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("partial_json"))
        self.messages.append({"role": "assistant", "content": blocks})
        self.n_cached = usage["cache_read_input_tokens"]
        self.n_prompt = usage["input_tokens"] + self.n_cached
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        return text, [(block["id"], block["input"]) for block in blocks if block["type"] == "tool_use"]

    def add_result(self, id_: str, text: str) -> None:
        result = {"type": "tool_result", "tool_use_id": id_, "content": [{"type": "text", "text": text}]}
        self.messages.append({"role": "user", "content": [result]})


class OpenCode(Agent):
    def __init__(self, server: Serving) -> None:
        super().__init__(server)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]

    def request(self) -> tuple[str, dict[str, Any]]:
        function = {"name": "read", "description": "Reads a file.", "parameters": READ}
        return "/v1/chat/completions", {
            "model": "demo",
            "max_tokens": 100,
            "messages": self.messages,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def add_user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_reply(self, events: list[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
        text, calls = "", dict[int, dict[str, Any]]()
        for event in events:
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls", ()):
                    call = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
                    call |= {"id": part["id"]} if "id" in part else {}
                    arguments = call["function"]["arguments"] + part["function"].get("arguments", "")
                    call["function"] |= part["function"] | {"arguments": arguments}
        usage = events[-1]["usage"]
        self.n_prompt, self.n_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        self.messages.append(message | ({"tool_calls": [*calls.values()]} if calls else {}))
        return text, [(call["id"], json.loads(call["function"]["arguments"])) for call in calls.values()]

    def add_result(self, id_: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": id_, "content": text})


@pytest.fixture(scope="module", params=["demo", "hybrid"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the demo model, or with a model whose recurrent states cannot be truncated."""
    options: dict[str, Any] = {}
    if request.param == "hybrid":
        for package in ("torch", "transformers"):
            pytest.importorskip(package, reason="needs the extra 'reference'")
        from tests.models.tiny import TINY, make_model, write

        entry = replace(TINY["qwen35"], config={**TINY["qwen35"].config, "max_position_embeddings": 8192})
        options["path"] = write(tmp_path_factory.mktemp("hybrid") / "model.gguf", entry, make_model(entry))
    with serving(scripted(script, **options)) as started:
        assert started.llm
        yield started


@pytest.mark.parametrize("with_titles", [False, True])
@pytest.mark.parametrize("agent_of", [Codex, ClaudeCode, OpenCode])
def test_a_session(agent_of: Callable[[Serving], Agent], with_titles: bool, server: Serving) -> None:
    agent, n_before = agent_of(server), 0
    for number in range(N_TURNS):
        titles = threading.Thread(target=agent.title)
        if with_titles:
            titles.start()
        assert agent.turn(f"step {number} please") == f"Step {number} is done."
        assert agent.n_cached >= MIN_REUSED * n_before
        n_before = agent.n_prompt
        if with_titles:
            titles.join()
