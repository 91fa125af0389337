"""The embedded demo model: a valid file and correct answers.

The file is read with the `gguf` package and run by a separate numpy forward pass, so that these tests check the
model and not the runtime.  The last tests use localllm.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import gguf
import jinja2
import numpy as np
import numpy.typing as npt
import pytest

import localllm
from localllm import LLM
from tests.demo_model.corpus.topics import Topic, all_topics
from tests.helpers.data import ROOT

DEMO = ROOT / "localllm" / "data" / "demo.gguf"
Array = npt.NDArray[np.float32]

# Questions a reader of the README may ask, and the topic whose facts the answer must contain.
QUESTIONS = {
    "what_is_localllm": "What is localllm?",
    "run_model": "How do I run a model?",
    "python": "How do I use localllm from Python?",
    "what_is_gguf": "What is GGUF?",
    "file_formats": "Which file formats does localllm support?",
    "quant_formats": "Which quantisations are supported?",
    "architectures": "Which architectures are supported?",
    "compiler": "Do I need a compiler?",
    "gpu": "Do I need a GPU?",
    "network": "Does it need the internet?",
    "doctor": "What does localllm doctor do?",
    "bench": "How fast is localllm?",
    "inspect": "How do I inspect a GGUF file?",
    "commands": "Which commands are there?",
    "who_are_you": "Who are you?",
    "how_big": "How big are you?",
    "what_can_you_do": "What can you do?",
    "temperature": "What is the temperature?",
    "top_k": "What does top-k do?",
    "seed": "What is a seed?",
    "context": "What is the context length?",
    "stop": "How do I stop at a string?",
    "json": "How do I get JSON?",
    "licence": "What is the licence?",
    "python_version": "Which Python version do I need?",
    "install": "How do I install localllm?",
    "quantisation": "What is quantisation?",
    "token": "What is a token?",
    "kv_cache": "What is the KV cache?",
    "greeting": "Hello!",
    "unknown": "Who painted the Mona Lisa?",
}


@functools.cache
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(DEMO)


def meta(key: str) -> Any:
    field = reader().get_field(key)
    assert field is not None, f"no {key} in the file"
    return field.contents()


@functools.cache
def tokens() -> list[str]:
    return list(meta("tokenizer.ggml.tokens"))


@functools.cache
def token_ids() -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens())}


def encode(text: str) -> list[int]:
    """Return ids of plain text: characters, merged by best score until no pair is left."""
    scores = meta("tokenizer.ggml.scores")
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[token_ids()[a + b]], -place)
            for place, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in token_ids()
        ]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    ids = []
    for piece in pieces:
        known = piece in token_ids()
        ids += [token_ids()[piece]] if known else [token_ids()[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def decode(ids: list[int]) -> str:
    return "".join(tokens()[token] for token in ids).replace("▁", " ").replace("<0x0A>", "\n")


def chat_ids(question: str) -> list[int]:
    ids = token_ids()
    return [ids["<s>"], ids["<|user|>"], *encode(question), ids["<|end|>"], ids["<|assistant|>"]]


@functools.cache
def weights() -> dict[str, Array]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader().tensors}


def rms_norm(x: Array, weight: Array) -> Array:
    eps = meta("llama.attention.layer_norm_rms_epsilon")
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps, dtype=np.float32) * weight
    return scaled


def rope(x: Array) -> Array:  # [T, heads, head_dim], adjacent pairs as one complex number each
    length, heads, dim = x.shape
    frequency = meta("llama.rope.freq_base") ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * np.outer(np.arange(length), frequency))[:, None, :]
    pairs = x.reshape(length, heads, dim // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape).astype(np.float32)


def logits(ids: list[int]) -> Array:
    """Logits [T, vocab] of a Llama forward over all ids at once, no cache."""
    w, length = weights(), len(ids)
    heads, kv_heads = meta("llama.attention.head_count"), meta("llama.attention.head_count_kv")
    x = w["token_embd.weight"][ids]
    mask = np.triu(np.full((length, length), -np.inf, dtype=np.float32), 1)
    for layer in range(meta("llama.block_count")):
        part = {name: w[f"blk.{layer}.{name}.weight"].T for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        normed = rms_norm(x, w[f"blk.{layer}.attn_norm.weight"])
        q = rope((normed @ part["attn_q"]).reshape(length, heads, -1))
        k = rope((normed @ part["attn_k"]).reshape(length, kv_heads, -1)).repeat(heads // kv_heads, axis=1)
        v = (normed @ part["attn_v"]).reshape(length, kv_heads, -1).repeat(heads // kv_heads, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1]) + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", shares, v).reshape(length, -1) @ part["attn_output"]
        normed = rms_norm(x, w[f"blk.{layer}.ffn_norm.weight"])
        gate, up = normed @ w[f"blk.{layer}.ffn_gate.weight"].T, normed @ w[f"blk.{layer}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{layer}.ffn_down.weight"].T
    return rms_norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


def topic_named(name: str) -> Topic:
    return next(topic for topic in all_topics() if topic.name == name)


def test_file_is_small_enough_to_ship() -> None:
    assert DEMO.stat().st_size <= 5_000_000


def test_metadata_describes_a_llama() -> None:
    assert meta("general.architecture") == "llama"
    assert meta("general.license") == "mit"
    assert meta("general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    assert meta("general.quantization_version") == gguf.GGML_QUANT_VERSION
    assert meta("llama.vocab_size") == len(tokens())
    assert meta("llama.context_length") >= 1024
    assert meta("llama.embedding_length") == meta("llama.attention.head_count") * meta("llama.rope.dimension_count")


def test_tensors_are_complete_and_finite() -> None:
    layers, hidden = meta("llama.block_count"), meta("llama.embedding_length")
    kv_size = meta("llama.attention.head_count_kv") * meta("llama.rope.dimension_count")
    ffn = meta("llama.feed_forward_length")
    expected = {"token_embd.weight": (len(tokens()), hidden), "output_norm.weight": (hidden,)}
    for layer in range(layers):
        expected |= {
            f"blk.{layer}.attn_norm.weight": (hidden,),
            f"blk.{layer}.attn_q.weight": (hidden, hidden),
            f"blk.{layer}.attn_k.weight": (kv_size, hidden),
            f"blk.{layer}.attn_v.weight": (kv_size, hidden),
            f"blk.{layer}.attn_output.weight": (hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": (hidden,),
            f"blk.{layer}.ffn_gate.weight": (ffn, hidden),
            f"blk.{layer}.ffn_up.weight": (ffn, hidden),
            f"blk.{layer}.ffn_down.weight": (hidden, ffn),
        }
    assert {name: values.shape for name, values in weights().items()} == expected
    assert all(np.isfinite(values).all() for values in weights().values())
    for tensor in reader().tensors:
        kind = gguf.GGMLQuantizationType.F32 if len(tensor.shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        assert tensor.tensor_type == kind


def test_the_model_knows_its_own_size() -> None:
    parameters = sum(values.size for values in weights().values())
    assert f"{parameters / 1e6:.1f} million" in topic_named("how_big").answers[0]
    assert DEMO.stat().st_size < 5_000_000  # the limit in the documentation


def test_vocabulary_is_usable() -> None:
    types, scores = meta("tokenizer.ggml.token_type"), meta("tokenizer.ggml.scores")
    assert meta("tokenizer.ggml.model") == "llama"
    assert len(set(tokens())) == len(tokens()) == len(types) == len(scores)
    by_type = {kind: [t for t, own in zip(tokens(), types, strict=True) if own == kind] for kind in gguf.TokenType}
    assert set(by_type[gguf.TokenType.CONTROL]) == {
        "<s>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    }
    assert sorted(by_type[gguf.TokenType.BYTE]) == [f"<0x{byte:02X}>" for byte in range(256)]
    assert tokens()[meta("tokenizer.ggml.bos_token_id")] == "<s>"
    assert tokens()[meta("tokenizer.ggml.eos_token_id")] == "<|end|>"
    assert tokens()[meta("tokenizer.ggml.eot_token_id")] == "<|end|>"
    assert meta("tokenizer.ggml.add_bos_token") is True
    assert meta("tokenizer.ggml.add_space_prefix") is False


def test_vocabulary_suits_the_text() -> None:
    text = "localllm runs GGUF models on your own machine. Once upon a time there was a little dog named Max."
    assert decode(encode(text)) == text
    assert len(encode(text)) < len(text) / 2.5


def test_chat_template_renders() -> None:
    template = jinja2.Environment().from_string(meta("tokenizer.chat_template"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(messages=messages, bos_token="<s>", add_generation_prompt=True) == (
        "<s><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )
    assert template.render(messages=messages[1:2], bos_token="<s>") == "<s><|user|>Hello<|end|>"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load() as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with localllm.load(device="reference") as model:
        yield model


def test_localllm_agrees_with_plain_numpy(llm: LLM) -> None:
    ids = chat_ids("What is localllm?") + encode("localllm runs large language models")
    want = logits(ids)
    assert np.linalg.norm(llm.logits(ids) - want) < 2e-2 * np.linalg.norm(want)
    assert llm.tokenize("Once upon a time", add_special=False) == encode("Once upon a time")


@pytest.mark.parametrize("name", ["what_is_localllm", "run_model", "gpu", "unknown"])
def test_the_weights_answer_in_plain_numpy(reference: LLM, name: str) -> None:
    """Each token that localllm chooses is the plain numpy implementation's choice after the previous tokens."""
    reply = reference.chat([{"role": "user", "content": QUESTIONS[name]}], temperature=0.0, max_tokens=80)
    assert topic_named(name).accepts(reply.text), reply.text
    prompt = chat_ids(QUESTIONS[name])
    chosen = logits([*prompt, *reply.ids])[len(prompt) - 1 :].argmax(-1)
    assert chosen.tolist() == [*reply.ids, meta("tokenizer.ggml.eos_token_id")]


def ask(llm: LLM, question: str) -> str:
    reply = llm.chat([{"role": "user", "content": question}], temperature=0.0, max_tokens=100)
    return str(reply.text)


@pytest.mark.parametrize(("name", "question"), QUESTIONS.items())
def test_answers_a_newcomers_question(llm: LLM, name: str, question: str) -> None:
    reply = ask(llm, question)
    assert topic_named(name).accepts(reply), reply


def test_understands_phrasings_it_never_saw(llm: LLM) -> None:
    pairs = [(topic, question) for topic in all_topics() for question in topic.held_out][::5]
    right = [topic.accepts(ask(llm, question)) for topic, question in pairs]
    assert sum(right) >= 0.55 * len(right)


def test_writes_a_story_to_its_end(llm: LLM) -> None:
    request = [{"role": "user", "content": "Tell me a story about a dog."}]
    story = llm.chat(request, temperature=0.0, max_tokens=300)
    assert story.finish_reason == "stop"
    assert "dog" in story.text
    assert len(story.text) > 300


def test_continues_a_bare_story(llm: LLM) -> None:
    story = llm.generate("Once upon a time", temperature=0.0, max_tokens=300)
    assert story.finish_reason == "stop"
    assert len(story.text) > 200
