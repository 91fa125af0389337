"""``localllm serve`` as a program, and every command of its documentation page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from localllm.cli.commands.generate import generation_options
from localllm.cli.commands.serve import sources
from localllm.cli.parser import parser_of
from localllm.errors import ModelNotFoundError, UsageError
from localllm.options.settings import Settings
from localllm.server.http import Limits
from localllm.server.local_network import invitation, lan_address
from localllm.server.models import Models
from localllm.server.sockets import listen
from localllm.server.stats import Stats
from tests.helpers.command_line import Outcome, command, environment, run_main, run_process
from tests.helpers.data import ROOT
from tests.helpers.http_server import demo, serving
from tests.helpers.tiny_models import config, random_weights, write_gguf
from tests.localllm.catalog.test_listing import in_ollama, with_layers

PAGE = ROOT / "docs" / "serve.md"


@contextmanager
def started(
    *arguments: object, warns: bool = False, **variables: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, and the address that it prints."""
    process = subprocess.Popen(
        command("serve", *arguments),
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {k: str(v) for k, v in variables.items()},
        cwd=ROOT,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if warns:
            assert line.startswith("localllm: warning: ")
            line = process.stderr.readline()
        match = re.search(r"listening on (https?://[^ ]+)", line)
        assert match is not None, line + process.stderr.read()
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    flags = ("-q", "--stats", "-c", 0, "--prompt-cache", tmp_path / "prompts")
    with started("-m", "demo", "--port", 0, "--api-key", "k", *flags) as (process, url):
        headers = {"Authorization": "Bearer k"}
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
        assert response.status_code == 200
        process.send_signal(number)
        assert process.wait(60) == 0
    assert len(list((tmp_path / "prompts").glob("*.blocks"))) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")
def test_other_devices_are_let_in_by_a_key_that_stays(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        with started("-m", "demo", "-q", "--port", 0, "--lan", LOCALLLM_CONFIG=tmp_path / "config.toml") as (
            process,
            url,
        ):
            assert process.stderr is not None
            line = process.stderr.readline()
            address, _, key = line.removeprefix("on another device: ").strip().partition("/#key=")
            assert address == url
            assert lan_address() is None or lan_address() in url
            keys.add(key)
            for host in ("phone.local", f"{socket.gethostname()}.local"):
                headers = {"Host": host, "Authorization": f"Bearer {key}"}
                assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert len(keys) == 1
    assert (tmp_path / "lan-key").stat().st_mode & 0o777 == 0o600


def test_the_page_has_tools_with_the_key_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[tools]\nfetch = true\n")
    (tmp_path / "notes").mkdir()
    flags, keys = ("-m", "demo", "-q", "--port", 0, "--page-folder", tmp_path / "notes"), set()
    for more in (("--page-tools",), ("--host", "0.0.0.0", "--api-key", "k")):
        with started(*flags, *more, LOCALLLM_CONFIG=tmp_path / "config.toml") as (process, url):
            assert process.stderr is not None
            address, _, key = process.stderr.readline().removeprefix("the page with tools: ").strip().partition("#")
            assert address == f"http://127.0.0.1:{url.rpartition(':')[2]}/"
            keys.add(key)
            headers = {"X-Page-Key": key.removeprefix("tools="), "Authorization": "Bearer k"}
            answer = httpx.get(f"{address}page/tools?folder=notes", headers=headers).json()
            assert {"fetch_page", "edit_file"} <= {tool["name"] for tool in answer["tools"]}
            assert httpx.get(f"{address}page/tools", headers={"Authorization": "Bearer k"}).status_code == 403
    assert len(keys) == 1
    with started(*flags, "--log-format", "text", LOCALLLM_CONFIG=tmp_path / "config.toml") as (process, _):
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "/#tools=KEY, with the KEY in " in line
        assert (tmp_path / "page-key").read_text() not in line
    if sys.platform != "win32":
        assert (tmp_path / "page-key").stat().st_mode & 0o777 == 0o600


def test_flags_of_tools_that_make_no_sense(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "notes").mkdir(parents=True)
    folders = [word for name in ("a", "b") for word in ("--page-folder", tmp_path / name / "notes")]
    for flags, message in (
        (["--page-tools"], "--page-tools needs tools: add the table [tools] to the settings file"),
        (["--page-folder", tmp_path / "none"], "none is not a folder"),
        (folders, "two folders have the name 'notes'"),
        ([*folders[:2], "--host", f"unix:{tmp_path}/socket"], "--page-tools needs an address of this machine"),
    ):
        if "--host" in flags and sys.platform == "win32":
            continue
        variables = environment(LOCALLLM_CONFIG=str(tmp_path / "config.toml"))  # next to which a key is stored
        outcome = run_process(["serve", "-m", "demo", "--port", 0, *flags], env=variables)
        assert message in outcome.error()


def test_the_qr_code_is_drawn_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("segno")
    assert invitation("http://192.168.1.2:8080", "a b").splitlines() == [
        "on another device: http://192.168.1.2:8080/#key=a%20b",
        "programs there: http://192.168.1.2:8080/v1 with the API key a b",
    ]
    monkeypatch.setattr("localllm.server.local_network.is_terminal", lambda stream: True)
    assert "▄▄▄▄▄" in invitation("http://192.168.1.2:8080", "k")


def test_models_have_options_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[short]\nmodel = "demo"\nmax_tokens = 3\nalias = ["gpt-4o"]\ntags = ["small", "fast"]\n'
        "ttl = 60\ncontext = 512\n[demo]\n"
    )
    with started("-q", "--port", 0, "--models", tmp_path / "models.toml", "--temp", 0, "--tags", "main") as (_, url):
        counts = {}
        for name in ("gpt-4o", "demo"):
            body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
            counts[response["model"]] = response["usage"]["completion_tokens"]
        assert counts["short"] == 3 < counts["demo"]
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert {model["id"]: model["meta"]["n_ctx"] for model in models} == {"short": 512, "demo": 1024}
        assert {model["id"]: model["tags"] for model in models} == {"short": ["main", "small", "fast"], "demo": []}
        running = {
            each["model"].removesuffix(":latest"): each for each in httpx.get(f"{url}/api/ps").json()["models"]
        }
        assert running["short"]["expires_at"] < running["demo"]["expires_at"]


def test_a_model_of_ollama_has_its_system_message(tmp_path: Path) -> None:
    path = in_ollama(tmp_path, "registry.ollama.ai/library/tiny/latest")
    shutil.copy(ROOT / "localllm" / "data" / "demo.gguf", path)
    with_layers(tmp_path, "registry.ollama.ai/library/tiny/brief", path, system="Be brief.")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    for flags in ((), ("-m", "tiny:brief")):
        line = ("-q", "--port", 0, "--chat-template", template, *flags)
        with started(*line, OLLAMA_MODELS=tmp_path, LOCALLLM_CONFIG=tmp_path / "config.toml") as (_, url):
            body = {"model": "tiny:brief", "messages": [{"role": "user", "content": "hi"}]}
            reply = httpx.post(f"{url}/apply-template", json=body, timeout=300).json()
            assert reply["prompt"] == "system: Be brief.\nuser: hi\n"


def test_a_server_whose_only_model_cannot_be_loaded_ends_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    done = run_process(["serve", "-m", "demo", "--mmproj", missing, "--port", 0])
    assert done.code == 1
    assert done.err.splitlines()[-1] == f"localllm: error: {missing} does not exist: check the path"


def test_a_faulty_section_can_be_corrected_while_the_server_runs(tmp_path: Path) -> None:
    presets, good = tmp_path / "models.toml", '[good]\nmodel = "demo"\n'
    presets.write_text(f'{good}[bad]\nmodel = "demo"\nalias = ["gpt-4o"]\ncontext = "many"\n')
    with started("-q", "--port", 0, "--models", presets, warns=True) as (_, url):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

        def post(name: str) -> httpx.Response:
            return httpx.post(f"{url}/v1/chat/completions", json=body | {"model": name}, timeout=300)

        assert post("good").status_code == 200
        assert post("bad").status_code == 500
        assert (
            "[bad] of the file of models: argument -c/--ctx-size/--context" in post("bad").json()["error"]["message"]
        )
        presets.write_text(f'{good}[bad]\nmodel = "demo"\ncontext = 512\n')
        assert post("bad").status_code == 200


@pytest.mark.parametrize("content", [None, b"GGUF" + bytes(100)])
def test_one_model_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path, content: bytes | None) -> None:
    model, presets = tmp_path / "big.gguf", tmp_path / "models.toml"
    presets.write_text('[demo]\nmodel = "demo"\n[big]\nmodel = "big.gguf"\nalias = ["gpt-4o"]\n')
    if content is not None:
        model.write_bytes(content)
    with started("-q", "--port", 0, "--models", presets, warns=True) as (_, url):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        replies = [
            httpx.post(f"{url}/v1/chat/completions", json=body | {"model": name}, timeout=300)
            for name in ("demo", "gpt-4o")
        ]
        assert [reply.status_code for reply in replies] == [200, 500]
        message = replies[1].json()["error"]["message"]
        assert message.startswith("the model big cannot be loaded: ")
        assert "big.gguf" in message
        assert str(tmp_path) not in message
        shutil.copy(ROOT / "tests" / "data" / "demo-f16.gguf", model)  # like mounting its drive
        reply = httpx.post(f"{url}/v1/chat/completions", json=body | {"model": "big"}, timeout=300)
        assert reply.status_code == 200


