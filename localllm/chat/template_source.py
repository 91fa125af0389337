"""Where a model's chat template comes from.

Apart from `localllm.chat.template`, for jinja2 takes a while to import, and who never chats does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.errors import TemplateError, path_text, quoted
from localllm.tokenizer.vocabulary import MetadataFile

_KEY = "tokenizer.chat_template"
#: What a named template is for: the variable that is given.
USES = {"tool_use": "tools", "rag": "documents"}


@dataclass(frozen=True, slots=True)
class TemplateSource:
    text: str | None  # jinja2 text; None if there is none
    where: str = "the chat template given"  # its name in error messages
    named: Mapping[str, str] = field(default_factory=dict)  # texts of others in the same file, by `USES`' names

    @classmethod
    def of_file(cls, file: MetadataFile, name: str | None = None) -> TemplateSource:
        """The template of an open GGUF file.  ``name``: one of its named templates
        (``tokenizer.chat_template.NAME``), such as ``tool_use``."""
        key = _KEY if name is None else f"{_KEY}.{name}"
        text = file.metadata.get(key)
        if text is None and name is not None:
            raise TemplateError(f"{path_text(file.path)} has no chat template called {quoted(name)}")
        if text is not None and not isinstance(text, str):
            raise TemplateError(f"{path_text(file.path)}: {key} is not a string; the file is damaged")
        found = {} if name is not None else {each: file.metadata.get(f"{_KEY}.{each}") for each in USES}
        named = {each: text for each, text in found.items() if isinstance(text, str)}
        return cls(text, f"the chat template of {path_text(os.path.basename(file.path))}", named)
