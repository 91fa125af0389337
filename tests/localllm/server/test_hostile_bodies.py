"""Small bodies that cost a server much time or memory are rejected, and reading them can be stopped."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from typing import Any

import httpx
import pytest

from localllm.cancellation import CancelledError, cancellable, check_cancelled
from localllm.chat.conversation import source_of_text
from localllm.errors import GrammarError, TemplateError
from localllm.options.declared import Sampling
from localllm.sampling.grammar import check_grammar
from localllm.server import bodies
from localllm.server.bodies import MAX_BYTES_OUTSIDE_STRINGS, MAX_TEXTS, MAX_VALUES, _decoded
from localllm.server.dispatcher import MAX_BIASES
from localllm.server.http import HTTPError
from localllm.server.llamacpp import MAX_CONTENT
from tests.helpers.http_server import Serving

#: Limit in seconds for every attack: each takes less than one on an idle machine.
LIMIT = 60.0
FORM = {"content-type": "multipart/form-data; boundary=a"}
JSON = {"content-type": "application/json"}
GZIP = JSON | {"content-encoding": "gzip"}
PART = b'--a\r\nContent-Disposition: form-data; name="prompt"'

ATTACKS: dict[str, tuple[bytes, dict[str, str], int]] = {
    "semicolons in a part's header": (PART + b";" * 240_000 + b"\r\n\r\nx\r\n--a--", FORM, 400),
    "parameters in a part's header": (PART + b"; name*0*=a" * 20_000 + b"\r\n\r\nx\r\n--a--", FORM, 400),
    "lines in a part's header": (PART + b"\r\n x" * 80_000 + b"\r\n\r\nx\r\n--a--", FORM, 400),
    "parts": (b"--a\r\n" * 6_000_000, FORM, 413),
    "whole parts": ((PART + b"\r\n\r\nx\r\n") * 400_000 + b"--a--", FORM, 413),
    "a boundary of one character": (b"\r\n---" * 6_000_000, {"content-type": "multipart/form-data; boundary=-"}, 413),
    "semicolons in the Content-Type": (b"", {"content-type": FORM["content-type"] + ";" * 30_000}, 400),
    "a boundary that is not Latin-1": (b"", {"content-type": "multipart/form-data; boundary*=utf-8''%E2%82%AC"}, 400),
    "a boundary in a charset that cannot be decoded": (
        b"",
        {"content-type": "multipart/form-data; boundary*=undefined''a"},
        400,
    ),
    "a boundary in a charset without replacements": (
        b"",
        {"content-type": "multipart/form-data; boundary*=idna''a"},
        400,
    ),
    "a part with a charset that cannot be decoded": (
        PART + b"\r\nContent-Type: multipart/mixed; boundary*=undefined''a\r\n\r\nx\r\n--a--",
        FORM,
        400,
    ),
    "objects in gzip": (gzip.compress(b"[" + b"{}," * 10_000_000 + b"{}]"), GZIP, 413),
    "numbers in gzip": (gzip.compress(b"[" + b"1," * 15_000_000 + b"1]"), GZIP, 413),
    "keys": (json.dumps(dict.fromkeys(map(str, range(1_000_000)))).encode(), JSON, 413),
    "strings": (b"[" + b'"",' * 2_000_000 + b'""]', JSON, 413),
    "arrays in arrays": (b"[" * 5_000_000, JSON, 413),
    "arrays in arrays, but few": (b"[" * 200_000, JSON, 400),
    "white space": (b"[" + b" " * 30_000_000 + b"]", JSON, 413),
    "a number": (b"[" + b"9" * 30_000_000 + b"]", JSON, 400),
    "numbers that are slow to read": (b"[" + b"2.2250738585072011e-308," * 400_000 + b"1]", JSON, 400),
    "text after gzip": (gzip.compress(b"x" * 30_000_000) * 2, GZIP, 413),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_body_that_costs_much_is_refused_soon(server: Serving, attack: str) -> None:
    body, headers, expected = ATTACKS[attack]
    began = time.monotonic()
    response = httpx.post(f"{server.url}/v1/audio/transcriptions", content=body, headers=headers, timeout=2 * LIMIT)
    assert response.status_code == expected, response.text
    assert time.monotonic() - began < LIMIT


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ("[" + "1," * MAX_VALUES + "1]", False),
        ("[" + "1," * MAX_VALUES + "1,1]", True),
        ("[" + "[]," * (MAX_TEXTS - 2) + "[]]", False),
        ("[" + "[]," * (MAX_TEXTS - 1) + "[]]", True),
        ("[" + '"",' * (MAX_TEXTS - 2) + '""]', False),
        ("[" + '"",' * (MAX_TEXTS - 1) + '""]', True),
        ("[" + " " * (MAX_BYTES_OUTSIDE_STRINGS - 2) + "]", False),
        ("[" + " " * (MAX_BYTES_OUTSIDE_STRINGS - 1) + "]", True),
        (json.dumps("[{," * 9_000_000), False),
        (json.dumps('"[{,' * 6_000_000), False),
        (json.dumps("\\[{," * 6_000_000), False),
        (json.dumps(['\\"', "\\", '"\\'] * 40_000), False),
        ("[" + f"{10**98}," * 9000 + "1]", False),
    ],
)
def test_values_are_counted_outside_of_strings(body: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(HTTPError, match="too many values"):
            _decoded(body.encode(), "identity", 1 << 26)
    else:
        assert _decoded(body.encode(), "identity", 1 << 26)[0] == json.loads(body)


def test_numbers_of_many_digits_are_refused() -> None:
    body = b"[" + (b"9" * 4000 + b",") * 2500 + b"1]"
    with pytest.raises(HTTPError, match="more than 100 digits"):
        _decoded(body, "identity", 1 << 26)


def test_numbers_of_long_bodies_keep_their_values() -> None:
    numbers = [0.1, 1e300, -2.5, 2.2250738585072011e-308, 5, 1 << 70, 1e5]
    assert _decoded(json.dumps(numbers).encode(), "identity", 1 << 20)[0] == numbers


def test_reading_a_body_ends_when_its_client_has_gone() -> None:
    body = json.dumps(["a" * 1_000_000]).encode()
    form = (PART + b"\r\n\r\nx\r\n") * 9 + b"--a--"
    with cancellable(lambda: True):
        with pytest.raises(CancelledError):
            _decoded(body, "identity", 1 << 26)
        with pytest.raises(CancelledError):
            _decoded(form, "identity", 1 << 26, FORM["content-type"])
        with pytest.raises(CancelledError):
            bodies.tolerant([1], list[int], [])


def test_other_bodies_wait_for_no_client_that_has_gone(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads long bodies is free as soon as the client disconnects."""
    is_reading, may_end = threading.Event(), threading.Event()
    check = bodies._check_json

    def slow(body: bytes) -> None:
        if b"slow" in body:
            is_reading.set()
            while not may_end.wait(0.01):
                check_cancelled()
        check(body)

    monkeypatch.setattr(bodies, "_check_json", slow)
    text = "a" * 600_000
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/tokenize", json={"content": f"slow {text}"}, timeout=1.0)
    assert is_reading.is_set()
    try:
        reply = httpx.post(f"{server.url}/tokenize", json={"content": text, "unknown": 1}, timeout=LIMIT)
        assert reply.status_code == 200
        assert reply.headers["x-ignored-fields"] == "unknown"
    finally:
        may_end.set()