def test_the_only_model_of_a_file_must_be_usable(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[big]\nmodel = "big.gguf"\n')
    done = run_process(["serve", "--models", tmp_path / "models.toml", "--port", 0])
    assert done.code == 1
    assert "big.gguf" in done.err


def test_the_time_to_read_a_request_does_not_limit_replies() -> None:
    arguments = parser_of("serve").parse_args(["--timeout", "5"])
    assert arguments.read_timeout == 5
    assert generation_options(arguments, Settings()).get("timeout") is None


def test_the_grammar_of_calls_can_be_switched_off() -> None:
    for word, expected in (("off", False), ("on", True)):
        arguments = parser_of("serve").parse_args(["--tool-grammar", word])
        assert generation_options(arguments, Settings())["tool_grammar"] is expected
    with pytest.raises(UsageError, match="'maybe' is neither on nor off"):
        parser_of("serve").parse_args(["--tool-grammar", "maybe"])


def test_the_context_is_divided_as_in_llama_server(tmp_path: Path) -> None:
    sections = {
        "divided": "context = 1024\nparallel = 4",
        "each": "context = 512\nparallel = 2\nkv_unified = true",
        "alone": "context = 512",
        "own": "context = 0\nparallel = 2",
    }
    text = "".join(f'[{name}]\nmodel = "demo"\n{keys}\n' for name, keys in sections.items())
    (tmp_path / "models.toml").write_text(text)
    flags = ("-q", "--port", 0, "--device", "reference")
    with started(*flags, "--models", tmp_path / "models.toml") as (_, url):
        props = {name: httpx.get(f"{url}/props?model={name}", timeout=300).json() for name in sections}
    contexts = {name: each["default_generation_settings"]["n_ctx"] for name, each in props.items()}
    assert contexts == {"divided": 256, "each": 512, "alone": 512, "own": 1024}
    assert [props[name]["total_slots"] for name in ("divided", "each", "own")] == [4, 2, 2]
    with started("-m", "demo", "-c", 512, "-np", 2, "--no-slots", "--prompt-cache", tmp_path, *flags) as (_, url):
        answer = httpx.post(f"{url}/completion", json={"prompt": "hi " * 300, "n_predict": 1}, timeout=300)
        assert answer.json()["error"]["n_ctx"] == 256
        assert "exceeds the available context size" in answer.json()["error"]["message"]
        # Only the list is disabled.
        assert httpx.get(f"{url}/slots").status_code == 501
        assert httpx.post(f"{url}/slots/0?action=save", json={"filename": "a"}).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https_and_keys_of_a_file(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    key, certificate, keys = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "keys"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *named], check=True, capture_output=True)
    keys.write_text("# mine\nk\n\n")
    tls = ("--ssl-key-file", key, "--ssl-cert-file", certificate)
    with started("-m", "demo", "--port", 0, "-q", "--api-key-file", keys, *tls) as (_, url):
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert url.startswith("https://")
        assert httpx.get(f"{url}/v1/models", verify=trusted).status_code == 401
        answer = httpx.get(f"{url}/v1/models", verify=trusted, headers={"Authorization": "Bearer k"})
        assert answer.json()["data"][0]["id"] == "demo"
    for flags, words in (
        (("--ssl-key-file", keys, "--ssl-cert-file", certificate), "give a key and a certificate as PEM"),
        (("--ssl-key-file", key), "need each other: add the missing flag"),
        (("--api-key-file", tmp_path / "none"), "the file of API keys"),
        (("--api-key-file", os.devnull), "contains no key"),
        (("--api-key", ""), "--api-key contains no key: add one, or remove it"),
        (("--api-key", "k", "--api-key", " , "), "--api-key contains no key"),
    ):
        assert words in run_main(capfdbinary, "serve", "-m", "demo", "--port", 0, *flags).error()


