"""What a conversation that is longer than the context can do without: from which turn on it fits.

The window of a message says so (`localllm.tui.conversation.Window`); nothing is deleted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from localllm.errors import UsageError
from localllm.tui import options, prompts
from localllm.tui.conversation import Conversation, Message
from localllm.tui.events import Choice
from localllm.tui.replies import ChatModel

INSTRUCTION = (
    "Summarise our conversation so far, for yourself: you will go on with only the summary. Keep what was decided, "
    "facts, names, numbers and open questions. Answer with the summary alone."
)


class Room:
    """Where the prompt of a reply can begin.

    Attributes:
        path: the messages to the one that is replied to.
        start: the place in it from which on the model gets it now.
        summary: what the model is told of those before.
        summary_tokens: tokens that a new summary may have.
    """

    def __init__(self, model: ChatModel, conversation: Conversation, question: str, begun: str) -> None:
        """For the reply to ``question``, of which ``begun`` is there already."""
        self._model = model
        self._system = conversation.system
        self._begun = begun
        self._settings = options.generation(conversation.settings)
        self._context = model.info.context
        self.path = conversation.path(question)
        window = prompts.window_of(self.path)
        self.start = len(self.path) - len(prompts.visible_part(self.path, window))
        self.summary = "" if window is None else window.summary
        self.summary_tokens = max(1, self._context // 8)

    def choices(self) -> tuple[Choice, ...]:
        """What can be done."""
        if self.first(0) is None:
            return ("stop",)
        return ("drop", "stop") if self.first(self.summary_tokens) is None else ("drop", "summarise", "stop")

    def first(self, reserve: int) -> int | None:
        """The place of the turn from which on the path fits, with room for an answer and ``reserve`` tokens.

        The last turn is taken even if there is little room for an answer; None if it does not fit at all.
        """
        starts = [i for i, message in enumerate(self.path) if message.role == "user" and i > self.start]
        wanted = self._settings.options.get("max_tokens") or self._context // 4
        limit = self._context - min(wanted, self._context // 2) - reserve
        i = bisect_left(starts, True, key=lambda start: self._count(self.path[start:]) <= limit)
        if i < len(starts):
            return starts[i]
        return starts[-1] if starts and self._count(self.path[starts[-1] :]) < self._context - reserve else None

    def _count(self, messages: Sequence[Message]) -> int:
        sent = prompts.prompt(messages, self._system, self.summary)
        return len(
            self._model.tokenize_chat(
                sent, template_variables=self._settings.template_variables, reply_prefix=self._begun
            )
        )

    def parts(self, first: int) -> list[Sequence[Message]]:
        """What comes before ``first``, in parts of whole turns that can be summarised one after the other.

        Raises:
            UsageError: a single turn is too long for it.
        """
        starts = [i for i in range(self.start, first) if self.path[i].role == "user" or i == self.start]
        ends = [*starts[1:], first]
        found: list[Sequence[Message]] = []
        at = self.start
        # The summary before, and the one to be written.
        limit = self._context - 2 * self.summary_tokens
        while at < first:
            left = [end for end in ends if end > at]
            n = bisect_right(left, limit, key=lambda end: self._count_request(self.path[at:end]))
            if n == 0:
                raise UsageError("a message is too long to be summarised: drop the oldest turns instead")
            found.append(self.path[at : left[n - 1]])
            at = left[n - 1]
        return found

    def request(self, part: Sequence[Message], summary: str) -> list[prompts.Sent]:
        """What asks the model for a summary of a part, and of what came before."""
        sent = prompts.prompt(part, self._system, summary)
        if sent and sent[-1]["role"] == "user":
            sent[-1]["content"] += f"\n\n{INSTRUCTION}"
        else:
            sent.append({"role": "user", "content": INSTRUCTION})
        return sent

    def _count_request(self, part: Sequence[Message]) -> int:
        return len(self._model.tokenize_chat(self.request(part, "")))
