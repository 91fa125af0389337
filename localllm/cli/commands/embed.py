"""``localllm embed``: print vectors of texts, or with a query the relevance of each text."""

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
        raise UsageError("no texts to embed: write them on the command line, or use -f FILE with one text per line")
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load(arguments.model, **load_options(arguments, arguments.model), progress=progress)
    with llm:
        if arguments.query is None:
            names = ("prefix", "dimensions", "layer", "pooling")
            options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
            if arguments.per_token or llm.is_late:
                results: Any = llm.embed(texts, per_token=True, **options)
            else:
                results = llm.embed(texts, **options)
            for vectors in results:
                print(json.dumps(vectors.astype(float).round(7).tolist()))
            return
        scores = llm.rerank(arguments.query, texts)
        for score, text in sorted(zip(scores.tolist(), texts, strict=True), key=lambda pair: -pair[0]):
            print(json.dumps({"score": round(score, 6), "text": text}, ensure_ascii=False))


def _layer(text: str) -> int | str:
    """Parse the number of a layer, negative from the end, or the name of a value."""
    return int(text) if text.removeprefix("-").isdecimal() else text


COMMAND = Command(
    "[-m FILE] [TEXT …] [options]",
    "compute vectors of texts, or rank texts",
    [
        flag("texts TEXT", "text to embed (default: the lines of standard input)", nargs="*"),
        several("-p --prompt TEXT", "text to embed, like TEXT", dest="prompts"),
        flag("-f --file FILE", "read texts from a file, one per line", Path),
        flag("--prefix TEXT", "text to insert before each text, such as 'search_query: '", default=""),
        flag("--dimensions N", "use only the first N values of each vector", whole(1)),
        flag("--per-token", "print a vector for each token of a TEXT, as for late-interaction models (ColBERT)"),
        flag(
            "--layer N", "use hidden states of a model that generates text: a layer, or the name of a value", _layer
        ),
        flag("--pooling mean|first|last", "how hidden states of tokens become a vector (default: mean)"),
        flag("--query TEXT", "rank the texts by relevance to TEXT, with a reranker or a late-interaction model"),
        flag("-q --quiet", "print nothing but vectors and errors"),
        "model",
        MODEL,
        HUB,
        *RUNNING,
    ],
    run,
    """\
embed needs an embedding model (BERT, Nomic Embed, ModernBERT, EmbeddingGemma, Qwen3-Embedding), a late-interaction
model (ColBERT) or a reranker.  With --layer or --pooling, it uses the hidden states of a model that generates text.

It prints one JSON array per text: a vector of length 1, or with --per-token one vector per token.  With --query it
prints one JSON object per text, with the score and the text, best first.
""",
    aliases="embedding embeddings llama-embedding",
)
