"""``localllm pull``: download a model from the Hugging Face hub."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.argument_types import model_file
from localllm.cli.parser import Command, flag
from localllm.console import LoadStatus, StatusLine, quantity, rounded, say, visible_line, warn
from localllm.errors import LocalLLMError, NotEnoughMemoryError

if TYPE_CHECKING:
    from localllm.catalog.pull import PullProgress


def run(arguments: argparse.Namespace) -> None:
    path = download(arguments.model, quiet=arguments.quiet)
    print(visible_line(str(path)))
    if not arguments.quiet:
        _say_speed(path)
        say(f"localllm generate -m {visible_line(arguments.model)} runs this model")


def _say_speed(path: Path) -> None:
    """Print the predicted speed and memory of a downloaded model on this machine."""
    # Imported here: downloading needs no kernels.
    from localllm.loading.load import plan_file
    from localllm.loading.prediction import Predictor
    from localllm.loading.progress import of_stage
    from localllm.options.declared import LoadOptions

    try:
        placement = plan_file(LoadOptions(path=path)).placement
        with LoadStatus() as progress:
            predictor = Predictor.of(path, placement, progress=of_stage(progress, "kernels"))
    except NotEnoughMemoryError as error:
        warn(str(error))
        return
    except LocalLLMError:  # the file is an encoder, or a model that localllm does not support
        return
    token_s = None if predictor is None else predictor.decode_s(0)
    speed = "" if token_s is None else f"about {rounded(1 / token_s)} tokens/s here, "
    say(f"{speed}{quantity(placement.total, 'B')} of memory with {placement.context:,} tokens of context")


def download(name: str, *, quiet: bool, by: Callable[[str, PullProgress], Path] | None = None) -> Path:
    """Download a model with ``by`` (default: `pull`), and show the progress.  Returns the path."""
    from localllm.catalog.pull import pull

    if not quiet:
        _say_meaning(name)
    progress = _Progress(enabled=not quiet)
    try:
        path = (by or pull)(name, progress)
    except KeyboardInterrupt:
        progress.close()
        if progress.fetched:
            say(f"localllm: stopped; {progress.fetched} are saved: run the same command again to continue")
        raise
    finally:
        progress.close()
    if by is None and not quiet:
        _say_encoder(path)
    return path


def _say_encoder(path: Path) -> None:
    """Print whether the model accepts images or audio by a file next to it."""
    from localllm.gguf import GGUFFile
    from localllm.loading.projector_files import find_projectors
    from localllm.models.encoders.registry import projectors_of

    for encoder in find_projectors(path)[0][:1]:
        name = visible_line(encoder.name)
        try:
            with GGUFFile.open(encoder) as file:
                projectors_of(file.metadata)
        except LocalLLMError as error:
            warn(f"{name} is next to the model, but the model accepts only text: {error}")
        else:
            say(f"{name} is next to the model: it lets the model accept images or audio")


def _say_meaning(name: str) -> None:
    """Print the repository and the format that a short name means, and whether they fit into memory."""
    from localllm.catalog.hub_names import HubName
    from localllm.catalog.known_models import available_bytes, known_model

    if HubName.parse(name) is not None or (known := known_model(name)) is None:
        return
    model, named_format = known
    available = available_bytes()
    format = named_format or model.format_for(available)
    say(f"{visible_line(name)} is {HubName(model.repository, format)} on the hub")
    if format not in model.formats:
        return
    if model.memory(format) > available:
        needed, free = quantity(model.memory(format), "B"), quantity(available, "B")
        warn(f"{model.name} takes about {needed} of memory in {format}, and {free} is available")
    elif named_format is None and format != model.default_format:
        say(f"{model.default_format}, the default, takes about {quantity(model.memory(model.default_format), 'B')}")


class _Progress:
    """Download progress, shown on a terminal."""

    def __init__(self, *, enabled: bool) -> None:
        self._status = StatusLine(enabled=enabled)
        self._start: tuple[float, int] | None = None
        self.fetched = ""

    def __call__(self, stage: str, n_bytes_done: int, total: int) -> None:
        share = f"{quantity(n_bytes_done, 'B')} of {quantity(total, 'B')}"
        if stage == "check":
            self._status.show(f"checking {share}")
            return
        now = time.monotonic()
        self._start = self._start or (now, n_bytes_done)
        seconds, n_bytes = now - self._start[0], n_bytes_done - self._start[1]
        rate = f", {quantity(n_bytes / seconds, 'B/s')}" if seconds > 1 else ""
        self._status.show(f"downloading {share}{rate}")
        self.fetched = share

    def close(self) -> None:
        self._status.clear()


COMMAND = Command(
    "NAME or ORG/REPO[:FILE or QUANT] [-q]",
    "download a model from the hub",
    [
        flag("model NAME", "what to download: a short name, or ORG/REPO[:…]", model_file),
        flag("-q --quiet", "show no progress"),
    ],
    run,
    """\
The model is stored in the Hugging Face cache, and all commands accept its name in place of a path.

Short names work as in Ollama: llama3.2, qwen3.5:4b, gemma4:e2b-q8_0.  The tag is a size, perhaps with a format.  By
default the format is Q4_K_M, or Q8_0 for models of less than a billion parameters, or a smaller one if only that fits
into memory.  localllm models --suggest suggests models for this machine.

Every repository of GGUF files on the hub works under its name.  ORG/REPO:Q4_K_M selects a file by its quantisation,
ORG/REPO:NAME.gguf by its name.  ORG/REPO alone selects the only file, or Q4_K_M.  The addresses of pages and files on
the hub work too.  If a repository contains a checkpoint and no GGUF files, localllm convert ORG/REPO downloads and
converts it.

The projector file (mmproj) of a model that accepts images or audio is downloaded as well.  To resume an interrupted
download, run the same command again.
""",
    aliases="download",
)
