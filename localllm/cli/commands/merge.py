"""``localllm merge``: merge low-rank adapters (LoRA) into the weights of a model."""

from __future__ import annotations

import argparse

from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Flag, Positionals
from localllm.cli.shared_flags import LORA, OUTPUT, QUIET
from localllm.console import StatusLine, visible_line
from localllm.errors import path_text


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile
    from localllm.loading.adapters import merge, read_adapter

    apply_settings(arguments)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        adapters = [(read_adapter(str(path), path, file), share) for path, share in arguments.lora]
        with StatusLine(enabled=not arguments.quiet) as status:
            for n, name in enumerate(merge(file, adapters, arguments.output), 1):
                status.show(f"{n} of {len(file.tensors)} tensors: {visible_line(name)}")
        changed = {name for adapter, _ in adapters for name in adapter.parts}
    if not arguments.quiet:
        print(f"{visible_line(path_text(arguments.output))}: {len(changed)} tensors changed")


COMMAND = Command(
    "FILE OUTPUT --lora ADAPTER[=X]",
    "merge adapters (LoRA) into the weights of a model",
    [OUTPUT, Flag(LORA.names, {**LORA.keywords, "required": True}), QUIET],
    run,
    words=Positionals(
        "FILE OUTPUT",
        "a GGUF file, or any file of a split model; and the file to write",
        ("model", "output"),
        n_needed=2,
    ),
    aliases="llama-export-lora export-lora",
)
