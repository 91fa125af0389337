"""A forward pass over several backends, traced: its operations as a list, cut where the next backend's weights begin.

Only the residual stream crosses such a cut, so each piece is a forward pass of its own, from the hidden states of the
one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from localllm.errors import KernelError
from localllm.kernels.ops import Backend, Tensor


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor of the forward pass that is traced: a row of so many values for each token, or for something else.

    A routing is one too.
    """

    width: int
    of_tokens: bool = True


@dataclass(frozen=True)
class Call:
    """An operation: called with a backend and ``inputs`` it gives ``results``; nobody needs ``last`` afterwards."""

    run: Callable[[Backend, Sequence[Tensor]], Sequence[Tensor]]
    inputs: tuple[Traced, ...]
    results: tuple[Traced, ...]
    last: tuple[Traced, ...] = ()


@dataclass(frozen=True)
class Piece:
    """The operations of one backend, from ``begin``, hidden states computed elsewhere, to ``end``."""

    backend: int
    begin: Traced | None
    calls: tuple[Call, ...]
    end: Traced

    def run(self, ops: Backend) -> Tensor:
        """Does them: the forward function of a part."""
        values: dict[Traced, Tensor] = {}
        if self.begin is not None:
            values[self.begin] = ops.hidden(self.begin.width)
        for call in self.calls:
            results = call.run(ops, [values[x] for x in call.inputs])
            values.update(zip(call.results, results, strict=True))
            del results
            for x in call.last:
                del values[x]
        return values[self.end]


class Trace:
    """The operations of a forward pass while it is traced."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        #: The piece that the next operation is added to.
        self.backend = 0
        self._begin: Traced | None = None
        self._calls: list[Call] = []
        self._known: set[Traced] = set()

    def add(
        self,
        backend: int | None,
        inputs: Sequence[Traced],
        results: Sequence[Traced],
        run: Callable[[Backend, Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Adds an operation, on the backend that has its weights; without any, on the one that is at work."""
        if backend is not None and backend > self.backend and len(inputs) == 1:
            self._cut(inputs[0], backend)
        if backend not in (None, self.backend) or not all(self._knows(x) for x in inputs):
            raise KernelError(
                f"an operation on backend {self.backend if backend is None else backend} of a split model was given "
                "what lies on another: only hidden states, of each token, can go to the next"
            )
        self._calls.append(Call(run, tuple(inputs), tuple(results)))
        self._known.update(results)

    def _cut(self, x: Traced, backend: int) -> None:
        """Ends the piece with ``x``; the next one begins with it, on another backend."""
        if self._knows(x) and x.of_tokens:
            self.end(x)
            self.backend, self._begin, self._calls, self._known = backend, x, [], {x}

    def _knows(self, x: Tensor) -> bool:
        """Whether it is a tensor of the piece."""
        return isinstance(x, Traced) and x in self._known

    def end(self, result: Traced) -> None:
        """Ends the piece with its result."""
        if not self._knows(result):
            raise KernelError("a forward pass ended with something else than a tensor of its last backend")
        needed = {result}
        calls = []
        for call in reversed(self._calls):
            last = {*call.inputs, *call.results} - needed
            needed |= last
            calls.append(replace(call, last=tuple(last)))
        self.pieces.append(Piece(self.backend, self._begin, tuple(reversed(calls)), result))