def test_a_text_of_millions_of_tokens_is_refused(server: Serving) -> None:
    for n, status in ((MAX_CONTENT // 100, 200), (MAX_CONTENT + 1, 413)):
        assert httpx.post(f"{server.url}/tokenize", json={"content": " " * n}, timeout=LIMIT).status_code == status


def test_a_form_may_have_long_values(server: Serving) -> None:
    """Only the number of parts and the length of their headers are limited."""
    value = base64.b64encode(bytes(3_000_000))
    form = (
        PART + b"\r\n\r\n" + value + b"\r\n" + PART.replace(b"prompt", b"file") + b"; filename=a\r\n\r\n;;\r\n--a--"
    )
    fields, is_long = _decoded(form, "identity", 1 << 26, FORM["content-type"])
    assert fields == {"prompt": value.decode(), "file": b";;"}
    assert is_long


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "' + '\\"' * 200_000,
        "root ::= [" + "\\]" * 200_000,
        "\n" * 400 + " " * 500_000,
        "\n" * 400 + " " * 400_000 + 'root ::= "a',
        'start: "a" & "' + '\\"' * 200_000,
        'start: "a" & /' + "\\/" * 200_000,
        "start: " + '%json "a" ' * 40_000 + "[" * 100,
        "start: " + "%json 5 " * 40_000 + "[" * 100,
        "start: " + "%json [1] " * 40_000,
        "start: " + "%json " * 60_000,
        "start: " + "%json [ " * 60 + ',"a"' * 100_000,
    ],
)
def test_a_grammar_without_an_end_is_refused_soon(grammar: str) -> None:
    began = time.monotonic()
    with pytest.raises((GrammarError, ValueError)):
        check_grammar(Sampling(grammar=grammar))
    assert time.monotonic() - began < LIMIT


