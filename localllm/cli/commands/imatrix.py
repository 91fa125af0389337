"""``localllm imatrix``: which weights matter to a text."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.argument_types import whole
from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Positionals, flag, several
from localllm.cli.shared_flags import MODEL_OR_WORD, OUTPUT, QUIET
from localllm.console import LoadStatus, StatusLine, visible_line, warn
from localllm.errors import UsageError, path_text
from localllm.files import check_is_new, read_text
from localllm.loading.progress import of_stage

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile
    from localllm.quantize.imatrix import ImportanceMatrix


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile
    from localllm.quantize.imatrix import ImportanceMatrix
    from localllm.quantize.imatrix_collection import chunks
    from localllm.tokenizer import Tokenizer

    apply_settings(arguments, skip=["threads", "context"])
    arguments.output = arguments.output or Path("imatrix.gguf")
    if arguments.hessian and arguments.output.suffix == ".dat":
        raise UsageError("a file in the older format (.dat) cannot hold --hessian: name one that ends in .gguf")
    before = [ImportanceMatrix.read(path) for path in arguments.in_file]
    text = read_text(arguments.text)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        if arguments.output not in arguments.in_file:
            check_is_new(arguments.output, file.paths)
        for matrix in before:
            matrix.check_is_of(file.tensors)
        pieces = chunks(Tokenizer.from_gguf(file), text, arguments.context)[: arguments.chunks]
        found, is_whole = _collected(file, pieces, arguments)
    if found is None:
        raise KeyboardInterrupt
    found = replace(found, datasets=(path_text(arguments.text.name),))
    whole = reduce(add, before, found)
    whole.write(arguments.output)
    unused = [name for name, entry in found.entries.items() if not entry.counts.all()]
    if unused:
        n = sum(int((found.entries[name].counts == 0).sum()) for name in unused)
        warn(f"no token went to {n} experts of {len(unused)} tensors: give a longer text")
    if not arguments.quiet:
        count = f"{found.n_chunks} pieces" if is_whole else f"{found.n_chunks} of {len(pieces)} pieces"
        more = f", with {whole.n_chunks - found.n_chunks} that were added" if before else ""
        print(f"{visible_line(path_text(arguments.output))}: {len(whole.entries)} tensors, {count}{more}")


def _collected(
    file: GGUFFile, pieces: list[list[int]], arguments: argparse.Namespace
) -> tuple[ImportanceMatrix | None, bool]:
    """The matrix collected until the end or Ctrl-C, and whether that is all."""
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.quantize.imatrix_collection import collect

    found, began, is_shown = None, time.monotonic(), not arguments.quiet
    with StatusLine(enabled=is_shown) as status, LoadStatus(enabled=is_shown) as loading:
        try:
            backend = CPUBackend(arguments.threads, progress=of_stage(loading, "kernels"))
            for found in collect(file, pieces, backend, hessians=arguments.hessian):
                loading.close()
                seconds = (time.monotonic() - began) / found.n_chunks * (len(pieces) - found.n_chunks)
                status.show(f"{found.n_chunks} of {len(pieces)} pieces, {seconds:.0f} s left")
        except KeyboardInterrupt:
            return found, False
    return found, True


COMMAND = Command(
    "FILE [OUTPUT] -f TEXT [options]",
    "measure which weights matter, for quantize",
    [
        *MODEL_OR_WORD,
        OUTPUT,
        flag("-f --file TEXT", "the text to read", Path, dest="text", required=True),
        flag("-c --context N", "tokens in a chunk", whole(8), default=512),
        flag("--chunks N", "number of chunks to read (default: the whole text)", whole(1)),
        several("--in-file FILE", "an importance matrix to add to", Path),
        flag("--hessian", "also measure how columns correlate: a large file, with which quantize loses much less"),
        flag("-t --threads N", "number of threads (default: one per physical core)", whole(1)),
        QUIET,
    ],
    run,
    """\
The model reads the text, which should be some thousands of words of the kind that the model is used for; 50 chunks
are enough, 200 are better.  `localllm quantize --imatrix` uses the result to keep what matters.  Take the F16 file or
a large quantisation as FILE.  Ctrl-C ends early and keeps the result so far.  An OUTPUT that ends in .dat is written
in llama.cpp's older format.
""",
    words=Positionals(
        "FILE OUTPUT",
        "a GGUF file, or any file of a split one, also -m FILE; and the file to write (default: imatrix.gguf)",
        ("model", "output"),
        n_needed=1,
    ),
    aliases="llama-imatrix",
)
