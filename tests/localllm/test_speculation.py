"""Speculative decoding in the library with real forward passes: the same text in fewer steps, and its options."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, Completion, Sampling
from localllm.engine.drafting import Drafts
from localllm.engine.drafting.cost import StepCost
from localllm.engine.engine import EngineLoop
from localllm.engine.request import Timings, Usage
from localllm.errors import NotEnoughMemoryError, UsageError
from localllm.generation.completion import Chunk
from localllm.options.declared import CheckedOptions
from localllm.options.types import MAX_DRAFTS
from localllm.server.openai import timings_json
from tests.helpers.devices import DEVICES
from tests.helpers.engines import in_engine, n_requests
from tests.helpers.samplings import SAMPLINGS
from tests.helpers.tiny_models import config, random_weights, write_gguf


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = config(num_hidden_layers=1, num_key_value_heads=4)
    path = tmp_path_factory.mktemp("speculation") / "small.gguf"
    return write_gguf(path, settings, random_weights(settings, seed=1))


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speculation") / "tiny.gguf"
    return write_gguf(path, config(), random_weights(config()))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["same", "small"])
def loaded(request: pytest.FixtureRequest, tiny_path: Path, small_path: Path, device: str) -> Iterator[LLM]:
    """A tiny model that drafts for itself, and one with a draft model."""
    if (request.param, device) == ("small", "reference"):
        pytest.skip("slow, and runs the same code as the CPU")
    draft = tiny_path if request.param == "same" else small_path
    with localllm.load(tiny_path, device=device, context=96, draft_model=draft) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same model with an empty cache, and drafts at every step regardless of cost."""
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    monkeypatch.setattr("localllm.engine.drafting.model.MIN_PROBABILITY", 0.0)
    in_engine(loaded, lambda loop: loop._cost.add(1, 1.0))
    loaded.forget()
    return loaded


def comparable(done: Completion) -> tuple[Any, ...]:
    return done.text, done.ids, done.finish_reason, done.logprobs, done.usage.completion_tokens


