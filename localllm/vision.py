"""Pictures to rows of embeddings: an encoder that lies in an ``mmproj`` file beside its model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.devices import open_devices
from localllm.engine.pictures import Embeddings, Picture
from localllm.errors import ModelError, UsageError, path_text
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Backend, Batch, HostOutput, Step
from localllm.models.vision.encoder import FrameRows, Prepared, VisionModel
from localllm.models.vision.pictures import open_picture
from localllm.models.vision.registry import projector_of, read_encoder

__all__ = ["Encoder", "Prepared"]

#: Patches that one step encodes at most, unless one frame has more.
STEP_PATCHES = 4096
#: How long a piece of a step takes, between which the engine goes on with others.
PIECE_S = 0.02


@dataclass(eq=False)
class Encoder:
    """An encoder of pictures.  Not to be used by several threads at once.

    Attributes:
        family: its projector, as the file names it.
        width: of the rows that it makes, which is the text model's.
        n_embeddings: rows that it makes for each token: one, and those that layers of the text model add.
        marker: what a chat template puts where a picture stands; `Prepared.parts` take its place.
        around: what stands around that where no template puts it.
    """

    path: Path
    family: str
    model: VisionModel
    _file: GGUFFile
    _backend: Backend
    _close: Any
    _step: Step | None = None
    _sizes: tuple[int, int] = (0, 0)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        width: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> Encoder:
        """Opens a file; its weights are read when the first picture is encoded.

        Args:
            width: that of the text model's embeddings, which the encoder's rows must have.
            device, threads: as `localllm.load` has them.

        Raises:
            ModelNotFoundError, GGUFError: there is no such file, or it is damaged.
            ModelError: it is not an encoder of pictures, is incomplete, or belongs to a model of another width.
            UnsupportedArchitectureError: its projector is not known.
        """
        file = GGUFFile.open(path)
        try:
            family, model = projector_of(file.metadata), read_encoder(file)
            if width not in (None, model.width):
                raise ModelError(
                    f"{path_text(path)} makes embeddings of {model.width} values, but the model takes {width}: use "
                    "the mmproj file of this model"
                )
            *_, chosen = open_devices(device, threads=threads)
        except BaseException:
            file.close()
            raise
        return cls(Path(path), family, model, file, chosen.backend, chosen.close)

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def n_embeddings(self) -> int:
        return 1 + len(self.model.further)

    @property
    def marker(self) -> str:
        return self.model.marker

    @property
    def around(self) -> tuple[str, str]:
        return self.model.around

    def prepare(self, picture: Any, max_tokens: int | None = None) -> Prepared:
        """A picture as the model's own processor prepares it.

        Args:
            picture: a path, the bytes of a file, a Pillow image, or an array uint8 [height, width, 3].
            max_tokens: that it may become; by default as many as the processor allows.

        Raises:
            UsageError: it cannot be read, or the model cannot take one of its shape.
        """
        if isinstance(picture, Prepared):
            return picture
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens={max_tokens} is out of range: give a picture at least 1 token")
        return self.model.prepare(open_picture(picture), max_tokens)

    def picture(self, picture: Any, max_tokens: int | None = None) -> Picture:
        """A picture as requests have it, by the same name wherever its pixels are the same.

        Args:
            picture, max_tokens: as for `prepare`.
        """
        prepared = self.prepare(picture, max_tokens)
        name = hashlib.sha256(self._file.fingerprint().encode())
        for frame in prepared.frames:
            name.update(repr(frame.shape).encode())
            name.update(frame.tobytes())
        return Picture(name.digest(), prepared.n_tokens, prepared.grid if self.model.has_grid else (0, 0), prepared)

    def encode(self, pictures: Sequence[Picture]) -> Generator[None, None, list[Embeddings]]:
        """The embeddings of pictures, float32 [n_tokens, n_embeddings, width] each; yields between pieces of work.

        Several frames are computed at once, and the same bits come of each whatever is beside it.
        """
        prepared: list[Prepared] = [picture.source for picture in pictures]
        frames = [self.model.rows(frame) for each in prepared for frame in each.frames]
        made: list[NDArray[np.float32]] = []
        for some in _batches(frames):
            rows = yield from self._run(some)
            made += np.split(rows, np.cumsum([len(frame.outputs) for frame in some])[:-1])
        found: list[Embeddings] = []
        for each in prepared:
            own, made = made[: len(each.frames)], made[len(each.frames) :]
            found.append(np.concatenate(own))
        return found

    def _run(self, frames: Sequence[FrameRows]) -> Generator[None, None, NDArray[np.float32]]:
        """One step: [N, n_embeddings, width]."""
        lengths = [frame.axes.shape[1] for frame in frames]
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        step = self._compiled(int(starts[-1]), sum(len(frame.outputs) for frame in frames), lengths)
        per_page = step.cache.page_size
        pages = [-(-length // per_page) for length in lengths]
        tables = np.zeros((1, len(frames), max(pages)), np.int32)
        begin = 0
        for table, n in zip(tables[0], pages, strict=True):
            table[:n] = np.arange(begin, begin + n)
            begin += n
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
        )
        given = HostOutput(np.concatenate([frame.given for frame in frames]))
        rows = (yield from step.run_in_pieces(batch, PIECE_S, given)).rows()
        return np.stack([rows, *(step.value(x) for x in self.model.further)], axis=1)

    def _compiled(self, n_tokens: int, n_outputs: int, lengths: Sequence[int]) -> Step:
        """A step with room for so many patches: that of before, or a larger one in its place."""
        if self._step is None or n_tokens > self._sizes[0] or n_outputs > self._sizes[1]:
            before = self._step  # until the new one has its weights
            self._sizes = max(n_tokens, self._sizes[0]), max(n_outputs, self._sizes[1])
            # Frames' last pages may be all but empty; smaller ones than these come in as many pages at most.
            n_pages = -(-self._sizes[0] // self._backend.page_size) + self._sizes[0] // min(lengths)
            graph = self.model.graph
            self._step = self._backend.compile(
                graph,
                n_pages=(n_pages,) * len(graph.windows),
                max_tokens=self._sizes[0],
                max_outputs=self._sizes[1],
            )
            del before
        return self._step

    def close(self) -> None:
        """Gives back memory and threads."""
        self._step = None
        self._file.close()
        self._close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
