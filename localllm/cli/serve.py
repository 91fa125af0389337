"""``localllm serve``: models for other programs, over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.defaults import chat_template, load_options, settle
from localllm.cli.main import DONE
from localllm.cli.terminal import say, warn
from localllm.engine.engine import Counts
from localllm.errors import ClosedError, UsageError, path_text
from localllm.files import expanded
from localllm.library.listing import find_models
from localllm.library.names import DEMO, HubName
from localllm.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from localllm.llm import LLM
    from localllm.progress import LoadProgress
    from localllm.server.models import Models

#: Environment variable with API keys, commas between them: a command line can be seen by others.
KEY_VARIABLE = "LOCALLLM_API_KEY"

#: Seconds for which a thread may go on while others wait to run.
_SWITCH_S = 0.0005

#: Addresses that only this machine reaches.
_OWN = ("127.0.0.1", "localhost", "::1")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM."""
    try:
        import msgspec  # noqa: F401

        from localllm.server.run import Server, end_if_busy, listen
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs {error.name}, which is not installed: pip install 'localllm[serve]'") from None
    from localllm.server.app import App
    from localllm.server.http import Limits
    from localllm.server.models import Models

    if arguments.lora and len(arguments.models) != 1:
        raise UsageError("--lora is for one model: name that with -m FILE, and no other")
    chat_template(arguments)  # what is wrong with it is said before a model is asked for
    settings = settle(arguments, skip=("model",))
    keys = [*arguments.api_keys, *(key for key in os.environ.get(KEY_VARIABLE, "").split(",") if key)]
    if arguments.host not in _OWN and not keys:
        warn(f"everybody who reaches {arguments.host} can use this server: --api-key KEY lets in those who have it")

    def load_model(source: str | None, progress: LoadProgress) -> LLM:
        from localllm.llm import load
        from localllm.progress import CompileNotice

        notice = CompileNotice()

        def report(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            notice(stage, done, total)

        llm = load(source, **load_options(arguments, source, max_waiting=arguments.max_queue), progress=report)
        llm.prepare_grammars()
        if not arguments.quiet:
            say(str(llm.info))
        if arguments.stats:
            stats.measure(llm)
        return llm

    # Python's own 5 ms for each thread that renders or tokenizes would hold up each step several times.
    sys.setswitchinterval(_SWITCH_S)
    models = Models(
        sources(arguments.models, settings),
        load_model,
        ttl_s=arguments.ttl,
        aliases=arguments.aliases,
        takes_any_name=len(arguments.models) == 1,
        n_slots=arguments.parallel,
        adapters={str(path): share for path, share in arguments.lora},
        prompts=_folder(arguments.prompts),
        log=(lambda line: None) if arguments.quiet else say,
    )
    stats = Stats(models)
    limits = Limits(
        api_keys=keys,
        hosts=[*arguments.hosts, arguments.host],
        origins=arguments.origins,
        max_body=arguments.max_body << 20,
    )
    app = App(models, limits, arguments.responses, loads_first=bool(arguments.models))
    with listen(arguments.host, arguments.port) as listening:
        host, port = listening.getsockname()[:2]
        say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends)")
        server = Server(app, grace_s=arguments.grace)
        with stats.shown() if arguments.stats else nullcontext():
            server.run(sockets=[listening])
    end_if_busy(DONE)
    return DONE


def sources(given: list[str], settings: Settings) -> dict[str, str | None]:
    """The models of the server by name, those given or else all on this machine; the first is the default."""
    names = given or [settings.model or DEMO]
    found = {_name(name): _source(name, settings) for name in names}
    if not given:
        listed = find_models(settings.model_folders).models
        found |= {model.name.removesuffix(".gguf"): str(model.path) for model in listed}
        found.setdefault(DEMO, None)
    return found


def _folder(prompts: Path | None) -> Path | None:
    """Raises:
    UsageError: it cannot be made.
    """
    if prompts is not None:
        prompts = expanded(prompts)
        try:
            prompts.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--prompt-cache {path_text(prompts)} cannot be made ({error.strerror}): name another folder"
            ) from None
    return prompts


def _name(given: str) -> str:
    """What requests call a model: a name on the hub as it is, a file without folder and ending."""
    if HubName.parse(given) is not None and not os.path.lexists(given):
        return given
    return Path(given).name.removesuffix(".gguf")


def _source(name: str, settings: Settings) -> str | None:
    # Imported here: --help does not wait for it.
    from localllm.library.find import model_path
    from localllm.loading import check_file

    path = model_path(name, settings.model_folders)
    if path is not None:
        check_file(path)
    return None if path is None else str(path)


# -- --stats -------------------------------------------------------------------------------------------------------


class Stats:
    """What each loaded model did since the last look."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._before: dict[str, tuple[float, Counts]] = {}
        self._read_speeds: dict[str, float] = {}

    def measure(self, llm: LLM) -> None:
        """Measures how fast this machine reads memory, before a model that is on the CPU has anything to do."""
        if llm.info.device == "cpu":
            from localllm.kernels.cpu.roofline import Roofline
            from localllm.kernels.cpu.target import choose

            with Roofline(llm.info.decode_threads, choose(None), 1 << 28) as roofline:
                self._read_speeds[str(llm.info.path)] = roofline.read_bandwidth()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows a table on standard error until the end."""
        from rich.console import Console
        from rich.live import Live

        ended = threading.Event()
        with Live(self.table(), console=Console(stderr=True), auto_refresh=False) as live:

            def show() -> None:
                while not ended.wait(1.0):
                    live.update(self.table(), refresh=True)

            thread = threading.Thread(target=show, name="localllm-stats", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("model", "running", "waiting", "cache", "prompt t/s", "reply t/s", "cached", "of reading speed"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for row in self.rows():
            table.add_row(*row)
        return table

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row for each model that is loaded, or being loaded."""
        for served in list(self._models.served.values()):
            llm = served.llm
            if served.load_progress is not None:
                yield served.name, f"loading {served.load_progress:.0%}"
            if llm is None:
                continue
            try:
                now, counts, n_waiting = time.monotonic(), replace(llm.counts), llm.n_waiting
            except ClosedError:  # just now
                continue
            then, before = self._before.get(served.name, (now - 1.0, Counts()))
            self._before[served.name] = now, counts
            if before.steps > counts.steps:  # it was loaded again
                before = Counts()
            seconds = max(1e-3, now - then)
            prompt, cached = counts.prompt_tokens - before.prompt_tokens, counts.cached_tokens - before.cached_tokens
            step_s, read_speed = counts.step_s - before.step_s, self._read_speeds.get(str(llm.info.path))
            share = "-"
            if step_s > 0 and read_speed is not None:
                n_bytes = llm.info.placement.multiplied * (counts.steps - before.steps)
                share = f"{n_bytes / step_s / read_speed:.0%}"
            yield (
                served.name,
                str(counts.running),
                str(n_waiting),
                f"{counts.n_pages_used / max(1, counts.n_pages):.0%}",
                f"{prompt / seconds:,.0f}",
                f"{(counts.generated_tokens - before.generated_tokens) / seconds:,.1f}",
                f"{cached / max(1, prompt + cached):.0%}",
                share,
            )
