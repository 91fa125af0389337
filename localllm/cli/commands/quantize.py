"""``localllm quantize``: reduce the precision of a model's weights."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.argument_types import divergence, override, size
from localllm.cli.defaults import apply_settings
from localllm.cli.parser import Command, Flag, Positionals, flag, several
from localllm.cli.shared_flags import DRY_RUN, OUTPUT, REQUANTIZE, WRITING
from localllm.console import StatusLine, quantity, visible_line, warn
from localllm.errors import UsageError
from localllm.files import check_is_new, read_text

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile
    from localllm.quant.types import GGMLType
    from localllm.quantize import ImportanceMatrix, QuantizePlan, TensorPlan, TensorResult

_LINE = "{:<36} {:>18} {:>8} {:>8} {:>9} {:>9} {:>8}"
_HEAD = _LINE.format("tensor", "shape", "from", "to", "bytes", "bytes", "error")


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile
    from localllm.quantize import ImportanceMatrix, plan
    from localllm.quantize.mixes import MIXES, mix_named

    apply_settings(arguments, skip=["threads"])
    imatrix = None if arguments.imatrix is None else ImportanceMatrix.read(arguments.imatrix)
    overrides = list(arguments.overrides)
    has_target = arguments.target_size is not None or arguments.target_kl is not None
    if has_target == (arguments.type is not None) or has_target == (arguments.text is None):
        raise UsageError(
            "write localllm quantize FILE OUTPUT TYPE, such as localllm quantize f16.gguf q4.gguf Q4_K_M; or replace "
            "TYPE by --target-size or --target-kl, with -f and text to measure on"
        )
    if has_target and (overrides or arguments.pure):
        raise UsageError("--target-size and --target-kl choose all types: remove --tensor and --pure, or use TYPE")
    if arguments.pure:
        overrides.append(("", MIXES[mix_named(arguments.type)][1].name))
    with GGUFFile.open(arguments.model or demo_path()) as file:
        if has_target and not (arguments.dry_run or arguments.keep_split):  # measuring takes long
            check_is_new(arguments.output, file.paths)
        planned = plan(
            file,
            arguments.output,
            arguments.type,
            types=_choose_types(file, imatrix, arguments) if has_target else None,
            imatrix=imatrix,
            overrides=overrides,
            keep_split=arguments.keep_split,
            allow_requantize=arguments.allow_requantize,
            search=arguments.search,
        )
        carry_out(planned, arguments)


def _choose_types(
    file: GGUFFile, imatrix: ImportanceMatrix | None, arguments: argparse.Namespace
) -> Mapping[str, GGMLType]:
    """Choose types for the target size or the target divergence of the command line."""
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.quantize.budget import CONTEXT, PIECES, choose_types
    from localllm.quantize.imatrix_collection import chunks
    from localllm.tokenizer import Tokenizer

    text_chunks = chunks(Tokenizer.from_gguf(file), read_text(arguments.text), CONTEXT)[:PIECES]
    with StatusLine(enabled=not arguments.quiet) as status:
        choice = choose_types(
            file,
            text_chunks,
            CPUBackend(arguments.threads),
            n_bytes=arguments.target_size,
            divergence=arguments.target_kl,
            imatrix=imatrix,
            search=arguments.search,
            progress=lambda n_measured, total: status.show(f"{n_measured} of {total} tensors measured"),
        )
    if not arguments.quiet:
        print(f"KL divergence {choice.divergence:.5f} on {arguments.text.name}", flush=True)
    return choice.types


def carry_out(planned: QuantizePlan, arguments: argparse.Namespace) -> None:
    """Write the planned file, or only show the plan (--dry-run)."""
    shows_table = not (arguments.quiet or arguments.json)
    results: list[TensorResult] = []
    if arguments.dry_run:
        if shows_table:
            print(_HEAD, *(_line(tensor) for tensor in planned.tensors), sep="\n", flush=True)
        if planned.missing_importance:
            warn(f"{len(planned.missing_importance)} tensors need an importance matrix: add --imatrix FILE")
    else:
        results = _write(planned, arguments, shows_table=shows_table)
    n_bytes = sum(tensor.source.n_bytes for tensor in planned.tensors)
    bits = 8 * planned.n_bytes / sum(tensor.source.n_values for tensor in planned.tensors)
    if shows_table:
        print(
            *_fallbacks(planned),
            f"{quantity(n_bytes, 'B')} to {quantity(planned.n_bytes, 'B')}, {bits:.2f} bits a weight",
            sep="\n",
        )
    if arguments.json:
        print(json.dumps(_as_json(planned, results)))


def _fallbacks(planned: QuantizePlan) -> list[str]:
    """Describe the tensors whose type differs from the mix, the reason, and the change in size."""
    from localllm.quant.types import BLOCK_SIZES

    groups: dict[tuple[str, str], list[TensorPlan]] = {}
    for tensor in planned.tensors:
        if tensor.replaced is not None:
            groups.setdefault((tensor.new.name, tensor.replaced.name), []).append(tensor)
    lines = []
    for (new, mix_type), tensors in groups.items():
        block = BLOCK_SIZES[tensors[0].replaced or tensors[0].new]
        widths = sorted({tensor.source.shape[-1] for tensor in tensors})
        n = sum(t.spec.n_bytes - t.source.n_values * block.n_bytes // block.length for t in tensors)
        lines.append(
            f"{len(tensors)} tensors are {new}, not {mix_type}: their rows of {' or '.join(map(str, widths))} values "
            f"are not a multiple of {block.length} ({quantity(abs(n), 'B')} {'more' if n >= 0 else 'less'})"
        )
    return lines


def _write(planned: QuantizePlan, arguments: argparse.Namespace, *, shows_table: bool) -> list[TensorResult]:
    from localllm.quantize import run as write

    start = time.monotonic()

    def progress(tensor: TensorPlan, n_done: int, total: int) -> None:
        seconds = time.monotonic() - start
        remaining = f", {seconds * (total - n_done) / n_done:.0f} s left" if n_done and seconds > 5 else ""
        status.show(f"{100 * n_done // max(total, 1)} %, {visible_line(tensor.name)}{remaining}")

    results = []
    with StatusLine(enabled=not arguments.quiet) as status:
        for result in write(planned, allow_nan=arguments.allow_nan, progress=progress, threads=arguments.threads):
            status.clear()
            results.append(result)
            if shows_table:
                print(*([] if results[1:] else [_HEAD]), _line(result.plan, result), sep="\n", flush=True)
            if result.n_cleared:
                warn(f"{visible_line(result.plan.name)}: {result.n_cleared:,} values were not finite and are now 0")
    return results


def _line(tensor: TensorPlan, result: TensorResult | None = None) -> str:
    error = "" if result is None or result.error is None else f"{result.error:.3%}"
    name, shape = visible_line(tensor.name), "×".join(map(str, tensor.source.shape))
    new = ("", "") if tensor.is_copied else (tensor.new.name, quantity(tensor.spec.n_bytes, "B"))
    old_size = quantity(tensor.source.n_bytes, "B")
    return _LINE.format(name, shape, tensor.old.name, new[0], old_size, new[1], error).rstrip()


def _as_json(planned: QuantizePlan, results: Sequence[TensorResult]) -> dict[str, object]:
    errors = {result.plan.name: result.error for result in results}
    return {
        "type": planned.mix,
        "files": [str(path) for path, _ in planned.files],
        "n_bytes": planned.n_bytes,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.source.shape),
                "from": tensor.old.name,
                "to": tensor.new.name,
                "n_bytes": tensor.spec.n_bytes,
                "error": errors.get(tensor.name),
            }
            for tensor in planned.tensors
        ],
    }


def _type_of(flag: str, pattern: str) -> Flag:
    text = f"short for --tensor '{pattern}=TYPE'"
    return several(f"{flag} TYPE", text, lambda type: (pattern, type), dest="overrides")


COMMAND = Command(
    "FILE OUTPUT TYPE [options]",
    "quantise a model, to reduce its size",
    [
        OUTPUT,
        [
            flag("--target-size SIZE", "choose the types for a file of at most SIZE, such as 4.2GB", size),
            flag("--target-kl X", "choose the types for a KL divergence of at most X nats", divergence),
        ],
        flag("-f --file FILE", "text file to measure the effect of types on", Path, dest="text"),
        flag("--imatrix FILE", "importance matrix, in GGUF or the older .dat format", Path),
        several(
            "--tensor --tensor-type REGEX=TYPE",
            "type of the tensors whose names match; the first match counts",
            override,
            dest="overrides",
        ),
        _type_of("--output-tensor-type", r"^output\.weight$"),
        _type_of("--token-embedding-type", r"^token_embd\."),
        flag("--pure", "use TYPE for all quantised tensors, without a mix"),
        flag("--search", "search for the best scales instead of plain rounding"),
        flag("--keep-split", "write as many files as the model is split into"),
        DRY_RUN,
        REQUANTIZE,
        *WRITING,
    ],
    run,
    """\
A mix uses better types for the tensors that matter most.  Common TYPEs are Q4_K_M, Q5_K_M, Q6_K, IQ4_XS, Q3_K_M,
IQ3_M and Q2_K; the error for an unknown TYPE lists all TYPEs.  Types below 3 bits need --imatrix.

--target-size and --target-kl choose a type for each tensor.  They measure the effect of each tensor's precision on
the text, and spend bytes where the Kullback-Leibler divergence from the original (nats per token) decreases most.

Without --imatrix, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0 and TQ2_0 are computed by rounding,
as in llama.cpp.  --search takes longer and reduces the error by 3 to 14%, or by half for ternary types.

The error of a tensor is the root mean square error, relative to the root mean square of its values and weighted by
importance.
""",
    words=Positionals(
        "FILE OUTPUT TYPE",
        "a GGUF file, or any file of a split model; the file to write; and a type or mix of types, such as Q4_K_M",
        ("model", "output", "type", "threads"),  # the fourth argument of llama-quantize is the number of threads
        n_needed=2,
    ),
    aliases="llama-quantize",
)
