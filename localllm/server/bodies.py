"""Bodies of requests: JSON and forms, decoded within limits of work and memory."""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable
from email.parser import BytesHeaderParser, HeaderParser
from functools import cache
from itertools import chain, repeat
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from localllm.cancellation import check_cancelled
from localllm.nesting import NestingError, check_nesting
from localllm.server.http import LONG_REQUEST, HTTPError, cancel_on_disconnect, too_large
from localllm.server.image_urls import fetch_images, image_addresses

_T = TypeVar("_T")

#: Limits of one JSON body.  The parser holds the interpreter's lock, which running replies need: at these limits for
#: about a tenth of a second.  A value takes up to 100 bytes of memory, a container or a string with its key 300.
MAX_VALUES, MAX_TEXTS, MAX_BYTES_OUTSIDE_STRINGS = 1 << 19, 1 << 17, 12 << 20

#: Digits of a number that every body may have.  Converting a number takes quadratic time.
MAX_DIGITS = 100

#: Limits of one form: parts, and bytes of a part's header or of the Content-Type, whose parser takes quadratic time.
MAX_PARTS, MAX_HEADER = 100, 2048

#: Types of objects whose reading is slow: files, such as PDF, and grammars of tools.
_SLOW = frozenset(("file", "input_file", "document", "grammar"))

#: Bytes of a body between two checks for cancellation.
_CHUNK = 1 << 20


async def decode(request: Request, body_type: type[_T], read_long: Callable[..., Awaitable[Any]]) -> _T:
    """Return a request's body as ``body_type``, read by `tolerant`: JSON, or a form.  An empty body is ``{}``.

    ``read_long`` calls functions with long bodies, forms and compressed bodies in another thread.
    """
    body, form = await request.body(), request.headers.get("content-type", "")
    if not (is_form := form.lower().startswith("multipart/form-data")):
        form = ""
    packing = request.headers.get("content-encoding", "identity").lower()
    is_long = len(body) > LONG_REQUEST or packing != "identity" or is_form
    request.state.ignored = ignored = list[str]()
    request.state.fields = _field_names(body_type)  # type: ignore[arg-type]  # a class can be hashed

    async def read(work: Callable[..., Any], *args: Any) -> Any:
        return await read_long(request, _with_pause, work, *args) if is_long else work(*args)

    try:
        value, request.state.is_slow = await read(_decoded, body, packing, request.state.max_body, form)
        if hosts := request.state.image_hosts:
            places = await read(image_addresses, value)
            await cancel_on_disconnect(request, fetch_images(places, hosts, request.state.max_body))
        converted: _T = await read(
            lambda: msgspec.convert(tolerant(value, body_type, ignored), body_type, strict=not is_form)
        )
    except NestingError as error:
        raise msgspec.DecodeError(str(error)) from None
    except UnicodeDecodeError:
        raise msgspec.DecodeError("it is not UTF-8") from None
    return converted


def _with_pause(work: Callable[..., _T], *args: Any) -> _T:
    """Return the result of ``work`` after a pause of the same length.

    A parser of JSON holds the interpreter's lock, which the engine and the event loop need before the next body is
    parsed.
    """
    began = time.perf_counter()
    try:
        return work(*args)
    finally:
        time.sleep(time.perf_counter() - began)


def _decoded(body: bytes, packing: str, limit: int, form: str = "") -> tuple[Any, bool]:
    """Return the JSON value of a body, or its fields if ``form`` is its content type, and whether it is long work."""
    body = (body if packing == "identity" else _unpacked(body, packing, limit)) or b"{}"
    if form:
        return _form_fields(body, form), len(body) > LONG_REQUEST
    if len(body) > LONG_REQUEST:
        _check_json(body)
    check_nesting(body)
    value = _decode_json(body)
    return value, len(body) > LONG_REQUEST or _has_slow_part(value)


def _has_slow_part(value: Any) -> bool:
    """Return whether a JSON value has an object of a type in `_SLOW`."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind in _SLOW:
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False


def _float(text: str) -> float:
    return float(text)


#: Decodes JSON.  msgspec's own parser takes 12 µs for some numbers, with the interpreter's lock held.
_decode_json = msgspec.json.Decoder(float_hook=_float).decode


def _check_json(body: bytes) -> None:
    """Raise HTTPError if a body has more values than a request may have, before the parser builds them."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    n_values = n_texts = n_outside = 0
    in_string = np.bool_(False)
    for begin in range(0, len(body), _CHUNK):
        check_cancelled()
        chunk = np.frombuffer(body, np.uint8, min(_CHUNK, len(body) - begin), begin)
        # A string lasts from its opening quote to the byte before the closing one.
        in_strings = np.logical_xor.accumulate(chunk == ord('"')) ^ in_string
        in_string = in_strings[-1]
        outside = chunk[~in_strings]
        _check_digits(outside)
        counts = np.bincount(outside, minlength=256)
        n_outside += int(counts.sum())
        n_values += int(counts[ord(",")])
        n_texts += int(counts[[ord('"'), ord("["), ord("{")]].sum())
        if n_values > MAX_VALUES or n_texts > MAX_TEXTS or n_outside > MAX_BYTES_OUTSIDE_STRINGS:
            raise HTTPError(
                413,
                f"the body has too many values: send up to {MAX_VALUES:,} values, {MAX_TEXTS:,} strings, arrays and "
                f"objects, and {MAX_BYTES_OUTSIDE_STRINGS >> 20} MiB outside of strings in one request",
            )


