"""Models with an encoder and a decoder, compared with transformers: in pieces, and several texts together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.loading.media_encoder import MediaEncoder
from localllm.loading.overrides import NO_OVERRIDES, Overrides
from localllm.loading.prediction import Predictor
from localllm.models.registry import read_model
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.offloading import OffloadingBackend
from tests.helpers.recorder import CPUOps, ReferenceOps, backend_of, compile_split
from tests.models.tiny import ENCODER_DECODERS, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: Prompts, the first longer than two pages and than the distances with separate biases; and the decoder's tokens.
PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(3, 300, n)] for n in (150, 5, 31)]
TOKENS = [0, *(int(i) for i in np.random.default_rng(7).integers(3, 300, 20))]
CONTEXT = 256


@cache
def model_of(name: str) -> Any:
    return make_model(ENCODER_DECODERS[name])


@cache
def _expected(name: str, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Array:
    import torch

    with torch.no_grad():
        ids: dict[str, Any] = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([tokens])}
        logits: Array = model_of(name)(**ids, use_cache=False).logits[0].numpy()
    return logits


def expected(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> Array:
    """Return transformers' logits of the decoder's tokens [T, n_vocab]."""
    return _expected(name, tuple(prompt), tuple(tokens))


class Decoder:
    """A model on a backend: its encoder, and a runner of its decoder."""

    def __init__(self, path: Path, ops: Any, layers: Sequence[range] = ()) -> None:
        cache_type = getattr(ops, "cache_type", None) or "f16"
        self.encoder = MediaEncoder.of_prompts(path, "t5", cache_type)
        self.encoder.backend = backend_of(ops)
        with GGUFFile.open(path) as file:
            graph = read_model(file, CONTEXT, cache_type, sees=True).graph
            sizes: dict[str, Any] = {"n_pages": (96,), "max_tokens": 64, "max_outputs": 64}
            compiled = compile_split([backend_of(ops)] * len(layers), layers, graph, **sizes) if layers else None
            step = compiled or backend_of(ops).compile(graph, **sizes)
        self._n_begun = 0
        self.runner = ModelRunner(step, n_vocab=300, context=CONTEXT, max_tokens=64, graph=graph)

    def begin(self, prompt: Sequence[int], *, chunk: int = 64) -> Any:
        """Evaluate a prompt in chunks. Return a function that makes the item of a batch with the next tokens."""
        ids, media = self.encoder.encoded_prompt(prompt)
        [medium] = {span.media for span in media.placed}
        work = self.encoder.encode([medium])
        try:
            while True:
                next(work)
        except StopIteration as stop:
            rows = {medium.key: stop.value[0]}
        self._n_begun += 1
        sequence = self.runner.cache.begin(ids[:-1], self._n_begun)  # does not share cached tokens
        for start in range(0, len(prompt), chunk):
            part = ids[start : min(start + chunk, len(prompt))]
            assert self.runner.cache.reserve(sequence, len(part))
            item = BatchItem(sequence, part, 0, start, media=media, embeddings=rows)
            assert self.runner.run([item]).shape[0] == 0
            self.runner.cache.append(sequence, part)

        def item(tokens: Sequence[int]) -> BatchItem:
            assert self.runner.cache.reserve(sequence, len(tokens))
            return BatchItem(sequence, list(tokens), len(tokens), len(sequence), media=media)

        return item

    def run(self, *items: BatchItem) -> Array:
        logits = np.array(self.runner.run(items), np.float32)
        for item in items:
            self.runner.cache.append(item.sequence, item.ids)
        return logits


@contextmanager
def decoder(path: Path, ops: Any, layers: Sequence[range] = ()) -> Iterator[Decoder]:
    made = Decoder(path, ops, layers)
    yield made
    made.encoder.close()


def check(name: str, path: Path, ops: Any, limit: float, *, n_prompts: int = 3, layers: Sequence[range] = ()) -> None:
    with decoder(path, ops, layers) as ours:
        alone = []
        for prompt in PROMPTS[-n_prompts:]:
            alone.append(ours.run(ours.begin(prompt)(TOKENS)))
            theirs = expected(name, prompt, TOKENS)
            assert np.abs(alone[-1] - theirs).max() < limit * np.abs(theirs).max()
        for chunk in (7, 64):
            begun = ours.begin(PROMPTS[-1], chunk=chunk)
            parts = [ours.run(begun(tokens)) for tokens in (TOKENS[:1], TOKENS[1:9], *([t] for t in TOKENS[9:]))]
            np.testing.assert_array_equal(np.concatenate(parts), alone[-1])
        begun_all = [ours.begin(prompt) for prompt in PROMPTS[-n_prompts:]]
        np.testing.assert_array_equal(ours.run(*(begun(TOKENS) for begun in begun_all)), np.concatenate(alone))


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_the_reference_matches_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODER_DECODERS[name], model_of(name))
    check(name, path, ReferenceOps(np.float32), 1e-4)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_the_cpu_matches_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODER_DECODERS[name], model_of(name))
    check(name, path, shared_by_threads(CPUOps(threads=2)), 5e-3)


def test_a_decoder_is_split_by_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODER_DECODERS["t5"], model_of("t5"))
    ops = shared_by_threads(CPUOps(threads=2))
    check("t5", path, ops, 5e-3, layers=(range(1), range(1, 2), range(2, 3)))


#: Matrices of the decoder, and of the graph of prompts.
ON_HOST = Overrides(("ffn=CPU", "cross_attn_k=CPU", "token_embd=CPU"))


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("overrides", [NO_OVERRIDES, Overrides(("ffn=CPU",)), ON_HOST])
def test_cuda_computes_what_transformers_does(overrides: Overrides, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODER_DECODERS["t5"], model_of("t5"))
    device: Any = emulated_cuda()
    with decoder(path, OffloadingBackend(device, overrides) if overrides else device) as ours:
        ours.encoder.backend = CPUOps(threads=2).backend  # encoders run on the CPU
        begun, theirs = ours.begin(PROMPTS[1]), expected("t5", PROMPTS[1], TOKENS[:6])
        logits = np.concatenate([ours.run(begun(TOKENS[:5])), ours.run(begun(TOKENS[5:6]))])
        assert np.abs(logits - theirs).max() < 1e-2 * np.abs(theirs).max()


def greedy(name: str, prompt: Sequence[int], n: int) -> list[int]:
    tokens = [0]
    for _ in range(n):
        tokens.append(int(expected(name, prompt, tokens)[-1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", ["flan-t5"])
def test_texts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODER_DECODERS[name], model_of(name))
    options: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}

    def ids(completion: Any) -> list[int]:
        return [token.id for token in completion.logprobs]

    with localllm.load(path, device="cpu", context=CONTEXT, parallel=3) as llm:
        alone = [llm.generate(prompt, **options) for prompt in PROMPTS]
        assert [ids(reply) for reply in alone] == [greedy(name, prompt, 8) for prompt in PROMPTS]
        assert [reply.usage.prompt_tokens for reply in alone] == [len(prompt) + 1 for prompt in PROMPTS]
        again = llm.generate(PROMPTS[0], **options)  # from the cache
        assert again.usage.cached_tokens >= 128
        assert [t.logprob for t in again.logprobs or ()] == [t.logprob for t in alone[0].logprobs or ()]
        together = llm.generate_many(PROMPTS, **options)
        assert [ids(reply) for reply in together] == [ids(reply) for reply in alone]
        chat = llm.chat([{"role": "user", "content": "ab"}], **options)
        assert ids(chat) == ids(llm.generate("ab</s>", parse_special=True, **options))
        with pytest.raises(UsageError, match="an encoder reads the model's prompts"):
            llm.score("ab", ["c"])
        with pytest.raises(UsageError, match="the model cannot continue a reply: end the chat with a user's message"):
            llm.chat([{"role": "user", "content": "ab"}], reply_prefix="c")
        for n in (0, 1, 4):  # the start token of the decoder takes a position, too
            usage = llm.generate("a" * 2 * CONTEXT, max_tokens=n, ignore_eos=True, overflow="truncate").usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (CONTEXT - n, n)
        assert Predictor.of(path, llm.info.placement, 2) is None  # an encoder takes most of a prompt's time


def test_servers_report_the_text_of_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    httpx = pytest.importorskip("httpx")
    from tests.helpers.http_server import Monitoring, demo, serving

    path = write(tmp_path / "model.gguf", ENCODER_DECODERS["flan-t5"], model_of("flan-t5"))
    caplog.set_level("INFO")
    with serving(demo(path=path), monitoring=Monitoring(logs_prompts=True)) as server:

        def post(route: str, **body: Any) -> Any:
            return httpx.post(f"{server.url}{route}", json=body, timeout=60).raise_for_status().json()

        more: dict[str, Any] = {"model": "demo", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
        first = post("/api/generate", prompt="ab", **more)
        prompt = server.llm.tokenize_chat([{"role": "user", "content": "ab"}])
        assert first["context"][: len(prompt)] == prompt
        assert server.llm.detokenize(first["context"][len(prompt) :]) == first["response"]
        second = post("/api/generate", prompt="cd", context=first["context"], **more)
        assert second["prompt_eval_count"] > len(first["context"])
        assert second["context"][: len(first["context"])] == first["context"]
        assert post("/completion", prompt="ab", n_predict=1, verbose=True)["prompt"] == "<s>ab"
    lines = [vars(record)["fields"] for record in caplog.records if record.name == "localllm.access"]
    prompts = [str(fields.get("prompt")) for fields in lines]
    assert prompts[0] == "<s>ab</s>"
    assert prompts[-1] == "<s>ab"
