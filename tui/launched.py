"""From a command line to what the app is built of: models, memory, settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from localllm.cli.terminal import short_count, visible_line
from localllm.devices import gpu_memory
from localllm.kernels.cpu.host import available_memory
from localllm.library.listing import demo_model, find_models, read_details
from localllm.tui.setup import ModelEntry, Setup

if TYPE_CHECKING:
    from localllm.tui.launch import Launch


def setup_of(launch: Launch) -> Setup:
    """What the app needs for a command line."""
    arguments, settings = launch.arguments, launch.settings

    return Setup(
        store=launch.store,
        conversation=launch.conversation,
        first_model=launch.model,
        load=launch.load,
        check=launch.check,
        list_models=lambda: list_models(settings.model_folders, arguments.device),
        memory=memory_in_use,
        more=launch.more,
        when_full=launch.when_full,
        history=None if launch.history is None else launch.history.with_suffix(".jsonl"),
        notices=tuple(launch.notices),
        theme=settings.theme,
    )


def list_models(folders: Sequence[Path], device: str) -> Iterator[ModelEntry]:
    """The models on this machine, with what is known of them; reads the headers of those that are new."""
    demo = demo_model()
    models = [*find_models(folders).models, *([] if demo is None else [demo])]
    available = available_memory() + gpu_memory(device)
    for model in read_details(models):
        details = model.details
        is_demo = demo is not None and model.path == demo.path
        yield ModelEntry(
            name=visible_line(model.name),
            path="" if is_demo else str(model.path),
            size=model.n_bytes,
            quantisation=(details and details.file_type) or "",
            parameters=short_count(details.n_parameters) if details and details.n_parameters else "",
            context=details.trained_context if details else None,
            fits=(details and details.fits(available)) or "",
            error=(details and details.error) or "",
        )


def memory_in_use() -> int:
    """Bytes of memory that this process has."""
    return int(psutil.Process().memory_info().rss)
