"""Log lines and request ids of the server."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from localllm import llm
from localllm.cli.commands.serve import _loader
from localllm.cli.parser import parser_of
from localllm.console import say, warn
from localllm.loading import progress
from localllm.options.types import LoadProgress
from localllm.server.http import Limits
from localllm.server.logs import LogFormat, logging_to_stderr
from localllm.server.monitor import Monitoring
from localllm.server.stats import Stats
from tests.helpers.command_line import command, environment, run_main
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually
from tests.helpers.http_server import FAILS, Serving, demo, scripted, serving

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
KEY = "sk-very-secret-key"
#: A word of prompts, which no log line may contain.
CANARY = "xylophone"


class Lines(io.StringIO):
    """Captured standard error."""

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    def requests(self, n: int) -> list[dict[str, Any]]:
        """Return the lines of ``n`` requests, which are written after the responses."""
        assert eventually(lambda: sum(row["message"] == "request" for row in self.rows()) >= n), self.getvalue()
        rows = [row for row in self.rows() if row["message"] == "request"]
        assert len(rows) == n
        return rows


@contextmanager
def logging_as(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    lines = Lines()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", lines)
        with logging_to_stderr(log_format):
            yield lines


def post(server: Serving, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


# -- Requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_explains_a_request(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    limits = Limits(api_keys=(KEY,))
    with serving(demo(), limits=limits, log=say) as server, logging_as("json", monkeypatch) as lines:
        headers = {"X-Request-ID": "req-1.a:b/c", "Authorization": f"Bearer {KEY}"}
        body = {"messages": HI, "max_tokens": 4, "ignore_eos": True, "stream": stream}
        for _ in range(2):
            response = post(server, headers=headers, **body)
            assert response.headers["x-request-id"] == "req-1.a:b/c"
        first, row = lines.requests(2)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["time"])
        assert (row["level"], row["request_id"], row["address"]) == ("info", "req-1.a:b/c", "127.0.0.1")
        assert (row["method"], row["path"], row["status"], row["model"]) == ("POST", CHAT, 200, "demo")
        assert (row["generated_tokens"], row["finish_reason"], row["stream"]) == (4, "length", stream)
        assert first["cached_tokens"] == 0 < row["cached_tokens"] < row["prompt_tokens"] == first["prompt_tokens"]
        assert first["load_s"] > row["load_s"] >= 0
        phases = row["load_s"] + row["queue_s"] + row["prefill_s"] + row["decode_s"]
        assert 0 < row["queue_s"] < row["first_token_s"] < row["duration_s"]
        assert 0 < phases < row["duration_s"]
        assert re.fullmatch("[0-9a-f]{8}", row["key"])
        loading = [(each["message"], each["request_id"]) for each in lines.rows() if each["message"] != "request"]
        assert loading == [("loading demo", "req-1.a:b/c"), ("loaded demo", "req-1.a:b/c")]
        assert KEY not in lines.getvalue()


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("a", True), ("a" * 128, True), ("a" * 129, False), ("", False), ("a b", False), ("a\tb", False), ("ä", False)],
)
def test_request_ids_are_checked(server: Serving, sent: str, is_kept: bool) -> None:
    response = httpx.get(f"{server.url}/health", headers=[(b"X-Request-ID", sent.encode("latin-1"))])
    id_ = response.headers["x-request-id"]
    assert (id_ == sent) == is_kept
    assert is_kept or re.fullmatch("[0-9a-f]{32}", id_)


def test_every_response_and_every_error_has_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(scripted(f"One {FAILS}"), limits=Limits(api_keys=(KEY,))) as server:
        auth = {"Authorization": f"Bearer {KEY}"}
        ids = set()
        with logging_as("json", monkeypatch) as lines:
            for path in (CHAT, "/v1/messages", "/api/chat", "/nothing"):
                for headers in ({}, auth):
                    response = post(server, path, headers, messages=HI, max_tokens=9, stream=False)
                    assert response.status_code >= 400
                    id_ = response.headers["x-request-id"]
                    assert response.json()["request_id"] == id_
                    assert response.json()["error"]
                    ids.add(id_)
            stream = post(server, CHAT, auth, messages=HI, max_tokens=9, stream=True)
            stream_id = stream.headers["x-request-id"]
            assert json.loads(stream.text.split("data: ")[-1])["request_id"] == stream_id
            rows = {row["request_id"]: row for row in lines.requests(9)}
            assert rows.keys() == ids | {stream_id}
            assert all(row["error"] for row in rows.values())
            assert (rows[stream_id]["status"], rows[stream_id]["finish_reason"]) == (200, "error")
            faults = [row for row in lines.rows() if row["level"] == "error"]
            assert len(faults) == 4
            assert all("RuntimeError: a defect" in row["traceback"] for row in faults)
            assert {row["request_id"] for row in faults} < rows.keys()


def test_prompts_are_logged_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": CANARY}]},
        "/v1/completions": {"prompt": CANARY},
        "/v1/messages": {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 1},
        "/v1/responses": {"input": CANARY},
        "/api/generate": {"prompt": CANARY},
        "/completion": {"prompt": CANARY},
        "/infill": {"input_prefix": CANARY, "input_suffix": CANARY},
        "/tokenize": {"content": CANARY},
        "/apply-template": {"messages": [{"role": "user", "content": CANARY}]},
    }
    contents = ([{"type": CANARY}], f"{CANARY} " * 2000, 7)
    bad: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    bad += [
        {"model": "unknown"},
        {"temperature": "hot"},
        {"n": 99},
        {"messages": CANARY},
        {"prompt": f"{CANARY} " * 2000},
    ]
    template = "{% set text = messages[0].content %}{{ raise_exception(text) if 'raise' in text }}{{ text }}"
    for logs_prompts in (False, True):
        options = Monitoring(logs_prompts=logs_prompts)
        with (
            serving(demo(chat_template=template), names=("demo", "other"), monitoring=options) as server,
            logging_as("json", monkeypatch) as lines,
        ):
            with httpx.Client(base_url=server.url, timeout=60) as client:
                for path, body in bodies.items():
                    for more in ({},) if logs_prompts else ({}, *bad):
                        client.post(path, json={"max_tokens": 1, "n_predict": 1, **body, **more})
            refused = post(server, messages=[{"role": "user", "content": f"raise {CANARY}"}])
            assert CANARY in refused.json()["error"]["message"]
            rows = lines.requests(1 + len(bodies) * (1 if logs_prompts else 1 + len(bad)))
            *prompts, error = [row.get("prompt", row.get("error", "")) for row in rows]
            assert sum(CANARY in prompt for prompt in prompts) == (6 if logs_prompts else 0)
            assert error == (refused.json()["error"]["message"] if logs_prompts else "invalid_request")
            assert logs_prompts or CANARY not in lines.getvalue()


def test_a_request_without_replies_has_its_tokens(monkeypatch: pytest.MonkeyPatch, server: Serving) -> None:
    with logging_as("json", monkeypatch) as lines:
        assert post(server, "/v1/embeddings", input=["a b c", "d"]).status_code in (200, 400)
        assert post(server, "/tokenize", content="abc").status_code == 200
        embeddings, tokenize = lines.requests(2)
        assert tokenize["model"] == embeddings["model"] == "demo"
        assert "prompt_tokens" in embeddings
        assert "prompt_tokens" not in tokenize


# -- Lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_request_can_forge_a_line(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch, server: Serving) -> None:
    forged = "%0a2026-01-01T00:00:00.000Z%20INFO%20request%1b[31m%c2%85%e2%80%a8%e2%80%ae%7f"
    with logging_as(log_format, monkeypatch) as lines:
        httpx.get(f"{server.url}/{forged}")
        httpx.get(f"{server.url}/{forged * 100}")
        assert eventually(lambda: len(lines.getvalue().split("\n")) == 3)
        text = lines.getvalue()
    assert len(text.splitlines()) == 2
    assert all(char.isprintable() or char == "\n" for char in text)
    assert max(map(len, text.splitlines())) < 6000


def test_text_lines_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_as("text", monkeypatch) as lines:
        log = logging.getLogger("localllm.server")
        log.info("request", extra={"fields": {"a": 1, "b": 0.1234567, "c": "x y", "d": True, "e": 'q"=\n', "f": ""}})
        say("loading\nqwen\t7b")
        warn("careful")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("uvicorn.error").info("details")
        try:
            raise ValueError("one\n2026-01-01T00:00:00.000Z INFO two\x1b")
        except ValueError as error:
            log.error("failed", exc_info=error)
    rows = [line.partition(" ")[2] for line in lines.getvalue().splitlines()]
    assert rows[:5] == [
        r'INFO request a=1 b=0.123457 c="x y" d=true e="q\"=\n"',
        "INFO loading",
        r"INFO qwen\t7b",
        "WARNING careful",
        "WARNING Invalid HTTP request received.",
    ]
    assert rows[5] == "ERROR failed"
    assert all(line.startswith("  ") for line in lines.getvalue().splitlines()[6:])
    assert "\x1b" not in lines.getvalue()


def test_nothing_remains_after_the_block(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = list(logging.getLogger().handlers)
    with logging_as("json", monkeypatch) as lines:
        pass
    say("after")
    assert capfd.readouterr().err == "after\n"
    assert (logging.getLogger().handlers, lines.getvalue()) == (handlers, "")
    assert not logging.getLogger("localllm.access").isEnabledFor(logging.INFO)


# -- The command ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_every_line_of_the_command_has_the_format() -> None:
    line = ("-m", "demo", "--port", 0, "--lan", "--api-key", KEY, "--log-format", "json")
    with subprocess.Popen(
        command("serve", *line), stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    ) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            match = re.search(r"listening on http://[^ ]+:(\d+)", first)
            assert match is not None, first
            url = f"http://127.0.0.1:{match[1]}"
            headers = {"Authorization": f"Bearer {KEY}"}
            body = {"messages": HI, "max_tokens": 1}
            assert httpx.post(url + CHAT, json=body, headers=headers, timeout=300).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0
    rows = (first + rest).splitlines()
    assert any("loaded demo" in row for row in rows)
    assert any(CHAT in row for row in rows)
    assert KEY not in first + rest
    assert all({"time", "level", "message"} <= json.loads(row).keys() for row in rows)


def test_the_notice_of_a_long_compilation_is_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Exception):
        pass

    def load(source: str | None, *, progress: LoadProgress, **options: Any) -> None:
        progress("kernels", 0, 2)
        raise Loading

    monkeypatch.setattr(llm, "load", load)
    monkeypatch.setattr(progress, "NOTICE_SECONDS", 0.0)
    arguments = parser_of("serve").parse_args(["-m", "demo"])
    with logging_as("json", monkeypatch) as lines, pytest.raises(Loading):
        _loader(arguments, Stats())[1]("demo", lambda *stage: None, lambda plan: None)
    (row,) = lines.rows()
    assert "compiling kernels" in row["message"]


def test_logging_prompts_needs_a_log(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert "--log-prompts needs --log-format" in run_main(capfdbinary, "serve", "--log-prompts").error()
    assert parser_of("serve").parse_args([]).log_format is None