@pytest.mark.parametrize("value", ["", " ", ",", " ,"])
def test_an_environment_variable_without_a_key_opens_no_server(
    value: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", value)
    outcome = run_main(capfdbinary, "serve", "-m", "demo", "--port", 0)
    assert outcome.error() == "the environment variable LOCALLLM_API_KEY contains no key: add one, or remove it"
    with pytest.raises(UsageError, match="api_keys has an empty key"):
        Limits(api_keys=(value.strip(" ,"),))


def test_templates_read_what_flags_say(tmp_path: Path) -> None:
    template = "{{ style }} {{ enable_thinking }} {{ messages[-1].content }}"
    flags = ("--chat-template", template, "--chat-template-kwargs", '{"style": "short"}', "--reasoning-budget", 0)
    with started("-m", "demo", "--port", 0, "-v", *flags) as (_, url):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for more, has_prompt in (({}, False), ({"verbose": True}, True)):  # -v applies to the log only
            asked = body | {"max_tokens": 1, **more}
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=300).json()
            assert ("__verbose" in answer) == has_prompt
        for more, prompt in (({}, "short False hi"), ({"enable_thinking": True}, "short True hi")):
            asked = body | {"chat_template_kwargs": more}
            answer = httpx.post(f"{url}/apply-template", json=asked, timeout=300).json()
            assert answer["prompt"].endswith(prompt)


