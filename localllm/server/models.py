"""The server's models by name.  A model is loaded at the first request for it, and unloaded when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from localllm.catalog.demo import demo_path
from localllm.catalog.file_details import Details, DetailsReader
from localllm.catalog.known_models import known_model
from localllm.engine.engine import Counts
from localllm.errors import ClosedError, LocalLLMError, NotEnoughMemoryError
from localllm.inspection.steering import Steering
from localllm.llm import LLM
from localllm.loading.placement import NO_MEMORY, Memory, Plan
from localllm.loading.progress import LoadPlan
from localllm.options.types import LoadProgress
from localllm.server.keys import CURRENT

_T = TypeVar("_T")

#: Loads a model from a source, and reports progress and the plan.
Loader = Callable[[str | None, LoadProgress, LoadPlan], LLM]


class Preset(NamedTuple):
    """A model's source and options."""

    source: str | None  # argument of `localllm.load`; None is the demo model
    load: Loader
    ttl_s: float | None = None  # seconds of idleness before it is unloaded; None is the server's default
    aliases: Sequence[str] = ()  # further names in requests
    adapters: Mapping[str, float] = MappingProxyType({})  # scale by adapter path
    tags: Sequence[str] = ()  # words in lists
    system: str = ""  # system message of chats that do not start with one
    context: int | None = None  # tokens of context that the options set; None is the default
    has_media_file: bool = False  # whether it is loaded with an encoder of images or audio
    group: str | None = None  # models of a group share the memory; None if the model is alone


class UnknownModelError(LocalLLMError):
    """A request names a model that the server does not serve."""


class LoadError(LocalLLMError):
    """A model cannot be loaded."""


class TooLargeError(LoadError):
    """A model does not fit into memory, even without other models."""


class _ShortMemoryError(Exception):
    """A model would be loaded on fewer GPUs, or with less context, than after unloading ``models``."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = models


@dataclass(eq=False)
class ServedModel:
    name: str  # name in requests and lists
    preset: Preset
    ttl_s: float | None  # seconds of idleness before it is unloaded; None is never
    adapters: dict[str, float]  # scale by adapter path, for requests without ``lora``
    llm: LLM | None = None  # None while it is not loaded
    # Unix time at which the server added the model
    created: int = field(default_factory=lambda: int(time.time()))
    n_users: int = 0  # requests that use it or wait for it
    n_loads: int = 0
    used_at: float = 0.0  # end of the last request, by `time.monotonic`
    load_progress: float | None = None  # from 0 to 1 during loading
    # facts from the file's header, set by `Models.listed`
    details: Details = field(default_factory=Details)
    props: dict[str, Any] = field(default_factory=dict)  # contents of ``/props`` while the model is not loaded
    last_counts: Counts | None = None  # counters at the last unloading
    told_counts: Counts = field(default_factory=Counts)  # counters at the last request of ``/metrics``

    @property
    def path(self) -> Path:
        return demo_path() if self.preset.source is None else Path(self.preset.source)

    @property
    def context(self) -> int | None:
        """Tokens of context, which are planned while the model is not loaded; None if they are not known."""
        if self.llm is not None:
            return self.llm.info.context
        if self.preset.context is None:
            return self.details.context
        return self.preset.context or self.details.trained_context

    @property
    def modalities(self) -> list[str]:
        """The kinds of input, which are complete only after the model was loaded."""
        has = self.props.get("modalities") or {"vision": self.preset.has_media_file}
        if self.llm is not None:
            has = {"vision": self.llm.accepts_images, "audio": self.llm.accepts_audio}
        names = {"vision": "image", "audio": "audio"}
        return ["text", *(names[name] for name, is_there in has.items() if is_there)]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors, or of the file while the model is not loaded."""
        if self.llm is not None:
            return self.llm.info.n_bytes
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def memory(self) -> Memory:
        """Planned bytes, which unloading the model frees."""
        if (llm := self.llm) is None:
            return NO_MEMORY
        info = llm.info
        encoder = Memory(0 if info.encoder is None else info.encoder.n_bytes)
        draft = NO_MEMORY if info.draft is None else info.draft.placement.memory
        return Memory.sum([info.placement.memory, draft, encoder])

    @property
    def state(self) -> str:
        return "loading" if self.load_progress is not None else "unloaded" if self.llm is None else "loaded"

    @property
    def expires_s(self) -> float | None:
        """Seconds until the model is unloaded; None if it stays loaded."""
        if self.llm is None or self.ttl_s is None:
            return None
        return max(0.0, self.used_at + self.ttl_s - time.monotonic()) if not self.n_users else self.ttl_s


