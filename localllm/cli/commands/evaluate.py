"""``localllm evaluate``: what a model knows, and what was lost where it was made smaller."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.argument_types import model_file, whole
from localllm.cli.chart import Point, point_label, svg_chart, text_chart
from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import DEVICE, JSON_AT_END, MODEL_OR_WORD, THREADS
from localllm.console import LoadStatus, StatusLine, model_line, quantity, visible_line
from localllm.errors import UsageError, path_text
from localllm.files import check_is_new, read_text

if TYPE_CHECKING:
    from localllm.evaluate import BaseLogits, Divergence, Estimate, Perplexity
    from localllm.llm import LLM
    from localllm.loading.model_info import ModelInfo

#: Sequences that the cache has room for, so that a chunk begins while others go on.
_PARALLEL = 4

#: Heights in the line of progress.
_BARS = "▁▂▃▄▅▆▇█"

_COMPARED = "{:>3} {:<36} {:>9} {:>11} {:>11} {:>10} {:>10}"


def run(arguments: argparse.Namespace) -> None:
    apply_settings(arguments, skip=["context"])
    if arguments.kl_divergence:  # as llama-perplexity has it, which then reads no text
        if arguments.save_logits is None:
            raise UsageError("--kl-divergence needs --kl-divergence-base FILE, which has the logits of another model")
        arguments.base_logits, arguments.save_logits, arguments.file = arguments.save_logits, None, None
    given = arguments.file, arguments.base_logits, arguments.choices
    if sum(each is not None for each in given) != 1:
        raise UsageError("give one of -f FILE with a text, --base-logits FILE and --choices FILE")
    if arguments.file is None and arguments.save_logits is not None:
        raise UsageError("--save-logits needs a text, which -f FILE gives")
    if arguments.save_logits is not None:
        check_is_new(arguments.save_logits)
    if arguments.svg is not None and not arguments.compare:
        raise UsageError("--svg needs --compare FILE …: it draws what they lose")
    if arguments.choices is not None:
        if arguments.compare:
            raise UsageError("--compare needs a text or logits: give -f FILE or --base-logits FILE")
        _choices(arguments)
        return
    if arguments.compare:
        _compare(arguments)
        return
    from localllm.evaluate import BaseLogits

    if arguments.base_logits is not None:
        base = BaseLogits.read(arguments.base_logits)
        with _loaded(arguments, arguments.model, base.context) as llm:
            far = _divergence(arguments, llm, base)
            _print(arguments, llm, _divergence_lines(far), far)
    else:
        text = _text(arguments)
        with _loaded(arguments, arguments.model, _context(arguments)) as llm:
            found = _perplexity(arguments, llm, text, arguments.save_logits)
            _print(arguments, llm, [_perplexity_line(found)], found)


def _context(arguments: argparse.Namespace) -> int:
    from localllm.evaluate.perplexity import CONTEXT

    return arguments.context or CONTEXT


def _text(arguments: argparse.Namespace) -> str | Path:
    """The text; its path where some chunks are wanted, which need not take all of it."""
    if arguments.chunks is None:
        return read_text(arguments.file)
    read_text(arguments.file, n_bytes=1)  # what cannot be read is said before a model is loaded
    return Path(arguments.file)


def _perplexity(arguments: argparse.Namespace, llm: LLM, text: str | Path, save: Path | None) -> Perplexity:
    from localllm.evaluate import perplexity

    with _progress(arguments, "chunks, perplexity {:.3f}") as progress:
        return perplexity(
            llm, text, context=_context(arguments), chunks=arguments.chunks, save_logits=save, progress=progress
        )


def _divergence(arguments: argparse.Namespace, llm: LLM, base: BaseLogits) -> Divergence:
    from localllm.evaluate import divergence

    with _progress(arguments, "chunks, KL divergence {:.5f}") as progress:
        return divergence(llm, base, chunks=arguments.chunks, progress=progress)


def _choices(arguments: argparse.Namespace) -> None:
    from localllm.evaluate import choices, read_questions

    questions = read_questions(arguments.choices)
    with _loaded(arguments, arguments.model, arguments.context) as llm:
        with _progress(arguments, "questions, {:.1%} right") as progress:
            found = choices(llm, questions, progress=progress)
        lines = [
            f"right answers           {_percent(found.accuracy)} of {found.n_questions:,} questions",
            f"  by length             {_percent(found.normalized)}",
            f"  by guessing           {100 * found.chance:.2f} %",
        ]
        _print(arguments, llm, lines, found)


def _compare(arguments: argparse.Namespace) -> None:
    """The divergence of several models from one, or from its logits in a file."""
    import tempfile

    from localllm.catalog.demo import demo_path
    from localllm.evaluate import BaseLogits
    from localllm.gguf import GGUFFile
    from localllm.llm import model_file as file_of

    others = [arguments.model] if arguments.base_logits is not None else []
    others += [file_of(name) for name in arguments.compare]
    for other in others:
        GGUFFile.open(other or demo_path()).close()  # what cannot be read is said before anything is measured
    if arguments.svg is not None and not arguments.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg: {path_text(arguments.svg)} is in no folder that exists: name another file")
    with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
        path = arguments.base_logits or arguments.save_logits or Path(folder) / "base.logits"
        if arguments.base_logits is None:
            text = _text(arguments)
            with _loaded(arguments, arguments.model, _context(arguments)) as llm:
                found = _perplexity(arguments, llm, text, path)
                if not arguments.quiet:
                    print(_perplexity_line(found), flush=True)
        base = BaseLogits.read(path)
        rows: list[tuple[ModelInfo, Divergence]] = []
        for other in others:
            with _loaded(arguments, other, base.context) as llm:
                rows.append((llm.info, _divergence(arguments, llm, base)))
        del base  # Windows removes no file that is mapped
    points = [Point(info.n_bytes, far.kl.value, visible_line(info.path.name)) for info, far in rows]
    if not arguments.quiet:
        head = _COMPARED.format("", "model", "size", "perplexity", "KL", "KL 99 %", "same top")
        print("", head, *(_compared_line(i, *row) for i, row in enumerate(rows)), sep="\n")
        print(*text_chart(points), sep="\n", flush=True)
    if arguments.svg is not None:
        arguments.svg.write_text(svg_chart({"": points}), "utf-8")
    if arguments.json:
        _print_json({"compared": [_as_json(*row) for row in rows]})


@contextmanager
def _loaded(arguments: argparse.Namespace, model: Any, context: int | None) -> Iterator[LLM]:
    from localllm.llm import load

    with LoadStatus(enabled=not arguments.quiet) as status:
        llm = load(model, **load_options(arguments, model, context=context, parallel=_PARALLEL), progress=status)
    with llm:
        if not arguments.quiet:
            print(model_line(llm.info), flush=True)
        yield llm


# -- What comes out ------------------------------------------------------------------------------------------------


@contextmanager
def _progress(arguments: argparse.Namespace, words: str) -> Iterator[Callable[[int, int, float], None]]:
    """Shows how far it is, and how what is measured goes."""
    began = time.monotonic()
    values: list[float] = []

    def show(done: int, total: int, value: float) -> None:
        values.append(value)
        seconds = (time.monotonic() - began) * (total - done) / done
        status.show(f"{done:,} of {total:,} {words.format(value)} {bars(values[-24:])} {seconds:.0f} s left")

    with StatusLine(enabled=not arguments.quiet) as status:
        yield show


def bars(values: Sequence[float]) -> str:
    """Numbers as bars, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in values)


