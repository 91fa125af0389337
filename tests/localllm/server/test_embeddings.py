"""Embeddings and reranking with the clients of OpenAI and Ollama, and LangChain's test suite for embeddings.

LangChain's tests run with `pytest -W default -o asyncio_mode=auto`.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import localllm
from localllm.models.registry import ARCHITECTURES
from tests.helpers.http_server import Serving, serving
from tests.helpers.tiny_models import tiny_gguf
from tests.models.tiny import ENCODERS, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models for embeddings, for reranking, and for both with token vectors; and a model that generates text."""
    folder, entry = tmp_path_factory.mktemp("models"), ENCODERS["bert"]
    tiny_gguf(folder / "writer.gguf")
    model = make_model(entry)
    write(folder / "embedder.gguf", entry, model)
    score = np.random.default_rng(3).normal(0, 0.3, (1, 64)).astype(np.float32)
    conversion = replace(ARCHITECTURES["bert"].conversion, extra=lambda _: {"cls.output.weight": score})
    write(folder / "reranker.gguf", replace(entry, conversion=conversion), model, pooling_type=4)
    linear = np.random.default_rng(5).normal(0, 0.2, (24, 64)).astype(np.float32)
    conversion = replace(ARCHITECTURES["bert"].conversion, extra=lambda _: {"dense_2.weight": linear})
    keys = {"pooling_type": 0, "embedding_length_out": 24}
    write(folder / "late.gguf", replace(entry, conversion=conversion), model, **keys)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    def load(source: str | None, progress: object, planned: object) -> localllm.LLM:
        assert source is not None
        return localllm.load(source, device="cpu")

    with serving(
        load, sources={name: str(folder / f"{name}.gguf") for name in ("embedder", "reranker", "late", "writer")}
    ) as started:
        yield started


@pytest.fixture
def openai_client(server: Serving) -> Iterator[Any]:
    with pytest.importorskip("openai").OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


@pytest.fixture
def ollama_client(server: Serving) -> Iterator[Any]:
    with pytest.importorskip("ollama").Client(host=server.url) as client:
        yield client


def test_openai(openai_client: Any, folder: Path) -> None:
    openai, client = pytest.importorskip("openai"), openai_client
    with localllm.load(folder / "embedder.gguf", device="cpu") as llm:
        expected, ids = llm.embed(["a cat", "b"]), llm.tokenize("a cat")
        n_tokens = len(ids) + len(llm.tokenize("b"))
    reply = client.embeddings.create(model="embedder", input=["a cat", "b"])  # requests base64
    np.testing.assert_allclose([each.embedding for each in reply.data], expected, rtol=1e-5, atol=1e-6)
    assert reply.usage.prompt_tokens == n_tokens
    (of_ids,) = client.embeddings.create(model="embedder", input=ids, encoding_format="float").data
    np.testing.assert_allclose(of_ids.embedding, expected[0], rtol=1e-5, atol=1e-6)
    (short,) = client.embeddings.create(model="embedder", input="b", dimensions=8).data
    assert len(short.embedding) == 8
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="embedder", input="b", dimensions=65)
    with pytest.raises(openai.BadRequestError, match="scores documents"):
        client.embeddings.create(model="reranker", input="b")


def test_a_client_that_goes_ends_the_work(server: Serving) -> None:
    llm_of = server.models.served["embedder"]
    httpx.post(server.url + "/embedding", json={"content": "a", "model": "embedder"}).raise_for_status()
    assert llm_of.llm is not None
    before = llm_of.llm.counts.ended
    content = json.dumps({"content": ["a cat " * 9] * 5_000, "model": "embedder"}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /embedding HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        while llm_of.llm.counts.ended == before:
            time.sleep(0.001)
    server.wait_until_idle()
    while llm_of.n_users:
        time.sleep(0.001)
    assert llm_of.llm.counts.ended - before < 5_000


def test_ollama_and_llama_cpp(server: Serving, ollama_client: Any) -> None:
    ollama, client = pytest.importorskip("ollama"), ollama_client
    first, second = client.embed(model="embedder", input=["a", "b " * 200]).embeddings  # the second is cut
    assert len(first) == len(second) == 64
    old = client.embeddings(model="embedder", prompt="a").embedding
    (row,) = httpx.post(server.url + "/embedding", json={"content": "a", "model": "embedder"}).json()
    np.testing.assert_allclose([old, row["embedding"][0]], [first, first], rtol=1e-5, atol=1e-6)
    none = httpx.post(server.url + "/api/embeddings", json={"input": [], "model": "embedder"})
    assert none.json() == {"embedding": []}
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model="embedder", input="b " * 200, truncate=False)


def test_reranking(server: Serving, folder: Path) -> None:
    documents = ["the cat", "e", "a dog"]
    body = {"model": "reranker", "query": "a cat?", "documents": [*documents[:2], {"text": documents[2]}]}
    reply = httpx.post(server.url + "/v1/rerank", json={**body, "return_documents": True, "top_n": 2}).json()
    with localllm.load(folder / "reranker.gguf", device="cpu") as llm:
        scores = llm.rerank("a cat?", documents)
    best = np.argsort(-scores)[:2]
    assert [each["index"] for each in reply["results"]] == best.tolist()
    assert [each["document"]["text"] for each in reply["results"]] == [documents[i] for i in best]
    assert reply["results"][0]["relevance_score"] == pytest.approx(float(scores[best[0]]), rel=1e-5)


