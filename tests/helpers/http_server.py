"""A server in a thread of this process, with the demo model or with scripted replies."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from localllm.llm import LLM
from localllm.loading.load import load_file
from localllm.options.declared import LoadOptions
from localllm.server.app import App
from localllm.server.http import Limits
from localllm.server.models import Loader, Models
from localllm.server.monitor import Monitoring
from localllm.server.page_tools import PageTools
from localllm.server.sockets import listen
from localllm.server.uvicorn_server import Server

#: Renders tools, tool results and thinking, as templates of large models do.
TOOLS_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{{ '\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<call {{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "assistant:{% if enable_thinking and messages[-1].content == 'think' %}<think>{% endif %}"
)

#: The same, with calls as Hermes and Qwen write them.
CALLS_TEMPLATE = TOOLS_TEMPLATE.replace(
    "<call {{ call.function.name }} {{ call.function.arguments | tojson }}>",
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>",
)

#: A scripted reply that ends with this string raises an error there.
FAILS = "(fails)"


def example(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """Return a value that is valid for a JSON schema."""
    root = root or schema
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if choices := schema.get("anyOf"):
        return example(choices[0], root)
    kind = schema.get("type")
    if kind == "object":
        return {name: example(each, root) for name, each in schema.get("properties", {}).items()}
    return {"array": [], "integer": 3, "number": 1.5, "boolean": True, "null": None}.get(kind, "some text")


class ScriptedLLM(LLM):
    """The demo model with forced output: ``reply`` of the prompt, or an example of the schema.

    The engine still evaluates the prompt and every token, and samples it, as with any model.
    """

    def __init__(self, reply: Callable[[str], str], options: Mapping[str, Any]) -> None:
        super().__init__(load_file(LoadOptions(**options)))
        self._reply = reply

    def _start(self, ids: list[int], given: Any, **more: Any) -> Any:
        tokenizer = self.tokenizer
        text, schema = self._reply(tokenizer.decode(ids, special=True)), given.sampling.json_schema
        calls = more.get("calls")
        if calls is not None and calls[0].must_call:  # in a template of unknown calls they have no tags
            text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
            if not text.startswith("{"):
                name = calls[0].openings[0].rpartition(":")[2].strip(' "')
                parameters = more["parser"]._calls.parameters[name]
                text = json.dumps({"name": name, "arguments": example(parameters or {"type": "object"})})
        elif schema is not None:
            text = text if text.startswith("{") else json.dumps(example(json.loads(schema)))
        script = tokenizer.encode(text, add_special=False, continuation=True) if text else []
        n_prompt = len(ids)

        def follow(tokens: Any, logits: Any) -> Any:
            at = len(tokens) - n_prompt
            if at >= len(script) and text.endswith(FAILS):
                raise RuntimeError("a defect")
            forced = np.full_like(logits, -1000.0)  # a grammar may forbid the token
            forced[script[at] if at < len(script) else tokenizer.eos_id] = 0.0
            return forced

        given = replace(given, sampling=given.sampling.replace(processors=(follow,)))
        more["continuation"] = True
        return super()._start(ids, given, **more)


def scripted(reply: Callable[[str], str] | str, **options: Any) -> Loader:
    """Return a loader of models that answer with ``reply``."""
    answer = (lambda prompt: reply) if isinstance(reply, str) else reply
    given = {"device": "cpu", "threads": 1, "parallel": 4, "chat_template": TOOLS_TEMPLATE, **options}
    return lambda source, progress, planned: ScriptedLLM(answer, given)


def demo(**options: Any) -> Loader:
    given = {"device": "cpu", "threads": 1, "parallel": 4, **options}
    return lambda source, progress, planned: LLM(load_file(LoadOptions(**given, progress=progress, planned=planned)))


@dataclass
class Serving:
    url: str
    port: int
    app: App
    server: Server

    def wait_until_idle(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while self.app.dispatcher.active or any(
            each.llm and each.llm.counts.running for each in self.models.served.values()
        ):
            assert time.monotonic() < end, "requests are still running"
            time.sleep(0.01)

    @property
    def models(self) -> Models:
        return self.app.models

    @property
    def llm(self) -> LLM:
        """The model "demo", loaded on first use."""
        httpx.post(self.url + "/tokenize", json={"model": "demo", "content": ""}, timeout=120).raise_for_status()
        llm = self.models.served["demo"].llm
        assert llm is not None
        return llm


@contextmanager
def serving(
    load: Loader,
    *,
    names: tuple[str, ...] = ("demo",),
    sources: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    grace_s: float = 0.2,
    responses_folder: Path | None = None,
    loads_first: bool = False,
    trusted_proxies: Sequence[str] = (),
    listening: AbstractContextManager[socket.socket] | None = None,
    monitoring: Monitoring | None = None,
    may_pull: bool = False,
    page_tools: PageTools | None = None,
    **options: Any,
) -> Iterator[Serving]:
    models = Models(sources or dict.fromkeys(names), load, **options)
    limits, monitoring = limits or Limits(), monitoring or Monitoring()
    given = {"monitoring": monitoring, "may_pull": may_pull, "page_tools": page_tools}
    app = App(models, limits, responses_folder, loads_first, **given)
    server = Server(app, grace_s=grace_s, trusted_proxies=trusted_proxies)
    with listening or listen("127.0.0.1", 0) as opened:
        address = opened.getsockname()  # a string for a Unix socket
        port = 0 if isinstance(address, str) else address[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, name="test-server", daemon=True)
        thread.start()
        try:
            yield Serving(f"http://127.0.0.1:{port}", port, app, server)
        finally:
            server.handle_exit(2, None)
            thread.join(60)
            assert not thread.is_alive()