def _compared_line(i: int, info: ModelInfo, far: Divergence) -> str:
    return _COMPARED.format(
        point_label(i),
        visible_line(info.path.name)[:36],
        quantity(info.n_bytes, "B"),
        f"{far.perplexity.perplexity.value:.3f}",
        f"{far.kl.value:z.5f}",
        f"{far.kl_percentiles[99]:.4f}",
        f"{far.same_top.value:.2%}",
    )


def _perplexity_line(found: Perplexity) -> str:
    counted = f"{found.n_tokens:,} tokens in {found.n_chunks:,} chunks of {found.context:,}"
    return f"perplexity              {found.perplexity.value:.4f} ± {found.perplexity.error:.4f} ({counted})"


def _divergence_lines(far: Divergence) -> list[str]:
    kl, change = far.kl_percentiles, far.probability_change_percentiles
    return [
        _perplexity_line(far.perplexity),
        f"  of the base model     {far.base_perplexity.value:.4f} ± {far.base_perplexity.error:.4f}",
        f"  ratio                 {far.ratio.value:.5f} ± {far.ratio.error:.5f}, "
        f"correlation of log-likelihoods {far.correlation:.2%}",
        f"KL divergence           {far.kl.value:z.6f} ± {far.kl.error:.6f}",
        "  percentiles           " + ", ".join(f"{p} %: {kl[p]:.5f}" for p in (50, 90, 99, 99.9, 100)),
        f"change of probability   {_percent(far.probability_change)}, RMS {_percent(far.probability_change_rms)}",
        "  percentiles           " + ", ".join(f"{p} %: {change[p]:.2%}" for p in (1, 10, 50, 90, 99)),
        f"same likeliest token    {_percent(far.same_top)}",
    ]


