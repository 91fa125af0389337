"""The text of PDF pages, or images of pages without text. Worker processes read the files."""

from __future__ import annotations

import io
import math

from localllm.errors import UsageError
from localllm.models.encoders import isolation

#: Maximum number of PDF pages sent as images, and their resolution in dots per inch.
MAX_PAGES, _PAGE_DPI = 20, 150
#: Maximum number of pixels of a page image.
_MAX_PIXELS = 20_000_000


def page_texts(name: str, data: bytes) -> str:
    """Return the text of a PDF file, with form feeds between pages.  Raises UsageError if it cannot be read."""
    return bytes(isolation.decode(decode_texts, data, name).data).decode()


def page_images(name: str, data: bytes) -> list[bytes]:
    """Return PNG files of a PDF file's pages.  Raises UsageError if it cannot be read or has too many pages."""
    sizes, files = isolation.decode(decode_images, data, name)
    stream = io.BytesIO(files)
    return [stream.read(n_bytes) for n_bytes in sizes["sizes"]]


def decode_texts(data: bytes, name: str) -> isolation.Decoded:
    """Return UTF-8 text; see `page_texts`."""
    try:
        from pypdf import PdfReader
    except ImportError:
        raise UsageError(f'{name} needs the package pypdf: pip install "localllm[pdf]"') from None
    try:
        text = "\f".join(page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)
    except Exception as error:  # any error of the package
        raise UsageError(f"{name} cannot be attached: it cannot be read as a PDF ({error})") from None
    return isolation.Decoded({}, text.encode(errors="replace"))


def decode_images(data: bytes, name: str) -> isolation.Decoded:
    """Return PNG files, concatenated; see `page_images`."""
    try:
        import pypdfium2
    except ImportError:
        raise UsageError(f'{name} has no text: to see it needs pypdfium2: pip install "localllm[pdf]"') from None
    sizes, files = list[int](), io.BytesIO()
    try:
        document = pypdfium2.PdfDocument(bytes(data))
        if len(document) > MAX_PAGES:
            raise UsageError(f"{name} has {len(document)} pages without text: attach a file of up to {MAX_PAGES}")
        for page in document:
            begin, area = files.tell(), page.get_width() * page.get_height()
            scale = min(_PAGE_DPI / 72, math.sqrt(_MAX_PIXELS / area)) if area else 1
            page.render(scale=scale).to_pil().convert("RGB").save(files, "PNG")
            sizes.append(files.tell() - begin)
    except pypdfium2.PdfiumError as error:
        raise UsageError(f"{name} cannot be attached: it cannot be read as a PDF ({error})") from None
    return isolation.Decoded({"sizes": sizes}, files.getvalue())
