"""Starts the agent of ``localllm launch``: finds or starts the server, and connects the agent."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

from localllm.cli import agent_server
from localllm.cli.agents import AGENTS, NO_KEY, Agent, Connection
from localllm.cli.foreign_flags import nearest
from localllm.cli.local_server import KEY_VARIABLE, address_of, ask, key_of
from localllm.console import say, visible_line
from localllm.errors import UsageError
from localllm.files import private_opener
from localllm.shell import join_command, set_variable

#: Seconds that a running server may take to load a model.
_LOAD_SECONDS = 3600.0


class Steps(NamedTuple):
    """How an agent is started."""

    files: Mapping[Path, str]  # written before, and removed after the agent has ended
    environment: Mapping[str, str]
    command: Sequence[str]  # empty if the user starts the agent
    settings: str  # text for the user to copy, or empty


def run(arguments: argparse.Namespace) -> int:
    """Runs the agent, and returns its exit code."""
    agent = _agent(arguments.agent)
    if arguments.context:
        _check_context(agent, arguments.context, "-c", "raise or remove -c")
    models = agent_server.running_models(arguments)
    if models is None:
        _select_default(arguments)
    if arguments.dry_run:
        _print_steps(arguments, agent, models)
        return 0
    program = _program(agent)
    with (
        _signals_as_exceptions(),
        TemporaryDirectory(prefix="localllm-", ignore_cleanup_errors=True) as folder,
        agent_server.started_server(arguments, Path(folder, "server.log"))
        if models is None
        else contextlib.nullcontext() as server,
    ):
        steps = steps_of(agent, _connection(arguments, agent, folder), arguments.forwarded)
        for path, text in steps.files.items():
            with open(path, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(text)
        if steps.settings:
            print(steps.settings, flush=True)
        if program is not None:
            environment = {**steps.environment, **_without_proxy(address_of(arguments).hostname or "")}
            return _run_agent([program, *steps.command[1:]], environment)
        if server is not None:
            say(f"the server runs at {arguments.url} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                server.wait()
        return 0


# -- The agent -----------------------------------------------------------------------------------------------------


def _agent(name: str) -> Agent:
    if name in AGENTS:
        return AGENTS[name]
    names = {agent.program: key for key, agent in AGENTS.items() if agent.program} | {key: key for key in AGENTS}
    near = names.get(nearest(name.lower(), names) or name)
    advice = f"did you mean {near}?" if near else f"the agents are {', '.join(AGENTS)}"
    raise UsageError(f"there is no agent {name!r:.80}: {advice}")


def _program(agent: Agent) -> str | None:
    """Return the path of the agent's program; None if the user starts it."""
    if agent.program is None:
        return None
    if (path := shutil.which(agent.program)) is None:
        raise UsageError(
            f"{agent.title} is not installed (there is no program {agent.program!r}): install it with {agent.install}"
        )
    return path


def steps_of(agent: Agent, connection: Connection, forwarded: Sequence[str]) -> Steps:
    """Return the steps for a connection.  ``forwarded``: the user's arguments for the agent."""

    def text(value: Any, indent: int | None = None) -> str:
        value = connection.fill(value)
        return value if isinstance(value, str) else json.dumps(value, indent=indent, ensure_ascii=False)

    return Steps(
        {Path(connection.folder, name): text(value, 2) for name, value in agent.files.items()},
        {name: text(value) for name, value in agent.environment.items()},
        [] if agent.program is None else [agent.program, *map(text, agent.arguments), *forwarded],
        "" if agent.settings is None else text(agent.settings, 2),
    )


def _without_proxy(host: str) -> dict[str, str]:
    """Return environment variables that let programs reach a host directly, although the environment has a proxy."""
    changes = {}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [word for word in os.environ.get(name, "").split(",") if word]
        if host not in hosts:
            changes[name] = ",".join([*hosts, host])
    return changes


