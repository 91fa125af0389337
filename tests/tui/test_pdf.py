"""Unusual PDF files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from localllm import pdf
from localllm.errors import UsageError
from localllm.models.encoders import isolation

pytest.importorskip("pypdf")


def test_endless_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of 3 million texts, each read separately by pypdf in Python."""
    content = b"BT /F 12 Tf\n" + b"(a) Tj\n" * 3_000_000 + b"ET"
    data = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    data += b"3 0 obj<</Type/Page/Parent 2 0 R/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>>endobj\n"
    data += b"4 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\n5 0 obj<</Length %d>>stream\n" % len(
        content
    )
    data += content + b"\nendstream endobj\ntrailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF\n"
    pool = isolation._Pool()
    monkeypatch.setattr(isolation, "SECONDS", 2)
    monkeypatch.setattr(isolation, "_pool", pool)
    try:
        with pytest.raises(UsageError, match=r"a\.pdf takes more than 2 seconds or"):
            pdf.page_texts("a.pdf", data)
    finally:
        pool.close()


def test_huge_pages_become_bounded_images(tmp_path: Path) -> None:
    """A page of 200 inches, the maximum of a PDF file."""
    pytest.importorskip("pypdfium2")
    Image.new("RGB", (200, 200), "red").save(tmp_path / "a.pdf", resolution=1)
    (page,) = pdf.page_images("a.pdf", (tmp_path / "a.pdf").read_bytes())
    image = Image.open(io.BytesIO(page))
    assert 0.9 * pdf._MAX_PIXELS < image.width * image.height < 1.1 * pdf._MAX_PIXELS
    assert image.getpixel((9, 9)) == (254, 0, 0)
