"""The public API of the library, on tiny random models and a trained model, on every device."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

import localllm
from localllm import LLM, Sampling, Stream
from localllm.chat import ChatTemplate
from localllm.chat.conversation import Message
from localllm.engine.engine import Engine
from localllm.errors import (
    ClosedError,
    ContextLengthError,
    ModelError,
    NotEnoughMemoryError,
    TemplateError,
    UsageError,
)
from localllm.llm import truncate, without_turns
from localllm.loading.load import LoadOptions
from localllm.options.keywords import SamplingOptions
from localllm.sampling import LogitsProcessor
from tests.helpers.data import ROOT, shared_data
from tests.helpers.devices import DEVICES
from tests.helpers.engines import eventually, n_requests
from tests.helpers.tiny_models import config, random_weights, tiny_gguf, write_gguf

CONTEXT = 96
BOS, EOS = 1, 2

#: Chat template of the tiny model: it uses no control tokens and rejects unknown roles.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('bad role') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};"
    "{% endfor %}a:"
)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = config()
    path = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    return write_gguf(path, settings, random_weights(settings), metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(tiny_path: Path, device: str) -> Iterator[LLM]:
    with localllm.load(tiny_path, device=device, context=CONTEXT) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> LLM:
    """The tiny model with an empty cache."""
    loaded.forget()
    return loaded


@pytest.fixture(scope="module")
def stories(device: str) -> Iterator[LLM]:
    with localllm.load(shared_data("models/stories260K/stories260K.gguf"), device=device) as llm:
        yield llm


# A trained model.


def test_greedy_from_bos_gives_the_expected_text(stories: LLM) -> None:
    expected = shared_data("models/stories260K/greedy_expected.txt").read_text()
    completion = stories.generate("", temperature=0, max_tokens=256)
    assert completion.text == expected
    assert completion.finish_reason == "length"
    assert stories.detokenize(completion.ids) == expected


def test_logits_of_a_trained_model(stories: LLM) -> None:
    """Compare with the values of llama.cpp and of the model's original implementation."""
    ids = stories.tokenize("Once upon a time")
    assert ids == [1, 403, 407, 261, 378]
    last = stories.logits(ids)[-1]
    assert last[432] == pytest.approx(17.7994, abs=2e-3)
    assert last[383] == pytest.approx(14.2813, abs=2e-3)
    assert last.argmax() == 432


def test_mean_loss_of_a_trained_model(stories: LLM) -> None:
    """Evaluate the first 200 stories of the sample, each cut to 256 tokens."""
    if stories.info.device == "reference":
        pytest.skip("the reference backend takes minutes for it")
    text = shared_data("text/tinystories_sample.txt").read_text()
    losses = [token_losses(stories, story.strip()) for story in text.split("<|endoftext|>")[:200]]
    together = np.concatenate(losses)
    assert len(together) == 50_651
    assert together.mean() == pytest.approx(1.43710, abs=1e-3)


def token_losses(llm: LLM, text: str) -> np.ndarray:
    """Return -log p of each token except the first."""
    ids = llm.tokenize(text)[:256]
    logits = llm.logits(ids).astype(np.float64)[:-1]
    log_total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_total - logits[np.arange(len(ids) - 1), ids[1:]]


def test_text_continues_with_its_space(stories: LLM) -> None:
    prompt = "Once upon a time, there was a little"
    completion = stories.generate(prompt, temperature=0, max_tokens=3)
    assert completion.text.startswith(" girl")


# Generation on a tiny random model.


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenize("the end")
    texts = {
        llm.generate(prompt, temperature=0, max_tokens=12).ids
        for prompt in ("the end", ids, tuple(ids), np.array(ids), np.array(ids, np.uint16).tolist())
    }
    assert len(texts) == 1


def test_generated_ids_are_greedy_on_the_logits(llm: LLM) -> None:
    ids = llm.tokenize("there and then")
    completion = llm.generate(ids, temperature=0, max_tokens=10, ignore_eos=True)
    logits = llm.logits([*ids, *completion.ids])[len(ids) - 1 : -1]
    logits[:, EOS] = -np.inf
    assert logits.argmax(-1).tolist() == list(completion.ids)


def test_an_empty_prompt_starts_with_bos(llm: LLM) -> None:
    expected = llm.generate([BOS], temperature=0, max_tokens=8).ids
    assert llm.generate("", temperature=0, max_tokens=8).ids == expected
    assert llm.generate([], temperature=0, max_tokens=8).ids == expected


