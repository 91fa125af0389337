"""``localllm imatrix``: which weights matter to a text."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

from localllm.cli.defaults import settle
from localllm.cli.main import DONE
from localllm.cli.terminal import LoadStatus, StatusLine, visible_line, warn
from localllm.errors import UsageError, path_text
from localllm.files import check_is_new, read_text
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.backend import CPUBackend
from localllm.library.find import demo_path
from localllm.progress import of_stage
from localllm.quantize.collect import chunks, collect
from localllm.quantize.imatrix import ImportanceMatrix
from localllm.tokenizer import Tokenizer


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for, and writes it."""
    settle(arguments, skip=["threads", "context"])
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
    return DONE


def _collected(
    file: GGUFFile, pieces: list[list[int]], arguments: argparse.Namespace
) -> tuple[ImportanceMatrix | None, bool]:
    """What was collected until the end or Ctrl-C, and whether that is all."""
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
