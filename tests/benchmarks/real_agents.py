"""Install coding agents and drive a tool loop with each through ``localllm launch``: the table in docs/agents.md.

    python -m tests.benchmarks.real_agents                    # installs all agents with npm and pip (5 GB)
    python -m tests.benchmarks.real_agents --only pi,codex --folder ~/agents --record requests

The server has the demo model with a template that supports tools.  A proxy in front of it adds ``regex`` to requests,
so that the model calls the agent's tool for reading a file or running a command, and then repeats the word that the
tool returned.  The loop has succeeded if the agent prints this word.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm.cli.agents import AGENTS
from tests.helpers.command_line import command

#: Tokens of context of the server.
CONTEXT = 131_072
#: Seconds that an agent may take.
LIMIT = 600.0

PROMPT = "Read the file hello.txt in the current folder and tell me the word in it."

#: Calls as JSON in <tool_call> tags, as many models write them.
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if loop.first and tools %}Tools: {{ tools | tojson }}
{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Tools that read a file or run a command, best first.
READERS = """
    read_file read Read view read_files readFile developer__read Bash bash shell exec_command shell_command
    run_shell_command run_terminal_command execute_command run_commands local_shell developer__shell
"""


@dataclass(frozen=True)
class Trial:
    """How an agent is installed, and run without a terminal."""

    packages: Sequence[str]  # of npm, or of PyPI if they start with "pip:"
    arguments: Sequence[str]  # {prompt} is replaced
    environment: dict[str, str] = field(default_factory=dict)


TRIALS = {
    "codex": Trial(
        ["@openai/codex"],
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"],
    ),
    "opencode": Trial(["opencode-ai"], ["run", "{prompt}"]),
    "qwen-code": Trial(["@qwen-code/qwen-code"], ["--yolo", "-p", "{prompt}"]),
    "pi": Trial(["@earendil-works/pi-coding-agent"], ["--no-session", "-p", "{prompt}"]),
    "cline": Trial(["cline@latest"], ["{prompt}"]),
    "continue": Trial(["@continuedev/cli"], ["--auto", "-p", "{prompt}"]),
    "aider": Trial(
        ["pip:aider-chat"],
        ["--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--message", "{prompt}", "hello.txt"],
    ),
    "copilot": Trial(["@github/copilot"], ["--allow-all-tools", "-p", "{prompt}"]),
    "crush": Trial(["@charmland/crush"], ["run", "{prompt}"]),
    "goose": Trial(
        ["@aaif/goose"],
        ["run", "--no-session", "--with-builtin", "developer", "--text", "{prompt}"],
        {"GOOSE_DISABLE_KEYRING": "1", "GOOSE_MODE": "auto"},
    ),
    "claude": Trial(["@anthropic-ai/claude-code"], ["--allowedTools", "Read", "-p", "{prompt}"]),
}


# -- Scripted replies ----------------------------------------------------------------------------------------------


@dataclass
class Script:
    """The replies of one loop: a call of a tool that reads the file, then a sentence with the file's word."""

    folder: Path
    word: str = ""
    n_calls: int = 0
    statuses: list[str] = field(default_factory=list)  # "POST /path status" of each request
    is_read: bool = False  # whether a request contained the word, which only a tool can read

    def reply(self, body: dict[str, Any]) -> str:
        """Return the text that the model shall write for a request."""
        text = json.dumps({key: body.get(key) for key in ("messages", "input")})
        if self.word in text:
            self.is_read = True
            return f"The word is {self.word}."
        call = self._call(body.get("tools") or [])
        if call is None or self.n_calls >= 3:
            return "There is no such tool."
        self.n_calls += 1
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def _call(self, tools: list[dict[str, Any]]) -> dict[str, Any] | None:
        functions = [tool.get("function") or tool for tool in tools]
        schemas = {f["name"]: f.get("parameters") or f.get("input_schema") or {} for f in functions if "name" in f}
        for name in READERS.split():
            if name in schemas and (arguments := self._arguments(schemas[name])) is not None:
                return {"name": name, "arguments": arguments}
        return None

    def _arguments(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """Return arguments for the required properties; None if a property is unknown."""
        properties, path = schema.get("properties", {}), str(self.folder / "hello.txt")
        values: dict[str, Any] = {
            **dict.fromkeys(("file_path", "filePath", "path", "absolute_path", "filepath"), path),
            **dict.fromkeys(("command", "cmd"), f"cat {path}"),
            **dict.fromkeys(("description", "explanation"), "Read the file"),
            **dict.fromkeys(("is_background", "run_in_background", "requires_approval"), False),
            "paths": [path],
            "files": [{"path": path}],
            "commands": [f"cat {path}"],
        }
        required = schema.get("required") or []
        names = [n for n in properties if n in required or (n in values and not required)]
        if any(name not in values for name in names):
            return None
        arguments = {name: values[name] for name in names}
        if "command" in arguments and properties["command"].get("type") == "array":
            arguments["command"] = ["cat", path]
        return arguments or None


def literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return re.sub(r"[\\.^$*+?{}\[\]|()/]", r"\\\g<0>", text)


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests to the server, and adds ``regex`` to those that generate text."""

    protocol_version = "HTTP/1.1"
    target = ""
    script: Script
    record: Path | None = None
    lock = threading.Lock()

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length) if length else None
        if data and self.command == "POST" and re.search(r"/(completions|responses|messages)(\?|$)", self.path):
            data = self._scripted(data)
        address = urlsplit(self.target)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=LIMIT)
        left_out = ("host", "content-length", "connection", "accept-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        connection.request(self.command, self.path, data, headers)
        response = connection.getresponse()
        type(self).script.statuses.append(f"{self.command} {self.path} {response.status}")
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        answer = b""
        while part := response.read1(65536):
            answer += part
            self.wfile.write(part)
            self.wfile.flush()
        self.close_connection = True
        if response.status >= 400 and "models" not in self.path:
            print(f"    {self.command} {self.path} {response.status}: {answer[:300]!r}", flush=True)
        connection.close()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

    def _scripted(self, data: bytes) -> bytes:
        body = json.loads(data)
        if self.record is not None:
            with self.lock:
                number = len(list(self.record.iterdir()))
                (self.record / f"{number:03}{self.path.partition('?')[0].replace('/', '-')}.json").write_bytes(data)
        with self.lock:
            body["regex"] = literal(self.script.reply(body))
        return json.dumps(body).encode()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted_server(script: Script) -> Iterator[str]:
    """Yield the address of a proxy in front of a server with the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template.jinja")
        template.write_text(TEMPLATE, encoding="utf-8")
        flags = ("-m", "demo", "-c", CONTEXT, "--chat-template-file", template, "--port", 0)
        server = subprocess.Popen(command("serve", *flags), stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        lines: list[str] = []
        try:
            for line in server.stderr:
                lines.append(line)
                if match := re.search(r"listening on (\S+)", line):
                    break
            else:
                raise SystemExit("".join(lines))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            Proxy.target, Proxy.script = match[1], script
            proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
            proxy.shutdown()
        finally:
            server.terminate()
            server.wait(60)


# -- Agents --------------------------------------------------------------------------------------------------------


def install(name: str, folder: Path) -> Path:
    """Install an agent, unless it is installed, and return the folder of its program."""
    home = folder / name
    python_packages = [p.removeprefix("pip:") for p in TRIALS[name].packages if p.startswith("pip:")]
    if python_packages:
        if not (home / "bin" / str(AGENTS[name].program)).exists():
            venv.create(home, with_pip=True)
            subprocess.run([home / "bin" / "pip", "install", "-q", *python_packages], check=True)
        return home / "bin"
    programs = home / "node_modules" / ".bin"
    if not (programs / str(AGENTS[name].program)).exists():
        home.mkdir(parents=True, exist_ok=True)
        words = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(home)]
        subprocess.run([*words, *TRIALS[name].packages], check=True)
    return programs


def version(programs: Path, name: str) -> str:
    done = subprocess.run(
        [programs / str(AGENTS[name].program), "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    match = re.search(r"\d+\.\d+[\w.-]*", done.stdout + done.stderr)
    return match[0] if match else "?"


def loop(name: str, programs: Path, url: str, script: Script) -> str:
    """Run an agent's loop, and return what happened."""
    trial, home = TRIALS[name], script.folder.parent / "home"
    home.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("LOCALLLM_", "OPENAI_", "XDG_"))},
        "HOME": str(home),
        "PWD": str(script.folder),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        **trial.environment,
    }
    arguments = [argument.format(prompt=PROMPT) for argument in trial.arguments]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command("launch", name, "--url", url, "--", *arguments),
            cwd=script.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
        )
        output, code = done.stdout + done.stderr, str(done.returncode)
    except subprocess.TimeoutExpired as error:
        output, code = str(error.output) + str(error.stderr), f"none within {LIMIT:.0f} s"
    seconds = time.monotonic() - begin
    failed = [status for status in script.statuses if status[-3:] >= "400"]
    is_answered = f"The word is {script.word}" in output
    parts = [
        "a tool is called, its result is answered" if script.is_read and script.n_calls else "",
        "the reply is printed" if is_answered else "",
        f"exit code {code}" if code != "0" else "",
        f"errors: {'; '.join(dict.fromkeys(failed))}" if failed else "",
    ]
    if not is_answered:
        print(output[-3000:])
    return f"{', '.join(filter(None, parts)) or 'nothing'} ({len(script.statuses)} requests, {seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRIALS), help="comma-separated names of agents")
    parser.add_argument("--folder", type=Path, help="where agents are installed (default: a temporary folder)")
    parser.add_argument("--record", type=Path, help="folder for the bodies of requests, in a folder per agent")
    arguments = parser.parse_args()
    if shutil.which("npm") is None:
        raise SystemExit("npm is not installed: install Node.js")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        installed = (arguments.folder or Path(scratch, "agents")).absolute()
        script = Script(Path(scratch))
        with scripted_server(script) as url:
            for name in arguments.only.split(","):
                try:
                    programs = install(name, installed)
                except subprocess.CalledProcessError as error:
                    print(f"| {name} | cannot be installed (exit code {error.returncode}) |", flush=True)
                    continue
                folder = Path(scratch, name, "project")
                folder.mkdir(parents=True)
                word = f"marmot{secrets.randbelow(10**6)}"
                (folder / "hello.txt").write_text(f"The word is {word}.\n", encoding="utf-8")
                Proxy.script = Script(folder, word)
                if arguments.record is not None:
                    Proxy.record = arguments.record / name
                    Proxy.record.mkdir(parents=True, exist_ok=True)
                result = loop(name, programs, url, Proxy.script)
                print(f"| {AGENTS[name].title} {version(programs, name)} | {result} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