def test_an_empty_prompt_without_bos_is_refused(tmp_path: Path) -> None:
    settings = config()
    no_bos = {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF, "tokenizer.ggml.add_bos_token": False}
    path = write_gguf(tmp_path / "no_bos.gguf", settings, random_weights(settings), metadata=no_bos)
    with localllm.load(path, device="reference") as llm:
        for prompt in ("", []):
            with pytest.raises(UsageError, match="empty"):
                llm.generate(prompt)
        assert llm.generate("a", max_tokens=1, ignore_eos=True).usage.completion_tokens == 1


def test_max_tokens_zero_evaluates_the_prompt_alone(llm: LLM) -> None:
    completion = llm.generate("hello", max_tokens=0)
    assert (completion.text, completion.ids, completion.finish_reason) == ("", (), "length")
    assert llm.generate("hello", max_tokens=1).usage.cached_tokens == completion.usage.prompt_tokens - 1


def test_the_end_of_generation_token_ends_the_text(llm: LLM) -> None:
    plain = llm.generate("hello", temperature=0, max_tokens=8, ignore_eos=True).ids
    ended = llm.generate("hello", temperature=0, max_tokens=8, logit_bias={EOS: 1e9})
    assert (ended.text, ended.ids, ended.finish_reason) == ("", (), "stop")
    going_on = llm.generate("hello", temperature=0, max_tokens=8, logit_bias={EOS: 1e9}, ignore_eos=True)
    assert going_on.ids == plain


def test_tokens_that_the_file_suppresses_are_never_chosen(tmp_path: Path, device: str) -> None:
    """``suppress_tokens`` holds in every reply, also against a request's bias, and in drafts."""
    settings = config()
    weights = random_weights(settings)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    path = write_gguf(tmp_path / "a.gguf", settings, weights)
    with localllm.load(path, device=device, context=CONTEXT) as llm:
        plain = llm.generate("hello", **greedy).ids
    keys = {"tokenizer.ggml.suppress_tokens": [plain[0], plain[5], 300, -1]}
    path = write_gguf(tmp_path / "b.gguf", settings, weights, metadata=keys)
    with localllm.load(path, device=device, context=CONTEXT, draft_model=tmp_path / "a.gguf") as llm:
        assert llm.tokenizer.suppressed_ids == {plain[0], plain[5]}
        bias = {plain[0]: 1e9}
        drafted = llm.generate("hello", **greedy, logit_bias=bias, draft_always=True)
        alone = llm.generate("hello", **greedy, speculate=None)
        assert drafted.ids == alone.ids
        drawn = llm.generate("hello", temperature=9, max_tokens=60, top_k=3, seed=1, ignore_eos=True).ids
        assert not {*alone.ids, *drawn} & llm.tokenizer.suppressed_ids


def test_settings_may_come_as_sampling_and_as_keywords(llm: LLM) -> None:
    base = Sampling(temperature=0, logprobs=1)
    assert llm.generate("a", sampling=base, max_tokens=3).logprobs is not None
    assert llm.generate("a", sampling=base, logprobs=None, max_tokens=3).logprobs is None


def test_penalties_count_the_prompt_and_the_generated_tokens(llm: LLM) -> None:
    prompt = llm.tokenize("hello there")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = llm.generate(prompt, **options).ids
    assert len(set(plain)) < 40 or set(plain) & set(prompt), "the text does not repeat itself"
    ids = llm.generate(prompt, presence_penalty=1e6, repeat_last_n=-1, **options).ids
    assert len({*prompt, *ids}) == len(set(prompt)) + 40


# Reuse of the cache.


def test_the_next_turn_evaluates_only_new_tokens(llm: LLM) -> None:
    prompt = llm.tokenize("once there was")
    first = llm.generate(prompt, max_tokens=10, ignore_eos=True)
    assert first.usage.cached_tokens == 0
    longer = [*prompt, *first.ids, *llm.tokenize(" and", add_special=False)]
    second = llm.generate(longer, max_tokens=4, temperature=0)
    assert second.usage.cached_tokens == len(prompt) + len(first.ids) - 1
    assert second.timings.prefill_tokens == len(longer) - second.usage.cached_tokens
    llm.forget()
    fresh = llm.generate(longer, max_tokens=4, temperature=0)
    assert (fresh.usage.cached_tokens, fresh.ids) == (0, second.ids)


