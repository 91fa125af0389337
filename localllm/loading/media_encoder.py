"""Encode images and audio to rows of embeddings with the encoders of an ``mmproj`` file, or prompts with a model's
own encoder."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.cancellation import cancellable
from localllm.chat.conversation import Media
from localllm.engine.media import Embeddings, MediaTokens, PreparedMedia, PromptMedia
from localllm.errors import ModelError, NotEnoughMemoryError, UsageError, path_text
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Backend, Batch, Footprint, HostOutput, Step
from localllm.kernels.cpu.host import available_memory
from localllm.kernels.graph import Graph, Tensor
from localllm.loading.placement import EncoderInfo
from localllm.models.encoders.encoder import EncoderModel, EncoderStage, FrameRows, Prepared
from localllm.models.encoders.registry import PROJECTORS, projectors_of, read_encoder
from localllm.models.registry import ARCHITECTURES
from localllm.parallel import in_thread

#: Maximum patches of a step, unless one frame has more.
STEP_PATCHES = 4096
#: Maximum bytes of prepared pixels of a prompt's images before they are encoded.
MAX_HELD_BYTES = 256 << 20
#: Maximum files whose images are remembered by hash.
_MAX_KNOWN = 4096
#: Seconds of a piece of a step. Between pieces the engine continues with other requests.
PIECE_S = 0.02
#: Seconds between two checks whether a thread has finished.
_LOOK_S = 0.001

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Released(Prepared):
    """An image without its pixels, or audio without its samples; prepared again when it is encoded."""

    media: Media


_NO_MEDIA = Media(None)


@dataclass(eq=False)
class _Compiled:
    stage: EncoderStage
    step: Step | None = None
    sizes: tuple[int, ...] = (0, 0, 0, 0)  # maximum patches, rows, cache pages and frames of the step


@dataclass(eq=False)
class _Encoder:
    family: str  # projector type in the file
    model: EncoderModel  # graphs and preprocessing
    stages: list[_Compiled] = field(init=False)

    def __post_init__(self) -> None:
        self.stages = [_Compiled(stage) for stage in self.model.stages]


@dataclass(eq=False)
class MediaEncoder:
    """Encoders of images and audio. Only one thread at a time may use the methods that encode."""

    path: Path  # the mmproj file, or the model's file
    encoders: dict[str, _Encoder]  # by kind, "image", "audio" or "text"
    _file: GGUFFile
    backend: Backend | None = None  # set before the first `encode`
    image_max_tokens: int | None = None  # limit for each image; None for the limit of the model's processor
    #: Most recent images and audio by hash of the file, kind and token limit.
    _cache: dict[tuple[bytes, str, int | None], PreparedMedia] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MediaEncoder:
        """Open a file. The first `encode` reads the weights and needs a ``backend``."""
        file = GGUFFile.open(path)
        try:
            families = projectors_of(file.metadata)
            encoders = {kind: _Encoder(family, read_encoder(file, kind)) for kind, family in families.items()}
            return cls(Path(path), encoders, file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def of_prompts(cls, path: Path, architecture: str, cache_type: str) -> MediaEncoder:
        """Open the encoder of prompts in a model's file."""
        file = GGUFFile.open(path)
        try:
            model = ARCHITECTURES[architecture].prompt_encoder(file, cache_type)
            return cls(path, {model.kind: _Encoder(architecture, model)}, file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def of(cls, path: str | os.PathLike[str], architecture: str, width: object) -> MediaEncoder:
        """Open a file for a text model of this architecture with embeddings of ``width`` values.

        Raises ModelError if the file is for another model.
        """
        encoder = cls.open(path)
        family = PROJECTORS[encoder.family]
        if architecture not in family.texts.split():
            words = f"is for {family.models}, but the model is of the architecture {architecture!r}"
        elif width != encoder.width:
            words = f"makes embeddings of {encoder.width:,} values, but the model's have {width}"
        else:
            return encoder
        encoder.close()
        raise ModelError(f"{path_text(encoder.path)} {words}: give the mmproj file of this model")

    @property
    def family(self) -> str:
        """Projector type of the first encoder."""
        return next(iter(self.encoders.values())).family

    @property
    def model(self) -> EncoderModel:
        """The first encoder."""
        return next(iter(self.encoders.values())).model

    @property
    def _computed_by(self) -> Backend:
        assert self.backend is not None
        return self.backend

    @property
    def width(self) -> int:
        """Values per row of embeddings."""
        return self.model.width

    @property
    def markers(self) -> dict[str, tuple[str, str, str]]:
        """By kind: the text before the marker, the marker of chat templates that `Prepared.segments` replace, and the
        text after it. The texts are for templates that do not write the marker."""
        models = {kind: encoder.model for kind, encoder in self.encoders.items()}
        return {kind: (model.around[0], model.marker, model.around[1]) for kind, model in models.items()}

    def of_kind(self, kind: str) -> EncoderModel:
        """Return the encoder of "image" or "audio". Raises UsageError if the file has no such encoder."""
        if (encoder := self.encoders.get(kind)) is None:
            inputs = "audio" if kind == "audio" else "images"
            raise UsageError(
                f"{path_text(self.path)} has no encoder of {inputs}, so the model does not accept {inputs}"
            )
        return encoder.model

    def prepare(
        self, source: Any, max_tokens: int | None = None, where: str = "the image", kind: str | None = None
    ) -> Prepared:
        """Return an image or audio file as the model's released processor prepares it.  May be called in any thread.

        Args:
            source: a path, the bytes of a file, a Pillow image, an array uint8 [height, width, 3], or audio samples
                (`localllm.models.encoders.sounds.open_audio`).
            max_tokens: maximum tokens of an image; ``image_max_tokens`` applies too.
            where: name of the source in errors, if it has no path.
            kind: "image" or "audio"; by default the kind of `model`.
        """
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens={max_tokens} is out of range: an image needs at least 1 token")
        model = self.model if kind is None else self.of_kind(kind)
        limits = [limit for limit in (max_tokens, self.image_max_tokens) if limit is not None]
        return model.prepare(model.open(source, where), min(limits, default=None))

    def as_media(self, prepared: Prepared) -> PreparedMedia:
        """Return a request's image. Equal pixels have equal keys."""
        name = hashlib.sha256(self._file.fingerprint().encode())
        name.update(repr((prepared.segments, prepared.grid)).encode())
        for frame in prepared.frames:
            name.update(repr(frame.shape).encode())
            name.update(frame.tobytes())
        model = self.of_kind(prepared.kind)
        grid, is_causal = prepared.grid if model.has_grid else (0, 0), prepared.kind != "image"
        return PreparedMedia(name.digest(), prepared.n_tokens, grid, prepared, is_causal, model.is_numbered)

    def encoded_prompt(self, ids: Sequence[int]) -> tuple[list[int], PromptMedia]:
        """Return the decoder's tokens for a prompt: a placeholder per token of the prompt, and the start token."""
        model: Any = self.model
        medium = replace(self.as_media(model.prepare(ids)), text=tuple(ids))
        return [*medium.ids, model.start_id], PromptMedia([MediaTokens(0, medium)])

    def prompt(
        self,
        pieces: Sequence[str | Media],
        encode: Callable[[str], list[int]],
        prepared: dict[Media, PreparedMedia] | None = None,
    ) -> tuple[list[int], list[MediaTokens]]:
        """Return the token ids of a prompt of text, images and audio, and the positions of the media tokens.

        Strings in ``pieces`` must not contain markers of media; ``encode`` tokenizes them. Images and audio that are
        not in ``prepared`` are prepared and added to it.
        """
        prepared = {} if prepared is None else prepared
        ids: list[int] = []
        placed: list[MediaTokens] = []
        n_seen: Counter[str] = Counter()  # images and audio so far, by kind
        words = ""  # text that is not tokenized yet, because text of neighbouring pieces is tokenized together
        for piece in pieces:
            if isinstance(piece, str):
                words += piece
                continue
            if piece not in prepared:
                prepared[piece] = self._prepared_or_cached(piece, prepared.values())
            medium, first = prepared[piece], 0
            words += self.of_kind(piece.kind).numbered.format(n_seen[piece.kind])
            n_seen[piece.kind] += 1
            for segment in medium.source.segments:
                if isinstance(segment, str):
                    words += segment
                    continue
                ids += encode(words) if words else ()
                words = ""
                placed.append(MediaTokens(len(ids), medium, first, segment if segment < medium.n_tokens else 0))
                ids += medium.ids[first : first + segment]
                first += segment
        return ids + (encode(words) if words else []), placed

    def _prepared_or_cached(self, media: Media, prompt_media: Collection[PreparedMedia]) -> PreparedMedia:
        """Return a prompt's image. An equal image of the prompt is used again. Pixels are released if the images have
        too many bytes, or if the same file came before: later turns of a chat do not open the file again."""
        name = None
        if isinstance(media.source, bytes):
            name = hashlib.sha256(media.source).digest(), media.kind, media.max_tokens
            with self._lock:
                if (cached := self._cache.get(name)) is not None:
                    return replace(cached, source=replace(cached.source, media=media))
        prepared = self.prepare(media.source, media.max_tokens, media.where, media.kind)
        medium = self.as_media(prepared)
        source = _Released((), prepared.segments, prepared.grid, media=media, kind=prepared.kind)
        released = replace(medium, source=source)
        if name is not None:
            with self._lock:
                self._cache[name] = replace(released, source=replace(released.source, media=_NO_MEDIA))
                if len(self._cache) > _MAX_KNOWN:
                    del self._cache[next(iter(self._cache))]
        for equal in prompt_media:
            if equal.key == medium.key:
                return equal
        n_bytes = sum(frame.nbytes for m in (medium, *prompt_media) for frame in m.source.frames)
        return released if n_bytes > MAX_HELD_BYTES else medium

    def _prepared(self, medium: PreparedMedia) -> Prepared:
        media = medium.source.media
        source = self.prepare(media.source, media.max_tokens, media.where, media.kind)
        if self.as_media(source).key != medium.key:
            raise UsageError(f"the file of {media.where} has changed since it was read: send it again")
        return source

    def encode(self, media: Sequence[PreparedMedia]) -> Generator[None, None, list[Embeddings]]:
        """Return the embeddings of images and audio, each float32 [n_tokens, n_embeddings, width].

        Yields between pieces of work. A step computes several frames; its results do not depend on the other frames.
        """
        prepared: list[Prepared] = []
        for medium in media:
            source = medium.source
            if isinstance(source, _Released):
                source = yield from _until_done(partial(self._prepared, medium), is_daemon=True)
            prepared.append(source)
        embeddings: dict[int, Embeddings] = {}
        n_embeddings = 1 + max(len(encoder.model.further) for encoder in self.encoders.values())
        for kind, encoder in self.encoders.items():
            items = [item for item in prepared if item.kind == kind]
            frames = []
            for frame in (frame for item in items for frame in item.frames):
                frames.append((yield from encoder.model.rows_in_pieces(frame)))
            all_rows: list[NDArray[np.float32]] = []
            for some in _batches(frames):
                rows: list[NDArray[np.float32]] = []
                stages = [encoder.stages[some[0].stage], *encoder.stages[encoder.model.n_alternatives :]]
                for stage in stages:
                    for i, row in enumerate(rows):
                        some[i] = yield from encoder.model.following_in_pieces(row[:, 0], some[i])
                    rows = yield from self._run(stage, some, encoder.model.further if stage is stages[-1] else ())
                all_rows += rows
            for item in items:
                mine, all_rows = all_rows[: len(item.frames)], all_rows[len(item.frames) :]
                arranged = encoder.model.arranged(item, np.concatenate(mine))
                # Layers that add further embeddings of images add zeros to audio.
                embeddings[id(item)] = np.pad(arranged, ((0, 0), (0, n_embeddings - arranged.shape[1]), (0, 0)))
        return [embeddings[id(item)] for item in prepared]

    def _run(
        self, compiled: _Compiled, frames: Sequence[FrameRows], further: Sequence[Tensor] = ()
    ) -> Generator[None, None, list[NDArray[np.float32]]]:
        """Run one step. Returns [n_outputs, 1 + len(further), width] for each frame."""
        lengths = [frame.axes.shape[1] for frame in frames]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        pages = [-(-length // self._computed_by.page_size) for length in lengths]
        n_outputs = sum(len(frame.outputs) for frame in frames)
        step = yield from self._compiled(compiled, int(starts[-1]), n_outputs, sum(pages), len(frames))
        tables = np.zeros((1, len(frames), max(pages)), np.int32)
        begin = 0
        for table, n in zip(tables[0], pages, strict=True):
            table[:n] = np.arange(begin, begin + n)
            begin += n
        spans = np.concatenate([frame.spans for frame in frames], axis=1)
        outputs = [frame.outputs + start for frame, start in zip(frames, starts.tolist(), strict=False)]
        batch = Batch(
            ids=np.zeros(starts[-1], np.int32),
            positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            query_starts=starts,
            kv_lengths=np.array(lengths, np.int32),
            block_tables=np.repeat(tables, len(step.cache.windows), axis=0),
            outputs=np.concatenate(outputs).astype(np.int32),
            axes=np.concatenate([frame.axes for frame in frames], axis=1),
            begins=spans[0],
            ends=spans[1],
            states=np.arange(len(frames), dtype=np.int32),
        )
        given = HostOutput(np.concatenate([frame.inputs for frame in frames]))
        rows = (yield from step.run_in_pieces(batch, PIECE_S, given)).rows()
        made = np.stack([rows, *(step.value(x) for x in further)], axis=1)
        return np.split(made, np.cumsum([len(frame.outputs) for frame in frames])[:-1])

    def _compiled(self, compiled: _Compiled, *sizes: int) -> Generator[None, None, Step]:
        """Return the step, or a larger one if there are more patches, rows, pages or frames than it has room for."""
        if compiled.step is None or any(size > room for size, room in zip(sizes, compiled.sizes, strict=True)):
            larger = tuple(map(max, sizes, compiled.sizes))
            footprint = self._footprint(compiled.stage.graph, *larger)
            n_bytes, available = footprint.buffers + sum(footprint.caches.values()), available_memory()
            if n_bytes > available:
                raise NotEnoughMemoryError(
                    f"to encode {sizes[0]:,} patches of an image takes {n_bytes / 1e9:.2f} GB, but "
                    f"{available / 1e9:.2f} GB are available: send a smaller image, or an image with detail = low"
                )
            for _ in footprint.pack():
                yield
            # The first image on a machine compiles kernels.
            compiled.step = yield from _until_done(partial(footprint.load, None), is_daemon=False)
            compiled.sizes = larger
        return compiled.step

    def _footprint(self, graph: Graph, n_tokens: int, n_outputs: int, n_pages: int, n_frames: int) -> Footprint:
        sizes: Any = {"n_pages": (n_pages,) * len(graph.windows)}
        if graph.states:
            sizes["n_states"] = n_frames
        return self._computed_by.footprint(graph, max_tokens=n_tokens, max_outputs=n_outputs, **sizes)

    @property
    def info(self) -> EncoderInfo:
        """Facts about the encoder, with its memory for images of up to `STEP_PATCHES` patches."""
        n_bytes = 0
        for encoder in self.encoders.values():
            n_patches = min(STEP_PATCHES, encoder.model.max_rows)
            for compiled in encoder.stages:
                n_rows, n_pages = n_patches // compiled.stage.n_joined, -(-n_patches // self._computed_by.page_size)
                n_bytes += self._footprint(compiled.stage.graph, n_patches, n_rows, n_pages, n_pages).n_bytes
                n_patches = n_rows
        family = ", ".join(encoder.family for encoder in self.encoders.values())
        return EncoderInfo(self.path, family, n_bytes, self.n_tokens("image"), self.n_tokens("audio"))

    def n_tokens(self, kind: str) -> int:
        """Return the tokens of an image of 1,024 × 768 pixels or of 30 seconds of audio; 0 without an encoder."""
        if kind not in self.encoders:
            return 0
        model = self.encoders[kind].model
        return model.prepare(model.example).n_tokens

    def close(self) -> None:
        for encoder in self.encoders.values():
            for compiled in encoder.stages:
                compiled.step = None
        self._file.close()


def _until_done(work: Callable[[], _T], *, is_daemon: bool) -> Generator[None, None, _T]:
    """Return the result of ``work`` from another thread, and yield until the thread ends.

    ``check_cancelled`` ends the work when the generator is closed.  A daemon thread does not delay the end of the
    program; a program that ended while LLVM compiles could crash.
    """
    is_over = threading.Event()

    def run() -> _T:
        with cancellable(is_over.is_set):
            return work()

    result = in_thread(run, "localllm-encoder", is_daemon=is_daemon)
    try:
        while not wait((result,), _LOOK_S).done:
            yield
        return result.result()
    finally:
        is_over.set()


def _batches(frames: Sequence[FrameRows]) -> Iterator[list[FrameRows]]:
    """Yield batches of frames with the same first stage and at most `STEP_PATCHES` patches.

    A larger frame is a batch alone.
    """
    some: list[FrameRows] = []
    for frame in frames:
        n_patches = sum(f.axes.shape[1] for f in (*some, frame))
        if some and (n_patches > STEP_PATCHES or frame.stage != some[0].stage):
            yield some
            some = []
        some.append(frame)
    if some:
        yield some
