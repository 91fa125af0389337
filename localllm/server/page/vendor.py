"""Rebuilds ``vendor.js``, the page's libraries, from npm: ``python -m localllm.server.page.vendor``."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple


class Library(NamedTuple):
    """A package of npm, the file in it that the page runs, and the hash of the package."""

    name: str
    version: str
    file: str
    sha512: str


LIBRARIES = [
    Library(
        "marked",
        "18.2.1",
        "lib/marked.umd.js",
        "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
    ),
    Library(
        "dompurify",
        "3.5.0",
        "dist/purify.min.js",
        "LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "highlight.min.js",
        "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
    ),
]

#: Oldest version of each library without a known vulnerability, and the reason.  A new advisory raises it.
FIRST_SAFE = {
    "marked": "4.0.10",  # CVE-2022-21680 and CVE-2022-21681: regular expressions that take forever
    "dompurify": "3.5.0",  # older releases are not supported; before 3.4.12 GHSA-c2j3-45gr-mqc4, 3.3.2 CVE-2026-0540
    "@highlightjs/cdn-assets": "10.4.1",  # GHSA-7wwv-vh3v-89cq: regular expressions that take forever
}


def bundled(library: Library, packed: bytes) -> str:
    """Return the library's code after its licence.  Raises ValueError if the package has the wrong hash."""
    digest = base64.b64encode(hashlib.sha512(packed).digest()).decode()
    if digest != library.sha512:
        raise ValueError(f"{library.name} {library.version} has the hash {digest}: this is not the reviewed package")
    with tarfile.open(fileobj=io.BytesIO(packed)) as package:

        def text(name: str) -> str:
            file = package.extractfile(f"package/{name}")
            assert file is not None
            return file.read().decode().replace("\r\n", "\n")

        licence, code = text("LICENSE"), text(library.file)
    lines = [line for line in code.split("\n") if not line.startswith("//# sourceMappingURL")]
    head = f"{library.name} {library.version}\n\n{licence.strip()}".replace("*/", "* /")
    # Inside strings, escape the tags that would end the script element or start a comment in it.
    body = "\n".join(lines).replace("</script", "<\\/script").replace("<!--", "<\\x21--")
    body = body.replace("<script", "<\\x73cript")
    return f"/*!\n{head}\n*/\n{body.rstrip().removesuffix(';')};\n"


def main() -> None:
    libraries = []
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            command = ["npm", "pack", "--silent", f"{library.name}@{library.version}"]
            result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
            libraries.append(bundled(library, (Path(folder) / result.stdout.split()[-1]).read_bytes()))
    (Path(__file__).parent / "vendor.js").write_text("\n".join(libraries), "utf-8")


if __name__ == "__main__":
    main()