def _percent(part: Estimate) -> str:
    return f"{100 * part.value:.2f} ± {100 * part.error:.2f} %"


def _print(arguments: argparse.Namespace, llm: LLM, lines: Sequence[str], result: Any) -> None:
    if not arguments.quiet:
        print(*lines, sep="\n", flush=True)
    if arguments.json:
        _print_json(_as_json(llm.info, result))


def _print_json(values: Any) -> None:
    print(json.dumps(values, ensure_ascii=False, allow_nan=False), flush=True)


def _as_json(info: ModelInfo, result: Any) -> dict[str, Any]:
    model = {"model": str(info.path), "n_bytes": info.n_bytes, "device": info.device, "kernels": info.kernels}
    return model | {name: _plain(value) for name, value in asdict(result).items()}


def _plain(value: Any) -> Any:
    """Estimates as objects, which JSON would have as lists."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


COMMAND = Command(
    "[FILE] -f TEXT [options]",
    "measure the quality of a model: perplexity, divergence, multiple choice",
    [
        *MODEL_OR_WORD,
        flag("-f --file FILE", "a text to predict"),
        flag("-c --ctx-size --context N", "tokens in a chunk (default: 512)", whole(4), dest="context"),
        flag("--chunks N", "use only the first N chunks", whole(1)),
        flag(
            "--save-logits --save-all-logits --kl-divergence-base FILE",
            "write the logits to a file, to compare other models with",
            Path,
        ),
        flag("--kl-divergence", "compare with the logits and the text in that file, as --base-logits does"),
        flag(
            "--base-logits FILE",
            "compare with the logits in a file that --save-logits wrote, on the text in it",
            Path,
        ),
        flag("--compare FILE", "compare these models with FILE", model_file, nargs="+"),
        flag("--svg FILE", "also draw the plot of --compare as an SVG file", Path),
        flag("--choices FILE", "a JSONL file of multiple-choice questions", Path),
        *DEVICE,
        *THREADS,
        JSON_AT_END,
        flag("-q --quiet", "print only JSON and errors"),
    ],
    run,
    """\
-f measures the perplexity of a text in chunks, of which the second half counts, as in llama.cpp.  --save-logits
writes the model's logits to a file, and --base-logits compares another model with them: Kullback-Leibler divergence,
change of probability, and how often both have the same likeliest token.  The file format is llama.cpp's.

--compare measures several models against FILE, and plots their divergence against their size; --svg writes the plot.

--choices takes a file with one question per line: {"prompt": "...", "choices": ["...", "..."], "answer": 0}.  It
counts how often the likeliest answer is the correct one.
""",
    words=Positionals("FILE", "a GGUF file (default: the demo model); also -m FILE", ("model",)),
    aliases="perplexity llama-perplexity",
)
