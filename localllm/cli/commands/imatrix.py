"""``localllm imatrix``: measure how much each weight matters for predicting text, for quantize."""

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
        raise UsageError("--hessian needs an output file in GGUF format: name a file that ends in .gguf")
    before = [ImportanceMatrix.read(path) for path in arguments.in_file]
    text = read_text(arguments.text)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        if arguments.output not in arguments.in_file:
            check_is_new(arguments.output, file.paths)
        for earlier in before:
            earlier.check_is_of(file.tensors)
        text_chunks = chunks(Tokenizer.from_gguf(file), text, arguments.context)[: arguments.chunks]
        matrix, is_complete = _collect(file, text_chunks, arguments)
    if matrix is None:
        raise KeyboardInterrupt
    matrix = replace(matrix, datasets=(path_text(arguments.text.name),))
    total = reduce(add, before, matrix)
    total.write(arguments.output)
    unused = [name for name, entry in matrix.entries.items() if not entry.counts.all()]
    if unused:
        n = sum(int((matrix.entries[name].counts == 0).sum()) for name in unused)
        warn(f"{n} experts of {len(unused)} tensors received no token: use a longer text")
    if not arguments.quiet:
        count = f"{matrix.n_chunks} chunks" if is_complete else f"{matrix.n_chunks} of {len(text_chunks)} chunks"
        more = f", with {total.n_chunks - matrix.n_chunks} from --in-file" if before else ""
        print(f"{visible_line(path_text(arguments.output))}: {len(total.entries)} tensors, {count}{more}")


def _collect(
    file: GGUFFile, text_chunks: list[list[int]], arguments: argparse.Namespace
) -> tuple[ImportanceMatrix | None, bool]:
    """Return the matrix collected until the end or Ctrl-C, or None, and whether all chunks were read."""
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.quantize.imatrix_collection import collect

    matrix, start, is_shown = None, time.monotonic(), not arguments.quiet
    with StatusLine(enabled=is_shown) as status, LoadStatus(enabled=is_shown) as loading:
        try:
            backend = CPUBackend(arguments.threads, progress=of_stage(loading, "kernels"))
            for matrix in collect(file, text_chunks, backend, hessians=arguments.hessian):
                loading.close()
                seconds = (time.monotonic() - start) / matrix.n_chunks * (len(text_chunks) - matrix.n_chunks)
                status.show(f"{matrix.n_chunks} of {len(text_chunks)} chunks, {seconds:.0f} s left")
        except KeyboardInterrupt:
            return matrix, False
    return matrix, True


COMMAND = Command(
    "FILE [OUTPUT] -f TEXT [options]",
    "measure how much each weight matters, for quantize",
    [
        *MODEL_OR_WORD,
        OUTPUT,
        flag("-f --file TEXT", "the text to read", Path, dest="text", required=True),
        flag("-c --context N", "tokens per chunk", whole(8), default=512),
        flag("--chunks N", "number of chunks to read (default: the whole text)", whole(1)),
        several("--in-file FILE", "importance matrix to add the result to", Path),
        flag("--hessian", "also measure correlations of columns: makes a large file, but quantize loses much less"),
        flag("-t --threads N", "number of threads (default: one per physical core)", whole(1)),
        QUIET,
    ],
    run,
    """\
The model reads the text, which should resemble the texts that the model is used for: 50 chunks are enough, 200 chunks
are better.  `localllm quantize --imatrix` uses the result to preserve important weights.  FILE should be the F16 file
or a large quantisation.  Ctrl-C stops early and saves the partial result.  An OUTPUT that ends in .dat is written in
llama.cpp's older format.
""",
    words=Positionals(
        "FILE OUTPUT",
        "a GGUF file, or any file of a split one, also -m FILE; and the file to write (default: imatrix.gguf)",
        ("model", "output"),
        n_needed=1,
    ),
    aliases="llama-imatrix",
)
