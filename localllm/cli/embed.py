"""``localllm embed``: vectors of texts, or with a query how well each text answers it."""

from __future__ import annotations

import argparse
import json
import sys

from localllm import load
from localllm.cli.defaults import load_options, settle
from localllm.cli.main import DONE
from localllm.cli.terminal import LoadStatus, is_terminal
from localllm.errors import UsageError
from localllm.files import read_text


def run(arguments: argparse.Namespace) -> int:
    """Prints a JSON array of numbers a text, or a line with score and text a document, the best first."""
    settle(arguments)
    texts: list[str] = arguments.texts
    if arguments.file is not None:
        texts += [line for line in read_text(arguments.file).splitlines() if line.strip()]
    elif not texts and sys.stdin is not None and not is_terminal(sys.stdin):
        texts += [line for line in read_text(sys.stdin.buffer, "standard input").splitlines() if line.strip()]
    if not texts:
        raise UsageError("there is nothing to embed: give texts, or -f with a file that has one a line")
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load(arguments.model, **load_options(arguments, arguments.model), progress=progress)
    with llm:
        if arguments.query is None:
            for vector in llm.embed(texts, prefix=arguments.prefix, dimensions=arguments.dimensions):
                print(json.dumps([round(float(value), 7) for value in vector]))
            return DONE
        scores = llm.rerank(arguments.query, texts)
        for score, text in sorted(zip(scores.tolist(), texts, strict=True), key=lambda pair: -pair[0]):
            print(json.dumps({"score": round(score, 6), "text": text}, ensure_ascii=False))
    return DONE
