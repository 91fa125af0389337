"""Several models by name: loaded on request, and unloaded when memory is short or after a timeout."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.errors import GGUFError, NotEnoughMemoryError
from localllm.loading import planned_memory
from localllm.loading.placement import MIN_CONTEXT, NO_MEMORY, Memory
from localllm.server.http import HTTPError
from localllm.server.models import LoadError, Models, Preset, TooLargeError, UnknownModelError
from tests.helpers.engines import eventually
from tests.helpers.http_server import TOOLS_TEMPLATE, Serving, demo, serving


class FakeLLM:
    def __init__(self, name: str | None, memory: Memory = NO_MEMORY) -> None:
        self.name, self.is_closed = name, False
        self.counts = None
        self.info = SimpleNamespace(placement=SimpleNamespace(memory=memory), draft=None, encoder=None)
        self.may_close = threading.Event()
        self.may_close.set()

    def close(self) -> None:
        self.may_close.wait(10)
        self.is_closed = True


class Machine:
    """A machine that has room for some models."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.loaded: list[FakeLLM] = []

    def load(self, source: str | None, progress: Any, planned: Any) -> Any:
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


class Bytes(Machine):
    """A machine with some bytes.  The source of a model is its name, its bytes on the host, and its bytes on GPUs.

    Layers that do not fit on GPUs take bytes of the host, as in `localllm.loading.placement`.
    """

    def __init__(self, host: int, gpus: int = 0) -> None:
        self.memory = Memory(host, gpus)
        self.loaded: list[FakeLLM] = []

    def load(self, source: str | None, progress: Any, planned: Any) -> Any:
        name, *needs = str(source).split()
        used = Memory.sum(llm.info.placement.memory for llm in self.loaded if not llm.is_closed)
        free = Memory(self.memory.host - used.host, self.memory.gpus - used.gpus)
        host, gpus = map(int, needs)
        spilled = max(0, gpus - free.gpus)
        if host + spilled > free.host:
            error = NotEnoughMemoryError("not enough memory")
            error.missing = host + spilled - free.host
            raise error
        planned(SimpleNamespace(missing=Memory(0, spilled)))
        self.loaded.append(FakeLLM(name, Memory(host + spilled, gpus - spilled)))
        return self.loaded[-1]


def models_in(memory: Machine, **options: Any) -> Models:
    return Models({name: name for name in ("a", "b", "c", "broken")}, memory.load, **options)


def loaded_after(machine: Bytes, needs: dict[str, str], names: str, groups: Mapping[str, str] | None = None) -> Any:
    """Return the models that are loaded after requests for ``names``, one after another."""
    groups = groups or {}
    models = Models(
        {name: Preset(f"{name} {need}", machine.load, group=groups.get(name)) for name, need in needs.items()},
        machine.load,
    )

    async def use() -> None:
        for name in names:
            served, _ = await models.acquire(name)
            models.release(served)

    asyncio.run(use())
    return "".join(sorted(map(str, machine.names)))


def test_the_least_recently_used_goes_when_memory_is_short() -> None:
    async def use(*names: str | None) -> None:
        for name in names:
            served, _ = await models.acquire(name)
            models.release(served)

    memory = Machine(2)
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

    memory = Machine(1)
    models = models_in(memory)
    asyncio.run(use())
    assert memory.names == ["b"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("abc", "abc"),  # all fit
        ("cabd", "abd"),  # the least recently used model is sufficient
        ("abcd", "acd"),  # a is not sufficient, but b is
        ("abce", "e"),
    ],
)
def test_models_are_unloaded_by_their_bytes(names: str, expected: str) -> None:
    needs = {"a": "1 0", "b": "4 0", "c": "3 0", "d": "5 0", "e": "10 0"}
    assert loaded_after(Bytes(10), needs, names) == expected


def test_a_model_that_is_too_large_unloads_no_other() -> None:
    async def use() -> None:
        for name in ("a", "b"):
            models.release((await models.acquire(name))[0])
        with pytest.raises(TooLargeError):
            await models.acquire("c")
        await models.acquire("a")
        with pytest.raises(NotEnoughMemoryError):  # it would fit if nobody used a
            await models.acquire("d")

    machine = Bytes(10)
    models = Models({"a": "a 2 0", "b": "b 2 0", "c": "c 11 0", "d": "d 9 0"}, machine.load)
    asyncio.run(use())
    assert machine.names == ["a", "b"]


GROUPS = {"a": "chat", "b": "chat", "c": "code"}


@pytest.mark.parametrize(
    ("names", "groups", "expected"),
    [
        ("ab", GROUPS, "ab"),  # a model of the group stays, and b takes memory of the host...
        ("ab", {}, "b"),  # ... but without a group b gets the GPU
        ("ac", GROUPS, "c"),
        ("ad", GROUPS, "ad"),  # another group stays if both fit
        ("dcab", GROUPS, "abd"),
        ("abe", GROUPS, "ae"),  # e needs memory of the host, which only b has
    ],
)
def test_models_of_a_group_share_the_memory(names: str, groups: dict[str, str], expected: str) -> None:
    needs = {"a": "0 6", "b": "0 6", "c": "0 6", "d": "2 0", "e": "20 0"}
    assert loaded_after(Bytes(20, 10), needs, names, groups) == expected


