"""Several models by name: loaded on request, and unloaded when memory is short or after a timeout."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from localllm.errors import GGUFError, NotEnoughMemoryError
from localllm.server.http import HTTPError
from localllm.server.models import LoadError, Models, Preset, TooLargeError, UnknownModelError
from tests.helpers.engines import eventually
from tests.helpers.http_server import TOOLS_TEMPLATE, Serving, demo, serving


class FakeLLM:
    def __init__(self, name: str | None) -> None:
        self.name, self.is_closed = name, False
        self.counts = None
        self.may_close = threading.Event()
        self.may_close.set()

    def close(self) -> None:
        self.may_close.wait(10)
        self.is_closed = True


class Memory:
    def __init__(self, room: int) -> None:
        self.room = room
        self.loaded: list[FakeLLM] = []

    def load(self, source: str | None, progress: Any) -> Any:
        progress("weights", 1, 2)
        if source == "broken":
            raise GGUFError("/home/me/broken.gguf is damaged")
        if sum(not llm.is_closed for llm in self.loaded) == self.room:
            raise NotEnoughMemoryError("not enough memory")
        self.loaded.append(FakeLLM(source))
        return self.loaded[-1]

    @property
    def names(self) -> list[str | None]:
        return [llm.name for llm in self.loaded if not llm.is_closed]


def models_in(memory: Memory, **options: Any) -> Models:
    return Models({name: name for name in ("a", "b", "c", "broken")}, memory.load, **options)


def test_the_least_recently_used_goes_when_memory_is_short() -> None:
    async def use(*names: str | None) -> None:
        for name in names:
            served, _ = await models.acquire(name)
            models.release(served)

    memory = Memory(2)
    models = models_in(memory)
    asyncio.run(use("a", "b", None, "c"))
    assert memory.names == ["a", "c"]
    assert models.served["b"].state == "unloaded"
    assert models.n_loads == 3


def test_what_is_in_use_stays() -> None:
    async def use() -> None:
        first, _ = await models.acquire("a")
        with pytest.raises(NotEnoughMemoryError):
            await models.acquire("b")
        models.release(first)
        await models.acquire("b")

    memory = Memory(1)
    models = models_in(memory)
    asyncio.run(use())
    assert memory.names == ["b"]


def test_a_model_that_fits_beside_no_other_is_too_large() -> None:
    """A retry would not help, so the status is 400, with the reason."""

    async def use() -> None:
        for name in ("a", "b"):
            with pytest.raises(TooLargeError) as caught:
                await models.acquire(name)
            error = HTTPError.of(caught.value)
            assert (error.status, str(error)) == (400, f"the model {name} cannot be loaded: not enough memory")

    models = models_in(Memory(0))
    asyncio.run(use())


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("/home/me/my models/a.gguf is damaged", "a.gguf is damaged"),
        (r"C:\Users\me\a.gguf is damaged", "a.gguf is damaged"),
        ("the file /home/me/a.jinja cannot be read", "the file a.jinja cannot be read"),
        ("~/b/adapter is no folder of PEFT", "adapter is no folder of PEFT"),
        ("the cache of org/repo has f16/q8_0, or 5 GB/s", "the cache of org/repo has f16/q8_0, or 5 GB/s"),
    ],
)
def test_a_load_error_tells_clients_the_reason_without_folders(reason: str, expected: str) -> None:
    assert str(HTTPError.of(LoadError("it cannot be loaded: ", reason))) == f"it cannot be loaded: {expected}"


def test_a_model_is_loaded_when_the_memory_of_one_that_goes_is_free() -> None:
    async def use() -> None:
        served, llm = await models.acquire("a")
        models.release(served)
        fake: Any = llm
        fake.may_close.clear()
        unloading = asyncio.create_task(models.unload_expired())
        while served.llm is not None:
            await asyncio.sleep(0)
        loading = asyncio.create_task(models.acquire("b"))
        await asyncio.wait({loading}, timeout=0.2)
        fake.may_close.set()
        await asyncio.gather(unloading, loading)

    memory = Memory(1)
    models = models_in(memory, ttl_s=0.0)
    asyncio.run(use())
    assert memory.names == ["b"]


def test_it_is_loaded_once_however_many_ask() -> None:
    async def use() -> None:
        await asyncio.gather(*(models.acquire("a") for _ in range(5)))

    memory = Memory(1)
    models = models_in(memory)
    asyncio.run(use())
    assert len(memory.loaded) == 1
    assert models.served["a"].n_users == 5


def test_a_broken_model_is_told_without_its_path_and_others_go_on() -> None:
    said: list[str] = []

    async def use() -> None:
        with pytest.raises(LoadError) as caught:
            await models.acquire("broken")
        assert str(HTTPError.of(caught.value)).startswith("the model broken cannot be loaded: broken.gguf is damaged")
        await models.acquire("a")

    models = models_in(Memory(1), log=said.append)
    asyncio.run(use())
    assert any("/home/me/broken.gguf is damaged" in line for line in said)
    assert models.served["broken"].n_users == 0


def test_names() -> None:
    models = models_in(Memory(1), aliases=["gpt-4o"])
    assert models.find(None) is models.find("") is models.find("gpt-4o") is models.find("a")
    assert (models.find("a").name, models.find("a").preset.aliases) == ("gpt-4o", ("gpt-4o",))
    assert models.find("b:latest").name == "b"
    assert models.find("B.gguf").name == "b"
    with pytest.raises(UnknownModelError, match=r"no model 'd' here, but gpt-4o, b, c, broken: .* --alias"):
        models.find("d")
    assert models_in(Memory(1), takes_any_name=True).find("d").name == "a"


def test_a_model_that_nobody_uses_is_unloaded_after_a_while() -> None:
    def state(server: Serving) -> str:
        listed: str = httpx.get(server.url + "/v1/models").json()["data"][0]["status"]["value"]
        return listed

    with serving(demo(), ttl_s=3600) as server:
        assert httpx.post(server.url + "/tokenize", json={"content": "a"}, timeout=60).status_code == 200
        assert state(server) == "loaded"
        server.models.served["demo"].ttl_s = 0.1
        assert httpx.post(server.url + "/tokenize", json={"content": "a"}, timeout=60).status_code == 200
        assert eventually(lambda: state(server) == "unloaded")
        assert httpx.post(server.url + "/tokenize", json={"content": "a"}, timeout=60).status_code == 200


def test_the_first_model_may_be_loaded_at_once() -> None:
    with serving(demo(), loads_first=True) as server:
        assert eventually(lambda: server.models.served["demo"].llm)


def test_the_system_message_of_a_model_is_the_default_of_its_chats() -> None:
    source: Any = Preset(None, demo(chat_template=TOOLS_TEMPLATE), system="Be brief.")
    hello = [{"role": "user", "content": "Hello!"}]
    own = [{"role": "system", "content": "Be brief.\nPlease!"}, *hello]
    brief, long = (
        "system: Be brief.\nuser: Hello!\nassistant:",
        "system: Be brief.\nPlease!\nuser: Hello!\nassistant:",
    )
    with serving(demo(), sources={"demo": source}) as server:

        def post(path: str, **body: Any) -> Any:
            return httpx.post(server.url + path, json={"max_tokens": 1, **body}, timeout=60).json()

        n_tokens = len(post("/tokenize", content=brief, add_special=True)["tokens"])
        for messages, prompt in ((hello, brief), (own, long)):
            assert post("/apply-template", messages=messages)["prompt"] == prompt
            reply = post("/v1/chat/completions", messages=messages, verbose=True)
            assert reply["__verbose"]["prompt"].endswith(prompt)
        assert post("/v1/messages/count_tokens", messages=hello) == {"input_tokens": n_tokens}
        assert post("/v1/messages", messages=hello)["usage"]["input_tokens"] <= n_tokens
        options = {"stream": False, "options": {"num_predict": 1}}
        assert post("/api/chat", messages=hello, **options)["prompt_eval_count"] == n_tokens
        assert post("/api/generate", prompt="Hello!", **options)["prompt_eval_count"] == n_tokens
        assert post("/api/generate", prompt="Hello!", system="Be", **options)["prompt_eval_count"] < n_tokens
        assert post("/api/show", model="demo")["system"] == "Be brief."
        first = post("/v1/responses", input="Hello!", max_output_tokens=1)
        items = httpx.get(f"{server.url}/v1/responses/{first['id']}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user"]
        assert post("/v1/chat/completions", messages=[])["error"]["message"].startswith("there are no messages")


def test_a_short_name_means_a_model_of_the_hub() -> None:
    names = ("org/repo:Q4_0", "unsloth/Qwen3.5-4B-GGUF:Q8_0", "unsloth/Qwen3.5-4B-GGUF:Q3_K_M")
    models = Models(dict.fromkeys(names), Memory(1).load)
    assert models.find("qwen3.5:4b").name == names[2]  # the first of the formats that is served
    assert models.find("Qwen3.5:4B-Q8_0").name == names[1]
    assert models.has("qwen3.5:4b")
    assert not models.has("qwen3.5:9b")
    with pytest.raises(UnknownModelError):
        models.find("qwen3.5:9b")
    assert Models({"a": None}, Memory(1).load, takes_any_name=True).find("qwen3.5:4b").name == "a"