def _run_agent(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent in the foreground, and return its exit code.

    The terminal sends Ctrl-C to the agent, too, and the agent decides whether to end.
    """
    with (
        agent_server.ignored_interrupts(),
        agent_server.running(command, subprocess.Popen.kill, env={**os.environ, **environment}) as process,
    ):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """End the block by an exception on Ctrl-C, SIGTERM and SIGHUP, so that the agent and the server end, too.

    Only the first signal counts, because ending takes a while.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for handled in handlers:
            signal.signal(handled, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = {number: signal.getsignal(number) for number in agent_server.ENDING_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -- The model -----------------------------------------------------------------------------------------------------


def _select_default(arguments: argparse.Namespace) -> None:
    """Sets the model for a server to start, and downloads it for -hf."""
    from localllm.catalog.hub_names import DEMO
    from localllm.cli.defaults import model_file
    from localllm.options.settings import load_settings

    settings = load_settings()
    if arguments.model is None:
        arguments.model = settings.model or DEMO
    elif arguments.download and not arguments.dry_run:
        model_file(vars(arguments), settings)


def _connection(arguments: argparse.Namespace, agent: Agent, folder: str) -> Connection:
    """Return the connection to the running server.  Raises UsageError if its model does not suit the agent."""
    model = agent_server.selected_model(arguments, ask(arguments, "/v1/models")["data"])["id"]
    properties = ask(arguments, f"/props?model={quote(model, safe='')}", seconds=_LOAD_SECONDS)
    context = properties["default_generation_settings"]["n_ctx"]
    _check_context(agent, context, f"the context of {model}", "start the server with -c N, or choose another model")
    if agent.uses_tools and not _uses_tools(properties):
        raise UsageError(
            f"{agent.title} needs a model that calls tools, but the chat template of {model} does not contain tools: "
            "choose a model that was trained to call tools, such as Qwen 3"
        )
    return Connection(_url(arguments), model, key_of(arguments) or NO_KEY, context, folder)


def _check_context(agent: Agent, context: int, name: str, remedy: str) -> None:
    if context < agent.context:
        raise UsageError(
            f"{agent.title} needs a context of at least {agent.context:,} tokens, but {name} is {context:,}: {remedy}"
        )


def _uses_tools(properties: Mapping[str, Any]) -> bool:
    from localllm.chat.template import ChatTemplate  # imported here, because jinja2 is slow to import

    prefix = "chat_template_"
    named = {name.removeprefix(prefix): text for name, text in properties.items() if name == f"{prefix}tool_use"}
    return ChatTemplate(properties["chat_template"], named=named).reads("tools")


def _url(arguments: argparse.Namespace) -> str:
    return address_of(arguments).geturl()


# -- Dry runs ------------------------------------------------------------------------------------------------------


def _print_steps(arguments: argparse.Namespace, agent: Agent, models: list[dict[str, Any]] | None) -> None:
    from localllm.cli.commands.serve import served_name

    context = arguments.context or agent.context
    if models is None:
        model = served_name(arguments.model)
        print(f"{_remark()} Start a server, which ends with {agent.title}:")
        print(join_command(["localllm", *agent_server.server_flags(arguments)]))
    else:
        entry = agent_server.selected_model(arguments, models)
        model, context = entry["id"], entry["meta"]["n_ctx"] or context
        print(f"{_remark()} Use the server at {_url(arguments)} with the model {visible_line(model)}.")
    key = _KEY if key_of(arguments) else NO_KEY
    folder = os.path.join(gettempdir(), f"localllm-{arguments.agent}")
    connection = Connection(_url(arguments), model, key, context, folder)
    steps = steps_of(agent, connection, arguments.forwarded)
    environment = {**steps.environment, **_without_proxy(address_of(arguments).hostname or "")}
    print("\n".join(shell_lines(steps._replace(environment=environment))))
    if steps.files:
        print(f"{_remark()} Remove {folder} after {agent.title} has ended.")


#: Placeholder of the key in a dry run: the variable that contains it.
_KEY = f"${KEY_VARIABLE}"
#: Special characters of shells: in a document and in a string of a POSIX shell, and anywhere on Windows.
_DOCUMENT, _STRING, _WINDOWS = r"\\`$", r'\\`$"', r'"^&|<>()%'


def _remark() -> str:
    """Return the start of a comment in the user's shell."""
    return "rem" if sys.platform == "win32" else "#"


def _with_key(text: str, special: str, escape: str = "\\", key: str = _KEY) -> str:
    """Escape the special characters of a shell in text, and replace the placeholder of the key."""
    return key.join(re.sub(f"([{special}])", lambda match: escape + match[1], piece) for piece in text.split(_KEY))


def _for_windows(text: str) -> str:
    return _with_key(text, _WINDOWS, "^", f"%{KEY_VARIABLE}%")


def _file_lines(path: Path, text: str) -> list[str]:
    """Return shell commands that write a file."""
    if sys.platform == "win32":
        lines = text.splitlines()
        return [f'{">>" if i else ">"} "{path}" echo {_for_windows(line)}' for i, line in enumerate(lines)]
    has_key = _KEY in text
    text = _with_key(text, _DOCUMENT) if has_key else text
    return [f"cat > {join_command([str(path)])} <<{'END' if has_key else repr('END')}", text.rstrip("\n"), "END"]


def shell_lines(steps: Steps) -> list[str]:
    """Return commands of the user's shell that do the same as a launch with a running server, and the settings."""
    is_windows, lines = sys.platform == "win32", list[str]()
    for name, value in steps.environment.items():  # before the files, which may contain variables
        if value != _KEY or name != KEY_VARIABLE:  # otherwise it is set already
            quoted = f'"{_with_key(value, _STRING)}"' if _KEY in value else join_command([value])
            lines.append(set_variable(name, _for_windows(value) if is_windows else quoted))
    for folder in dict.fromkeys(path.parent for path in steps.files):  # fails for a folder of another user
        lines.append(join_command(["mkdir", *([] if is_windows else ["-m", "700"]), str(folder)]))
    for path, text in steps.files.items():
        lines += _file_lines(path, text)
    return [*lines, *steps.settings.splitlines(), *([join_command(steps.command)] if steps.command else [])]
