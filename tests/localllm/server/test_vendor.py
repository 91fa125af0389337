"""The libraries in the page: pinned, bundled from the pinned versions, and without known vulnerabilities."""

from __future__ import annotations

from importlib import resources

import pytest

from localllm.server.page.vendor import FIRST_SAFE, LIBRARIES, Library


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_no_vulnerable_library_is_bundled(library: Library) -> None:
    bundle = (resources.files("localllm.server.page") / "vendor.js").read_text("utf-8")
    assert f"/*!\n{library.name} {library.version}\n" in bundle
    assert version(library.version) >= version(FIRST_SAFE[library.name])


def test_the_bundled_sanitiser_is_the_pinned_one() -> None:
    bundle = (resources.files("localllm.server.page") / "vendor.js").read_text("utf-8")
    pinned = next(library.version for library in LIBRARIES if library.name == "dompurify")
    assert f"DOMPurify {pinned} |" in bundle
