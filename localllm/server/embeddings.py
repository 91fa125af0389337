"""Embeddings in the formats of OpenAI, Ollama and llama.cpp, and reranking in Jina's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from localllm.llm import LLM
from localllm.server.answers import Prompt, Prompts, join_prompt, prompts_of
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import HTTPError, json_response
from localllm.server.keys import charge
from localllm.server.records import note


class EmbeddingsRequest(msgspec.Struct):
    """Texts are in ``input`` (OpenAI, Ollama), ``content`` (llama.cpp) or ``prompt`` (Ollama's older path)."""

    input: Prompts | None = None
    content: Prompts | None = None
    prompt: str | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate: bool = False
    # hidden states of models that generate text; see `localllm.LLM.embed`
    layer: int | str | None = None
    pooling: Literal["mean", "first", "last"] | None = None

    def texts(self) -> list[Prompt]:
        prompts = next((field for field in (self.input, self.content, self.prompt) if field is not None), None)
        if prompts is None:
            raise HTTPError(400, "input is missing: give a string, or a list of strings")
        texts = prompts_of(prompts)
        if not texts and not isinstance(self, OllamaEmbedRequest):  # Ollama returns no vectors for no texts
            raise HTTPError(400, "input is an empty list: give at least one text")
        return texts


class OllamaEmbedRequest(EmbeddingsRequest):
    """Texts that are too long are truncated, unless ``truncate`` is false."""

    truncate: bool = True


class PoolingRequest(EmbeddingsRequest):
    """vLLM's format: one vector per text, or one per token with ``task`` "token_embed".

    Models of late interaction return token vectors by default.
    """

    task: Literal["embed", "token_embed"] | None = None


class RerankRequest(msgspec.Struct):
    """Jina's and Cohere's format; with ``texts`` the format of Hugging Face's text-embeddings-inference."""

    query: str
    documents: list[str | dict[str, str]] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False


#: Number of texts between two checks whether the client is still connected.
_AT_ONCE = 64


async def _in_steps(
    request: Request,
    dispatcher: Dispatcher,
    model: str | None,
    texts: list[Any],
    work: Callable[[list[Any], LLM], tuple[Any, int]],
) -> tuple[list[Any], int]:
    """Calls ``work`` with batches of texts, and returns all results and the number of tokens."""
    note(operation="embeddings", requested_model=model, submitted=time.perf_counter())
    rows, n_tokens = [], 0
    for i in range(0, max(1, len(texts)), _AT_ONCE):
        batch, n = await dispatcher.with_model(request, model, partial(work, texts[i : i + _AT_ONCE]))
        rows += batch
        n_tokens += n
        charge(n)
    note(prompt_tokens=n_tokens)
    return rows, n_tokens


def _array(values: NDArray[np.float32]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


def _base64(values: NDArray[np.float32]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(values.astype("<f4").tobytes()))  # msgspec writes bytes as base64


async def _vectors(
    request: Request,
    dispatcher: Dispatcher,
    body: EmbeddingsRequest,
    per_token: bool | None = False,
    *,
    normalizes_tokens: bool = True,
    write: Callable[[NDArray[np.float32]], msgspec.Raw] = _array,
) -> tuple[list[msgspec.Raw], int]:
    """Return one vector per text, or one row per token with ``per_token``, as JSON, and the total number of tokens.

    ``per_token`` None selects the model's default.  ``write`` converts a vector to JSON, in another thread.
    """

    def work(texts: list[Any], llm: LLM) -> tuple[list[msgspec.Raw], int]:
        texts = [join_prompt(llm, text) for text in texts]
        vectors: Sequence[NDArray[np.float32]]
        names = ("dimensions", "truncate", "layer", "pooling")
        options: Any = {name: getattr(body, name) for name in names}
        if llm.is_late if per_token is None else per_token:
            vectors = llm.embed(texts, normalize=normalizes_tokens, per_token=True, **options)
        else:
            vectors = [*llm.embed(texts, **options)]
        n_tokens = sum(len(llm.tokenize(text) if isinstance(text, str) else text) for text in texts)
        return [write(vector) for vector in vectors], n_tokens

    texts = await dispatcher.read(request, body.texts)
    return await _in_steps(request, dispatcher, body.model, texts, work)


def _about(dispatcher: Dispatcher, name: str | None, n_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"model": dispatcher.models.find(name).name, "usage": usage}


async def openai(request: Request, dispatcher: Dispatcher, body: EmbeddingsRequest) -> Response:
    write = _base64 if body.encoding_format == "base64" else _array
    vectors, n_tokens = await _vectors(request, dispatcher, body, write=write)
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return json_response({"object": "list", "data": data, **_about(dispatcher, body.model, n_tokens)})


async def llamacpp(request: Request, dispatcher: Dispatcher, body: EmbeddingsRequest) -> Response:
    """Return vectors in llama.cpp's format.

    For a model of late interaction these are unnormalized token vectors, as with llama-server's ``--pooling none``.
    """

    def write(vector: NDArray[np.float32]) -> msgspec.Raw:
        return _array(np.atleast_2d(vector))

    vectors, _ = await _vectors(request, dispatcher, body, None, normalizes_tokens=False, write=write)
    return json_response([{"index": i, "embedding": vector} for i, vector in enumerate(vectors)])


async def vllm(request: Request, dispatcher: Dispatcher, body: PoolingRequest) -> Response:
    per_token = None if body.task is None else body.task == "token_embed"
    vectors, n_tokens = await _vectors(request, dispatcher, body, per_token)
    data = [{"index": i, "object": "pooling", "data": vector} for i, vector in enumerate(vectors)]
    head = {"object": "list", "created": int(time.time()), **_about(dispatcher, body.model, n_tokens)}
    return json_response({**head, "data": data})


async def ollama(request: Request, dispatcher: Dispatcher, body: OllamaEmbedRequest) -> Response:
    began = time.perf_counter_ns()
    vectors, n_tokens = await _vectors(request, dispatcher, body)
    if request.url.path.endswith("/embeddings"):  # the older path, for a single text
        return json_response({"embedding": vectors[0] if vectors else []})
    took = {"total_duration": time.perf_counter_ns() - began, "prompt_eval_count": n_tokens}
    model = dispatcher.models.find(body.model).name
    return json_response({"model": model, "embeddings": vectors, **took})


async def rerank(request: Request, dispatcher: Dispatcher, body: RerankRequest) -> Response:
    documents = body.texts if body.documents is None else body.documents
    if documents is None:
        raise HTTPError(400, "documents is missing: give a list of strings")
    texts = [document if isinstance(document, str) else document.get("text", "") for document in documents]

    def work(texts: list[str], llm: LLM) -> tuple[list[float], int]:
        scores = list(map(float, llm.rerank(body.query, texts)))
        return scores, sum(len(llm.tokenize(text)) for text in texts)

    scores, n_tokens = await _in_steps(request, dispatcher, body.model, texts, work)
    n_tokens += await dispatcher.with_model(request, body.model, lambda llm: len(llm.tokenize(body.query)))
    note(operation="rerank", prompt_tokens=n_tokens)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    if body.documents is None:
        return json_response([{"index": i, "score": scores[i]} for i in best])
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return json_response({"object": "list", **_about(dispatcher, body.model, n_tokens), "results": results})
