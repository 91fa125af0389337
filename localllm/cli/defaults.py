"""Defaults of the command line, from the settings file and the program."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from localllm.console import warn
from localllm.errors import ModelNotFoundError, UsageError
from localllm.files import read_text
from localllm.options.declared import LoadOptions, declared
from localllm.options.settings import Settings, load_settings, settings_path

#: Settings that are defaults of the flags of the same name, in every command with such a flag.
_FOR_FLAGS = ("model", *(name for name, option in declared(LoadOptions).items() if option.is_setting))
#: Settings that apply only to the ``device`` in the same file.
_WITH_DEVICE = ("n_gpu_layers", "tensor_split", "split_mode")


def apply_settings(arguments: argparse.Namespace, *, skip: Collection[str] = ()) -> Settings:
    """Sets missing arguments except ``skip`` from the settings, and finds the files of named models.

    ``arguments.from_settings`` contains names for error messages, of arguments that come from the settings or a file.
    """
    settings = load_settings()
    values = vars(arguments)
    values.setdefault("from_settings", {})
    if values.get("device") is not None:
        skip = {*skip, *_WITH_DEVICE}
    for name in _FOR_FLAGS:
        if name not in skip and values.get(name, name) is None:
            setattr(arguments, name, getattr(settings, name))
            if name in settings.keys_in_file:
                arguments.from_settings[name] = f"the setting {name} in {settings_path()}"
    _ignore_layers(arguments)
    if "model" in values and "model" not in skip:
        arguments.model = model_file(values, settings)
    if values.get("draft_model") is not None:
        from localllm.catalog.find import find

        arguments.draft_model = find(arguments.draft_model, settings.model_folders)
    return settings


def _ignore_layers(arguments: argparse.Namespace) -> None:
    """Warns that ``n_gpu_layers`` has no effect without a GPU, unless the device is a GPU."""
    values = vars(arguments)
    device = str(values.get("device"))
    for name, flag in (("n_gpu_layers", "-ngl"), ("tensor_split", "--tensor-split"), ("split_mode", "-sm")):
        if values.get(name) and not device.lower().startswith(("cuda", "gpu")):
            from localllm.loading.devices import gpu_memory  # imported here because it is rarely used

            if not gpu_memory(device):
                setattr(arguments, name, None)
                if not values.get("quiet"):
                    source = arguments.from_settings.get(name, flag)
                    warn(f"{source} has no effect, because no GPU can be used (localllm doctor shows why)")


def model_file(values: Mapping[str, Any], settings: Settings) -> str | Path | None:
    """Return the file of the command line's model, downloaded for -hf; None for the demo model."""
    name, file = values["model"], values.get("hub_file")
    if file is not None and name is not None:
        name = f"{name}:{file}"
    if name is None:
        return None
    # Imported here: many starts name no model.
    from localllm.catalog.find import model_path

    try:
        return model_path(name, settings.model_folders)
    except ModelNotFoundError:
        if not values.get("download"):
            raise
    from localllm.cli.commands.pull import download

    return download(name, quiet=bool(values.get("quiet")))


def load_options(arguments: argparse.Namespace, path: str | Path | None, **more: Any) -> dict[str, Any]:
    """Return a command line's keywords of `localllm.load`, and ``more``.  Context 0 is the training context."""
    options = {name: value for name, value in vars(arguments).items() if name in declared(LoadOptions)} | more
    if "chat_template" in options:
        options["chat_template"] = chat_template(arguments)
    options["adapters"] = {str(adapter): adapter for adapter, _ in vars(arguments).get("lora", ())}
    options.setdefault("mmproj", False)  # without images and audio no encoder is needed
    if options.get("context") == 0:
        # Imported here because the import takes as long as reading the file.
        from localllm.catalog.demo import demo_path
        from localllm.catalog.find import trained_context

        options["context"] = trained_context(path or demo_path())
    return options


def template_variables(arguments: argparse.Namespace) -> dict[str, Any]:
    switch = "off" if vars(arguments).get("reasoning_budget") == 0 else arguments.reasoning
    thinking = {} if switch in (None, "auto") else {"enable_thinking": switch == "on"}
    return {**thinking, **arguments.chat_template_kwargs}


def chat_template(arguments: argparse.Namespace) -> str | None:
    text: str | None = arguments.chat_template
    if arguments.chat_template_file is not None:
        if text is not None:
            raise UsageError("--chat-template and --chat-template-file cannot be combined: remove either")
        return without_line_end(read_text(arguments.chat_template_file, "the chat template file"))
    if text is None or "{" in text:
        return text
    from localllm.chat.built_in_templates import NAMES, built_in  # imported here because it is rarely used

    if (template := built_in(text)) is None:
        raise UsageError(
            f"there is no chat template {text!r:.80}: remove --chat-template to use the file's template, or "
            f"write Jinja source or one of {', '.join(NAMES)}"
        )
    return template


def without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
