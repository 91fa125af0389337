"""``localllm evaluate``: measure a model's quality, and the loss caused by quantisation."""

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

#: Sequences in the cache, so that the next chunks start before the current chunks end.
_PARALLEL = 4

#: Bar characters of the progress line.
_BARS = "▁▂▃▄▅▆▇█"

_COMPARED = "{:>3} {:<36} {:>9} {:>11} {:>11} {:>10} {:>10}"


def run(arguments: argparse.Namespace) -> None:
    apply_settings(arguments, skip=["context"])
    if arguments.kl_divergence:  # llama-perplexity's flag: the file contains the text too
        if arguments.save_logits is None:
            raise UsageError("--kl-divergence needs --kl-divergence-base FILE with the logits of another model")
        arguments.base_logits, arguments.save_logits, arguments.file = arguments.save_logits, None, None
    inputs = arguments.file, arguments.base_logits, arguments.choices
    if sum(path is not None for path in inputs) != 1:
        raise UsageError("choose exactly one of -f FILE (text), --base-logits FILE and --choices FILE")
    if arguments.file is None and arguments.save_logits is not None:
        raise UsageError("--save-logits needs text: add -f FILE")
    if arguments.save_logits is not None:
        check_is_new(arguments.save_logits)
    if arguments.svg is not None and not arguments.compare:
        raise UsageError("--svg draws the results of --compare: add --compare FILE …")
    if arguments.choices is not None:
        if arguments.compare:
            raise UsageError("--compare needs text or logits: add -f FILE or --base-logits FILE")
        _choices(arguments)
        return
    if arguments.compare:
        _compare(arguments)
        return
    from localllm.evaluate import BaseLogits

    if arguments.base_logits is not None:
        base = BaseLogits.read(arguments.base_logits)
        with _loaded(arguments, arguments.model, base.context) as llm:
            comparison = _divergence(arguments, llm, base)
            _print(arguments, llm, _divergence_lines(comparison), comparison)
    else:
        text = _text(arguments)
        with _loaded(arguments, arguments.model, _context(arguments)) as llm:
            result = _perplexity(arguments, llm, text, arguments.save_logits)
            _print(arguments, llm, [_perplexity_line(result)], result)


def _context(arguments: argparse.Namespace) -> int:
    from localllm.evaluate.perplexity import CONTEXT

    return arguments.context or CONTEXT


def _text(arguments: argparse.Namespace) -> str | Path:
    """Return the text, or its path if ``--chunks`` limits the number of chunks to read."""
    if arguments.chunks is None:
        return read_text(arguments.file)
    read_text(arguments.file, n_bytes=1)  # reports an unreadable file before a model is loaded
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
            result = choices(llm, questions, progress=progress)
        lines = [
            f"right answers           {_percent(result.accuracy)} of {result.n_questions:,} questions",
            f"  by length             {_percent(result.normalized)}",
            f"  by guessing           {100 * result.chance:.2f} %",
        ]
        _print(arguments, llm, lines, result)


def _compare(arguments: argparse.Namespace) -> None:
    """Measure the divergence of several models from a base model, or from a file of its logits."""
    import tempfile

    from localllm.catalog.demo import demo_path
    from localllm.evaluate import BaseLogits
    from localllm.gguf import GGUFFile
    from localllm.llm import model_file as file_of

    names = [arguments.model] if arguments.base_logits is not None else []
    names += [file_of(name) for name in arguments.compare]
    for name in names:
        GGUFFile.open(name or demo_path()).close()  # reports an unreadable file before anything is measured
    if arguments.svg is not None and not arguments.svg.absolute().parent.is_dir():
        raise UsageError(f"--svg: {path_text(arguments.svg)} is in a folder that does not exist: name another file")
    with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
        path = arguments.base_logits or arguments.save_logits or Path(folder) / "base.logits"
        if arguments.base_logits is None:
            text = _text(arguments)
            with _loaded(arguments, arguments.model, _context(arguments)) as llm:
                result = _perplexity(arguments, llm, text, path)
                if not arguments.quiet:
                    print(_perplexity_line(result), flush=True)
        base = BaseLogits.read(path)
        rows: list[tuple[ModelInfo, Divergence]] = []
        for name in names:
            with _loaded(arguments, name, base.context) as llm:
                rows.append((llm.info, _divergence(arguments, llm, base)))
        del base  # Windows cannot remove a mapped file
    points = [Point(info.n_bytes, result.kl.value, visible_line(info.path.name)) for info, result in rows]
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