#: The first prompt makes a tiny random model repeat itself.
REAL_SAMPLINGS = {"repeating": Sampling(temperature=0.9, seed=1, top_k=3)} | {
    name: SAMPLINGS[name] for name in ("greedy", "penalties", "mirostat", "adaptive-p")
}


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
@pytest.mark.parametrize("sampling", REAL_SAMPLINGS)
def test_the_text_is_the_same_to_the_last_bit(llm: LLM, speculate: Any, sampling: str) -> None:
    settings = REAL_SAMPLINGS[sampling]
    prompt = [1, *[40, 41, 42, 43, 44, 45] * 3, 40, 41]
    options: dict[str, Any] = {"sampling": settings.replace(logprobs=2), "max_tokens": 40, "ignore_eos": True}
    expected = llm.generate(prompt, speculate=None, **options)
    assert expected.drafts is None
    for draft_max in (2, 20):
        llm.forget()
        done = llm.generate(prompt, speculate=speculate, draft_max=draft_max, **options)
        assert comparable(done) == comparable(expected)
        assert done.drafts is not None
        assert done.drafts.steps == 39 - done.drafts.accepted
        assert speculate == "lookup" or done.drafts.drafted > 0


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_drafts_that_are_forced(tiny_path: Path, small_path: Path, device: str, speculate: Any) -> None:
    """Without measured costs and regardless of gain: one text, several in parallel, and one with a grammar."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 3, "top_k": 4}
    prompts = [[1, *[40, 41, 42, 43] * 4, 40 + n, 41] for n in range(3)]
    with localllm.load(tiny_path, device=device, context=96, draft_model=small_path) as llm:
        for more in ({"ignore_eos": True}, {"regex": "[a-z ]{20,60}"}):
            expected = [llm.generate(prompt, speculate=None, **options, **more).ids for prompt in prompts]
            llm.forget()
            forced: dict[str, Any] = {"speculate": speculate, "draft_always": True, "draft_max": 3}
            done = list(llm.generate_many(prompts, **forced, **options, **more))
            assert [each.ids for each in done] == expected
            alone = llm.generate(prompts[0], **forced, **options, **more)
            assert alone.ids == expected[0]
            assert alone.drafts is not None
            assert speculate == "lookup" or alone.drafts.drafted > 0
            steps = len(alone.ids) - 1 - alone.drafts.accepted
            assert alone.drafts.steps == steps or "regex" in more


def test_timings_of_the_server_count_drafts() -> None:
    chunk = Chunk("", usage=Usage(3, 8, 0), timings=Timings(0.1, 3, 0.1, 0.2, 8))
    assert "draft_n" not in timings_json(chunk)
    assert "draft_n" not in timings_json(dataclasses.replace(chunk, drafts=Drafts(0, 0, 8)))
    told = timings_json(dataclasses.replace(chunk, drafts=Drafts(6, 4, 3)))
    assert (told["draft_n"], told["draft_n_accepted"]) == (6, 4)


def test_forced_drafts_need_something_that_drafts(tiny_path: Path) -> None:
    with (
        localllm.load(tiny_path, context=96) as llm,
        pytest.raises(UsageError, match=r"draft_always is True, but no drafts are available: .* a draft_model"),
    ):
        llm.generate("the", draft_always=True)


def test_a_model_that_drafts_for_itself_is_always_right(tiny_path: Path, device: str, llm: LLM) -> None:
    assert llm.info.draft is not None
    if llm.info.draft.n_layers != llm.info.n_layers:
        pytest.skip("another model drafts")
    done = llm.generate("the", temperature=0, max_tokens=41, ignore_eos=True)
    assert done.drafts == Drafts(35, 35, 5)


def test_logits_are_the_same_bits_in_a_batch(llm: LLM) -> None:
    """The basis of all other tests: a token's logits do not depend on the other tokens of a step."""
    ids = [1, *range(40, 60)]
    drafted = [*ids, *range(70, 79)]
    llm.logits(ids)
    rows = llm.logits(drafted, last=10)
    llm.forget()
    llm.logits(ids[:-1])
    alone = [llm.logits(drafted[:n], last=1)[0] for n in range(len(ids), len(drafted) + 1)]
    assert np.array_equal(rows, alone)


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_streams_deliver_one_token_at_a_time(llm: LLM, speculate: Any) -> None:
    expected = llm.generate("the the the", speculate=None, temperature=0, max_tokens=30, ignore_eos=True)
    with llm.stream("the the the", speculate=speculate, temperature=0, max_tokens=30, ignore_eos=True) as stream:
        chunks = list(stream)
    assert [chunk.ids for chunk in chunks] == [*((id_,) for id_ in expected.ids), ()]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].drafts == stream.drafts is not None
    assert all(chunk.drafts is None for chunk in chunks[:-1])


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_cancelling_frees_the_pages_of_both_models(llm: LLM, speculate: Any) -> None:
    def n_pages_held(loop: EngineLoop) -> int:
        assert loop.draft_model is not None
        caches = (loop.runner.cache, loop.draft_model.runner.cache)
        return sum(cache.n_pages - cache.n_available for cache in caches)

    expected = llm.generate("the the the", speculate=None, temperature=0, ignore_eos=True)
    stream = llm.stream("the the the", speculate=speculate, temperature=0, ignore_eos=True)
    ids = [next(stream).ids[0] for _ in range(10)]
    stream.cancel()
    *rest, last = stream
    assert last.finish_reason == "cancelled"
    ids += [id_ for chunk in rest for id_ in chunk.ids]
    assert tuple(ids) == expected.ids[: len(ids)]
    assert (n_requests(llm), in_engine(llm, n_pages_held)) == (0, 0)


def test_the_next_turn_reuses_the_cache_of_drafts(llm: LLM) -> None:
    prompt = [1, *range(40, 60)]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    answer = llm.generate(prompt, **options)
    turn = [*prompt, *answer.ids, 50, 51]
    again = llm.generate(turn, **options)
    assert again.usage.cached_tokens >= len(turn) - 3
    assert again.ids == llm.generate(turn, speculate=None, **options).ids


def test_the_draft_models_context_may_be_shorter(tmp_path: Path, tiny_path: Path, llm: LLM) -> None:
    settings = config(max_position_embeddings=32)
    short = write_gguf(tmp_path / "short.gguf", settings, random_weights(settings))
    with localllm.load(tiny_path, device=llm.info.device, context=96, draft_model=short) as longer:
        assert longer.info.draft is not None
        assert (longer.info.context, longer.info.draft.context) == (96, 32)
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
        done = longer.generate([1] * 20, **options)
        assert done.drafts is not None
        assert 0 < done.drafts.drafted <= 12
        assert done.ids == longer.generate([1] * 20, speculate=None, **options).ids


