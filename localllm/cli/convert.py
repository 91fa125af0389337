"""``localllm convert``: a Hugging Face checkpoint as a GGUF file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from localllm.cli.defaults import settle
from localllm.cli.pull import download
from localllm.cli.quantize import carry_out
from localllm.convert import Checkpoint
from localllm.library.names import HubName
from localllm.library.pull import pull_checkpoint
from localllm.quantize import plan


def run(arguments: argparse.Namespace) -> int:
    """Converts the checkpoint that the command line names, which is downloaded first if it is on the hub."""
    settle(arguments, skip=["threads"])
    folder = Path(arguments.model)
    if not folder.exists() and HubName.parse(arguments.model):
        folder = download(arguments.model, quiet=arguments.quiet, pull=pull_checkpoint)
    checkpoint = Checkpoint(folder)
    planned = plan(
        checkpoint, arguments.output or Path(), arguments.type, allow_requantize=arguments.allow_requantize
    )
    if arguments.output is None:
        output = Path(f"{checkpoint.metadata['general.name']}-{planned.mix}.gguf")
        planned = replace(planned, files=[(output, planned.tensors)])
    return carry_out(planned, arguments)
