"""What a command line leaves open: taken from the settings file, and else from the program's defaults."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from localllm.settings import Settings, load_settings

#: The settings that stand for flags of the same names, wherever a command has these.
_FOR_FLAGS = ("device", "cache_type", "context", "threads")
#: Those that hold for the device beside them alone.
_WITH_DEVICE = ("n_gpu_layers", "tensor_split")


def settle(arguments: argparse.Namespace, *, skip: Collection[str] = ()) -> Settings:
    """Fills in what the command line did not say, but for ``skip``, and finds the files of the models that it named.

    Raises:
        SettingsError: see `load_settings`.
        ModelNotFoundError, UsageError: see `localllm.library.find.find`.
    """
    settings = load_settings()
    names = _FOR_FLAGS if vars(arguments).get("device") is not None else (*_FOR_FLAGS, *_WITH_DEVICE)
    for name in names:
        if name not in skip and vars(arguments).get(name, name) is None:
            setattr(arguments, name, getattr(settings, name))
    for name in ("model", "draft_model"):
        given = vars(arguments).get(name) or (settings.model if name == "model" else None)
        setattr(arguments, name, None if given is None else _path(given, settings))
    return settings


def _path(name: str, settings: Settings) -> str | Path | None:
    # Imported here: many starts name no model.
    from localllm.library.find import model_path

    return model_path(name, settings.model_folders)
