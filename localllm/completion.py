"""Generated text: all at once (`Completion`), or as it comes (`Stream` of `Chunk`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from localllm.drafting.drafter import Drafts
from localllm.generation import FinishReason, Generation, Timings, Usage
from localllm.sampling import Choice
from localllm.tokenizer.stream import StreamDecoder


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model wrote.

    Attributes:
        text: without the stop string or end-of-generation token that ended it.
        ids: the tokens generated, without the end-of-generation token.  Where a stop string ended the text, its
            tokens are among them.
        finish_reason: "stop" (the model ended its text, or a stop string came), "length" (``max_tokens`` or the
            end of the context) or "cancelled".
        usage: counts of tokens.
        timings: seconds and rates.
        logprobs: of each token, with the likeliest ones, where ``logprobs`` asked for them.
        drafts: how many tokens were guessed and how many accepted, where ``speculate`` asked for guesses.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[Choice, ...] | None = None
    drafts: Drafts | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream: one for each token, and a last one.

    Attributes:
        text: what is certain now; it may be empty, for half a character or what may become a stop string is
            held back.
        ids: the token; none in the last chunk.
        logprobs: as `Completion.logprobs`, of this token.
        finish_reason, usage, timings, drafts: in the last chunk alone; as in `Completion`.
    """

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[Choice, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    drafts: Drafts | None = None

    def __str__(self) -> str:
        return self.text


class Stream:
    """An iterator of `Chunk`, and a context manager.

    ``cancel`` may be called from any thread: the work stops at the next token, or between two chunks of a long
    prompt, and a last chunk says so.  ``close``, or dropping the stream, ends it without one.
    """

    def __init__(self, generation: Generation, decoder: StreamDecoder, *, logprobs: bool) -> None:
        self._generation = generation
        self._decoder = decoder
        self._logprobs = logprobs
        self._ended = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it goes on."""
        return self._generation.finish_reason

    @property
    def usage(self) -> Usage:
        """Counts of tokens so far."""
        return self._generation.usage

    @property
    def timings(self) -> Timings:
        """Seconds and rates so far."""
        return self._generation.timings

    @property
    def drafts(self) -> Drafts | None:
        """What became of guesses so far; None where none were asked for."""
        return self._generation.drafts

    def cancel(self) -> None:
        """Ends the text at the next token."""
        self._generation.close()

    def close(self) -> None:
        """Ends the stream."""
        self._ended = True
        self._generation.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            StopIteration: it has ended.
            ClosedError: the model was closed.
        """
        if self._ended:
            raise StopIteration
        choice = next(self._generation, None)
        if choice is None:
            return self._last_chunk()
        text = self._decoder.feed(choice.id)
        if self._decoder.stopped is not None:
            self._generation.stop()
        return Chunk(text, (choice.id,), (choice,) if self._logprobs else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> Completion:
        """Waits for what is still to come, and returns it as one."""
        chunks = list(self)
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            ids=tuple(id_ for chunk in chunks for id_ in chunk.ids),
            finish_reason=self.finish_reason or "cancelled",
            usage=self.usage,
            timings=self.timings,
            logprobs=tuple(c for chunk in chunks for c in chunk.logprobs or ()) if self._logprobs else None,
            drafts=self.drafts,
        )

    def _last_chunk(self) -> Chunk:
        self._ended = True
        text = self._decoder.finish()
        if self._decoder.stopped is not None:
            self._generation.stop()
        return Chunk(
            text, finish_reason=self.finish_reason, usage=self.usage, timings=self.timings, drafts=self.drafts
        )
