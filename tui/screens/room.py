"""What is asked when the context is full; nothing is left out unasked."""

from __future__ import annotations

from localllm.tui.events import ContextFull
from localllm.tui.screens.dialogs import Choose

_CHOICES = {
    "drop": "Drop the oldest turns: the model does not get them any more; they stay here",
    "summarise": "Summarise: the model writes down what was said, and goes on with that",
    "stop": "Stop: the reply is left as it is",
}


def ask_room(event: ContextFull) -> Choose:
    """The dialog; its result is a `localllm.tui.events.Choice`."""
    what = "the conversation and the reply so far have" if event.in_reply else "the conversation has"
    text = f"{what[0].upper()}{what[1:]} {event.needed:,} tokens, and the context holds {event.context:,}."
    if event.choices == ("stop",):
        text += " The last message alone is too long: shorten it, or load the model with a larger context."
    return Choose("The context is full", text, [(choice, _CHOICES[choice]) for choice in event.choices])
