"""``localllm launch`` with fake agents: environment, files, exit codes, errors, Ctrl-C; the page docs/agents.md."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.cli.agent_launcher import shell_lines, steps_of
from localllm.cli.agents import AGENTS, NO_KEY, Connection
from localllm.cli.interrupt import INTERRUPTED
from localllm.cli.local_server import KEY_VARIABLE
from localllm.kernels.code_cache import cache_root
from localllm.server.http import Limits
from tests.helpers.command_line import default_interrupts, on_terminal, read_all, run_main
from tests.helpers.data import ROOT
from tests.helpers.http_server import TOOLS_TEMPLATE, Serving, demo, serving
from tests.helpers.windows import elsewhere

pytestmark = [
    pytest.mark.posix("the fake agents are scripts with a shebang"),
    pytest.mark.filterwarnings("ignore:the model was trained on"),
]

CONTEXT = 40_000
KEY = "the-secret"
PROGRAMS = {name: agent.program for name, agent in AGENTS.items() if agent.program is not None}

#: Writes what it was given to a file, prints "ready", runs ``FAKE_WAIT`` and ends with ``FAKE_CODE``.
FAKE = """\
#!{python}
import json, os, stat, sys, tempfile
from pathlib import Path
folders = [Path(tempfile.gettempdir(), name) for name in os.listdir(tempfile.gettempdir())]
files = {{
    str(path): {{"text": path.read_text(), "mode": stat.S_IMODE(path.stat().st_mode)}}
    for folder in folders if folder.name.startswith("localllm-")
    for path in folder.iterdir() if path.name != "server.log"
}}
modes = [stat.S_IMODE(folder.stat().st_mode) for folder in folders if folder.name.startswith("localllm-")]
given = {{"pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}}
given |= {{"files": files, "folder modes": modes}}
Path(os.environ["FAKE_LOG"]).write_text(json.dumps(given))
print("ready", flush=True)
exec(os.environ.get("FAKE_WAIT", ""))
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""

#: Waits for Ctrl-C and continues, as an agent that stops its current reply.
WAITS = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted") and os._exit(7))
print("waiting", flush=True)
time.sleep(600)
"""
SLEEPS = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print('waiting', flush=True); time.sleep(600)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    load = demo(context=CONTEXT, chat_template=TOOLS_TEMPLATE)
    with serving(load, limits=Limits(api_keys=[KEY])) as started:
        yield started


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that the fake agents write.  The home folder, the temporary folder and the programs are next to it."""
    for folder in ("bin", "home", "tmp"):
        (tmp_path / folder).mkdir()
    for program in PROGRAMS.values():
        path = tmp_path / "bin" / program
        path.write_text(FAKE.format(python=sys.executable))
        path.chmod(0o755)
    for name, value in {
        "LOCALLLM_CACHE": str(cache_root() or ""),  # which may be in the home folder
        "PATH": str(tmp_path / "bin"),
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "FAKE_LOG": str(tmp_path / "log.json"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_PROXY", "no_proxy", "LOCALLLM_API_KEY", "FAKE_WAIT", "FAKE_CODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "log.json"


def leftovers(log: Path) -> list[Path]:
    return [*(log.parent / "tmp").iterdir(), *(log.parent / "home").iterdir()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_agent_gets_its_settings_and_its_exit_code_is_returned(
    name: str, server: Serving, log: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "3")
    monkeypatch.setenv("NO_PROXY", "example.org")
    words = ("launch", name, "--url", server.url, "--api-key", KEY, "--", "-p", "--help", "a b")
    outcome = run_main(capfdbinary, *words)
    assert (outcome.code, outcome.out, outcome.err) == (3, "ready\n", "")
    given = json.loads(log.read_text("utf-8"))
    settings = {k: v for k, v in given["environment"].items() if os.environ.get(k) != v}
    texts = [*settings.values(), *given["arguments"], *(file["text"] for file in given["files"].values())]
    for needed in (server.url, "demo", KEY):
        assert any(needed in text for text in texts), needed
    assert given["arguments"][-3:] == ["-p", "--help", "a b"]
    assert not any(KEY in argument for argument in given["arguments"])
    assert {file["mode"] for file in given["files"].values()} <= {0o600}
    assert given["folder modes"] == [0o700]
    for path, file in given["files"].items():
        assert "{" not in path
        if path.endswith((".json", ".yaml")):
            json.loads(file["text"])
        assert any(path in text or str(Path(path).parent) in text for text in texts), path
    assert not [text for text in texts if re.search(r"\{(url|model|key|context|folder|reply|prompt)\}", text)]
    assert settings["NO_PROXY"] == "example.org,127.0.0.1"
    assert settings["no_proxy"] == "127.0.0.1"
    assert not leftovers(log)


def test_numbers_are_numbers(server: Serving, log: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run_main(capfdbinary, "launch", "opencode", "--url", server.url, "--api-key", KEY).code == 0
    given = json.loads(log.read_text("utf-8"))["environment"]
    provider = json.loads(given["OPENCODE_CONFIG_CONTENT"])["provider"]["localllm"]
    assert provider["models"] == {"demo": {"limit": {"context": CONTEXT, "output": CONTEXT // 4}}}


def test_settings_of_zed_are_printed(server: Serving, log: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "launch", "zed", "--url", server.url, "--api-key", KEY)
    assert (outcome.code, outcome.err) == (0, "")
    assert server.url in json.dumps(json.loads(outcome.out))
    assert not leftovers(log)


@pytest.mark.parametrize("name", AGENTS)
def test_a_dry_run_prints_the_steps_and_runs_none(
    name: str, server: Serving, log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    outcome = run_main(capfdbinary, "launch", name, "-m", "some/model.gguf", "-c", 65536, "--dry-run", "--", "x y")
    assert (outcome.code, outcome.err) == (0, "")
    assert "localllm serve -m some/model.gguf -c 65536 --host 127.0.0.1 --port 8080\n" in outcome.out
    assert "http://127.0.0.1:8080" in outcome.out
    if name in PROGRAMS:
        assert "\nexport NO_PROXY=127.0.0.1\n" in outcome.out
        assert any(
            line.startswith(f"{PROGRAMS[name]} ") and line.endswith(" 'x y'") for line in outcome.out.split("\n")
        )
    outcome = run_main(capfdbinary, "launch", name, "--url", server.url, "--api-key", KEY, "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert "localllm serve" not in outcome.out
    assert server.url in outcome.out
    assert KEY not in outcome.out
    assert not log.exists()
    assert not leftovers(log)


def test_files_of_a_dry_run_have_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a key of the user: the lines set the variable before a file contains it."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    steps = steps_of(AGENTS["crush"], Connection("http://127.0.0.1:8080", "m", NO_KEY, 65536, f"{tmp_path}/c"), [])
    subprocess.run(["sh", "-c", "\n".join(shell_lines(steps)[:-1])], check=True)
    settings = json.loads((tmp_path / "c" / "crush.json").read_text("utf-8"))
    assert settings["providers"]["localllm"]["api_key"] == NO_KEY


def test_a_dry_run_on_windows_prints_commands_of_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "win32")
    connection = Connection("http://127.0.0.1:8080", "a & b", f"${KEY_VARIABLE}", 65536, r"C:\my files\crush")
    steps = steps_of(AGENTS["crush"], connection, ["x y"])
    lines = shell_lines(steps)
    assert lines[0] == r"set CRUSH_GLOBAL_CONFIG=C:\my files\crush"
    assert r'mkdir "C:\my files\crush"' in lines
    assert lines[-1] == 'crush "x y"'
    written = [line.partition(" echo ")[2] for line in lines if line.startswith(">")]
    assert not [line for line in written if re.search(r'(?<!\^)[&"()<>|]', line)]
    ((path, text),) = steps.files.items()
    assert [line for line in lines if line.startswith("> ")] == [f'> "{path}" echo {{']
    text = text.replace("$LOCALLLM_API_KEY", "%LOCALLLM_API_KEY%")
    assert json.loads("".join(line.replace("^", "") for line in written)) == json.loads(text)


def test_agents_that_do_not_exist_or_are_not_installed(
    server: Serving, log: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def error(*words: object) -> str:
        return run_main(capfdbinary, "launch", *words).error()

    assert error("opencod") == "there is no agent 'opencod': did you mean opencode?"
    assert error("qwen") == "there is no agent 'qwen': did you mean qwen-code?"
    assert error("emacs") == f"there is no agent 'emacs': the agents are {', '.join(AGENTS)}"
    monkeypatch.setenv("PATH", str(log.parent))
    for name, program in PROGRAMS.items():
        text = error(name, "--url", server.url, "--api-key", KEY)
        assert f"is not installed (there is no program {program!r}): install it with {AGENTS[name].install}" in text


def test_servers_and_models_that_do_not_suit_an_agent(
    server: Serving, log: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def error(name: str, *words: object) -> str:
        return run_main(capfdbinary, "launch", name, *words).error()

    at = ("--url", server.url, "--api-key", KEY)
    assert "the API key is missing or wrong" in error("codex", "--url", server.url)
    assert "does not serve the model 'other'" in error("codex", *at, "-m", "other")
    assert run_main(capfdbinary, "launch", "codex", *at, "-m", "folder/Demo.gguf").code == 0
    assert "needs a context of at least 16,384 tokens, but -c is 9,000: raise" in error("codex", *at, "-c", 9000)
    with serving(demo(context=4096, chat_template=TOOLS_TEMPLATE)) as small:
        text = error("codex", "--url", small.url)
        assert "Codex needs a context of at least 16,384 tokens, but the context of demo is 4,096: start" in text
    with serving(demo(context=CONTEXT)) as plain:
        assert "the chat template of demo does not contain tools: choose" in error("codex", "--url", plain.url)
        assert run_main(capfdbinary, "launch", "aider", "--url", plain.url).code == 0
    assert "no server answers at https://127.0.0.1:9 (" in error("codex", "--url", "https://127.0.0.1:9")
    assert "is not the address of a server" in error("codex", "--url", "localhost")
    assert not leftovers(log)


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "other", "owned_by": "llamacpp"}]}',
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
def test_the_port_of_another_program(answer: bytes, log: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def serve() -> None:
        listening.accept()[0].close()  # the first connection sends nothing
        connection, _ = listening.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listening.getsockname()[1]
        error = run_main(capfdbinary, "launch", "codex", "--url", f"http://127.0.0.1:{port}").error()
        thread.join()
    assert error == (
        f"another program answers at http://127.0.0.1:{port}: stop it, or choose another port with "
        f"--url http://127.0.0.1:{port + 1}"
    )


@pytest.mark.parametrize("name", AGENTS)
def test_the_page_states_the_installation_and_the_context(name: str) -> None:
    """The commands of docs/agents.md are written by `tests.cli_reference`, and compared in tests/test_docs.py."""
    agent, page = AGENTS[name], (ROOT / "docs" / "agents.md").read_text("utf-8")
    section = page.partition(f"\n## {agent.title}\n")[2].partition("\n## ")[0]
    assert agent.install in section
    assert f"{agent.context:,} tokens" in section


# -- With a server that is started ---------------------------------------------------------------------------------


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def is_free(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def words(url: str) -> list[str]:
    return ["launch", "aider", "-m", "demo", "-c", "8192", "--url", url]


def read_until(descriptor: int, text: str) -> str:
    screen = ""
    while text not in screen:
        screen += os.read(descriptor, 4096).decode()
    return screen


def test_a_server_is_started_and_ends_with_the_agent(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "5")
    url = free_url()
    outcome = run_main(capfdbinary, *words(url), "--api-key", KEY)
    assert (outcome.code, outcome.out) == (5, "ready\n"), outcome.err
    assert outcome.err.startswith("starting localllm serve -m demo -c 8192 --host 127.0.0.1 --port ")
    assert KEY not in outcome.err
    assert json.loads(log.read_text("utf-8"))["environment"]["OPENAI_API_KEY"] == KEY
    assert is_free(url)
    assert not leftovers(log)


def test_a_model_that_cannot_be_loaded(log: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    broken = log.parent / "broken.gguf"
    broken.write_bytes(b"no model")
    outcome = run_main(capfdbinary, "launch", "aider", "-m", broken, "--url", free_url())
    assert outcome.code == 1
    assert re.search(r"localllm: error: the server could not start: .*broken.gguf", outcome.err.splitlines()[-1])
    assert not log.exists()
    assert not leftovers(log)


@pytest.mark.parametrize(("waits", "code"), [(WAITS, 7), (SLEEPS, -signal.SIGINT)])
def test_ctrl_c_is_for_the_agent(waits: str, code: int, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WAIT", waits)
    url = free_url()
    with on_terminal(words(url)) as (process, master):
        read_until(master, "waiting")
        assert not is_free(url)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does for all processes in the foreground
        screen = read_all(master).decode()
        assert process.wait() == code, screen
    assert ("interrupted" in screen) == (code == 7)
    assert is_free(url)
    assert not leftovers(log)


def test_ctrl_c_while_the_server_starts(log: Path) -> None:
    url = free_url()
    with on_terminal(words(url)) as (process, master):
        read_until(master, "starting localllm serve")
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does for all processes in the foreground
        read_all(master)
        assert process.wait() == -signal.SIGINT
    assert is_free(url)
    assert not log.exists()
    assert not leftovers(log)


def test_ctrl_c_while_the_state_of_the_server_is_read(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """An exception there would leave the lock of `subprocess.Popen` locked, and the wait for the server's end would
    never return."""
    n_started = n_finished = 0

    def interrupted(process: subprocess.Popen[bytes]) -> None:
        nonlocal n_started, n_finished
        n_started += 1
        signal.raise_signal(signal.SIGINT)
        n_finished += 1

    monkeypatch.setattr(subprocess.Popen, "poll", interrupted)
    url = free_url()
    with default_interrupts():
        assert run_main(capfdbinary, *words(url)).code == INTERRUPTED
    assert n_started == n_finished > 0
    assert is_free(url)
    assert not leftovers(log)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_agent_and_the_server_end_with_launch(name: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, name)  # Windows has no SIGHUP
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("programs under nohup ignore SIGHUP")
    monkeypatch.setenv("FAKE_WAIT", SLEEPS)
    url = free_url()
    with on_terminal(words(url)) as (process, master):
        read_until(master, "waiting")
        agent = json.loads(log.read_text("utf-8"))["pid"]
        process.send_signal(number)
        assert process.wait() == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)
    assert is_free(url)
    assert not leftovers(log)
