"""``localllm convert``: a Hugging Face checkpoint as a GGUF file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from localllm.cli.commands.pull import download
from localllm.cli.commands.quantize import carry_out
from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import DRY_RUN, OUTPUT, REQUANTIZE, WRITING
from localllm.library.hub_names import HubName


def run(arguments: argparse.Namespace) -> None:
    from localllm.convert import Checkpoint, MmprojCheckpoint
    from localllm.library.pull import pull_checkpoint
    from localllm.quantize import plan

    apply_settings(arguments, skip=["threads"])
    folder = Path(arguments.model)
    if not folder.exists() and HubName.parse(arguments.model):
        folder = download(arguments.model, quiet=arguments.quiet, by=pull_checkpoint)
    checkpoint = MmprojCheckpoint(folder) if arguments.mmproj else Checkpoint(folder)
    planned = plan(
        checkpoint, arguments.output or Path(), arguments.type, allow_requantize=arguments.allow_requantize
    )
    if arguments.output is None:
        before = "mmproj-" if arguments.mmproj else ""
        output = Path(f"{before}{checkpoint.metadata['general.name']}-{planned.mix}.gguf")
        planned = replace(planned, files=[(output, planned.tensors)])
    carry_out(planned, arguments)


COMMAND = Command(
    "FOLDER [OUTPUT] [options]",
    "make a GGUF file of a checkpoint",
    [
        OUTPUT,
        flag("--mmproj", "the encoders of pictures and sounds of a model, as mmproj-NAME-TYPE.gguf"),
        flag("--type TYPE", "a type or mix of types, such as Q8_0 (default: as it is stored)"),
        DRY_RUN,
        REQUANTIZE,
        *WRITING,
    ],
    run,
    """\
Reads safetensors, also split, of F32, F16, BF16, FP8, MXFP4 and NVFP4, and INT4 as GPTQ, AWQ and compressed-tensors
have it, whose integers are kept as Q4_0 or Q4_1 unless --type says otherwise.  Of models that see or hear it converts
what writes, and with --mmproj what sees and hears.  What would not load is refused before anything is written.  After
Ctrl-C or a crash the same command goes on where it stopped.
""",
    words=Positionals(
        "FOLDER OUTPUT",
        "a folder with config.json, *.safetensors and tokenizer, or ORG/REPO on the hub; and the file to write "
        "(default: NAME-TYPE.gguf)",
        ("model", "output"),
        n_needed=1,
    ),
)