def test_a_schema_of_many_patterns_is_refused_soon() -> None:
    began = time.monotonic()
    patterns: dict[str, Any] = {f"^a{number}$": {} for number in range(5000)}
    with pytest.raises(GrammarError, match="more than 100 patterns"):
        check_grammar(Sampling(json_schema={"type": "object", "patternProperties": patterns}))
    assert time.monotonic() - began < LIMIT


def test_data_urls_of_many_signs_are_read_or_refused_soon() -> None:
    began = time.monotonic()
    assert source_of_text("data:;base64," + "Q U\n" * 1_000_000, "the picture")[:3] == b"AD\x14"
    with pytest.raises(TemplateError, match="percent signs: send it in base64"):
        source_of_text("data:," + "%" * 30_000_000, "the picture")
    assert time.monotonic() - began < LIMIT


def test_images_by_address_are_found_in_a_thread_that_can_be_stopped() -> None:
    from localllm.server.image_urls import image_addresses

    body: Any = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://example.org/a"}}]}]}
    assert [holder[key] for holder, key in image_addresses(body)] == ["https://example.org/a"]
    with cancellable(lambda: True), pytest.raises(CancelledError):
        image_addresses(body)


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        ("/completion", "logit_bias", [[1, 0.5]] * (MAX_BIASES + 1), "has 32,769 entries: send up to 32,768"),
        ("/completion", "logit_bias", [["a" * 1000, 0.5]] * 66, "has strings of more than 65,536 characters"),
        ("/completion", "response_fields", ["content"] * 101, "has 101 names: send up to 100"),
        (
            "/v1/chat/completions",
            "chat_template_kwargs",
            {f"v{i}": i for i in range(1001)},
            "has 1,001 names: give up to 1,000",
        ),
    ],
)
def test_a_field_of_too_many_values_is_refused(
    server: Serving, path: str, field: str, value: Any, message: str
) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n_predict": 1}
    reply = httpx.post(server.url + path, json=body | {field: value}, timeout=LIMIT)
    assert reply.status_code == 400
    assert f"{field} {message}" in reply.json()["error"]["message"]


def test_biases_up_to_the_limit_are_used(server: Serving) -> None:
    biases = [[i % 400, -0.5] for i in range(MAX_BIASES - 2)] + [["a b", 1.0], ["9" * 30, 2.0]]
    body = {"prompt": ["a", "b"], "n_predict": 1, "logit_bias": biases, "temperature": 0}
    replies = httpx.post(f"{server.url}/completion", json=body, timeout=LIMIT).json()
    shown = [reply["generation_settings"]["logit_bias"] for reply in replies]
    assert shown[0] == shown[1]
    assert len(shown[0]) > 400
