"""The cache's tier on disk: the same tokens as without it, and nothing is evaluated again that was stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.engine import cache as cache_module, disk_tier
from localllm.engine.block_store import BlockStore, StoredBlock
from localllm.engine.request import Request
from tests.helpers.fake_backend import PAGE_SIZE, FakeCache, greedy_after
from tests.helpers.requests import SteppedEngine, results, writing

#: Tokens between two snapshots of a prompt in these tests.
INTERVAL = 2 * PAGE_SIZE

#: Windows of each group, and whether there are recurrent states.
KINDS: dict[str, tuple[tuple[int | None, ...], bool]] = {
    "all tokens": ((None,), False),
    "a window": ((None, 9), False),
    "states": ((None,), True),
    "all": ((None, 3, 14), True),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[tuple[int | None, ...], bool]:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)


class Engines:
    """Engines that use one folder one after another, like a program that is started again."""

    def __init__(self, folder: Path, windows: tuple[int | None, ...], has_states: bool) -> None:
        self.folder, self.windows, self.has_states = folder, windows, has_states
        self.engine: SteppedEngine | None = None

    def start(self, n_pages: int = 60, **settings: Any) -> SteppedEngine:
        self.stop()
        self.store = BlockStore(self.folder, 1 << 24)
        cache = FakeCache((n_pages, *(n_pages for _ in self.windows[1:])), self.windows, 8 * self.has_states)
        settings = {"label_of": str} | settings
        self.engine = SteppedEngine(200, cache=cache, max_tokens=16, store=self.store, **settings)
        return self.engine

    def stop(self) -> None:
        if self.engine is not None:
            assert self.engine.loop._tier is not None
            self.engine.loop._tier.close()
            self.engine = None


@pytest.fixture
def engines(kind: tuple[tuple[int | None, ...], bool], tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "cache", *kind)
    yield engines
    engines.stop()


def run(engine: SteppedEngine, *requests: Request) -> None:
    """Run requests, and store their blocks."""
    engine.submit(*requests)
    deadline = time.monotonic() + 60
    while engine.cache.changed or not all(results(request).ended.is_set() for request in requests):
        assert time.monotonic() < deadline
        if not engine.step():
            time.sleep(0.0005)
    assert engine.loop._tier is not None
    engine.loop._tier._store.flush()
    for request in requests:
        assert results(request).error is None
        assert results(request).ids == greedy_after(request.tokens[: request.n_prompt], len(results(request).ids))


def chat(engine: SteppedEngine, prompt: list[int], n_turns: int = 1) -> list[int]:
    """Continue a prompt by turns of three tokens and replies of five tokens."""
    for turn in range(n_turns):
        run(engine, request := writing([*prompt, turn, 90, 91], 5))
        prompt = request.tokens
    return prompt


def n_evaluated(engine: SteppedEngine, *requests: Request) -> int:
    before = engine.n_evaluated
    run(engine, *requests)
    return engine.n_evaluated - before


def test_a_prompt_continues_after_a_restart(engines: Engines) -> None:
    """Tokens of the last reply and of the next message are evaluated, and no others."""
    tokens = chat(engines.start(), list(range(30)), 3)
    engine = engines.start()
    # The last token of a reply has not been evaluated.
    assert n_evaluated(engine, request := writing([*tokens, 1, 2, 3], 1)) == 4
    assert request.n_cached == len(tokens) - 1
    assert engine.loop._tier is not None
    assert engine.loop._tier.n_restored == len(tokens) - 1
    engine.check_all_pages_are_back()


def test_branches_continue_after_a_restart(engines: Engines) -> None:
    engine = engines.start()
    common = chat(engine, list(range(25)), 2)
    branches = [chat(engine, [*common, branch], 2) for branch in (60, 61, 62, 63, 64)]
    n_most = 4 + (INTERVAL if engines.has_states else 0)
    for branch in reversed(branches):
        engine = engines.start()
        assert n_evaluated(engine, writing([*branch, 1, 2, 3], 1)) <= n_most
    # A new branch of the common beginning
    engine = engines.start()
    assert n_evaluated(engine, writing([*common, 65], 1)) <= 2 + (INTERVAL if engines.has_states else 0)


def test_memory_is_smaller_than_the_prompts(engines: Engines) -> None:
    """Prompts that were evicted from memory are found on disk, in random order, while others are stored."""
    engine, rng = engines.start(n_pages=30), np.random.default_rng(0)
    chats = [chat(engine, rng.integers(0, 97, int(n)).tolist()) for n in rng.integers(10, 50, 8)]
    n_most = 4 + (INTERVAL if engines.has_states else 0)
    for turn in range(24):
        i = int(rng.integers(len(chats)))
        before = engine.n_evaluated
        chats[i] = chat(engine, chats[i][:80])
        if turn and len(chats[i]) < 80:
            assert engine.n_evaluated - before <= n_most + 4
    assert engine.loop._tier is not None
    assert engine.loop._tier.n_restored > 100
    engine.check_all_pages_are_back()


def test_a_block_is_found_among_many(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_MOST_CHILDREN", 2)
    engine = engines.start()
    for last in (range(4, 8), *([id_] * 4 for id_ in range(50, 60))):
        run(engine, writing([*range(4), *last], 1))
    assert n_evaluated(engines.start(), writing([*range(8), 96, 95], 1)) == 2


def test_several_requests_at_once(engines: Engines) -> None:
    engine, rng = engines.start(), np.random.default_rng(1)
    common = rng.integers(0, 97, 20).tolist()
    prompts = [common[: rng.integers(21)] + rng.integers(0, 97, 9).tolist() for _ in range(10)]
    run(engine, *(writing(prompt, 12) for prompt in prompts))
    engine = engines.start(n_pages=40)
    requests = [writing([*greedy_continued(prompt, 11), 5], 12) for prompt in prompts]
    run(engine, *requests)
    assert engine.loop._tier is not None
    assert engine.loop._tier.n_restored > 50
    engine.check_all_pages_are_back()


def greedy_continued(prompt: list[int], n: int) -> list[int]:
    return [*prompt, *greedy_after(prompt, n)]


def test_a_request_for_everything_that_is_stored(engines: Engines) -> None:
    """The last token of a prompt is always evaluated, for its logits."""
    prompt = list(range(8 * PAGE_SIZE))
    run(engines.start(), writing(prompt, 1))
    engine = engines.start()
    assert n_evaluated(engine, writing(prompt, 1)) <= 1 + (INTERVAL if engines.has_states else PAGE_SIZE)


def test_evaluating_may_be_faster(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = chat(engines.start(), list(range(30)))
    monkeypatch.setattr(disk_tier, "_READ_RATE", 1.0)
    engine = engines.start()
    assert n_evaluated(engine, writing(tokens, 1)) == len(tokens)
    assert engine.loop._tier is not None
    assert engine.loop._tier.n_restored == 0


def test_a_store_of_another_model_is_not_read(engines: Engines) -> None:
    tokens = chat(engines.start(), list(range(30)))
    engine = engines.start(label_of=lambda tree: f"another model {tree}")
    assert n_evaluated(engine, writing(tokens, 1)) == len(tokens)
    engine = engines.start()
    assert n_evaluated(engine, writing(tokens, 1, adapters=(0.5,))) == len(tokens)
    assert n_evaluated(engine, writing(tokens, 1)) < len(tokens)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_clients_share_nothing_if_the_cache_is_scoped(engines: Engines, is_restarted: bool) -> None:
    engine = engines.start(is_scoped=True)
    prompt = list(range(40))
    run(engine, writing(prompt, 1, client="one"))
    if is_restarted:
        engine = engines.start(is_scoped=True)
    assert n_evaluated(engine, writing(prompt, 1, client="two")) == 40
    assert n_evaluated(engine, writing(prompt, 1, client="one")) < 40
    engine = engines.start()
    assert n_evaluated(engine, writing(prompt, 1, client="one")) == 40


def test_damaged_blocks_are_evaluated_again(engines: Engines) -> None:
    tokens = chat(engines.start(), list(range(60)))
    engines.stop()
    rng = np.random.default_rng(0)
    [path] = engines.folder.glob("*.blocks")
    data = path.read_bytes()
    n_restored, notices = 0, set()
    for _ in range(20):
        i = int(rng.integers(len(data)))
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << int(rng.integers(8))]) + data[i + 1 :])
        for other in engines.folder.glob("*.blocks"):
            if other != path:
                other.unlink()
        engine = engines.start()
        run(engine, request := writing([*tokens, 4], 3))
        notices.add(request.notice[:23])
        assert engine.loop._tier is not None
        n_restored += engine.loop._tier.n_restored
        engine.check_all_pages_are_back()
        engines.stop()
    assert n_restored > 0
    assert notices == {"", "files of the prompt cac"}


def test_a_store_that_cannot_be_written(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.start()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localllm.engine.block_store._write_all", full)
    notices = []
    for i in range(4):
        run(engine, request := writing([*range(30), i], 2))
        notices.append(request.notice)
        engines.store.flush()
    assert ["no longer stored" in notice for notice in notices if notice] == [True]
    engine.step()
    assert not engine.cache.changed


class Reads:
    """Holds reads of a store back."""

    def __init__(self, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[StoredBlock, int, Future[bytes | None]]] = []
        self.read = store._read
        monkeypatch.setattr(store, "read", self.hold)

    def hold(self, node: StoredBlock, part: int) -> Future[bytes | None]:
        future: Future[bytes | None] = Future()
        self.held.append((node, part, future))
        return future

    def release(self) -> None:
        for node, part, future in self.held:
            future.set_result(self.read(node, part))
        self.held = []


def test_other_requests_run_while_blocks_are_read(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = chat(engines.start(), list(range(30)))
    engine = engines.start()
    run(engine, writing([50], 1))  # the index is read
    reads = Reads(engines.store, monkeypatch)
    engine.submit(waiting := writing([*tokens, 1], 5))
    run(engine, writing([60, 61, 62], 20))
    assert reads.held
    assert not results(waiting).ids
    engine.submit(cancelled := writing([*tokens, 2], 5))
    engine.step()
    cancelled.is_cancelled = True
    engine.step()
    assert results(cancelled).ended.is_set()
    reads.release()
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while not results(waiting).ended.is_set() and time.monotonic() < deadline:
        engine.step()
    assert results(waiting).ids == greedy_after([*tokens, 1], 5)
    assert waiting.n_cached == len(tokens) - 1
    engine.check_all_pages_are_back()


def test_a_request_is_cancelled_while_its_blocks_are_read(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = chat(engines.start(), list(range(30)))
    engine = engines.start()
    run(engine, writing([50], 1))
    monkeypatch.setattr(disk_tier, "_READ_AHEAD", 1)
    reads = Reads(engines.store, monkeypatch)
    engine.submit(request := writing([*tokens, 1], 5))
    for _ in range(3):
        engine.step()
        reads.release()
    request.is_cancelled = True
    engine.step()
    assert results(request).ended.is_set()
    engine.check_all_pages_are_back()
    monkeypatch.undo()
    assert n_evaluated(engine, writing([*tokens, 1, 2], 1)) == 3


def test_blocks_are_copied_a_few_at_a_time(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "BYTES_AT_ONCE", 1)
    engine = engines.start()
    engine.submit(writing([9, 9], 60))
    engine.submit(writing(list(range(60)), 1))
    most = 0
    while engine.scheduler.requests or engine.cache.changed:
        before = len(engine.cache.changed)
        engine.step()
        most = max(most, before - len(engine.cache.changed))
    assert most == 1
    engine = engines.start()
    assert n_evaluated(engine, writing([*range(60), 1], 1)) <= 2 + (INTERVAL if engines.has_states else 0)
