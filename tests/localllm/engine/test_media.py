"""Prompts with images: encoded once, cached, cut and continued like other prompts."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from localllm.engine import encoding, saved_prompts
from localllm.engine.block_store import BlockStore
from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.media import EmbeddingCache, Embeddings, MediaTokens, PreparedMedia, PromptMedia
from localllm.engine.request import Request
from localllm.engine.runner import ModelRunner, max_outputs, n_cache_pages
from localllm.errors import UsageError
from localllm.loading.devices import Device, open_devices
from localllm.sampling import Sampler
from tests.helpers.engines import in_engine
from tests.helpers.hybrid import N_VOCAB, D, hybrid
from tests.helpers.requests import GREEDY, Results, SteppedEngine, finish, reading, results

CONTEXT, MAX_TOKENS = 512, 48


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    [device] = open_devices(request.param, threads=2)
    yield device
    device.close()


@dataclass
class FakeEncoder:
    """An encoder with random embeddings, computed in several steps."""

    n_pieces: int = 1
    encoded: list[bytes] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def encode(self, pictures: Sequence[PreparedMedia]) -> Generator[None, None, list[Embeddings]]:
        self.batches.append(len(pictures))
        for _ in range(self.n_pieces):
            yield
        if any(picture.source == "broken" for picture in pictures):
            raise ValueError("a broken image")
        self.encoded += [picture.key for picture in pictures]
        sizes = [(np.random.default_rng(zlib.crc32(p.key)), (p.n_tokens, 2, D)) for p in pictures]
        return [rng.normal(0, 1, size).astype(np.float32) for rng, size in sizes]


def picture(name: str, rows: int, columns: int, source: str = "") -> PreparedMedia:
    return PreparedMedia(name.encode() * 11, rows * columns, (rows, columns), source)


CAT, DOG, WIDE = picture("cat", 3, 5), picture("dog", 7, 4), picture("wid", 1, 40)


def prompt(*parts: int | PreparedMedia, seed: int = 0) -> tuple[list[int], PromptMedia]:
    """Return a prompt of random tokens and images; an int is a number of tokens."""
    rng, ids, placed = np.random.default_rng(seed), list[int](), list[MediaTokens]()
    for part in parts:
        if isinstance(part, PreparedMedia):
            placed.append(MediaTokens(len(ids), part))
        ids += part.ids if isinstance(part, PreparedMedia) else rng.integers(0, N_VOCAB, part).tolist()
    return ids, PromptMedia(placed)


def runner_on(device: Device, max_tokens: int = MAX_TOKENS) -> ModelRunner:
    graph, backend = hybrid(sees=True), device.backend
    n_pages = n_cache_pages(graph, CONTEXT, 2, backend.page_size, max_tokens)
    outputs = max_outputs(N_VOCAB, max_tokens)
    step = backend.compile(graph, n_pages=n_pages, max_tokens=max_tokens, max_outputs=outputs)
    sees = {"has_axes": graph.has_axes, "has_spans": graph.has_spans}
    return ModelRunner(step, n_vocab=N_VOCAB, context=CONTEXT, max_tokens=max_tokens, **sees)


def stepped(device: Device, encoder: FakeEncoder, **settings: float) -> SteppedEngine:
    return SteppedEngine(runner=runner_on(device), encoder=encoder, **settings)


def writing(ids: Sequence[int], pictures: PromptMedia, n: int = 8) -> Request:
    sampler = Sampler(GREEDY, N_VOCAB)
    return Request(list(ids), Results(), sampler=sampler, max_tokens=n, media=pictures)


def written(engine: SteppedEngine, ids: Sequence[int], pictures: PromptMedia, n: int = 8) -> list[int]:
    request = writing(ids, pictures, n)
    engine.run(request)
    assert results(request).error is None
    return results(request).ids


def test_ids_and_places() -> None:
    assert len({*CAT.ids, *DOG.ids, *WIDE.ids}) == 15  # five ids from each key of 33 bytes
    assert max(CAT.ids) < -(1 << 61)
    assert picture("cat", 3, 5).ids == CAT.ids
    ids, pictures = prompt(4, CAT, 2, DOG, 3)
    assert pictures.stop == len(ids) - 3 == 49
    assert [each.start for each in pictures.of(5, 22)] == [4, 21]
    axes = pictures.axes(0, len(ids))
    assert axes[:, 3:10].tolist() == [
        *([3, 4, 4, 4, 4, 4, 4], [3, 4, 4, 4, 4, 4, 5], [3, 4, 5, 6, 7, 8, 4]),
        [3, 4, 4, 4, 4, 4, 4],
    ]
    assert axes[:, 19:23].T.tolist() == [[9] * 4, [10] * 4, [11] * 4, [11, 11, 12, 11]]
    assert axes[:, 49:].tolist() == [[18, 19, 20]] * 4
    ends = pictures.ends(0, len(ids))
    assert ends[:4].tolist() == [1, 2, 3, 4]
    assert set(ends[4:19]) == {19}
    assert set(ends[21:49]) == {49}
    for start, stop in ((0, 7), (7, 30), (11, 11 + 9), (30, 52), (50, 52)):
        np.testing.assert_array_equal(pictures.axes(start, stop), axes[:, start:stop])
        np.testing.assert_array_equal(pictures.ends(start, stop), ends[start:stop])


def test_places_of_images_that_are_numbered() -> None:
    """Image tokens have row, column and frame positions, and share a time; surrounding tokens have text positions."""
    placed = [MediaTokens(start, PreparedMedia(b"a", 8, (2, 3), is_numbered=True)) for start in (2, 11)]
    pictures = PromptMedia(placed)
    axes = pictures.axes(0, 20)
    assert axes[0].tolist() == [*range(20)]
    for number, start in enumerate((2, 11)):
        inner = axes[1:, start + 1 : start + 7].tolist()
        assert inner == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [number] * 6]
    others = [0, 1, 2, 9, 10, 11, 18, 19]
    assert (axes[:, others] == others).all()
    for start, stop in ((0, 3), (4, 9), (9, 12), (5, 20)):
        np.testing.assert_array_equal(pictures.axes(start, stop), axes[:, start:stop])


def test_a_prompt_gives_the_same_tokens_in_any_batch(device: Device) -> None:
    """Alone, next to other decoding requests, and from the cache; before and after an edit."""
    whole, pictures = prompt(9, CAT, 4, DOG, 3, WIDE, 6)
    fresh = written(stepped(device, FakeEncoder()), whole, pictures, 20)
    encoder = FakeEncoder()
    engine = stepped(device, encoder)
    others = [writing(*prompt(n, seed=n), n=60) for n in (3, 30)]
    engine.submit(*others)
    engine.step(4)
    assert written(engine, whole, pictures, 20) == fresh
    assert encoder.encoded == [CAT.key, DOG.key, WIDE.key]
    evaluated = engine.loop.counts.prompt_tokens
    assert written(engine, whole, pictures, 20) == fresh
    assert engine.loop.counts.prompt_tokens - evaluated <= engine.cache.page_size  # tokens that were in the cache
    for edited, edited_pictures in (prompt(9, CAT, 5, DOG, 3, WIDE, 6, seed=5), prompt(9, CAT, 4, DOG, 3, DOG, 6)):
        expected = written(stepped(device, FakeEncoder()), edited, edited_pictures)
        assert written(engine, edited, edited_pictures) == expected
    assert sorted(encoder.encoded) == sorted([CAT.key, DOG.key, WIDE.key])


@pytest.mark.parametrize("shared", ["text", "a picture", "more"])
def test_a_prompt_continues_after_a_shared_prefix(device: Device, shared: str) -> None:
    """Another prompt may end before an image, at its last token (one token is always evaluated), or after it."""
    ids, pictures = prompt(9, DOG, 4)
    expected = written(stepped(device, FakeEncoder()), ids, pictures)
    engine = stepped(device, FakeEncoder())
    n = {"text": 9, "a picture": pictures.stop, "more": pictures.stop + 2}[shared]
    written(engine, ids[:n], PromptMedia(pictures.placed if n > 9 else ()))
    assert written(engine, ids, pictures) == expected


def test_ten_turns_with_edits_and_branches(device: Device) -> None:
    encoder = FakeEncoder()
    engine, rng = stepped(device, encoder), np.random.default_rng(3)
    parts: list[int | PreparedMedia | list[int]] = [7, CAT]
    for turn in range(10):
        if turn == 4:  # an edit before the images, and one between them
            parts[0] = 8
        if turn in (2, 6):
            parts += [DOG if turn == 2 else WIDE]
        parts += [int(rng.integers(3, 12))]
        ids, pictures = prompt(*(part for part in parts if not isinstance(part, list)), seed=turn // 4)
        assert written(engine, ids, pictures) == written(stepped(device, FakeEncoder()), ids, pictures)
    assert sorted(encoder.encoded) == sorted([CAT.key, DOG.key, WIDE.key])
    assert engine.loop._encoding.n_encoded == 3


def test_embeddings_above_the_limit_are_encoded_again(device: Device) -> None:
    encoder = FakeEncoder()
    engine = stepped(device, encoder)
    engine.cache.embeddings = engine.loop._encoding._cache = EmbeddingCache(CAT.n_tokens * 2 * D * 4)
    ids, pictures = prompt(3, CAT, 3, DOG, 3)
    first = written(engine, ids, pictures)
    edited, edited_pictures = prompt(4, CAT, 3, DOG, 3)
    written(engine, edited, edited_pictures)
    assert encoder.encoded == [CAT.key, DOG.key, DOG.key]
    engine.loop.forget()
    assert written(engine, ids, pictures) == first
    assert len(encoder.encoded) == 5


def test_images_are_encoded_together_and_a_broken_one_ends_only_its_request(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = FakeEncoder()
    engine = stepped(device, encoder)
    good, bad = writing(*prompt(3, CAT, 2)), writing(*prompt(4, picture("bad", 2, 2, "broken"), 2))
    engine.run(good, bad)
    assert encoder.batches == [2, 1, 1]
    assert encoder.encoded == [CAT.key]
    assert isinstance(results(bad).error, ValueError)
    assert results(good).error is None
    assert len(results(good).ids) == 8
    monkeypatch.setattr(encoding, "_TOKENS_AT_ONCE", 30)
    monkeypatch.setattr(encoding, "_TOKENS_AHEAD", 50)
    many = [picture(f"{i:03}", 2, 7) for i in range(9)]
    expected = written(stepped(device, FakeEncoder()), *prompt(3, *many, 2))
    encoder.batches.clear()
    assert written(engine, *prompt(3, *many, 2)) == expected
    assert sum(encoder.batches) == 9
    assert max(encoder.batches) == 2


def test_others_go_on_while_an_image_is_encoded(device: Device) -> None:
    engine = stepped(device, FakeEncoder(n_pieces=20), step_s=0.0)
    other = writing(*prompt(5), n=40)
    engine.submit(other)
    engine.step(3)
    seeing = writing(*prompt(3, CAT, 2))
    engine.submit(seeing)
    before = len(results(other).ids)
    engine.step(20)
    assert len(results(other).ids) == before + 20
    assert not results(seeing).ids
    seeing.is_cancelled = True
    engine.step()
    assert engine.loop._encoding._work is None
    engine.run()
    assert len(results(other).ids) == 40


def test_a_cache_on_disk_has_embeddings(device: Device, tmp_path: Path) -> None:
    """A new prompt with images of an earlier one: its tokens are evaluated, its images are not encoded."""
    first, second = prompt(9, CAT, 4, DOG, 6), prompt(9, CAT, 4, DOG, 6, seed=1)
    expected = written(stepped(device, FakeEncoder()), *second)
    for ids, pictures, n_encoded in ((*first, 2), (*second, 0)):
        encoder = FakeEncoder()
        engine = Engine(EngineLoop(runner_on(device), encoder=encoder, store=BlockStore(tmp_path)))
        texts = finish(engine, writing(ids, pictures)).ids
        engine.close()
        assert len(encoder.encoded) == n_encoded
    assert texts == expected


def test_clients_share_no_embeddings_if_the_cache_is_scoped(device: Device) -> None:
    encoder, texts = FakeEncoder(), []
    engine = SteppedEngine(runner=runner_on(device), encoder=encoder, is_scoped=True)
    for client, n_encoded in (("one", 1), ("two", 2), ("one", 2)):
        request = writing(*prompt(9, CAT, 4))
        request.client = client
        engine.run(request)
        texts.append(results(request).ids)
        assert len(encoder.encoded) == n_encoded
    assert texts == texts[:1] * 3


def test_a_saved_cache_has_embeddings(device: Device, tmp_path: Path) -> None:
    ids, pictures = prompt(9, CAT, 4, DOG, 6)
    other = prompt(8, CAT, 4)
    engine = Engine(EngineLoop(runner_on(device), encoder=FakeEncoder()))
    expected = finish(engine, writing(ids, pictures)).ids
    others = finish(engine, writing(*other)).ids
    n_saved = saved_prompts.save(engine.with_cache, tmp_path / "cache", "key")
    engine.close()
    encoder = FakeEncoder()
    engine = Engine(EngineLoop(runner_on(device), encoder=encoder))
    assert saved_prompts.load(engine.with_cache, tmp_path / "cache", "key") == n_saved
    assert finish(engine, writing(ids, pictures)).ids == expected
    assert finish(engine, writing(*other)).ids == others
    assert in_engine(engine, lambda loop: len(loop.runner.cache.embeddings.items())) == 2
    assert not encoder.encoded
    engine.close()


def test_invalid_prompts_with_images(device: Device) -> None:
    ids, pictures = prompt(3, CAT, 2)
    blind = Engine(EngineLoop(runner_on(device)))
    with pytest.raises(UsageError, match="without an encoder"):
        blind.submit(writing(ids, pictures))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        blind.submit(writing(ids, PromptMedia()))
    blind.close()
    engine = Engine(EngineLoop(runner_on(device), encoder=FakeEncoder()))
    for wrong in (ids[:-4], [*ids[:5], 1, *ids[6:]], [1, *ids]):
        with pytest.raises(UsageError, match="are not at position 3"):
            engine.submit(writing(wrong, pictures))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        engine.submit(writing([*ids, -5], pictures))
    tall = PreparedMedia(b"tall", 10, (3, 5))
    with pytest.raises(UsageError, match="cannot have 3 rows"):
        engine.submit(writing(*prompt(3, tall)))
    with pytest.raises(UsageError, match="an image of 49 tokens does not fit into a step"):
        engine.submit(writing(*prompt(3, picture("big", 7, 7))))
    with pytest.raises(UsageError, match="have no logits"):
        engine.submit(reading(ids, 2, media=pictures))
    rows = finish(engine, reading(ids, 18, media=pictures)).rows
    assert len(rows) == 2
    engine.close()


def test_an_image_as_large_as_a_step_does_not_wait_for_those_that_decode(device: Device) -> None:
    engine = stepped(device, FakeEncoder())
    others = [writing(*prompt(2, seed=n), n=90) for n in range(3)]
    engine.submit(*others)
    engine.step(8)
    large = picture("big", 6, 8)
    assert large.n_tokens == MAX_TOKENS
    seeing = writing(*prompt(1, large, 1))
    engine.submit(seeing)
    engine.step(12)
    assert results(seeing).ids
