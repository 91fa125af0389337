"""Pictures to rows of embeddings: an encoder that lies in an ``mmproj`` file beside its model."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.chat.conversation import Image
from localllm.engine.pictures import Embeddings, Picture, PictureTokens
from localllm.errors import ModelError, UsageError, path_text
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Backend, Batch, Footprint, HostOutput, Step
from localllm.loading.placement import EncoderInfo
from localllm.models.vision.encoder import FrameRows, Prepared, VisionModel
from localllm.models.vision.pictures import open_picture
from localllm.models.vision.registry import PROJECTORS, projector_of, read_encoder

#: Patches that one step encodes at most, unless one frame has more.
STEP_PATCHES = 4096
#: Bytes of prepared pixels that the pictures of a prompt have at most before they are encoded.
MAX_HELD_BYTES = 256 << 20
#: Files whose pictures are known by their hashes.
_MAX_KNOWN = 4096
#: How long a piece of a step takes, between which the engine goes on with others.
PIECE_S = 0.02


@dataclass(frozen=True)
class _Released(Prepared):
    """A picture without its pixels, which are prepared again when it is encoded."""

    image: Image


_NO_IMAGE = Image(None)


@dataclass(eq=False)
class VisionEncoder:
    """An encoder of pictures.  What computes is not to be used by several threads at once."""

    path: Path  # its file
    family: str  # its projector, as the file names it
    model: VisionModel  # its graph, and how it prepares pictures
    _file: GGUFFile
    backend: Backend | None = None  # what computes
    _step: Step | None = None
    _sizes: tuple[int, ...] = (0, 0, 0)  # patches, rows and pages of the cache that the step has room for
    #: Pictures by their files' hashes and bounds of tokens, those that came last.
    _known: dict[tuple[bytes, int | None], Picture] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> VisionEncoder:
        """Opens a file; its weights are read when the first picture is encoded, which needs a ``backend``."""
        file = GGUFFile.open(path)
        try:
            return cls(Path(path), projector_of(file.metadata), read_encoder(file), file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def of(cls, path: str | os.PathLike[str], architecture: str, width: object) -> VisionEncoder:
        """As `open`, for a text model of this architecture, whose embeddings have so many values."""
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
    def _computed_by(self) -> Backend:
        assert self.backend is not None
        return self.backend

    @property
    def width(self) -> int:
        """Of the rows that it makes."""
        return self.model.width

    @property
    def marker(self) -> str:
        """The marker that chat templates write for a picture; `Prepared.parts` replace it."""
        return self.model.marker

    @property
    def around(self) -> tuple[str, str]:
        """Texts around the marker where no template writes it."""
        return self.model.around

    def prepare(self, picture: Any, max_tokens: int | None = None, where: str = "the picture") -> Prepared:
        """A picture as the model's own processor prepares it; in any thread.

        ``picture`` is a path, the bytes of a file, a Pillow image, or an array uint8 [height, width, 3].  It becomes
        at most ``max_tokens``, by default as many as the processor allows.  Errors call it ``where`` without a path.
        """
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens={max_tokens} is out of range: give a picture at least 1 token")
        return self.model.prepare(open_picture(picture, where), max_tokens)

    def picture(self, prepared: Prepared) -> Picture:
        """A picture as requests have it, with the same key wherever its pixels are the same."""
        name = hashlib.sha256(self._file.fingerprint().encode())
        name.update(repr((prepared.parts, prepared.grid)).encode())
        for frame in prepared.frames:
            name.update(repr(frame.shape).encode())
            name.update(frame.tobytes())
        return Picture(name.digest(), prepared.n_tokens, prepared.grid if self.model.has_grid else (0, 0), prepared)

    def prompt(
        self,
        pieces: Sequence[str | Image],
        encode: Callable[[str], list[int]],
        known: dict[Image, Picture] | None = None,
    ) -> tuple[list[int], list[PictureTokens]]:
        """The ids of a prompt of texts and pictures, and where the pictures' tokens are in it.

        Texts among the ``pieces`` have no markers of pictures, and ``encode`` tokenizes them.  Pictures that are not
        in ``known`` are prepared and added to it.
        """
        known = {} if known is None else known
        ids: list[int] = []
        placed: list[PictureTokens] = []
        words = ""  # what was not made ids of: texts of neighbouring pieces are tokenized together
        for piece in pieces:
            if isinstance(piece, str):
                words += piece
                continue
            if piece not in known:
                known[piece] = self._kept(piece, known.values())
            picture, first = known[piece], 0
            for part in picture.source.parts:
                if isinstance(part, str):
                    words += part
                    continue
                ids += encode(words) if words else ()
                words = ""
                placed.append(PictureTokens(len(ids), picture, first, part if part < picture.n_tokens else 0))
                ids += picture.ids[first : first + part]
                first += part
        return ids + (encode(words) if words else []), placed

    def _kept(self, image: Image, others: Collection[Picture]) -> Picture:
        """A picture of a prompt: another one of the same pixels, or without its own where others have many, or where
        the same file came before: further turns of a chat open no file again."""
        name = None
        if isinstance(image.source, bytes):
            name = hashlib.sha256(image.source).digest(), image.max_tokens
            with self._lock:
                if (found := self._known.get(name)) is not None:
                    return replace(found, source=replace(found.source, image=image))
        picture = self.picture(prepared := self.prepare(image.source, image.max_tokens, image.where))
        released = replace(picture, source=_Released((), prepared.parts, prepared.grid, image))
        if name is not None:
            with self._lock:
                self._known[name] = replace(released, source=replace(released.source, image=_NO_IMAGE))
                if len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]
        for other in others:
            if other.key == picture.key:
                return other
        n_bytes = sum(frame.nbytes for each in (picture, *others) for frame in each.source.frames)
        if n_bytes > MAX_HELD_BYTES:
            return released
        return picture

    def _prepared(self, picture: Picture) -> Prepared:
        source: Prepared = picture.source
        if isinstance(source, _Released):
            image = source.image
            source = self.prepare(image.source, image.max_tokens, image.where)
            if self.picture(source).key != picture.key:
                raise UsageError(f"the file of {image.where} has changed since it was read: send it again")
        return source

    def encode(self, pictures: Sequence[Picture]) -> Generator[None, None, list[Embeddings]]:
        """The embeddings of pictures, float32 [n_tokens, n_embeddings, width] each; yields between pieces of work.

        Several frames are computed at once, and the same bits come of each whatever is beside it.
        """
        prepared = [self._prepared(picture) for picture in pictures]
        frames = [self.model.rows(frame) for each in prepared for frame in each.frames]
        made: list[NDArray[np.float32]] = []
        for some in _batches(frames):
            rows = yield from self._run(some)
            made += np.split(rows, np.cumsum([len(frame.outputs) for frame in some])[:-1])
        found: list[Embeddings] = []
        for each in prepared:
            own, made = made[: len(each.frames)], made[len(each.frames) :]
            found.append(self.model.arranged(each, np.concatenate(own)))
        return found

    def _run(self, frames: Sequence[FrameRows]) -> Generator[None, None, NDArray[np.float32]]:
        """One step: [N, n_embeddings, width]."""
        lengths = [frame.axes.shape[1] for frame in frames]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        pages = [-(-length // self._computed_by.page_size) for length in lengths]
        step = yield from self._compiled(int(starts[-1]), sum(len(frame.outputs) for frame in frames), sum(pages))
        tables = np.zeros((1, len(frames), max(pages)), np.int32)
        begin = 0
        for table, n in zip(tables[0], pages, strict=True):
            table[:n] = np.arange(begin, begin + n)
            begin += n
        spans = np.concatenate([frame.spans for frame in frames], axis=1)
        batch = Batch(
            ids=np.zeros(starts[-1], np.int32),
            positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            query_starts=starts,
            kv_lengths=np.array(lengths, np.int32),
            block_tables=np.repeat(tables, len(step.cache.windows), axis=0),
            outputs=np.concatenate(
                [frame.outputs + start for frame, start in zip(frames, starts.tolist(), strict=False)]
            ).astype(np.int32),
            axes=np.concatenate([frame.axes for frame in frames], axis=1),
            begins=spans[0],
            ends=spans[1],
        )
        given = HostOutput(np.concatenate([frame.given for frame in frames]))
        rows = (yield from step.run_in_pieces(batch, PIECE_S, given)).rows()
        return np.stack([rows, *(step.value(x) for x in self.model.further)], axis=1)

    def _compiled(self, *sizes: int) -> Generator[None, None, Step]:
        """A step with room for so many patches, rows and pages: that of before, or a larger one in its place."""
        if self._step is None or any(size > room for size, room in zip(sizes, self._sizes, strict=True)):
            larger = tuple(map(max, sizes, self._sizes))
            footprint = self._footprint(*larger)
            for _ in footprint.pack():
                yield
            self._step, self._sizes = footprint.load(None), larger
        return self._step

    def _footprint(self, n_tokens: int, n_outputs: int, n_pages: int) -> Footprint:
        graph = self.model.graph
        pages = (n_pages,) * len(graph.windows)
        return self._computed_by.footprint(graph, n_pages=pages, max_tokens=n_tokens, max_outputs=n_outputs)

    @property
    def info(self) -> EncoderInfo:
        """Its memory for pictures of up to `STEP_PATCHES` patches."""
        n_pages = -(-STEP_PATCHES // self._computed_by.page_size)
        footprint = self._footprint(STEP_PATCHES, STEP_PATCHES // self.model.merge**2, n_pages)
        return EncoderInfo(self.path, self.family, footprint.n_bytes, self.common_tokens)

    @property
    def common_tokens(self) -> int:
        """Tokens that it makes of a picture of 1,024 × 768 pixels."""
        return self.prepare(np.zeros((768, 1024, 3), np.uint8)).n_tokens

    def close(self) -> None:
        self._step = None
        self._file.close()


def _batches(frames: Sequence[FrameRows]) -> Iterator[list[FrameRows]]:
    """Frames of together at most `STEP_PATCHES` patches, or one alone."""
    some: list[FrameRows] = []
    for frame in frames:
        if some and sum(each.axes.shape[1] for each in some) + frame.axes.shape[1] > STEP_PATCHES:
            yield some
            some = []
        some.append(frame)
    if some:
        yield some