def test_vectors_of_tokens(server: Serving, folder: Path) -> None:
    with localllm.load(folder / "late.gguf", device="cpu") as llm:
        expected, scores = llm.embed(["a", "b cat"], per_token=True), llm.rerank("a", ["b", "a cat"])
        unscaled = llm.embed(["a"], per_token=True, normalize=False)[0]
    reply = httpx.post(server.url + "/pooling", json={"model": "late", "input": ["a", "b cat"]}).json()
    for each, rows in zip(reply["data"], expected, strict=True):
        np.testing.assert_allclose(each["data"], rows, rtol=1e-5, atol=1e-6)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    (row,) = httpx.post(server.url + "/embedding", json={"model": "late", "content": "a"}).json()
    np.testing.assert_allclose(row["embedding"], unscaled, rtol=1e-5, atol=1e-6)
    body = {"model": "late", "query": "a", "documents": ["b", "a cat"]}
    results = httpx.post(server.url + "/v1/rerank", json=body).json()["results"]
    assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(
        dict(enumerate(scores)), 1e-5
    )
    refused = httpx.post(server.url + "/v1/embeddings", json={"model": "late", "input": "a"})
    assert refused.status_code == 400
    assert "vector per token" in refused.json()["error"]["message"]
    for task, shape in ((None, (64,)), ("embed", (64,)), ("token_embed", (len(expected[0]), 64))):
        body = {"model": "embedder", "input": "a", "task": task}
        assert np.shape(httpx.post(server.url + "/pooling", json=body).json()["data"][0]["data"]) == shape


def test_hidden_states_of_a_model_that_generates_text(server: Serving, folder: Path) -> None:
    with localllm.load(folder / "writer.gguf", device="cpu") as llm:
        expected = llm.embed(["a", "b cat"], layer=-2, pooling="last", dimensions=8)
        of_value = llm.embed(["a"], layer="layers.0.mlp")[0]
        rows = llm.embed(["b cat"], layer=0, per_token=True)[0]
    body: dict[str, Any] = {"model": "writer", "input": ["a", "b cat"]}
    fields = {"layer": -2, "pooling": "last", "dimensions": 8}
    reply = httpx.post(server.url + "/v1/embeddings", json=body | fields).json()
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], expected, rtol=1e-5, atol=1e-6)
    body = {"model": "writer", "input": "a", "layer": "layers.0.mlp"}
    (vector,) = httpx.post(server.url + "/api/embed", json=body).json()["embeddings"]
    np.testing.assert_allclose(vector, of_value, rtol=1e-5, atol=1e-6)
    body = {"model": "writer", "input": "b cat", "layer": 0, "task": "token_embed"}
    (each,) = httpx.post(server.url + "/pooling", json=body).json()["data"]
    np.testing.assert_allclose(each["data"], rows, rtol=1e-5, atol=1e-6)
    for model, more, message in (
        ("writer", {}, "choose hidden states with layer"),
        ("writer", {"layer": 3}, "layer is 3, but must be a whole number from -3 to 2"),
        ("writer", {"pooling": "max"}, "pooling"),
        ("embedder", {"pooling": "mean"}, "has its own pooling: leave it out"),
    ):
        refused = httpx.post(server.url + "/v1/embeddings", json={"model": model, "input": "a", **more})
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_texts_as_objects_and_among_tokens(server: Serving) -> None:
    ids = server.app.models.find("embedder").llm.tokenize("a b", add_special=False)  # type: ignore[union-attr]
    given: list[object] = ["a b", {"prompt_string": "a b"}, [*ids, "a b"], [*ids, *ids]]
    response = httpx.post(server.url + "/v1/embeddings", json={"model": "embedder", "input": given})
    text, same, mixed, tokens = (each["embedding"] for each in response.json()["data"])
    assert text == same
    assert mixed == tokens != text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": [{"prompt_string": "a", "multimodal_data": ["aGk="]}]}, "accepts only text"),
        ("/v1/embeddings", {"input": []}, "an empty list"),
        ("/v1/embeddings", {"input": {"a": 1}}, "prompt_string"),
        ("/v1/embeddings", {"input": [10**30]}, ""),
        ("/v1/embeddings", {"input": [-1]}, ""),
        ("/v1/rerank", {"query": "a"}, "documents"),
    ],
)
def test_odd_requests(server: Serving, path: str, body: dict[str, object], said: str) -> None:
    response = httpx.post(server.url + path, json={"model": "embedder", **body})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_base64_is_little_endian_float32(server: Serving) -> None:
    body = {"model": "embedder", "input": "a"}
    plain = httpx.post(server.url + "/v1/embeddings", json=body).json()["data"][0]["embedding"]
    coded = httpx.post(server.url + "/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    values = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, plain, rtol=1e-6)


# -- LangChain -----------------------------------------------------------------------------------------------------

if all(map(find_spec, ("langchain_tests", "langchain_openai", "langchain_ollama"))):
    from langchain_ollama import OllamaEmbeddings
    from langchain_openai import OpenAIEmbeddings
    from langchain_tests.integration_tests import EmbeddingsIntegrationTests

    class Standard(EmbeddingsIntegrationTests):
        url = ""

        @pytest.fixture(autouse=True)
        def _at(self, server: Serving) -> None:
            type(self).url = server.url

    class TestOpenAI(Standard):
        embeddings_class = OpenAIEmbeddings

        @property
        def embedding_model_params(self) -> dict[str, Any]:
            # It would cut texts by OpenAI's tokens.
            options = {"base_url": self.url + "/v1", "api_key": "none", "check_embedding_ctx_length": False}
            return {"model": "embedder", **options}

    class TestOllama(Standard):
        embeddings_class = OllamaEmbeddings

        @property
        def embedding_model_params(self) -> dict[str, Any]:
            return {"model": "embedder", "base_url": self.url}
