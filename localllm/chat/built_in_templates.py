"""Chat templates by llama.cpp's names, for ``--chat-template NAME``, as markers before and after turns.

Source: llama.cpp's ``src/llama-chat.cpp``.  Tests compare the results with llama.cpp's.
"""

from __future__ import annotations

from typing import NamedTuple

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{{ raise_exception('ChatML, which is used in place of a template, knows messages of text only') }}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template for files without a template.  Many models support this format."""

MESSAGES = "{{ messages | map(attribute='content') | join('\n') }}{{ eos_token }}"
"""The template for files without a template whose prompts an encoder reads, such as Flan-T5's: the messages alone."""


class _TurnMarkers(NamedTuple):
    """Markers before and after the turns of system, user and assistant."""

    before: tuple[str, str, str]
    after: tuple[str, str, str]
    trims: bool = False  # whether white space around messages is removed
    start: str = ""  # before all turns
    opens: bool = True  # whether the prompt ends with the start of the assistant's turn


def _alike(before: str, after: str, roles: str = "system user assistant", **more: bool | str) -> _TurnMarkers:
    system, user, assistant = (before.format(role) for role in roles.split())
    return _TurnMarkers((system, user, assistant), (after,) * 3, **more)  # type: ignore[arg-type]


_TEMPLATES = {
    "llama3": _alike("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trims=True),
    "llama4": _alike("<|header_start|>{}<|header_end|>\n\n", "<|eot|>", trims=True),
    "command-r": _alike(
        "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "SYSTEM USER CHATBOT", trims=True
    ),
    "phi3": _alike("<|{}|>\n", "<|end|>\n"),
    "phi4": _alike("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "zephyr": _alike("<|{}|>\n", "<|endoftext|>\n"),
    "granite": _alike("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "falcon3": _alike("<|{}|>\n", "\n"),
    "chatglm4": _alike("<|{}|>\n", "", start="[gMASK]<sop>"),
    "megrez": _alike("<|role_start|>{}<|role_end|>", "<|turn_end|>"),
    "bailing": _alike("<role>{}</role>", "", "SYSTEM HUMAN ASSISTANT"),
    "deepseek3": _TurnMarkers(("", "<｜User｜>", "<｜Assistant｜>"), ("\n\n", "", "<｜end▁of▁sentence｜>")),
    "mistral-v7": _TurnMarkers(
        ("[SYSTEM_PROMPT] ", "[INST] ", " "), ("[/SYSTEM_PROMPT]", "[/INST]", "</s>"), opens=False
    ),
    "mistral-v7-tekken": _TurnMarkers(
        ("[SYSTEM_PROMPT]", "[INST]", ""), ("[/SYSTEM_PROMPT]", "[/INST]", "</s>"), opens=False
    ),
}
NAMES = ("chatml", *_TEMPLATES)


def built_in(name: str) -> str | None:
    """Return the jinja2 text of a template; None for an unknown name."""
    turns = _TEMPLATES.get(name)
    if turns is None:
        return CHATML if name == "chatml" else None
    before, after = (dict(zip(("system", "user", "assistant"), texts, strict=True)) for texts in turns[:2])
    return (
        f"{{% set before = {before!r} %}}{{% set after = {after!r} %}}{{{{ {turns.start!r} }}}}"
        "{% for message in messages %}"
        "{% if message.role not in before %}{{ raise_exception('this template knows no tools') }}{% endif %}"
        f"{{{{ before[message.role] + message.content{' | trim' if turns.trims else ''} + after[message.role] }}}}"
        "{% endfor %}" + ("{% if add_generation_prompt %}{{ before['assistant'] }}{% endif %}" if turns.opens else "")
    )
