"""``localllm embed``: vectors of texts, or with a query how well each text answers it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from localllm.cli.argument_types import whole
from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, flag, several
from localllm.cli.shared_flags import HUB, MODEL, RUNNING
from localllm.console import LoadStatus, is_terminal
from localllm.errors import UsageError
from localllm.files import read_text


def run(arguments: argparse.Namespace) -> None:
    from localllm import load

    apply_settings(arguments)
    texts: list[str] = arguments.texts + arguments.prompts
    if arguments.file is not None:
        texts += [line for line in read_text(arguments.file).splitlines() if line.strip()]
    elif not texts and sys.stdin is not None and not is_terminal(sys.stdin):
        texts += [line for line in read_text(sys.stdin.buffer, "standard input").splitlines() if line.strip()]
    if not texts:
        raise UsageError("there is nothing to embed: give texts, or a file with one per line (-f FILE)")
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load(arguments.model, **load_options(arguments, arguments.model), progress=progress)
    with llm:
        if arguments.query is None:
            options: dict[str, Any] = {"prefix": arguments.prefix, "dimensions": arguments.dimensions}
            if arguments.per_token or llm.is_late:
                found: Any = llm.embed(texts, per_token=True, **options)
            else:
                found = llm.embed(texts, **options)
            for vectors in found:
                print(json.dumps(vectors.astype(float).round(7).tolist()))
            return
        scores = llm.rerank(arguments.query, texts)
        for score, text in sorted(zip(scores.tolist(), texts, strict=True), key=lambda pair: -pair[0]):
            print(json.dumps({"score": round(score, 6), "text": text}, ensure_ascii=False))


COMMAND = Command(
    "[-m FILE] [TEXT …] [options]",
    "make vectors of texts, or rank them",
    [
        flag("texts TEXT", "a text (default: the lines of standard input)", nargs="*"),
        several("-p --prompt TEXT", "another way to give a text", dest="prompts"),
        flag("-f --file FILE", "read texts from a file, one per line", Path),
        flag("--prefix TEXT", "put TEXT before each text, such as 'search_query: '", default=""),
        flag("--dimensions N", "only the first N values of each vector", whole(1)),
        flag("--per-token", "a vector for each token of a text, as late-interaction models (ColBERT) make them"),
        flag("--query TEXT", "with a reranker or a late-interaction model: rank the texts by how well they answer"),
        flag("-q --quiet", "print nothing but vectors and errors"),
        "model",
        MODEL,
        HUB,
        *RUNNING,
    ],
    run,
    """\
It needs an embedding model (BERT, Nomic Embed, ModernBERT, EmbeddingGemma, Qwen3-Embedding), a late-interaction model
(ColBERT) or a reranker.

It prints a JSON array of numbers for each text, a vector of length 1; with --per-token, an array of such vectors for
each text; with --query, a JSON object with the score and the text for each, best first.
""",
    aliases="embedding embeddings llama-embedding",
)