# Ending early.


def test_a_processor_cannot_use_its_own_model(llm: LLM) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("there"),
        lambda: list(llm.generate_many(["there"])),
        lambda: llm.logits([1]),
        lambda: llm.score("a", ["b"]),
    ]
    for call in calls:

        def use(ids: np.ndarray, logits: np.ndarray, call: Callable[[], object] = call) -> np.ndarray:
            call()
            return logits

        with pytest.raises(UsageError, match="call the model from another thread"):
            llm.generate("hello", processors=(use,))
    assert eventually(lambda: n_requests(llm) == 0)


def test_a_generation_inside_another_of_the_same_thread(llm: LLM) -> None:
    """Both streams need the whole context and only one fits: the one with a slow reader is preempted."""
    outer = llm.generate("hello", temperature=0, ignore_eos=True).ids
    llm.forget()
    written: list[int] = []
    for chunk in llm.stream("hello", temperature=0, ignore_eos=True):
        written += chunk.ids
        if len(written) in (5, 20):
            inner = llm.generate("there", temperature=0, ignore_eos=True)
            assert inner.finish_reason == "length"
    assert tuple(written) == outer


def test_a_timeout(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="cut off: its timeout of 1e-06 seconds has passed"):
        completion = llm.generate("hello", timeout=1e-6)
    assert (completion.finish_reason, completion.ids) == ("timeout", ())
    assert completion.to_dict()["warnings"] == list(completion.warnings)
    assert llm.generate("hello", timeout=1000, max_tokens=3, ignore_eos=True).finish_reason == "length"