# -- Output --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(arguments: argparse.Namespace, words: str) -> Iterator[Callable[[int, int, float], None]]:
    """Show the progress, the remaining time, and a bar chart of the latest values."""
    start = time.monotonic()
    values: list[float] = []

    def show(n_done: int, total: int, value: float) -> None:
        values.append(value)
        seconds = (time.monotonic() - start) * (total - n_done) / n_done
        status.show(f"{n_done:,} of {total:,} {words.format(value)} {bars(values[-24:])} {seconds:.0f} s left")

    with StatusLine(enabled=not arguments.quiet) as status:
        yield show


def bars(values: Sequence[float]) -> str:
    """Draw numbers as bars, scaled from the lowest to the highest number."""
    low, high = min(values), max(values)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in values)


def _compared_line(i: int, info: ModelInfo, result: Divergence) -> str:
    return _COMPARED.format(
        point_label(i),
        visible_line(info.path.name)[:36],
        quantity(info.n_bytes, "B"),
        f"{result.perplexity.perplexity.value:.3f}",
        f"{result.kl.value:z.5f}",
        f"{result.kl_percentiles[99]:.4f}",
        f"{result.same_top.value:.2%}",
    )


def _perplexity_line(result: Perplexity) -> str:
    counted = f"{result.n_tokens:,} tokens in {result.n_chunks:,} chunks of {result.context:,}"
    return f"perplexity              {result.perplexity.value:.4f} ± {result.perplexity.error:.4f} ({counted})"


def _divergence_lines(result: Divergence) -> list[str]:
    kl, change = result.kl_percentiles, result.probability_change_percentiles
    return [
        _perplexity_line(result.perplexity),
        f"  of the base model     {result.base_perplexity.value:.4f} ± {result.base_perplexity.error:.4f}",
        f"  ratio                 {result.ratio.value:.5f} ± {result.ratio.error:.5f}, "
        f"correlation of log-likelihoods {result.correlation:.2%}",
        f"KL divergence           {result.kl.value:z.6f} ± {result.kl.error:.6f}",
        "  percentiles           " + ", ".join(f"{p} %: {kl[p]:.5f}" for p in (50, 90, 99, 99.9, 100)),
        f"change of probability   {_percent(result.probability_change)}, "
        f"RMS {_percent(result.probability_change_rms)}",
        "  percentiles           " + ", ".join(f"{p} %: {change[p]:.2%}" for p in (1, 10, 50, 90, 99)),
        f"same likeliest token    {_percent(result.same_top)}",
    ]


def _percent(share: Estimate) -> str:
    return f"{100 * share.value:.2f} ± {100 * share.error:.2f} %"


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
    """Convert named tuples to objects, because json would write them as arrays."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


COMMAND = Command(
    "[FILE] -f TEXT [options]",
    "measure the quality of a model: perplexity, divergence, multiple choice",
    [
        *MODEL_OR_WORD,
        flag("-f --file FILE", "text file to predict"),
        flag("-c --ctx-size --context N", "tokens in a chunk (default: 512)", whole(4), dest="context"),
        flag("--chunks N", "use only the first N chunks", whole(1)),
        flag(
            "--save-logits --save-all-logits --kl-divergence-base FILE",
            "write the logits to a file that other models can be compared with",
            Path,
        ),
        flag("--kl-divergence", "compare with the logits and the text in the file of --kl-divergence-base"),
        flag("--base-logits FILE", "compare with the logits and the text in a file that --save-logits wrote", Path),
        flag("--compare FILE", "compare these models with the model FILE", model_file, nargs="+"),
        flag("--svg FILE", "also draw the plot of --compare as an SVG file", Path),
        flag("--choices FILE", "a JSONL file of multiple-choice questions", Path),
        *DEVICE,
        *THREADS,
        JSON_AT_END,
        flag("-q --quiet", "print only JSON and errors"),
    ],
    run,
    """\
-f measures the perplexity of a text, in chunks.  As in llama.cpp, only the second half of each chunk counts.
--save-logits writes the model's logits to a file.  --base-logits compares another model with them: Kullback-Leibler
divergence, change of probability, and how often both models agree on the likeliest token.  The file format is
llama.cpp's.

--compare measures the divergence of several models from FILE and plots it against their size; --svg saves the plot.

--choices reads a file with one question per line: {"prompt": "...", "choices": ["...", "..."], "answer": 0}.  It
counts the questions for which the likeliest answer is correct.
""",
    words=Positionals("FILE", "a GGUF file (default: the demo model); also -m FILE", ("model",)),
    aliases="perplexity llama-perplexity",
)
