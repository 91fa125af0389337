"""The web page: one file without network, joined from the sources beside this one.

`localllm.server.page.vendor` rebuilds ``vendor.js``, which holds the libraries.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

_SCRIPTS = ("vendor", "basics", "markdown", "server", "chat_schema", "chats", "page")


@cache
def page() -> tuple[str, str]:
    """The page and its ``Content-Security-Policy``: just these scripts run, and none that a reply could bring in."""
    folder = resources.files(__name__)
    style = (folder / "page.css").read_text("utf-8")
    script = '"use strict";\n' + "\n".join((folder / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    text = (folder / "page.html").read_text("utf-8")
    text = text.replace("<!-- page.css -->", f"<style>{style}</style>")
    text = text.replace("<!-- scripts -->", f"<script>{script}</script>")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data: blob:; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    )
    return text, policy


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