def test_background_requests_come_after_others(tiny_path: Path) -> None:
    """Only one fits at a time, because each prompt needs the whole context."""
    order: list[str] = []
    in_step, go_on = threading.Event(), threading.Event()

    def note(name: str) -> LogitsProcessor:
        def noting(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
            order.append(name)
            in_step.set()
            go_on.wait(60)
            return logits

        return noting

    def start(name: str, first: int, **options: Any) -> Stream:
        return llm.stream([first] * 16, processors=(note(name),), max_tokens=1, ignore_eos=True, **options)

    with localllm.load(tiny_path, device="reference", context=16) as llm:
        streams = [start("running", 5)]
        assert in_step.wait(60)
        streams += [start("background", 6, priority="background"), start("normal", 7)]
        go_on.set()
        assert [len(stream.read().ids) for stream in streams] == [1, 1, 1]
    assert order == ["running", "normal", "background"]


# Many prompts.


def test_generate_many_is_generate_of_each(llm: LLM) -> None:
    prompts = ["hello", "the end", [5, 6, 7], "hello"] * 3
    options: dict[str, Any] = {"max_tokens": 6, "seed": 2, "temperature": 1.5, "ignore_eos": True}
    calls: list[tuple[int, int]] = []
    done = list(llm.generate_many(prompts, progress=lambda *call: calls.append(call), **options))
    assert [each.ids for each in done] == [llm.generate(prompt, **options).ids for prompt in prompts]
    assert calls == [(n, 12) for n in range(1, 13)]
    assert list(llm.generate_many([])) == []


def test_a_completion_as_json(llm: LLM) -> None:
    done = llm.generate("a", max_tokens=2, logprobs=1)
    values = json.loads(json.dumps(done.to_dict()))
    assert (values["text"], values["ids"]) == (done.text, list(done.ids))
    assert values["usage"]["total_tokens"] == done.usage.total_tokens
    assert values["timings"]["decode_tokens_per_s"] == done.timings.decode_tokens_per_s
    assert done.logprobs is not None
    assert [each["id"] for each in values["logprobs"]] == list(done.ids)
    assert values["logprobs"][0]["top"] == [{"id": id_, "logprob": p} for id_, p in done.logprobs[0].top]
    assert llm.generate("a", max_tokens=1).to_dict()["logprobs"] is None


def test_generate_many_keeps_the_batch_full(tiny_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts start when others end; early results wait for their turn."""
    monkeypatch.setattr("localllm.llm._AT_ONCE", 3)
    taken: list[int] = []
    is_all = threading.Event()

    def prompts() -> Iterator[list[int]]:
        for i in range(10):
            taken.append(i)
            assert n_requests(llm) <= 2
            yield [5 + i]
        is_all.set()

    def end_first_prompt_last(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[EOS] = 1e9 if ids[0] != 5 or is_all.wait(0.01) else -1e9
        return logits

    with localllm.load(tiny_path, device=device, parallel=4) as llm:
        many = llm.generate_many(prompts(), processors=(end_first_prompt_last,))
        assert not taken, "no prompt may start before iteration"
        assert next(many).ids
        assert taken == list(range(10))
        assert [each.ids for each in many] == [()] * 9


def test_an_error_in_the_middle_of_generate_many_comes_in_its_turn_and_closes_the_rest(llm: LLM) -> None:
    many = llm.generate_many(iter(["a", "b", [300], "c"]), ignore_eos=True)
    assert [len(next(many).ids) > 0 for _ in range(2)] == [True, True]
    with pytest.raises(UsageError, match="300"):
        next(many)
    assert eventually(lambda: n_requests(llm) == 0)
    with pytest.raises(UsageError, match="progress"):
        llm.generate_many([], progress=3)

    def fail(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if ids[0] == 6:
            raise ZeroDivisionError
        return logits

    many = llm.generate_many([[5], [6], [7]], ignore_eos=True, processors=(fail,))
    assert next(many).ids
    with pytest.raises(ZeroDivisionError):
        next(many)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(llm.generate_many(["a", "b"], max_tokens=2, progress=lambda *_: next(iter(()))))
    assert eventually(lambda: n_requests(llm) == 0)


def test_leaving_generate_many_cancels_the_rest(llm: LLM) -> None:
    for _ in llm.generate_many([[5 + i] for i in range(30)], max_tokens=20, ignore_eos=True):
        break
    assert eventually(lambda: n_requests(llm) == 0)


def test_generate_many_waits_if_the_queue_is_full(tiny_path: Path) -> None:
    with localllm.load(tiny_path, device="reference", context=CONTEXT, max_waiting=2) as llm:
        prompts = [[5 + i] for i in range(12)]
        many = llm.generate_many(prompts, max_tokens=3, temperature=0, ignore_eos=True)
        alone = [llm.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True).ids for prompt in prompts]
        assert [each.ids for each in many] == alone


def test_generate_many_handles_requests_that_end_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Engine.submit

    def submit_and_wait(engine: Engine, request: Any) -> None:
        submit(engine, request)
        assert eventually(lambda: n_requests(engine) == 0)

    monkeypatch.setattr(Engine, "submit", submit_and_wait)
    assert len(list(llm.generate_many(["a"] * 3, max_tokens=1))) == 3


# Tasks.


def test_tasks_and_threads_get_the_same(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "seed": 2, "temperature": 1.5, "ignore_eos": True}
    messages = [{"role": "user", "content": "hello"}]
    written, chat = llm.generate("hello", **options), llm.chat(messages, **options)

    async def main() -> None:
        done = await asyncio.gather(*(llm.agenerate("hello", **options) for _ in range(20)))
        assert {(each.ids, each.text, each.finish_reason) for each in done} == {(written.ids, written.text, "length")}
        assert "".join([chunk.text async for chunk in llm.astream("hello", **options)]) == written.text
        assert (await llm.achat(messages, **options)).ids == chat.ids
        assert "".join([chunk.text async for chunk in llm.astream_chat(messages, **options)]) == chat.text
        with pytest.raises(UsageError):
            await llm.agenerate("hello", max_tokens=-1)
        task = asyncio.create_task(llm.achat(messages, ignore_eos=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert eventually(lambda: n_requests(llm) == 0)


# Threads, and several models.


def test_many_threads_on_one_model(llm: LLM) -> None:
    prompts = ["the", "and then", "here", "a hen in the", "x", "the"]
    alone = []
    for prompt in prompts:
        llm.forget()
        alone.append(llm.generate(prompt, seed=3, max_tokens=14, temperature=1.2).ids)
    together: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        together[i] = llm.generate(prompts[i], seed=3, max_tokens=14, temperature=1.2).ids

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[i] for i in range(len(prompts))] == alone


def test_several_models_in_one_process(llm: LLM, tmp_path: Path, device: str) -> None:
    other_path = tiny_gguf(tmp_path / "other.gguf", "qwen2", vocab_size=400)
    before = llm.generate("hello", temperature=0, max_tokens=6).ids
    with localllm.load(other_path, device=device) as other:
        assert other.info.architecture == "qwen2"
        both = [iter(m.stream("hello", temperature=0, max_tokens=6, ignore_eos=True)) for m in (llm, other)]
        in_turn = [[next(stream).ids for stream in both] for _ in range(6)]
        assert [a for a, _ in in_turn] != [b for _, b in in_turn]
    assert llm.generate("hello", temperature=0, max_tokens=6).ids == before


def test_a_closed_model_refuses_everything(tiny_path: Path, device: str) -> None:
    llm = localllm.load(tiny_path, device=device)
    stream = llm.stream("hello", ignore_eos=True)
    next(stream)
    llm.close()
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream_chat([{"role": "user", "content": "a"}]),
        lambda: llm.tokenize("a"),
        lambda: llm.detokenize([1]),
        lambda: llm.logits([1]),
        lambda: llm.score("a", ["b"]),
        lambda: next(llm.generate_many(["a"])),
        lambda: asyncio.run(llm.agenerate("a")),
        lambda: llm.forget(),
        lambda: llm.chat_template,
        lambda: llm.__enter__(),
        lambda: list(stream),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert "closed" in repr(llm)
    assert llm.info.architecture == "llama"


# The context.


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(
        ContextLengthError, match=r"100 tokens, which exceeds the available context size of 96.*overflow"
    ) as caught:
        llm.generate([5] * 100)
    assert (caught.value.n_tokens, caught.value.context) == (100, 96)
    with pytest.raises(ContextLengthError):
        llm.logits([5] * 97)
    assert llm.generate([5] * 96, max_tokens=9, ignore_eos=True).usage.completion_tokens == 1


def test_truncation_keeps_bos_and_the_newest_tokens(llm: LLM) -> None:
    ids = [BOS, *(3 + i % 200 for i in range(200))]
    completion = llm.generate(ids, overflow="truncate", max_tokens=10, temperature=0, ignore_eos=True)
    kept = [BOS, *ids[-85:]]
    assert completion.usage.prompt_tokens == len(kept) == CONTEXT - 10
    assert completion.ids == llm.generate(kept, max_tokens=10, temperature=0, ignore_eos=True).ids
    short = llm.generate([5, 6, 7], overflow="truncate", max_tokens=2)
    assert short.usage.prompt_tokens == 3


@given(ids=st.lists(st.integers(0, 5), min_size=1), n_tokens=st.integers(1, 60))
def test_truncate(ids: list[int], n_tokens: int) -> None:
    kept = truncate(ids, n_tokens, BOS)
    assert len(kept) == min(n_tokens, len(ids))
    if len(ids) <= n_tokens or ids[0] != BOS or n_tokens == 1:
        assert kept == ids[-n_tokens:]
    else:
        assert kept[0] == BOS
        assert kept[1:] == ids[len(ids) - n_tokens + 1 :]


def test_more_context_than_trained_is_a_warning(tiny_path: Path) -> None:
    with pytest.warns(UserWarning, match="trained on 128 tokens") as caught:
        localllm.load(tiny_path, device="reference", context=129).close()
    assert [warning.filename for warning in caught] == [__file__]
    with localllm.load(tiny_path, device="reference") as llm:
        assert llm.info.context == 128


# Chat.


def test_chat_uses_the_template_of_the_file(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    ids = llm.tokenize("s:be kind;u:hello;a:", add_special=False)
    expected = llm.generate([BOS, *ids], temperature=0, max_tokens=6)
    completion = llm.chat(messages, temperature=0, max_tokens=6)
    assert completion.ids == expected.ids
    chunks = list(llm.stream_chat(messages, temperature=0, max_tokens=6))
    assert "".join(chunk.text for chunk in chunks) == completion.text


def test_a_chat_that_is_too_long_loses_its_oldest_turns(llm: LLM) -> None:
    system = {"role": "system", "content": "be kind"}
    turns = [{"role": role, "content": text * 12} for text in "bcdf" for role in ("user", "assistant")]
    question = {"role": "user", "content": "why"}
    with pytest.raises(ContextLengthError):
        llm.chat([system, *turns, question])
    completion = llm.chat([system, *turns, question], overflow="truncate", max_tokens=8, temperature=0)
    kept = llm.chat([system, *turns[-4:], question], max_tokens=8, temperature=0)
    assert completion.usage.prompt_tokens == kept.usage.prompt_tokens
    assert completion.ids == kept.ids
    with pytest.raises(ContextLengthError):
        llm.chat([{"role": "user", "content": "b" * 200}])
    with pytest.raises(ContextLengthError, match="or overflow='truncate'") as caught:
        llm.chat([*turns, question])
    assert "overflow='truncate'" in str(caught.value)
    with pytest.raises(ContextLengthError, match=r"shorten it, or use a larger context$") as caught:
        llm.chat([system, {"role": "user", "content": "b" * 200}])
    assert "overflow='truncate'" not in str(caught.value)
    with pytest.raises(ContextLengthError, match="the last message alone makes a prompt of 207 tokens") as caught:
        llm.chat([*turns, {"role": "user", "content": "b" * 200}], overflow="truncate")
    assert caught.value.truncated
    assert "truncate" not in str(caught.value)


def test_without_turns() -> None:
    roles = ("system", "user", "assistant", "tool", "user", "assistant", "user")
    system, *turns = map(Message, roles)
    assert without_turns([system, *turns], 0) == [system, *turns]
    assert without_turns([system, *turns], 1) == [system, *turns[3:]]
    assert without_turns([*turns[:3], system, *turns[3:]], 2) == [system, turns[5]]


@pytest.mark.parametrize("n_kept", [1, 2, 3, 31, 32, 33, 63, 64])
def test_a_long_chat_loses_the_fewest_possible_turns(n_kept: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"role": "user", "content": f"{i:02}" * 4 * (i >= 64 - n_kept) or "x" * 200} for i in range(64)]
    rendered = []
    render = ChatTemplate.render

    def counting(self: ChatTemplate, messages: Sequence[Mapping[str, object]], **more: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", counting)
    room = len(llm.tokenize_chat(turns[64 - n_kept :]))
    del rendered[:]
    if room > CONTEXT - 1:
        pytest.skip("the context is too small")
    completion = llm.chat(turns, overflow="truncate", max_tokens=CONTEXT - room)
    assert completion.usage.prompt_tokens == room
    assert len(rendered) <= 8  # of 64 turns, by bisection
    assert sum(rendered) <= 5 * 64
    del rendered[:]
    with pytest.raises(ContextLengthError, match="overflow='truncate'"):
        llm.chat(turns)
    assert rendered == [64]  # the hint in the message needs no rendering


def test_a_template_given_replaces_that_of_the_file(tiny_path: Path) -> None:
    with localllm.load(tiny_path, device="reference", chat_template="{{ messages[0].content }}!") as llm:
        chat = llm.chat([{"role": "user", "content": "hello"}], temperature=0, max_tokens=4)
        assert chat.usage.prompt_tokens == len(llm.tokenize("hello!"))
    with pytest.raises(TemplateError):
        localllm.load(tiny_path, device="reference", chat_template="{% if")


HELLO = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "read",
    [
        lambda llm: llm.tokenize_chat(HELLO),
        lambda llm: llm.stream_chat(HELLO),
        lambda llm: llm.chat(HELLO, max_tokens=1),
    ],
)
def test_the_warning_of_a_missing_template_points_to_the_caller(
    read: Callable[[LLM], object], tmp_path: Path
) -> None:
    with (
        localllm.load(tiny_gguf(tmp_path / "plain.gguf"), device="reference") as llm,
        pytest.warns(UserWarning, match="no chat template") as caught,
    ):
        read(llm)
    assert [warning.filename for warning in caught] == [__file__]


TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}


@pytest.mark.parametrize(
    "chat",
    [
        lambda llm: llm.chat(HELLO, tools=[TOOL], max_tokens=1),
        lambda llm: llm.stream_chat(HELLO, tools=[TOOL], max_tokens=1),
        lambda llm: llm.tokenize_chat(HELLO, tools=[TOOL]),
    ],
)
def test_tools_that_a_template_does_not_use_are_a_warning(chat: Callable[[LLM], object], tiny_path: Path) -> None:
    with localllm.load(tiny_path, device="reference", chat_template="{{ messages[0].content }}") as llm:
        with pytest.warns(UserWarning, match="does not use tools, so the model does not see them") as caught:
            chat(llm)
        assert [warning.filename for warning in caught] == [__file__]
    with localllm.load(
        tiny_path, device="reference", chat_template="{{ messages[0].content }}{{ tools[0].function.name }}"
    ) as llm:
        chat(llm)


def test_a_file_with_a_vocabulary_alone(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, config(), {})
    with pytest.raises(ModelError, match=r"vocabulary\.gguf holds only a vocabulary, no weights: "):
        localllm.load(path)


@pytest.mark.parametrize(
    "messages",
    ["hello", [], (), [{"role": "user"}], ["a"], 5, None, {"role": "user", "content": "a"}]
    + [[{"role": role, "content": "a"}] for role in ("judge", "", None, 5, b"user")],
)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(TemplateError) as caught:
        llm.chat(messages)
    assert "bad role" in str(caught.value) or "content" in str(caught.value)


# Loading.


def test_info(llm: LLM, tiny_path: Path, device: str) -> None:
    info = llm.info
    assert (info.path, info.architecture, info.file_type, info.device) == (tiny_path, "llama", "F32", device)
    assert (info.n_layers, info.n_vocab, info.trained_context, info.context) == (3, 300, 128, CONTEXT)
    assert info.n_parameters == sum(array.size for array in random_weights(config()).values())
    assert info.n_bytes == 4 * info.n_parameters
    assert 1 <= info.decode_threads <= info.threads
    assert info.placement.context == CONTEXT
    shown = str(info).splitlines()
    assert shown[0].startswith(f"{tiny_path.name}: llama, ")
    assert [line.split(" on ")[0] for line in shown[2:5]] == ["  embedding", "  layers 0-2", "  output"]
    assert len(shown) == 6
    assert [group.name for group in info.placement.groups] == ["embedding", "layers 0-2", "output"]


def test_progress_of_loading(tiny_path: Path, device: str) -> None:
    calls: list[tuple[str, int, int]] = []
    localllm.load(tiny_path, device=device, progress=lambda *call: calls.append(call)).close()
    done = [(n, total) for stage, n, total in calls if stage == "weights"]
    assert done == sorted(done)
    assert done[-1] == (done[-1][1], done[-1][1])


@pytest.mark.parametrize(
    "arguments",
    [
        *({"context": 0}, {"context": True}, {"context": 1.5}, {"threads": 0}, {"threads": "2"}, {"parallel": 0}),
        *({"device": 5}, {"device": ["cpu"]}, {"isa": 2}, {"chat_template": 5}, {"progress": 5}),
        *({"cache_type": "q4_1"}, {"cache_type": 8}),
        *({"device": 5}, {"draft_model": 5}, {"path": 5}, {"parallel": 0}),
    ],
)
def test_arguments_of_load_out_of_range(tiny_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(arguments))} is "):
        localllm.load(**({"path": tiny_path, "device": "reference"} | arguments))


def test_load_options_are_the_arguments_of_load_in_plain_types() -> None:
    arguments = {name: p.default for name, p in inspect.signature(localllm.load).parameters.items()}
    del arguments["unknown"]
    assert {field.name: field.default for field in fields(LoadOptions)} == arguments
    assert [field.name for field in fields(LoadOptions)] == list(arguments)
    options = LoadOptions(**(arguments | {"context": np.int64(64), "threads": np.uint8(2)}))
    assert (options.context, options.threads) == (64, 2)
    assert (type(options.context), type(options.threads)) == (int, int)


def test_every_argument_of_load_reaches_the_options(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {
        "path": tiny_path,
        "device": "reference",
        "n_gpu_layers": 3,
        "tensor_split": (1.0, 2.0),
        "split_mode": "row",
        "n_cpu_moe": 1,
        "cpu_moe": True,
        "override_tensor": "exps=CPU",
        "max_memory": 5.0,
        "context": 64,
        "threads": 2,
        "isa": "avx2",
        "parallel": 3,
        "cache_type": "q8_0",
        "chat_template": "x",
        "adapters": {"a": "b"},
        "draft_model": tiny_path,
        "mmproj": False,
        "image_max_tokens": 90,
        "prompt_cache": Path("folder"),
        "prompt_cache_size": 2.0,
        "cache_scope": "key",
        "progress": print,
        "planned": print,
        "max_waiting": 7,
        "step_s": 0.5,
    }
    assert list(arguments) == [field.name for field in fields(LoadOptions)]
    options = list[LoadOptions]()

    def load_file(options_: LoadOptions) -> None:
        options.append(options_)
        raise InterruptedError

    monkeypatch.setattr("localllm.llm.load_file", load_file)
    with pytest.raises(InterruptedError):
        localllm.load(**arguments)
    assert options == [LoadOptions(**arguments)]


def test_without_a_path_the_demo_model_is_loaded(device: str) -> None:
    demo = ROOT / "localllm" / "data" / "demo.gguf"
    if not demo.exists():
        pytest.skip("needs the demo model")
    with localllm.load(device=device) as llm:
        assert llm.info.path == demo
        assert llm.chat([{"role": "user", "content": "Hello"}], max_tokens=4, ignore_eos=True).text


def test_a_missing_demo_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.loading.load.resources.files", lambda package: tmp_path)
    with pytest.raises(UsageError, match="no demo model"):
        localllm.load()


def test_memory_that_runs_out_while_loading(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("localllm.loading.placement.Planner.load", fail)
        with pytest.raises(NotEnoughMemoryError, match="ran out"):
            localllm.load(tiny_path, device="reference")


def test_too_little_memory_is_reported_before_loading(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.loading.load.available_memory", lambda: 1 << 20)
    monkeypatch.setattr("localllm.loading.placement.Planner.load", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(NotEnoughMemoryError, match="GB"):
        localllm.load(tiny_path, device="reference")


def test_logits_that_would_not_fit_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.llm.available_memory", lambda: 4 * 300 * 3)
    assert llm.logits([1, 2, 3]).shape == (3, 300)
    with pytest.raises(NotEnoughMemoryError):
        llm.logits([1, 2, 3, 4])


# Bad arguments.


@given(
    ids=st.lists(
        st.one_of(
            st.integers(-(10**30), -1),
            st.integers(300, 10**30),
            st.booleans(),
            st.floats(),
            st.text(),
            st.none(),
            st.binary(),
            st.just(np.bool_(True)),
            st.just(np.float32(3)),
        ),
        min_size=1,
        max_size=3,
    ),
    good=st.lists(st.integers(0, 299), max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_bad_ids_are_usage_errors(loaded_reference: LLM, ids: list[Any], good: list[int]) -> None:
    for bad in ([*good, *ids], tuple(ids)):
        for call in (loaded_reference.generate, loaded_reference.logits, loaded_reference.detokenize):
            with pytest.raises(UsageError):
                call(bad)  # type: ignore[operator]


@pytest.fixture(scope="module")
def loaded_reference(tiny_path: Path) -> Iterator[LLM]:
    with localllm.load(tiny_path, device="reference") as llm:
        yield llm


#: Calls with one argument, values that they refuse, and the error; ``{}`` is the type of the value.
REFUSED: list[tuple[Callable[[LLM, Any], object], list[Any], str]] = [
    (
        lambda llm, prompt: llm.generate(prompt),
        [b"abc", bytearray(b"ab"), 5, None, {1: 2}, {1, 2}],
        "^prompt must be text or a list of token ids, not {}$",
    ),
    (lambda llm, prompt: llm.generate(prompt), [np.array([[1, 2]]), np.array(1.5)], "token"),
    (lambda llm, prompts: list(llm.generate_many(prompts)), ["a", b"a", 5, None], "must be a list of prompts"),
    (lambda llm, text: llm.tokenize(text), [b"x", None, 3, ["x"]], "text"),
    (lambda llm, tools: llm.chat(HELLO, tools=tools), [5, "tool", {"name": "f"}, ["f"], [None]], "tools"),
    (
        lambda llm, variables: llm.chat(HELLO, template_variables=variables),
        [5, "enable_thinking", [("a", 1)], {1: 2}]
        + [{name: 1} for name in ("messages", "tools", "tokenizer", "template", "self")],
        "template_variables",
    ),
]


@pytest.mark.parametrize(("call", "values", "words"), REFUSED)
def test_values_of_other_types(
    loaded_reference: LLM, call: Callable[[LLM, Any], object], values: list[Any], words: str
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=words.format(type(value).__name__)):
            call(loaded_reference, value)


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "'temperature'"), ("max_token", "'max_tokens'"), ("qqq", "the keywords are")]
)
def test_an_unknown_option_names_its_nearest(loaded_reference: LLM, name: str, hint: str) -> None:
    for method in ("generate", "stream"):
        with pytest.raises(TypeError, match=f"{name}.*{hint}"):
            getattr(loaded_reference, method)("a", **{name: 1})


def test_sampling_options_are_those_of_sampling() -> None:
    names = {"LogitsProcessor": LogitsProcessor, "Callable": Callable, "np": np, "npt": npt}
    of_sampling = get_type_hints(Sampling, localns=names)
    assert get_type_hints(SamplingOptions, localns=names) == {
        field.name: of_sampling[field.name] for field in fields(Sampling)
    }
