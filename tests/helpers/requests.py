"""Requests without text, and an engine without a thread, which a test steps explicitly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.request import Request
from localllm.engine.runner import ModelRunner
from localllm.sampling import Choice, Sampler, Sampling
from tests.helpers.fake_backend import N_VOCAB, FakeStep, fake_runner, greedy_after

GREEDY = Sampling(temperature=0)


class Results:
    """An output that stores all results.

    Attributes:
        choices: the chosen tokens.
        rows: rows of logits.
        n_done: number of evaluated prompt tokens, before the first step and after each step.
        error: the error that ended the request.
        is_full: set by the test.
        on_token: called with each id; returns whether the text is complete.
    """

    def __init__(self, on_token: Callable[[int], object] = lambda id_: False) -> None:
        self.choices: list[Choice] = []
        self.rows: list[np.ndarray] = []
        self.n_done: list[int] = []
        self.error: BaseException | None = None
        self.is_full = False
        self.on_token = on_token
        self.ended = threading.Event()
        self._next_row: int | None = None

    @property
    def ids(self) -> list[int]:
        return [choice.id for choice in self.choices]

    def progress(self, n_evaluated: int) -> None:
        self.n_done.append(n_evaluated)

    def token(self, choice: Choice) -> bool:
        self.choices.append(choice)
        return bool(self.on_token(choice.id))

    def logits(self, position: int, rows: np.ndarray) -> None:
        assert self._next_row in (None, position), "rows come once, and in order"
        self._next_row = position + len(rows)
        self.rows += list(rows.copy())

    def flush(self) -> None: ...

    def end(self, error: BaseException | None) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()


class FakeDrafter:
    """Drafts the tokens that a function of the text and of ``most`` returns."""

    def __init__(self, guess: Callable[[list[int], int], Sequence[int]]) -> None:
        self.guess = guess
        self.n_closed = 0

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        assert most >= 1
        return self.guess(list(tokens), most)

    def close(self) -> None:
        self.n_closed += 1


def nearly_right(n_right: int) -> FakeDrafter:
    """Draft ``n_right`` right tokens and two wrong ones."""

    def guess(tokens: list[int], most: int) -> list[int]:
        ids = greedy_after(tokens, min(most, n_right + 2))
        return ids[:n_right] + [(id_ + 1) % N_VOCAB for id_ in ids[n_right:]]

    return FakeDrafter(guess)


def results(request: Request) -> Results:
    assert isinstance(request.output, Results)
    return request.output


def writing(
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    sampling: Sampling = GREEDY,
    n_vocab: int = N_VOCAB,
    output: Results | None = None,
    **options: Any,
) -> Request:
    sampler = Sampler(sampling, n_vocab, prompt_ids=[id_ for id_ in prompt if id_ >= 0])
    return Request(list(prompt), output or Results(), sampler=sampler, max_tokens=max_tokens, **options)


def reading(ids: Sequence[int], first: int = 0, **options: Any) -> Request:
    """Return a request for the logits from position ``first``."""
    return Request(list(ids), Results(), logits_from=first, **options)


class SteppedEngine:
    """An engine that runs only the steps that the test requests."""

    def __init__(self, context: int = 64, *, runner: ModelRunner | None = None, **settings: Any) -> None:
        self.fake: FakeStep
        if runner is None:
            names = ("parallel", "max_tokens", "max_top_k", "cache")
            sizes = {name: settings.pop(name) for name in names if name in settings}
            runner, self.fake = fake_runner(context, **sizes)
        self.cache = runner.cache
        self.loop = EngineLoop(runner, **settings)
        self.scheduler = self.loop._scheduler

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.loop.add(request)

    def step(self, n: int = 1) -> bool:
        """Run n steps; return whether the last one had work."""
        return [self.loop.step() for _ in range(n)][-1]

    def run(self, *requests: Request, most: int = 5000) -> None:
        """Submit requests and run steps until no work is left."""
        self.submit(*requests)
        for _ in range(most):
            if not self.loop.step():
                return
        raise AssertionError(f"the engine still has work after {most} steps")

    @property
    def n_evaluated(self) -> int:
        """Number of tokens that the backend has evaluated."""
        return sum(len(batch.ids) for batch in self.fake.batches)

    @property
    def sizes(self) -> list[int]:
        """Number of tokens in each batch."""
        return [len(batch.ids) for batch in self.fake.batches]

    def check_all_pages_are_back(self) -> None:
        assert not self.scheduler.requests
        assert self.cache.n_available == self.cache.n_pages


def finish(engine: Engine, request: Request, seconds: float = 60) -> Results:
    """Submit a request and wait for its end."""
    engine.submit(request)
    out = results(request)
    assert out.ended.wait(seconds)
    return out
