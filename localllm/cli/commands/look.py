"""``localllm look``: show values inside a model at the tokens of a prompt, as charts."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.argument_types import whole
from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import CACHE_TYPE, CONTEXT, JSON, MODEL_OR_WORD, PLACEMENT, THREADS
from localllm.console import LoadStatus, StatusLine, say
from localllm.errors import UsageError
from localllm.files import expanded, read_text

if TYPE_CHECKING:
    from localllm.inspection.drawing import Drawing
    from localllm.inspection.views import View
    from localllm.llm import LLM


def run(arguments: argparse.Namespace) -> None:
    from localllm import load
    from localllm.inspection.drawing import require_matplotlib, save_png

    apply_settings(arguments)
    files = arguments.control_vector_from
    if files is not None and arguments.output is None:
        raise UsageError("--control-vector-from needs a file to write: add -o FILE")
    if files is None and not arguments.prompt:
        raise UsageError("look needs a prompt: add -p TEXT")
    if files is None and arguments.output is not None:
        raise UsageError("-o is the file of --control-vector-from, which is missing: add it, or use --png FILE")
    if arguments.token is not None and arguments.patch is None and not arguments.attribution:
        raise UsageError("--token needs --patch or --attribution: add either")
    if arguments.png is not None:
        require_matplotlib()
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load(arguments.model, **load_options(arguments, arguments.model), progress=progress)
    with llm, StatusLine(enabled=not arguments.quiet) as status:
        drawings, report = _view(llm, arguments, status)
    if arguments.json:
        print(json.dumps(report))
    elif arguments.png is None:
        _print(drawings)
    if arguments.png is not None:
        save_png(expanded(arguments.png), drawings)
        if not arguments.quiet:
            say(f"localllm: wrote {arguments.png}")


def _view(llm: LLM, arguments: argparse.Namespace, status: StatusLine) -> View:
    """Return the chosen view."""
    from localllm.inspection import views

    if arguments.control_vector_from is not None:
        return _control_vector(llm, arguments)
    if arguments.attention is not None:
        return views.attention(llm, arguments.prompt, arguments.attention)
    if arguments.patch is not None:

        def show(n: int, total: int) -> None:
            status.show(f"replaced {n:,} of {total:,} streams")

        return views.patch(llm, arguments.prompt, arguments.patch, arguments.token, show)
    if arguments.attribution:
        return views.attribution(llm, arguments.prompt, arguments.token)
    if arguments.experts:
        return views.experts(llm, arguments.prompt)
    return views.logit_lens(llm, arguments.prompt, arguments.last)


def _print(drawings: Sequence[Drawing]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for i, drawing in enumerate(drawings):
        if i:
            console.print()
        console.print(drawing.text(console.width), no_wrap=True, overflow="crop")


def _control_vector(llm: LLM, arguments: argparse.Namespace) -> View:
    """Write a control vector, and return the lengths of its vectors. Raises UsageError if the files have no pairs."""
    import numpy as np

    from localllm.inspection import tools
    from localllm.inspection.drawing import Bars
    from localllm.inspection.views import View

    positive, negative = (
        [line for line in read_text(path).splitlines() if line.strip()] for path in arguments.control_vector_from
    )
    if len(positive) != len(negative) or not positive:
        raise UsageError(
            f"the files have {len(positive):,} and {len(negative):,} prompts, but must be pairs: "
            "write one prompt per line, and an opposite in the same line of the second file"
        )
    steering = tools.control_vector(llm, [*zip(positive, negative, strict=True)], arguments.method)
    tools.save_control_vector(arguments.output, steering, llm.info.architecture)
    if not arguments.quiet:
        say(f"localllm: wrote {arguments.output}")
    lengths = {name.split(".")[1]: float(np.linalg.norm(vector)) for name, vector in steering.vectors.items()}
    chart = Bars("length of the control vector of each layer", [*lengths], np.array([*lengths.values()], np.float32))
    return View([chart], {"file": str(arguments.output), "lengths": lengths})


def _heads(text: str) -> list[tuple[int, int]]:
    """Return pairs of a layer and a head."""
    if not re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of heads such as 0.3,5.1 (LAYER.HEAD)")
    return [(int(layer), int(head)) for layer, head in (pair.split(".") for pair in text.split(","))]


COMMAND = Command(
    "[FILE] -p TEXT [view] [options]",
    "show values inside a model: logit lens, attention, patching, attribution, experts",
    [
        *MODEL_OR_WORD,
        flag("-p --prompt TEXT", "the text to evaluate"),
        "views (default: the most likely next token after each layer)",
        [
            flag("--attention LAYER.HEAD,…", "attention probabilities of heads, counted from 0", _heads),
            flag("--patch TEXT", "effect of each stream of the prompt in a second prompt of the same length"),
            flag("--attribution", "how much the next token depends on each token of the prompt"),
            flag("--experts", "share of the tokens that chose each expert of a mixture"),
            flag(
                "--control-vector-from FILE",
                "write a control vector that leads from the prompts of the second file to the prompts of the first, "
                "one per line",
                Path,
                nargs=2,
                metavar=("POSITIVE", "NEGATIVE"),
            ),
        ],
        flag("--last N", "tokens in the default view, counted from the end", whole(1), default=8),
        flag("--token TEXT", "the token for --patch and --attribution (default: the most likely next token)"),
        flag("--method mean|pca", "how --control-vector-from summarises the differences", default="mean"),
        "output",
        flag("-o --output FILE", "the control vector to write, a GGUF file", Path),
        JSON,
        flag("--png FILE", "write the chart to a PNG file (needs matplotlib: the extra plot)", Path),
        flag("-q --quiet", "print no progress"),
        "model",
        *CONTEXT,
        *THREADS,
        *PLACEMENT,
        *CACHE_TYPE,
    ],
    run,
    """\
look evaluates the text without a chat template, and draws a chart of values inside the model.  Columns that
do not fit in the terminal follow below.  In pipes, and if NO_COLOR is set, charts have no colours.

A control vector has a vector for each layer after the first, and their effects add up.  Start with a scale of 1
divided by the number of layers: localllm generate --control-vector-scaled FILE:0.03 for 30 layers.

docs/look-inside.md explains the views.  The functions of localllm.inspection.tools return the same values as arrays.
""",
    words=Positionals("FILE", "a GGUF file (default: the demo model); also -m FILE", ("model",)),
)
