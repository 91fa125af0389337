"""``localllm convert``: convert a Hugging Face checkpoint to a GGUF file."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from localllm.catalog.hub_names import HubName
from localllm.cli.commands.pull import download
from localllm.cli.commands.quantize import carry_out
from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import DRY_RUN, OUTPUT, REQUANTIZE, WRITING


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.pull import pull_checkpoint
    from localllm.convert import Checkpoint, MmprojCheckpoint
    from localllm.gguf import GGUFFile
    from localllm.quantize import plan

    # Without the model of the settings, because MODEL is a folder or a name on the hub here.
    apply_settings(arguments, skip=["model", "threads"])
    folder = Path(arguments.model)
    if not folder.exists() and HubName.parse(arguments.model):
        folder = download(arguments.model, quiet=arguments.quiet, by=pull_checkpoint)
    with ExitStack() as files:
        target: Checkpoint | GGUFFile | None = None
        if arguments.target is not None:
            path = arguments.target
            target = Checkpoint(path) if path.is_dir() else files.enter_context(GGUFFile.open(path))
        checkpoint: Checkpoint | MmprojCheckpoint
        if arguments.mmproj:
            checkpoint = MmprojCheckpoint(folder)
        else:
            checkpoint = Checkpoint(folder, target=target, only_block=arguments.mtp)
    output = arguments.output or Path()
    planned = plan(checkpoint, output, arguments.type, allow_requantize=arguments.allow_requantize)
    if arguments.output is None:
        prefix = "mmproj-" if arguments.mmproj else "mtp-" if arguments.mtp else ""
        output = Path(f"{prefix}{checkpoint.metadata['general.name']}-{planned.mix}.gguf")
        planned = replace(planned, files=[(output, planned.tensors)])
    carry_out(planned, arguments)


COMMAND = Command(
    "FOLDER [OUTPUT] [options]",
    "convert a Hugging Face checkpoint to a GGUF file",
    [
        OUTPUT,
        flag("--mmproj", "convert the encoder of images or audio instead, to mmproj-NAME-TYPE.gguf"),
        flag("--mtp", "convert only the block that predicts further tokens, to mtp-NAME-TYPE.gguf"),
        flag(
            "--target --target-model-dir MODEL",
            "for a drafter (EAGLE-3, DFlash, DSpark): the model that it drafts for, a folder or a GGUF file",
            Path,
        ),
        flag("--type TYPE", "a type or mix of types, such as Q8_0 (default: as stored)"),
        DRY_RUN,
        REQUANTIZE,
        *WRITING,
    ],
    run,
    """\
Reads safetensors files of F32, F16, BF16, FP8, MXFP4 and NVFP4, and the INT4 of GPTQ, AWQ and compressed-tensors,
whose integers become Q4_0 or Q4_1 unless --type is given.  ORG/REPO is first downloaded from the hub (localllm pull
downloads GGUF files).  A model that accepts images or audio becomes two files: this command converts the language
model, and with --mmproj the encoder.  A drafter (EAGLE-3, DFlash, DSpark) has no tokenizer, so name the model that it
drafts for with --target.  A checkpoint that localllm could not load is refused before anything is written.  After
Ctrl-C or a crash, the same command continues the conversion.
""",
    words=Positionals(
        "FOLDER OUTPUT",
        "a folder with config.json, *.safetensors and a tokenizer, or ORG/REPO on the hub; and the file to write "
        "(default: NAME-TYPE.gguf)",
        ("model", "output"),
        n_needed=1,
    ),
)
