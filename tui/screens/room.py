"""What is asked when the context is full; nothing is left out unasked."""

from __future__ import annotations

from localllm.tui.events import ContextFull
from localllm.tui.screens.dialogs import Choose

#: What is done with a message that does not fit, beside the choices of `ContextFull`.
EDIT, TAKE_BACK = "edit", "take back"

_CHOICES = {
    "drop": "Drop the oldest turns: the model does not get them any more; they stay here",
    "summarise": "Summarise: the model writes down what was said, and goes on with that",
    "stop": "Stop: the reply is left as it is",
}


def ask_room(event: ContextFull) -> Choose:
    """The dialog; its result is a `localllm.tui.events.Choice`, `EDIT` or `TAKE_BACK`."""
    what = "the conversation and the reply so far have" if event.in_reply else "the conversation has"
    text = f"{what[0].upper()}{what[1:]} {event.needed:,} tokens, and the context holds {event.context:,}."
    if event.choices == ("stop",):
        too_long = "reply is too long: ask for a shorter one"
        if not event.in_reply:
            too_long = "last message alone is too long: shorten it"
        text += f" The {too_long}, or load the model with a larger context."
    choices: list[tuple[str, str]] = [(choice, _CHOICES[choice]) for choice in event.choices]
    if not event.in_reply:
        choices[-1:] = [
            (EDIT, "Edit your message"),
            (TAKE_BACK, "Take your message back"),
            ("stop", "Stop: the message stays without a reply"),
        ]
    return Choose("The context is full", text, choices)