# Speculation decides from costs alone, without measured times.


def by_size(seconds: Callable[[int], float], patch: pytest.MonkeyPatch) -> None:
    """Replace the clock: the cost of a step is a function of its size."""
    real = StepCost.add
    patch.setattr(StepCost, "add", lambda self, n, _: real(self, n, seconds(n)))


def repeating(llm: LLM, **options: Any) -> Completion:
    """Force a text that repeats its prompt."""
    words = [1, *range(40, 70)]

    def force(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        forced = np.full_like(logits, -np.inf)
        forced[words[1 + (len(ids) - 1) % (len(words) - 1)]] = 0
        return forced

    return llm.generate(words, processors=(force,), temperature=0, max_tokens=60, ignore_eos=True, **options)


def test_a_task_that_repeats_its_input_takes_few_steps(
    tiny_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_size(lambda n: 1.0 if n == 1 else 1.7, monkeypatch)
    with localllm.load(tiny_path, device=device, context=96) as llm:
        done = repeating(llm, speculate="lookup")
        assert done.ids == repeating(llm).ids
    assert done.drafts is not None
    assert done.drafts.accepted == done.drafts.drafted
    assert done.drafts.steps <= 20


def test_every_token_is_decoded_alone_if_drafts_do_not_pay(
    tiny_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_size(lambda n: 4.0 * n - 3, monkeypatch)
    with localllm.load(tiny_path, device=device, context=96) as llm:
        done = repeating(llm, speculate="lookup")
        assert done.drafts is not None
        assert done.drafts.steps >= 40, "except for the trial steps"


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_the_demo_model(device: str, speculate: Any) -> None:
    demo = Path(localllm.__file__).parent / "data" / "demo.gguf"
    if not demo.is_file():
        pytest.skip("needs the demo model")
    question = [{"role": "user", "content": "What is localllm?"}]
    with localllm.load(device=device, draft_model=demo) as llm:
        done = llm.chat(question, temperature=0, max_tokens=60, speculate=speculate)
        assert done.text == llm.chat(question, temperature=0, max_tokens=60, speculate=None).text
        assert done.drafts is not None


# Options.


def test_a_draft_model_is_used_by_default(tiny_path: Path, small_path: Path, device: str) -> None:
    with localllm.load(tiny_path, device=device, context=96, draft_model=small_path) as llm:
        assert llm.info.draft is not None
        assert llm.info.draft.path == small_path
        assert llm.info.draft.context == 96
        assert llm.generate("the", max_tokens=3).drafts is not None
        assert llm.generate("the", max_tokens=3, speculate=None).drafts is None
    with localllm.load(tiny_path, device=device, context=96) as llm:
        assert llm.info.draft is None
        assert llm.generate("the", max_tokens=3).drafts is None
        assert llm.generate("the", max_tokens=3, speculate="lookup").drafts is not None
        with pytest.raises(UsageError, match="there is no draft model"):
            llm.generate("the", speculate="draft")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculate": "ngram"}, "speculate is 'ngram', but must be one of 'auto', 'lookup', 'draft'"),
        ({"speculate": 1}, "speculate is 1"),
        ({"speculate": ["lookup"]}, "speculate is"),
        ({"speculate": np.array(["lookup", "draft"])}, "speculate is"),
        ({"overflow": np.array(["error", "truncate"])}, "overflow is"),
        ({"draft_max": 0}, "draft_max is 0, but must be a whole number from 1 to 64"),
        ({"draft_max": 2.5}, "draft_max is 2.5"),
        ({"draft_max": MAX_DRAFTS + 1}, "draft_max is 65, but must be a whole number from 1 to 64"),
    ],
)
def test_bad_options(options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CheckedOptions.of(options)


def other_vocabulary(path: Path, change: Callable[[list[str]], Any], **metadata: Any) -> Path:
    """Write the tiny model with a changed list of tokens."""
    from localllm.gguf import GGUFFile

    with GGUFFile.open(write_gguf(path, config(), random_weights(config()))) as file:
        tokens = [str(token) for token in file.metadata["tokenizer.ggml.tokens"]]
    change(tokens)
    settings = config(vocab_size=len(tokens))
    more: dict[str, Any] = {"tokenizer.ggml.tokens": tokens} | metadata
    return write_gguf(path, settings, random_weights(settings), metadata=more)


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_path: Path) -> None:
    def swap(tokens: list[str]) -> None:
        tokens[290] = "qqq"

    draft = other_vocabulary(tmp_path / "other.gguf", swap)
    with pytest.raises(UsageError, match=r"other\.gguf has another vocabulary than the model: token 290 is 'qqq'"):
        localllm.load(tiny_path, device="reference", draft_model=draft)


def test_a_vocabulary_of_another_length(tmp_path: Path, tiny_path: Path) -> None:
    """Padding tokens make no difference, other tokens do."""
    types = [2, 3, 3, *[6] * 256, *[1] * 41]
    longer = other_vocabulary(
        tmp_path / "longer.gguf",
        lambda tokens: tokens.extend(["[PAD300]", "[PAD301]"]),
        **{"tokenizer.ggml.token_type": [*types, 5, 5], "tokenizer.ggml.scores": [0.0] * 302},
    )
    with localllm.load(tiny_path, device="reference", context=64, draft_model=longer) as llm:
        expected = llm.generate("the", temperature=0, max_tokens=20, speculate=None)
        assert llm.generate("the", temperature=0, max_tokens=20).ids == expected.ids
    longer = other_vocabulary(
        tmp_path / "longest.gguf",
        lambda tokens: tokens.extend(["more", "and more"]),
        **{"tokenizer.ggml.token_type": [*types, 1, 1], "tokenizer.ggml.scores": [0.0] * 302},
    )
    with pytest.raises(UsageError, match="it has 302 tokens instead of 300"):
        localllm.load(tiny_path, device="reference", draft_model=longer)


def test_the_model_that_does_not_fit_is_named_before_loading(
    tiny_path: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with localllm.load(tiny_path, device="reference", context=96, draft_model=small_path) as llm:
        assert llm.info.draft is not None
        large, small = llm.info.placement.total, llm.info.draft.placement.total
    assert small < large
    monkeypatch.setattr(
        "localllm.loading.placement.Planner.load", lambda *_, **__: pytest.fail("weights were loaded")
    )

    def fails_with(available: int, path: Path, draft: Path, words: str) -> None:
        monkeypatch.setattr("localllm.loading.load.available_memory", lambda: available)
        with pytest.raises(NotEnoughMemoryError, match=words):
            localllm.load(path, device="reference", context=96, draft_model=draft)

    fails_with(large - 1, tiny_path, small_path, r"^the model needs .*GB is available: ")
    leave_out = r"^the model needs .* and the draft model .*{}\.gguf needs .*GB is available: leave the draft"
    fails_with(large - 1, small_path, tiny_path, leave_out.format("tiny"))
    fails_with(large, tiny_path, small_path, leave_out.format("small"))
    fails_with(large + small - 1, tiny_path, small_path, leave_out.format("small"))
    monkeypatch.undo()
    monkeypatch.setattr("localllm.loading.load.available_memory", lambda: large + small)
    localllm.load(tiny_path, device="reference", context=96, draft_model=small_path).close()


def test_both_models_are_logged(tiny_path: Path, small_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "localllm")
    localllm.load(tiny_path, device="reference", draft_model=small_path).close()
    lines = [record.getMessage() for record in caplog.records if " on reference" in record.getMessage()]
    draft = next(i for i, line in enumerate(lines) if line.startswith(f"draft model {small_path} on reference"))
    assert lines[0].startswith(f"{tiny_path} on reference")
    assert [line.partition(" on ")[0] for line in lines[1:draft]] == ["embedding", "layers 0-2", "output"]
    assert len(lines) > draft + 1, "the plan lists the draft model's layers"


@pytest.mark.parametrize("path", ["", "missing.gguf"])
def test_a_missing_draft_model(tiny_path: Path, path: str) -> None:
    with pytest.raises(localllm.GGUFError):
        localllm.load(tiny_path, device="reference", draft_model=path)


def test_a_draft_model_of_another_type(tiny_path: Path) -> None:
    with pytest.raises(UsageError, match="draft_model is 5"):
        localllm.load(tiny_path, device="reference", draft_model=5)  # type: ignore[arg-type]
