"""The web page: one file that needs no network, joined from the sources in this folder.

`localllm.server.page.vendor` rebuilds ``vendor.js``, which contains the libraries.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

_SCRIPTS = ("vendor", "basics", "markdown", "server", "chat_schema", "chats", "downloads", "tools", "page")


@cache
def page() -> tuple[str, str]:
    """Return the page and its ``Content-Security-Policy``, which allows only these scripts, but none from replies."""
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
