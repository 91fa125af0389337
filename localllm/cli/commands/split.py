"""``localllm split``: split a model into several files, or join them."""

from __future__ import annotations

import argparse
from dataclasses import replace

from localllm.cli.argument_types import size, whole
from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import OUTPUT, QUIET
from localllm.console import StatusLine, quantity, visible_line
from localllm.errors import path_text


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile
    from localllm.quantize import plan, run as write, split_files

    apply_settings(arguments)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        planned = plan(file, arguments.output, None)
        if not arguments.merge:
            files = split_files(planned.tensors, arguments.output, arguments.max_tensors, arguments.max_size)
            planned = replace(planned, files=files)
        if not arguments.dry_run:
            with StatusLine(enabled=not arguments.quiet) as status:
                for n, result in enumerate(write(planned, allow_nan=True), 1):
                    status.show(f"{n} of {len(planned.tensors)} tensors: {visible_line(result.plan.name)}")
        for path, tensors in () if arguments.quiet else planned.files:
            n_bytes = sum(tensor.spec.n_bytes for tensor in tensors)
            print(f"{visible_line(path_text(path))}: {len(tensors)} tensors, {quantity(n_bytes, 'B')}")


COMMAND = Command(
    "FILE OUTPUT [--max-size SIZE | --max-tensors N | --merge]",
    "split a model into several files, or join them",
    [
        OUTPUT,
        [
            flag("--max-size --split-max-size SIZE", "maximum size of the tensors in a file, such as 2GB", size),
            flag("--max-tensors --split-max-tensors N", "maximum number of tensors per file", whole(1), default=128),
            flag("--merge", "join the files into one"),
        ],
        flag("--split", "split into several files (the default)"),
        flag("--dry-run", "show the files without writing them"),
        QUIET,
    ],
    run,
    "A split model needs no joining: name any of its files as the model.\n",
    words=Positionals(
        "FILE OUTPUT",
        "a GGUF file, or any file of a split model; and the file to write, or the start of the files' names",
        ("model", "output"),
        n_needed=2,
    ),
    aliases="llama-gguf-split gguf-split",
)