class Models:
    """All models of a server.  Used only in the server's event loop."""

    def __init__(
        self,
        sources: Mapping[str, str | Preset | None],
        load: Loader,
        *,
        ttl_s: float | None = None,
        aliases: Iterable[str] = (),
        tags: Iterable[str] = (),
        takes_any_name: bool = False,
        adapters: Mapping[str, float] | None = None,
        prompts: Path | None = None,
        context: int | None = None,
        has_media_file: bool = False,
        steering: Mapping[str, Steering] = MappingProxyType({}),
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Create the table of models, without loading a model.

        Args:
            sources: source by name.  A `Preset` replaces ``load`` and ``ttl_s``.
            load: called in another thread, for one model at a time.
            ttl_s: seconds of idleness before a model is unloaded; None is never.
            aliases: other names of the first model.  Lists show the first in alphabetical order, like llama.cpp.
            tags: tags of the first model.
            takes_any_name: whether an unknown name selects the first model.
            adapters, context, has_media_file: as in `Preset`, for sources without a `Preset`.
            steering: vectors that requests can add, by name.
        """
        aliases = sorted(aliases)
        self.served: dict[str, ServedModel] = {}  # by name; the first is the default
        self._by_key: dict[str, ServedModel] = {}
        shared = Preset(None, load, ttl_s, adapters=adapters or {}, context=context, has_media_file=has_media_file)
        self._shared = shared
        for key, source in sources.items():
            preset = source if isinstance(source, Preset) else shared._replace(source=source)
            name = key
            if preset.ttl_s is None:
                preset = preset._replace(ttl_s=ttl_s)
            if not self.served:
                name = aliases[0] if aliases else key
                preset = preset._replace(aliases=(*aliases, *preset.aliases), tags=(*tags, *preset.tags))
            self.served[name] = model = ServedModel(name, preset, preset.ttl_s, dict(preset.adapters))
            self._by_key |= dict.fromkeys(map(_key, (*preset.aliases, key)), model)
        self.prompts = prompts  # folder for files of `LLM.save_prompts`; None if clients cannot save any
        self.steering = steering
        self.is_closed = False  # no model is loaded after this
        self.log = log  # called with messages about loading and unloading
        self.describe: Callable[[LLM], dict[str, Any]] = lambda llm: {}  # returns ``props``
        self._takes_any_name = takes_any_name
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # of `begin_load`; asyncio itself keeps no reference
        # Not asyncio's default executor, because asyncio waits for its threads at the end.
        self._threads = ThreadPoolExecutor(4, "localllm-models")

    def find(self, name: str | None) -> ServedModel:
        """Return the model that a request names.  Ignores case, Ollama's ":latest" and ".gguf".

        Raises UnknownModelError, also for a model that the request's key may not use.
        """
        visible = self.visible()
        if not visible:
            raise UnknownModelError("this key may use no model here: an administrator must add one")
        if not name:
            return visible[0]
        model = self._by_key.get(_key(name))
        if model is None:
            model = visible[0] if self._takes_any_name else self._by_short_name(name)
        if model not in visible:
            names = ", ".join(each.name for each in visible[:5]) + (", …" if len(visible) > 5 else "")
            raise UnknownModelError(
                f"there is no model {name!r:.80} here, but {names}: name one of them, or give the first this name "
                "with serve --alias"
            )
        assert model is not None
        return model

    def visible(self) -> list[ServedModel]:
        """Return the models that the current request may use."""
        key = CURRENT.get()
        return [m for m in self.served.values() if key is None or key.allows(m.name, *m.preset.aliases)]

    def named(self, name: str) -> ServedModel:
        """Return the model with exactly this name.  Raises UnknownModelError."""
        if not self.has(name):
            raise UnknownModelError(f"there is no model {name!r:.80} here: /v1/models lists the models")
        return self.find(name)

    def has(self, name: str | None) -> bool:
        """Return whether a model that the current request may use has exactly this name."""
        return (self._by_key.get(_key(name or "")) or self._by_short_name(name or "")) in self.visible()

    @property
    def n_loads(self) -> int:
        """Number of loads of all models."""
        return sum(model.n_loads for model in self.served.values())

    def _by_short_name(self, name: str) -> ServedModel | None:
        """Return the model of the hub that a short name means, such as qwen3.5:4b."""
        known = known_model(name)
        if known is None:
            return None
        model, format = known
        keys = (_key(f"{model.repository}:{format_}") for format_ in (model.formats if format is None else (format,)))
        return next((self._by_key[key] for key in keys if key in self._by_key), None)

    def add(self, name: str, source: str) -> None:
        """Add a model, with the server's options."""
        model = ServedModel(name, self._shared._replace(source=source), self._shared.ttl_s, {**self._shared.adapters})
        self.served[name] = self._by_key[_key(name)] = model

    async def remove(self, served: ServedModel) -> None:
        """Unload a model, which ends its requests, and remove it from the table."""
        await self.unload(served)
        del self.served[served.name]
        self._by_key = {key: model for key, model in self._by_key.items() if model is not served}

    async def listed(self) -> list[ServedModel]:
        """Return the visible models, with `ServedModel.details` read from the files' headers."""

        def read_details() -> None:
            reader = DetailsReader()
            for model in self.served.values():
                if model.details == Details():
                    model.details = reader.read(model.path)
            reader.save()

        await self._in_thread(read_details)
        return self.visible()

    async def acquire(self, name: str | None) -> tuple[ServedModel, LLM]:
        """Return a model for one request, and load it if necessary.  The request must call `release`."""
        served = self.find(name)
        served.n_users += 1
        try:
            if served.llm is None:
                async with self._loading:
                    if served.llm is None:
                        await self._load_model(served)
            assert served.llm is not None
            return served, served.llm
        except BaseException:
            self.release(served)
            raise

    def release(self, served: ServedModel) -> None:
        served.n_users -= 1
        served.used_at = time.monotonic()

    async def _load_model(self, served: ServedModel) -> None:
        served.load_progress = 0.0
        self.log(f"loading {served.name}")
        try:
            served.llm = await self._load_into_memory(served)
            served.n_loads += 1
        except Exception as error:
            self.log(f"{served.name} cannot be loaded: {error}")
            error_type: type[LoadError] = LoadError
            if isinstance(error, NotEnoughMemoryError):
                if _sufficient(self._loaded(), error.missing):
                    raise  # the model may fit after the requests of other models have ended
                error_type = TooLargeError
            why = error.args if isinstance(error, LocalLLMError) else ("the server's log says why",)
            raise error_type(f"the model {served.name} cannot be loaded: ", *why) from error
        finally:
            served.load_progress = None
        self.log(f"loaded {served.name}")
        # Stored now, because a request for them after unloading would load the model again.
        with contextlib.suppress(LocalLLMError):  # its template may be invalid
            served.props = await self._in_thread(self.describe, served.llm)

    async def _load_into_memory(self, served: ServedModel) -> LLM:
        """Load a model, and unload idle models if memory is short: the least recently used first.

        Models of other groups are unloaded first, also if the model could be loaded with less context or with fewer
        layers on GPUs.  Models of the same group are unloaded only if the model could not be loaded otherwise.
        """
        preset, report = served.preset, partial(self._report, served)
        while True:
            idle = [model for model in self._loaded() if not model.n_users]
            others = [model for model in idle if preset.group is None or model.preset.group != preset.group]

            def check(plan: Plan, others: Sequence[ServedModel] = others) -> None:
                if victims := _fewest(others, plan.missing):
                    raise _ShortMemoryError(victims)

            try:
                return await self._in_thread(preset.load, preset.source, report, check)
            except _ShortMemoryError as error:
                victims = error.models
            except NotEnoughMemoryError as error:
                same = [model for model in idle if model not in others]
                if not (victims := _sufficient([*others, *same], error.missing)):
                    raise
            for model in victims:
                if not model.n_users:  # a request may have come for it since
                    await self._unload(model)

    def _loaded(self) -> list[ServedModel]:
        """Return the loaded models, the least recently used first."""
        return sorted((m for m in self.served.values() if m.llm is not None), key=lambda model: model.used_at)

    async def _in_thread(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _report(self, served: ServedModel, stage: str, n_done: int, total: int) -> None:
        """Set the progress of loading (`localllm.loading.progress.LoadProgress`)."""
        if self.is_closed:
            raise ClosedError("the server is stopping: send the request again later")
        if stage == "weights":
            served.load_progress = n_done / max(1, total)

    def begin_load(self, served: ServedModel) -> None:
        """Start loading a model.  Errors are logged."""

        async def load() -> None:
            with contextlib.suppress(LocalLLMError):
                await self.acquire(served.name)
                self.release(served)

        task = asyncio.create_task(load())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def unload(self, served: ServedModel) -> None:
        """Unloads a model and ends its requests.  Its memory is freed before another model is loaded."""
        async with self._loading:
            await self._unload(served)

    async def _unload(self, served: ServedModel) -> None:
        llm, served.llm = served.llm, None
        if llm is not None:
            served.last_counts = llm.counts
            await self._in_thread(llm.close)
            served.ttl_s = served.preset.ttl_s
            self.log(f"unloaded {served.name}")

    async def unload_expired(self) -> float:
        """Unloads models that were idle for ``ttl_s``.  Returns the seconds until the next check."""
        async with self._loading:
            for served in self.served.values():
                if served.expires_s == 0.0 and not served.n_users:
                    await self._unload(served)
        times = (served.expires_s for served in self.served.values())
        return max(0.05, min((1.0, *(seconds for seconds in times if seconds is not None))))

    async def close(self) -> None:
        self.is_closed = True
        for served in self.served.values():
            await self._unload(served)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _fewest(models: Sequence[ServedModel], missing: Memory) -> list[ServedModel]:
    """Return the fewest models whose memory is sufficient, or if it is not, all models with such memory.

    ``models``: the first is preferred.
    """
    fewest = [model for model in models if any(map(min, model.memory, missing))]
    for model in reversed(fewest):
        others = [other for other in fewest if other is not model]
        if _covers(others, missing):
            fewest = others
    return fewest


def _sufficient(models: Sequence[ServedModel], missing: int | None) -> list[ServedModel]:
    """Return the fewest models that have ``missing`` bytes on the host; empty if all together have fewer.

    With None the number is unknown, and the first model is returned.
    """
    if missing is None:
        return [*models[:1]]
    return _fewest(models, Memory(missing)) if _covers(models, Memory(missing)) else []


def _covers(models: Sequence[ServedModel], missing: Memory) -> bool:
    memory = Memory.sum(model.memory for model in models)
    return memory.host >= missing.host and memory.gpus >= missing.gpus


def _key(name: str) -> str:
    """Return the normal form of a model's name."""
    return name.casefold().removesuffix(":latest").removesuffix(".gguf")
