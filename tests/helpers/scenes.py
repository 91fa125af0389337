"""A chat with every element, for snapshots and for the README's screenshots."""

from __future__ import annotations

from localllm.tui.chat.conversation import Attachment, Conversation, ReplyStats
from localllm.tui.setup import ModelEntry

ANSWER = """\
The sky is blue because air scatters **short waves** more than long ones, by `1 / wavelength⁴`:

```python
def scattered(wavelength: float) -> float:
    return (400e-9 / wavelength) ** 4
```

| light | wavelength | share |
|---|---|---|
| violet | 400 nm | 100 % |
| red | 700 nm | 11 % |
"""

MODELS = (
    ModelEntry(
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", "/models/a.gguf", 1_117_320_736, "Q4_K_M", "1.54B", 32768, "yes"
    ),
    ModelEntry("llama-3.2-3b.gguf", "/models/b.gguf", 3_421_000_000, "Q8_0", "3.21B", 131072, "with less context"),
    ModelEntry("llama-3.3-70b.gguf", "/models/c.gguf", 42_520_000_000, "Q4_K_M", "70.6B", 131072, "no"),
    ModelEntry("demo", "", 2_620_000, "Q8_0", "2.31M", 1024, "yes"),
)


def conversation() -> Conversation:
    """Two turns; the first message was edited and the last reply was stopped."""
    chat = Conversation(id="scene", title="Why is the sky blue?")
    first = chat.add("user", "Why is the sky bleu?")
    chat.add("assistant", "Do you mean blue?", stats=ReplyStats(12, 0, 5, 0.2, 31.0, "Qwen2.5 1.5B"))
    chat.add_sibling(
        first.id, "Why is the sky blue? See @notes.txt", attachments=(Attachment("notes.txt", "-", 312),)
    )
    thinking = "<think>They want physics. Rayleigh scattering, then.</think>"
    chat.add("assistant", thinking + ANSWER, stats=ReplyStats(340, 0, 140, 0.41, 31.4, "Qwen2.5 1.5B"))
    chat.add("user", "And at sunset?")
    chat.add(
        "assistant",
        "The way through the air is longer then, so that",
        state="stopped",
        stats=ReplyStats(495, 480, 12, 0.08, 32.2, "Qwen2.5 1.5B"),
    )
    return chat
