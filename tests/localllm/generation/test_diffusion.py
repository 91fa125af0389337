"""Requests to models that write by diffusion: their steps, ends, options and front ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import localllm
from localllm import LLM, ContextLengthError, ModelError, UsageError
from localllm.engine.canvas import MAX_MASKS, Canvas, DiffusionSettings
from localllm.engine.request import Request
from localllm.engine.runner import ModelRunner, max_outputs, n_cache_pages
from localllm.generation.diffusion import make_canvas
from localllm.gguf import GGUFFile
from localllm.loading.devices import open_devices
from localllm.models.diffusion import LLADA
from localllm.models.registry import read_model
from localllm.options.declared import CheckedOptions
from localllm.sampling import Sampling, greedy
from tests.helpers.command_line import run_main
from tests.helpers.diffusion import MASK, write
from tests.helpers.gguf_writer import finish
from tests.helpers.requests import Results, SteppedEngine, results

PROMPT = [5, 17, 200, 33]
N = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    path = tmp_path_factory.mktemp("llada") / "model.gguf"
    return write(path, "llada", **{"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with localllm.load(path, device="cpu", parallel=3) as llm:
        yield llm


MakeEngine = Callable[..., SteppedEngine]


@pytest.fixture
def make_engine(path: Path) -> Iterator[MakeEngine]:
    """Return a function that creates an engine for ``max_tokens`` per step and ``parallel`` texts of 96 tokens."""
    [device] = open_devices("cpu", threads=2)

    def make(max_tokens: int = 96, parallel: int = 2) -> SteppedEngine:
        with GGUFFile.open(path) as file:
            model = read_model(file, 96)
            n_pages = n_cache_pages(model.graph, 96, parallel, device.backend.page_size)
            sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs(300, max_tokens, model.diffusion)}
            step = device.backend.compile(model.graph, n_pages=n_pages, **sizes)
        runner = ModelRunner(
            step, n_vocab=300, context=96, max_tokens=max_tokens, is_causal=False, diffusion=model.diffusion
        )
        return SteppedEngine(runner=runner)

    yield make
    device.close()


def settings(**changes: Any) -> DiffusionSettings:
    values: dict[str, Any] = {"mask_id": MASK, "shifts": False, "steps": N, "block_length": 4, "seed": 0}
    return DiffusionSettings(**values | {"algorithm": "confidence", "sampling": greedy} | changes)


def request(prompt: list[int] = PROMPT, n: int = N, **options: Any) -> Request:
    canvas = Canvas(prompt, n, settings(steps=n))
    return Request(prompt[:], Results(), canvas=canvas, max_tokens=n, **options)


# Steps.


def test_a_step_without_a_token_to_keep_is_omitted() -> None:
    """Of 12 masks, the first of 24 steps keeps 12 / 24 tokens."""
    canvas, n = Canvas(PROMPT, N, settings(steps=24, block_length=0)), 0
    while not canvas.is_complete:
        n_masks = len(canvas.masks)
        canvas.advance(np.zeros((n_masks, 300), np.float32))
        assert len(canvas.masks) < n_masks
        n += 1
    assert n <= N
    assert MASK not in canvas.ids


def test_the_mask_is_never_generated_and_masks_of_the_prompt_stay() -> None:
    canvas = Canvas([MASK, 5], N, settings())
    logits = np.zeros((4, 300), np.float32)
    logits[:, MASK] = 9
    while not canvas.is_complete:
        canvas.advance(logits[: len(canvas.masks)])
    assert canvas.ids == [MASK, 5, *[0] * N]


def test_biased_tokens() -> None:
    canvas = Canvas(PROMPT, 4, settings(sampling=Sampling(temperature=0, logit_bias={7: 1, 8: 2, 9: -np.inf})))
    canvas.advance(np.eye(300, dtype=np.float32)[[9] * 4])
    assert canvas.ids[4:] == [8, MASK, MASK, MASK]


def test_invalid_logits_are_an_error() -> None:
    with pytest.raises(ModelError, match="nan"):
        Canvas(PROMPT, 4, settings()).advance(np.full((4, 300), np.nan, np.float32))


def test_texts_in_a_batch_equal_texts_alone(make_engine: MakeEngine) -> None:
    texts = [PROMPT, [9] * 20, [1, 2]]
    alone = []
    for text in texts:
        each = request(text)
        make_engine().run(each)
        alone.append(results(each).ids)
    together = [request(text) for text in texts]
    engine = make_engine(parallel=3)
    engine.run(*together)
    assert [results(each).ids for each in together] == alone
    assert engine.loop.counts.in_steps > engine.loop.counts.steps
    engine.check_all_pages_are_back()


def test_requests_without_room_in_one_step_take_turns(make_engine: MakeEngine) -> None:
    engine, first, second = make_engine(max_tokens=40), request([9] * 20), request([8] * 20)
    engine.submit(first, second)
    engine.step(8)
    assert [each.canvas and each.canvas.n_steps for each in (first, second)] == [4, 4]
    assert results(first).ids
    engine.run()
    other = request([8] * 20)
    make_engine().run(other)
    assert results(second).ids == results(other).ids


def test_counts(make_engine: MakeEngine) -> None:
    engine, each = make_engine(), request()
    engine.run(each)
    assert each.finish_reason == "length"
    assert (each.usage.prompt_tokens, each.usage.cached_tokens, each.usage.completion_tokens) == (4, 0, N)
    assert (each.timings.prefill_tokens, each.timings.decode_tokens) == (4, N - 1)
    assert each.prefill_s > 0
    assert each.first_token_s > 0
    counts = engine.loop.counts
    assert (counts.prompt_tokens, counts.generated_tokens, counts.steps) == (4, N, N)


def test_a_cancelled_request_ends_before_its_next_step(make_engine: MakeEngine) -> None:
    engine, each = make_engine(), request()
    engine.submit(each)
    engine.step(5)
    each.is_cancelled = True
    assert not engine.step()
    assert each.finish_reason == "cancelled"
    assert each.canvas is not None
    assert each.canvas.n_steps == 5
    assert 4 <= len(results(each).ids) < N, "the first block is complete"
    engine.check_all_pages_are_back()


def test_a_request_ends_at_its_timeout(make_engine: MakeEngine) -> None:
    engine, each = make_engine(), request(timeout_s=3600.0)
    engine.submit(each)
    engine.step(2)
    each.timeout_s = 1e-9
    assert not engine.step()
    assert each.finish_reason == "timeout"


def test_a_preempted_text_continues(make_engine: MakeEngine) -> None:
    alone, each, engine = request(), request(), make_engine()
    make_engine().run(alone)
    engine.submit(each)
    engine.step(3)
    engine.scheduler._preempt(each)
    engine.run()
    assert results(each).ids == results(alone).ids


# The library.


def test_ends(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_tokens=N, ignore_eos=True)
    assert (whole.finish_reason, len(whole.ids)) == ("length", N)
    assert llm.generate(PROMPT, max_tokens=0).finish_reason == "length"
    ended = llm.generate(PROMPT, max_tokens=N, logit_bias={2: 100})
    assert (ended.text, ended.finish_reason, ended.usage.completion_tokens) == ("", "stop", 0)
    stop = whole.text[3]
    stopped = llm.generate(PROMPT, max_tokens=N, ignore_eos=True, stop=stop)
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert sum(1 for chunk in llm.stream(PROMPT, max_tokens=N, ignore_eos=True) if chunk.ids) == N


def test_a_reply_has_the_length_of_the_release_or_fills_the_context(llm: LLM) -> None:
    assert len(llm.generate([9] * 100, ignore_eos=True).ids) == 28
    with pytest.raises(ContextLengthError):
        llm.generate([9] * 128)
    assert llm.defaults["temperature"] == 0


def test_the_same_prompt_gives_the_same_text_without_the_cache(llm: LLM) -> None:
    first, second = (llm.generate([9] * 70, max_tokens=N) for _ in range(2))
    assert (second.ids, second.usage.cached_tokens) == (first.ids, 0)
    hot: dict[str, Any] = {"temperature": 2, "max_tokens": N, "ignore_eos": True}
    assert llm.generate(PROMPT, seed=1, **hot).ids == llm.generate(PROMPT, seed=1, **hot).ids
    assert llm.generate(PROMPT, seed=1, **hot).ids != llm.generate(PROMPT, seed=2, **hot).ids


def test_threads_share_the_model(llm: LLM) -> None:
    prompts = [[9 + i] * (3 + i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, max_tokens=N).ids, prompts))
    assert together == [llm.generate(prompt, max_tokens=N).ids for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        *({"json_schema": {}}, {"regex": "a"}, {"grammar": 'start: "a"'}, {"logprobs": 1}, {"repeat_penalty": 1.1}),
        *({"mirostat": 2}, {"dry_multiplier": 1}, {"speculate": "lookup"}, {"reasoning_budget": 3}),
        *({"processors": lambda ids, logits: logits}, {"hooks": {"layers.0.output": print}}, {"typical_p": 0.5}),
        *({"steer": {"layers.0.output": [0.0] * 64}}, {"watch": "layers.0.output", "on_values": print}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_it_cannot_use_are_refused(options: dict[str, Any], llm: LLM) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(options))} cannot be used with a model that writes by diff"):
        llm.generate(PROMPT, **options)


def test_methods_that_need_the_next_token_are_refused(llm: LLM) -> None:
    for use in (
        lambda: llm.logits(PROMPT),
        lambda: llm.score(PROMPT, [[5]]),
        lambda: llm.trace(PROMPT, "layers.0.output"),
    ):
        with pytest.raises(UsageError, match="writes by diffusion"):
            use()


def test_adapters(path: Path, llm: LLM, tmp_path: Path) -> None:
    """The reply with an adapter and the reply without it are written in the same steps."""
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llada")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4)
    rng = np.random.default_rng(0)
    for part, shape in (("a", (4, 64)), ("b", (64, 4))):
        writer.add_tensor(f"blk.0.attn_output.weight.lora_{part}", rng.normal(0, 0.5, shape).astype(np.float32))
    finish(writer)
    with localllm.load(path, device="cpu", parallel=2, adapters={"a": tmp_path / "adapter.gguf"}) as adapted:
        streams = [adapted.stream(PROMPT, max_tokens=N, adapters={"a": scale}) for scale in (0.0, 1.0)]
        without, with_adapter = ([id_ for chunk in stream for id_ in chunk.ids] for stream in streams)
    assert tuple(without) == llm.generate(PROMPT, max_tokens=N).ids
    assert with_adapter != without


def test_a_draft_model_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match=r"^draft_model is not used by a model that writes by diffusion"):
        localllm.load(path, draft_model=path, device="cpu")


@pytest.mark.parametrize("name", ["diffusion_steps", "diffusion_block_length", "diffusion_eps"])
def test_other_models_refuse_options_of_diffusion(name: str) -> None:
    with localllm.load(device="cpu") as demo, pytest.raises(UsageError, match=f"^{name} is only for models"):
        demo.generate("a", max_tokens=1, **{name: 1 if name != "diffusion_eps" else 0.5})


@pytest.mark.parametrize(("name", "block_length"), [("diffusion_block_length", 600), ("max_tokens", 0)])
def test_masks_beyond_a_step_are_refused(name: str, block_length: int) -> None:
    def canvas(block_length: int) -> Canvas:
        checked = CheckedOptions(max_tokens=600, diffusion_block_length=block_length, sampling=greedy)
        model, limits = replace(LLADA, mask_id=MASK), {"context": 1024, "max_masks": MAX_MASKS}
        return make_canvas(PROMPT, checked, greedy, model, **limits)

    with pytest.raises(UsageError, match=f"^{name} is 600, but must be at most 512"):
        canvas(block_length)
    assert len(canvas(512).ids) == 604


@pytest.mark.parametrize("mask", [300, -1, "a", None])
def test_a_file_needs_a_mask(mask: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mask_token_id"):
        localllm.load(write(tmp_path / "model.gguf", "llada", **{"tokenizer.ggml.mask_token_id": mask}))


def test_the_default_context_is_short(tmp_path: Path) -> None:
    with GGUFFile.open(write(tmp_path / "model.gguf", "dream", **{"dream.context_length": 131072})) as file:
        assert read_model(file).default_context == 4096


# Front ends.


def test_the_command_line(path: Path, llm: LLM, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    options: dict[str, Any] = {"diffusion_steps": 4, "diffusion_block_length": 6, "diffusion_algorithm": "margin"}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = run_main(capfdbinary, "generate", "-m", path, "-p", "a b", "-n", N, "--json", "-no-cnv", *flags)
    assert done.code == 0, done.err
    assert tuple(json.loads(done.out)["ids"]) == llm.generate("a b", max_tokens=N, **options).ids
    done = run_main(capfdbinary, "generate", "-m", path, "-p", "a", "--regex", "a", "-no-cnv")
    assert "--regex cannot be used with a model that writes by diffusion" in done.err


def test_the_server(path: Path, llm: LLM) -> None:
    httpx = pytest.importorskip("httpx")
    helper = pytest.importorskip("tests.helpers.http_server", reason="needs the extra 'serve'")
    messages = [{"role": "user", "content": "Hi"}]
    expected = llm.chat(messages, max_tokens=N, diffusion_steps=6, ignore_eos=True)
    body = {"messages": messages, "max_tokens": N, "diffusion_steps": 6, "ignore_eos": True}
    with helper.serving(helper.demo(path=path)) as server:
        address = f"{server.url}/v1/chat/completions"
        reply = httpx.post(address, json=body, timeout=60).json()
        lines = httpx.post(address, json=body | {"stream": True}, timeout=60).text.splitlines()
        refused = httpx.post(address, json=body | {"logprobs": True}, timeout=60)
    choice = reply["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "length")
    assert reply["usage"]["completion_tokens"] == N
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected.text
    assert refused.status_code == 400
    assert "writes by diffusion" in refused.json()["error"]["message"]
