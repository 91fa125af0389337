"""Encodes the images and audio of prompts shortly before requests need their embeddings.

One piece of work is done at a time, between two steps of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Protocol

from localllm.engine.media import EmbeddingCache, Embeddings, PreparedMedia
from localllm.engine.request import Request

#: Most tokens of images and audio encoded at once, and most such tokens for which a prompt holds embeddings. A single
#: image may have more.
_TOKENS_AT_ONCE, _TOKENS_AHEAD = 1024, 4096


class MediaEmbedder(Protocol):
    """Computes embeddings of images and audio. Only the engine thread uses it."""

    def encode(self, media: Sequence[PreparedMedia], /) -> Generator[None, None, list[Embeddings]]:
        """Return the embeddings. Yields after each piece of work, which should take at most the time of a step.

        If a batch of several images fails, each image is encoded again on its own.
        """


class Encoding:
    """The encoding of missing embeddings, in batches of images and audio."""

    def __init__(self, encoder: MediaEmbedder | None, cache: EmbeddingCache) -> None:
        self.n_encoded = 0
        self.is_busy = False  # True if a request lacks embeddings
        self._encoder, self._cache = encoder, cache
        self._batch: dict[bytes, PreparedMedia] = {}  # being encoded, by `Request.media_key`
        self._work: Generator[None, None, list[Embeddings]] | None = None
        #: Keys of images from a failed batch. Each is encoded again on its own.
        self._alone: set[bytes] = set()

    def advance(self, requests: Iterable[Request], seconds: float) -> Mapping[Request, BaseException]:
        """Encode at least one piece of missing work, and more until ``seconds`` have passed.

        Return requests with an image that cannot be encoded, and the error.
        """
        missing = self._assign_embeddings(requests)
        if self._work is not None and not any(key in missing for key in self._batch):
            self._stop()
        end, self.is_busy = time.perf_counter() + seconds, bool(missing)
        failed: dict[Request, BaseException] = {}
        while missing:
            if self._work is None:
                self._begin(missing)
            assert self._work is not None
            try:
                next(self._work)
            except StopIteration as stop:
                for (key, media), embeddings in zip(self._batch.items(), stop.value, strict=True):
                    self.n_encoded += 1
                    _, waiting = missing.pop(key, (media, ()))
                    self._cache.put(key, embeddings)
                    for request in waiting:
                        request.embeddings[media.key] = embeddings
                self._stop()
            except BaseException as error:
                if len(self._batch) > 1:
                    self._alone.update(self._batch)
                else:
                    [(key, media)] = self._batch.items()
                    _, waiting = missing.pop(key, (media, ()))
                    failed |= dict.fromkeys(waiting, error)
                self._stop()
            if time.perf_counter() >= end:
                break
        return failed

    def _assign_embeddings(self, requests: Iterable[Request]) -> dict[bytes, tuple[PreparedMedia, list[Request]]]:
        """Give requests the cached embeddings of their next images.

        Return missing images and their requests, by `Request.media_key`.
        """
        missing: dict[bytes, tuple[PreparedMedia, list[Request]]] = {}
        for request in requests:
            if request.sequence is None or request.media.stop <= len(request.sequence):
                request.embeddings.clear()
                continue
            near, n_tokens = list[PreparedMedia](), 0
            for span in request.media.of(len(request.sequence), request.media.stop):
                if near and n_tokens + span.stop - span.start > _TOKENS_AHEAD:
                    break
                near.append(span.media)
                n_tokens += span.stop - span.start
            for key in {*request.embeddings} - {media.key for media in near}:
                del request.embeddings[key]
            for media in dict.fromkeys(near):
                if media.key in request.embeddings:
                    continue
                key = request.media_key(media)
                if (embeddings := self._cache.get(key)) is not None and len(embeddings) == media.n_tokens:
                    request.embeddings[media.key] = embeddings
                else:
                    missing.setdefault(key, (media, []))[1].append(request)
        return missing

    def _begin(self, missing: Mapping[bytes, tuple[PreparedMedia, list[Request]]]) -> None:
        n_tokens = 0
        for key, (media, _) in missing.items():
            is_alone = key in self._alone
            if self._batch and (is_alone or n_tokens + media.n_tokens > _TOKENS_AT_ONCE):
                break
            self._batch[key] = media
            n_tokens += media.n_tokens
            if is_alone:
                self._alone.discard(key)
                break
        assert self._encoder is not None
        self._work = self._encoder.encode(list(self._batch.values()))

    def _stop(self) -> None:
        if self._work is not None:
            self._work.close()
        self._work, self._batch = None, {}