def test_what_a_request_leaves_open_is_in_the_files_the_settings_and_the_flags(tmp_path: Path) -> None:
    """Flags override settings, settings override the model's file, and a request overrides all."""
    keys = {"general.sampling.temp": 0.3, "general.sampling.top_k": 7, "general.sampling.min_p": 9.0}
    settings = config("llama")
    file = write_gguf(tmp_path / "m.gguf", settings, random_weights(settings), metadata=keys)
    (tmp_path / "config.toml").write_text("[sampling]\ntop_k = 8\ntop_p = 0.5\nseed = 3\n")
    flags = ("--top-p", 0.25, "-n", 3, "--ignore-eos", "--device", "reference")
    with started("-m", file, "--port", 0, "-q", *flags, LOCALLLM_CONFIG=tmp_path / "config.toml") as (_, url):
        params = httpx.get(f"{url}/props", timeout=300).json()["default_generation_settings"]["params"]
        shown = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "n_predict")}
        assert shown == {
            "temperature": 0.3, "top_k": 8, "top_p": 0.25, "min_p": 0.05, "seed": 3, "n_predict": 3
        }  # fmt: skip
        ids = []
        for more in ({}, {}, {"n_predict": 2}, *({"seed": seed} for seed in range(4, 12))):
            body = {"prompt": "a", "return_tokens": True, **more}
            ids.append(httpx.post(f"{url}/completion", json=body, timeout=300).json()["tokens"])
    assert [len(each) for each in ids] == [3, 3, 2] + 8 * [3]
    assert ids[0] == ids[1]
    assert any(each != ids[0] for each in ids[3:])