def test_models_of_other_groups_are_unloaded_first() -> None:
    needs = dict.fromkeys("abc", "4 0")
    groups = {"a": "chat", "c": "chat"}
    assert loaded_after(Bytes(10), needs, "abc", groups) == "ac"
    assert loaded_after(Bytes(10), needs, "abc") == "bc"
    groups["b"] = "chat"
    assert loaded_after(Bytes(10), needs, "abc", groups) == "bc"


@pytest.mark.parametrize("group", ["x", "y"])
def test_the_caches_of_loaded_models_keep_their_memory(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models fit only if the second has a shorter context, which it has in the group of the first."""
    monkeypatch.setattr(planned_memory, "_open", set())
    monkeypatch.setattr(planned_memory, "used_memory", lambda: 0)  # no cache has been written
    with demo()(None, lambda *_: None, lambda plan: None) as llm:
        placed = llm.info.placement
    available = placed.total + placed.kv_cache // 2
    monkeypatch.setattr("localllm.loading.load.available_memory", lambda: available)
    models = Models({"a": Preset(None, demo(), group="x"), "b": Preset(None, demo(), group=group)}, demo())

    async def use() -> list[int]:
        for name in ("a", "b"):
            models.release((await models.acquire(name))[0])
        contexts = [model.llm.info.context for model in models.served.values() if model.llm is not None]
        assert placed.memory.host <= sum(model.memory.host for model in models.served.values()) <= available
        await models.close()
        return contexts

    contexts = asyncio.run(use())
    if group == "x":
        assert contexts[0] == placed.context > contexts[1] >= MIN_CONTEXT
    else:
        assert contexts == [placed.context]


def test_a_model_stays_if_a_request_arrives_while_another_is_unloaded() -> None:
    async def use() -> None:
        for name in ("a", "b"):
            models.release((await models.acquire(name))[0])
        fake: Any = models.served["a"].llm
        fake.may_close.clear()
        loading = asyncio.create_task(models.acquire("c"))
        while models.served["a"].llm is not None:
            await asyncio.sleep(0)
        await models.acquire("b")
        fake.may_close.set()
        with pytest.raises(NotEnoughMemoryError):
            await loading

    machine = Bytes(10)
    models = Models({"a": "a 5 0", "b": "b 5 0", "c": "c 9 0"}, machine.load)
    asyncio.run(use())
    assert machine.names == ["b"]


def test_a_model_that_fits_beside_no_other_is_too_large() -> None:
    """A retry would not help, so the status is 400, with the reason."""

    async def use() -> None:
        for name in ("a", "b"):
            with pytest.raises(TooLargeError) as caught:
                await models.acquire(name)
            error = HTTPError.of(caught.value)
            assert (error.status, str(error)) == (400, f"the model {name} cannot be loaded: not enough memory")

    models = models_in(Machine(0))
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

    memory = Machine(1)
    models = models_in(memory, ttl_s=0.0)
    asyncio.run(use())
    assert memory.names == ["b"]


def test_it_is_loaded_once_however_many_ask() -> None:
    async def use() -> None:
        await asyncio.gather(*(models.acquire("a") for _ in range(5)))

    memory = Machine(1)
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

    models = models_in(Machine(1), log=said.append)
    asyncio.run(use())
    assert any("/home/me/broken.gguf is damaged" in line for line in said)
    assert models.served["broken"].n_users == 0


def test_names() -> None:
    models = models_in(Machine(1), aliases=["gpt-4o"])
    assert models.find(None) is models.find("") is models.find("gpt-4o") is models.find("a")
    assert (models.find("a").name, models.find("a").preset.aliases) == ("gpt-4o", ("gpt-4o",))
    assert models.find("b:latest").name == "b"
    assert models.find("B.gguf").name == "b"
    with pytest.raises(UnknownModelError, match=r"no model 'd' here, but gpt-4o, b, c, broken: .* --alias"):
        models.find("d")
    assert models_in(Machine(1), takes_any_name=True).find("d").name == "a"


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
    models = Models(dict.fromkeys(names), Machine(1).load)
    assert models.find("qwen3.5:4b").name == names[2]  # the first of the formats that is served
    assert models.find("Qwen3.5:4B-Q8_0").name == names[1]
    assert models.has("qwen3.5:4b")
    assert not models.has("qwen3.5:9b")
    with pytest.raises(UnknownModelError):
        models.find("qwen3.5:9b")
    assert Models({"a": None}, Machine(1).load, takes_any_name=True).find("qwen3.5:4b").name == "a"