def _check_digits(text: NDArray[np.uint8]) -> None:
    """Raise HTTPError if a number has ``2 * MAX_DIGITS`` digits, so that they fill a row of `MAX_DIGITS` bytes."""
    rows = text[: len(text) // MAX_DIGITS * MAX_DIGITS].reshape(-1, MAX_DIGITS) - ord("0")  # other bytes are above 9
    if (rows.max(axis=1) < 10).any():
        raise HTTPError(400, f"a number of the body has more than {MAX_DIGITS} digits: send it as a string")


def _form_fields(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the fields of a form by name: strings, and bytes of files.  Source: RFC 7578."""
    _check_header(len(content_type), "Content-Type")
    # HeaderParser reads no parameters by itself: the codec of a parameter's charset may fail.
    text = HeaderParser().parsestr(f"content-type: {content_type}").get_param("boundary", "")
    boundary = text.rstrip().encode("latin-1", "replace") if isinstance(text, str) else b""
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_PARTS + 1)
    if len(parts) > MAX_PARTS + 1:
        raise HTTPError(413, f"the form has more than {MAX_PARTS} parts: send fewer fields")
    if not boundary or len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise HTTPError(400, "the form is cut off, or its Content-Type names another boundary: send the whole form")
    fields: dict[str, Any] = {}
    for part in parts[1:-1]:
        check_cancelled()
        head, _, value = part.partition(b"\r\n\r\n")
        _check_header(len(head), "header of a form's part")
        headers = BytesHeaderParser().parsebytes(head.lstrip())
        name = headers.get_param("name", "", "content-disposition")
        is_file = headers.get_param("filename", None, "content-disposition") is not None
        fields[str(name)] = value if is_file else value.decode()
    return fields


def _check_header(n_bytes: int, name: str) -> None:
    if n_bytes > MAX_HEADER:
        raise HTTPError(400, f"the {name} has {n_bytes:,} bytes, but may have {MAX_HEADER:,}: shorten it")


def _unpacked(body: bytes, packing: str, limit: int) -> bytes:
    """Return the bytes of a gzip body."""
    if packing not in ("gzip", "x-gzip"):
        raise HTTPError(415, f"the body is in {packing!r:.40}: send it with gzip or without compression")
    unpacking = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacking.decompress(body, limit + 1)
    except zlib.error:
        raise HTTPError(400, "the body is not valid gzip data: compress it, or omit Content-Encoding") from None
    if len(unpacked) > limit:
        raise too_large(limit)
    if not unpacking.eof:
        raise HTTPError(400, "the gzip data of the body is cut off: send the whole body")
    return unpacked


def tolerant(value: Any, annotation: Any, ignored: list[str]) -> Any:
    """Return a JSON value for ``annotation``, a type that msgspec reads.

    Fields that are null are absent, and 2.0 becomes 2 for integers.  ``ignored`` takes the names of unknown fields.
    """
    if type(value) not in _CHANGED:
        return value
    alternatives = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if isinstance(value, float):
        return int(value) if int in alternatives and float not in alternatives and value.is_integer() else value
    if isinstance(value, list):
        check_cancelled()
        item_types = [get_args(kind) for kind in alternatives if get_origin(kind) in (list, tuple)]
        if not item_types or item_types[0] == (Any,):
            return value
        types_of_items = chain(item_types[0], repeat(item_types[0][-1]))
        pairs = zip(value, types_of_items, strict=False)
        return [tolerant(item, item_type, ignored) if type(item) in _CHANGED else item for item, item_type in pairs]
    structs = list(filter(_is_struct, alternatives))
    if not isinstance(value, dict) or not structs:
        return value
    types = _field_types(structs[0])
    read = {}
    for name, item in value.items():
        if name in types and item is not None:
            read[name] = tolerant(item, types[name], ignored)
        elif item is not None and name not in _HARMLESS:
            ignored.append(name)
    return read


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


#: Types of values that `tolerant` may change.
_CHANGED = frozenset((float, list, dict))


@cache
def _field_names(annotation: Any) -> dict[str, str]:
    """Return the JSON names of fields by attribute names, including fields of nested structs."""
    names: dict[str, str] = {}
    for field in msgspec.structs.fields(annotation) if _is_struct(annotation) else ():
        names[field.name] = field.encode_name
        for within in get_args(field.type):
            for name, inner in _field_names(within).items():
                names.setdefault(name, f"{field.encode_name}.{inner}")
    return names | getattr(annotation, "FIELDS", {})


@cache
def _field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


#: Unsupported fields that are ignored without a warning, because replies do not depend on them.
_HARMLESS = frozenset(
    """user store metadata service_tier safety_identifier prompt_cache_key cache_control context_management include
    betas cache_prompt id_slot n_keep num_keep truncate truncation include_obfuscation
    client_metadata verbosity summary prompt_cache_retention prompt_cache_options
    reasoning_control""".split()  # noqa: SIM905
)
