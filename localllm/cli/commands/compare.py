"""``localllm compare``: compare the values inside a model with another device or with transformers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import CACHE_TYPE, CONTEXT, JSON, MODEL_OR_WORD, PLACEMENT, THREADS
from localllm.console import LoadStatus
from localllm.errors import UsageError
from localllm.files import expanded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from localllm.inspection.names import ValueNames

_TRANSFORMERS = "transformers:"
#: Formats of weights whose products are computed with floats.
_FLOATS = ("F32", "F16", "BF16")


def run(arguments: argparse.Namespace) -> None:
    from localllm.inspection.compare import FLOAT_ROUNDING, INTEGER_ROUNDING, differences, first_jump, table

    apply_settings(arguments)
    if arguments.prompt is None:
        raise UsageError("compare needs a prompt: add -p TEXT")
    values, ids, names, is_float = _values(arguments, arguments.prompt)
    if arguments.against.startswith(_TRANSFORMERS):
        from localllm.inspection.transformers_values import transformers_values

        folder = expanded(arguments.against.removeprefix(_TRANSFORMERS))
        expected: dict[str, NDArray[Any]] = transformers_values(Path(folder), ids, names)
    else:
        expected, _, _, also_float = _values(arguments, ids, device=arguments.against)
        is_float = is_float and also_float
    errors = differences(expected, values)
    if not errors:
        raise UsageError(f"{arguments.against} has no values of the same shapes: name the checkpoint of this model")
    jump = first_jump(errors, FLOAT_ROUNDING if is_float else INTEGER_ROUNDING)
    if arguments.json:
        report = {"errors": {d.name: d.error for d in errors}, "first_jump": None if jump is None else jump.name}
        print(json.dumps(report))
        return
    for line in table(errors):
        print(line)
    if not any(difference.error for difference in errors):
        print("all values are equal")
    elif jump is None:
        print("no value jumps: the errors grow gradually, as rounding errors do")
    else:
        before = max((d.error for d in errors[: errors.index(jump)]), default=0.0)
        print(f"{jump.name} is the first value that jumps: {jump.error:.1e}, after errors of at most {before:.1e}")


def _values(
    arguments: argparse.Namespace, prompt: Any, **options: Any
) -> tuple[dict[str, NDArray[Any]], list[int], ValueNames, bool]:
    """Return all values at a prompt, the prompt's token ids, the names of values, and whether products are floats."""
    from localllm import load

    keywords = load_options(arguments, arguments.model, **options)
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load(arguments.model, **keywords, progress=progress)
    with llm:
        ids = llm.tokenize(prompt) if isinstance(prompt, str) else prompt
        names = llm.graph
        is_float = all(format.kernel_type in _FLOATS for format in llm.info.placement.formats)
        return llm.trace(ids, [*names]), ids, names, is_float


COMMAND = Command(
    "[FILE] -p TEXT --with WHAT [options]",
    "find the first layer with values that differ from a reference",
    [
        *MODEL_OR_WORD,
        flag("-p --prompt TEXT", "the text to evaluate"),
        flag(
            "--with WHAT",
            "what to compare with: a device such as reference or cpu, or transformers:FOLDER for the original "
            "checkpoint",
            dest="against",
            default="reference",
        ),
        JSON,
        flag("-q --quiet", "print no progress"),
        *CONTEXT,
        *THREADS,
        *PLACEMENT,
        *CACHE_TYPE,
    ],
    run,
    """\
compare evaluates the text twice, and prints the relative error of each value inside the model, with a row per layer.
localllm inspect --graph lists the values.  The last line names the first value whose error is several times as large
as all errors before it: the fault is in the operations that compute this value.
""",
    words=Positionals("FILE", "a GGUF file (default: the demo model); also -m FILE", ("model",)),
)