def test_models_by_name(tmp_path: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes((ROOT / "localllm" / "data" / "demo.gguf").read_bytes())
    assert sources([{"model": str(file)}, {"model": "demo"}], Settings()) == {"my model": str(file), "demo": None}
    found = sources([], Settings(model_folders=(tmp_path,)))
    assert next(iter(found)) == "demo"
    assert found["my model"] == str(file)
    with pytest.raises(ModelNotFoundError):
        sources([{"model": "nobody/nothing:Q4_0"}], Settings())


def test_a_port_that_is_taken(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with listen("127.0.0.1", 0) as taken:
        outcome = run_main(capfdbinary, "serve", "-m", "demo", "--port", taken.getsockname()[1])
    assert outcome.code == 2
    assert "cannot be listened on" in outcome.error()
    with pytest.raises(UsageError, match="choose another"):
        listen("256.1.1.1", 80)


def test_connections_send_each_token_at_once() -> None:
    with listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname(), timeout=60):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_stats_are_those_of_the_engine() -> None:
    with serving(demo()) as server:
        stats = Stats()
        assert list(stats.rows(server.models)) == []
        httpx.post(server.url + "/completion", json={"prompt": "a b c", "n_predict": 7}, timeout=60)
        llm = server.llm
        stats.measure(llm)
        (row,) = stats.rows(server.models)
        assert row[:3] == ("demo", "0", "0")
        assert row[5] == "7.0"
        assert row[7].endswith("%")
        (row,) = stats.rows(server.models)
        assert (row[5], row[7]) == ("0.0", "-")


def test_without_its_packages_it_says_what_to_install(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    outcome: Outcome = run_main(capfdbinary, "serve", "-m", "demo")
    assert outcome.code == 2
    assert 'pip install "localllm[serve]"' in outcome.error()


def test_flags_of_llama_server_that_change_nothing_are_one_warning() -> None:
    from localllm.cli.foreign_flags import in_our_flags
    from localllm.cli.parser import parser_of

    line = "-m a.gguf --metrics --slots --no-webui -fa on --cache-reuse 256 -np 2 --jinja"
    ours, warning, _ = in_our_flags("serve", line.split(), parser_of("serve").flags)
    assert ours == ["-m", "a.gguf", "-np", "2"]
    assert warning is not None
    assert warning.startswith("--metrics, --slots, --no-webui, -fa, --cache-reuse, --jinja have no effect")


@pytest.mark.parametrize(
    "flags",
    [
        "-hf org/repo -md draft.gguf -v --timeout 600",
        "--embedding --pooling mean --reranking --no-mmproj -kvu --reasoning-format none --no-jinja --no-ui",
        "--reasoning-budget -1 --chat-template-kwargs {} --api-key-file f --ssl-key-file f --ssl-cert-file f",
        "--fit on --cache-ram -1 --reasoning off",
    ],
)
def test_flags_of_llama_server_stop_no_start(flags: str) -> None:
    from localllm.cli.foreign_flags import in_our_flags
    from localllm.cli.parser import parser_of

    parser = parser_of("serve")
    ours, _, _ = in_our_flags("serve", flags.split(), parser.flags)
    assert parser.parse_known_args(ours)[1] == []


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_first_commands_of_the_page_start_a_server() -> None:
    serve = blocks("sh")[0]
    assert all(line.startswith("localllm serve") for line in serve.splitlines() if line and line[0] != "#")


@pytest.mark.skipif(shutil.which("curl") is None or sys.platform == "win32", reason="needs curl and a shell")
def test_every_request_of_the_page_is_answered() -> None:
    with started("-m", "demo", "--port", 0) as (_, url):
        for block in blocks("sh")[1:]:
            script = block.replace("http://127.0.0.1:8080", url)
            done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert '"error"' not in done.stdout, done.stdout
            assert done.stdout


def test_every_program_of_the_page_runs() -> None:
    with started("-m", "demo", "--port", 0) as (_, url):
        for block in blocks("python"):
            for name in re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE):
                pytest.importorskip(name)
            code = block.replace("http://127.0.0.1:8080", url)
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=dict(os.environ)
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_every_flag_that_the_page_names_is_there() -> None:
    from localllm.cli.parser import parser_of

    known = parser_of("serve").flags
    named = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", "\n".join([*blocks("sh")[:1], *inline(PAGE)])))
    assert named
    assert named <= set(known), named - set(known)


def inline(page: Path) -> list[str]:
    return re.findall(r"`(--?[a-z][^`]*)`", page.read_text("utf-8"))


def test_models_are_made_without_an_event_loop() -> None:
    assert Models({"a": None}, lambda *_: None).find("a").state == "unloaded"  # type: ignore[arg-type, return-value]
