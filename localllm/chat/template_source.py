"""The source of a model's chat template.

A separate module from `localllm.chat.template`, because jinja2 is slow to import and only chats need it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.errors import TemplateError, path_text
from localllm.tokenizer.vocabulary import MetadataFile

_KEY = "tokenizer.chat_template"
#: Variable for which a named template is used.
USES = {"tool_use": "tools", "rag": "documents"}


@dataclass(frozen=True, slots=True)
class TemplateSource:
    text: str | None  # jinja2 text; None without a template
    where: str = "the chat template given"  # its name in error messages
    named: Mapping[str, str] = field(default_factory=dict)  # other templates of the file, by the names in `USES`

    @classmethod
    def of_file(cls, file: MetadataFile) -> TemplateSource:
        """Return the template of an open GGUF file."""
        text = file.metadata.get(_KEY)
        if text is not None and not isinstance(text, str):
            raise TemplateError(f"{path_text(file.path)}: {_KEY} is not a string; the file is damaged")
        texts = {use: file.metadata.get(f"{_KEY}.{use}") for use in USES}
        named = {use: text for use, text in texts.items() if isinstance(text, str)}
        return cls(text, f"the chat template of {path_text(os.path.basename(file.path))}", named)
