"""``localllm service``: run the server as a service of systemd, launchd or the Task Scheduler of Windows."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_config_path, user_data_path, user_log_path

from localllm.cli.commands.config import VARIABLES
from localllm.cli.foreign_flags import in_our_flags
from localllm.cli.parser import Command, flag, parser_of
from localllm.console import say
from localllm.errors import UsageError, path_text

_NAME = "localllm"
_LABEL = "localllm.serve"


#: Seconds from the end of the last reply (``--grace``) until a server that does not stop is killed.
_STOP_S = 20


class Task(NamedTuple):
    """A service to install."""

    command: Sequence[str]
    folder: Path  # working directory of the command
    variables: Mapping[str, str]  # environment variables
    stop_s: int  # seconds until a server that does not stop is killed


class Manager(NamedTuple):
    """The service manager of a platform: the file that describes a service, and the commands for it."""

    name: str
    path: Path
    text: Callable[[Task], bytes]
    install: Sequence[Sequence[str]]
    uninstall: Sequence[Sequence[str]]  # while the file exists
    uninstalled: Sequence[Sequence[str]]  # after the file is removed
    status: Sequence[str]
    hint: str


def manager() -> Manager:
    """Return the service manager of this platform."""
    if sys.platform == "win32":
        path = user_data_path("localllm", appauthor=False) / "service.xml"
        create = ["schtasks", "/Create", "/F", "/TN", _NAME, "/XML", str(path)]
        return Manager(
            "the Task Scheduler",
            path,
            scheduled_task,
            [create, ["schtasks", "/Run", "/TN", _NAME]],
            [["schtasks", "/End", "/TN", _NAME], ["schtasks", "/Delete", "/F", "/TN", _NAME]],
            [],
            ["schtasks", "/Query", "/TN", _NAME, "/V", "/FO", "LIST"],
            "it starts when you log in, with the variables of localllm from your account (setx)",
        )
    if sys.platform == "darwin":
        path, domain = Path.home() / "Library" / "LaunchAgents" / f"{_LABEL}.plist", f"gui/{os.getuid()}"
        return Manager(
            "launchd",
            path,
            launch_agent,
            [["launchctl", "bootstrap", domain, str(path)]],
            [["launchctl", "bootout", f"{domain}/{_LABEL}"]],
            [],
            ["launchctl", "print", f"{domain}/{_LABEL}"],
            f"it starts when you log in; its log is {_log()}",
        )
    systemctl = ["systemctl", "--user"]
    return Manager(
        "systemd",
        user_config_path() / "systemd" / "user" / f"{_NAME}.service",
        systemd_unit,
        [[*systemctl, "daemon-reload"], [*systemctl, "enable", _NAME], [*systemctl, "restart", _NAME]],
        [[*systemctl, "disable", "--now", _NAME]],
        [[*systemctl, "daemon-reload"]],
        [*systemctl, "status", "--no-pager", _NAME],
        f"it starts at login (loginctl enable-linger: at boot); its log: journalctl --user -u {_NAME}",
    )


def _log() -> Path:
    return user_log_path() / "localllm.log"


def systemd_unit(task: Task) -> bytes:
    """Return a unit of systemd (systemd.service(5); quoting as in systemd.syntax(7))."""

    def quoted(word: str) -> str:
        word = re.sub(r'([\\"])', r"\\\1", word).replace("%", "%%").replace("\n", "\\n")
        return f'"{word}"'

    lines = [
        "[Unit]",
        "Description=localllm serve, language models for this user's programs",
        "",
        "[Service]",
        "ExecStart=" + " ".join(quoted(word).replace("$", "$$") for word in task.command),
        f"WorkingDirectory={str(task.folder).replace('%', '%%')}",
        *(f"Environment={quoted(f'{name}={value}')}" for name, value in task.variables.items()),
        "Restart=on-failure",
        "RestartSec=2",
        f"TimeoutStopSec={task.stop_s}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return ("\n".join(lines) + "\n").encode()


def launch_agent(task: Task) -> bytes:
    """Return a property list of launchd (launchd.plist(5))."""
    import plistlib  # imported here, because `localllm --help` imports every command

    return plistlib.dumps(
        {
            "Label": _LABEL,
            "ProgramArguments": list(task.command),
            "WorkingDirectory": str(task.folder),
            "EnvironmentVariables": dict(task.variables),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": task.stop_s,
            "StandardErrorPath": str(_log()),
        }
    )


def scheduled_task(task: Task) -> bytes:
    """Return a task of Windows (https://learn.microsoft.com/windows/win32/taskschd/task-scheduler-schema)."""
    from html import escape
    from subprocess import list2cmdline

    program, *words = task.command
    text = f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled></LogonTrigger></Triggers>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>10</Count></RestartOnFailure>
  </Settings>
  <Actions>
    <Exec>
      <Command>{escape(program, quote=False)}</Command>
      <Arguments>{escape(list2cmdline(words), quote=False)}</Arguments>
      <WorkingDirectory>{escape(str(task.folder), quote=False)}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""
    return text.encode("utf-16")


def run(arguments: argparse.Namespace) -> int:
    if arguments.flags and arguments.action != "install":
        raise UsageError(f"{arguments.action} accepts no flags of serve: write localllm service {arguments.action}")
    service_manager = manager()
    if arguments.action == "install":
        _install(service_manager, arguments.flags)
        return 0
    if arguments.action == "status":
        if not service_manager.path.exists():
            say("no service is installed: localllm service install -- FLAGS OF SERVE installs it")
            return 1
        say(f"service defined in {path_text(service_manager.path)}:")
        import subprocess

        return subprocess.run(service_manager.status, check=False).returncode
    if not service_manager.path.exists():
        raise UsageError("no service is installed, so no service was removed")
    failures = [_run_command(command) for command in service_manager.uninstall]
    service_manager.path.unlink()
    failures += [_run_command(command) for command in service_manager.uninstalled]
    say(f"{path_text(service_manager.path)} was removed")
    if failure := next(filter(None, failures), None):
        say(f"{service_manager.name} reported: {failure}")
    return 0


def _install(service_manager: Manager, flags: Sequence[str]) -> None:
    parser = parser_of("serve")
    line, _, parser.typed = in_our_flags("serve", flags, parser.flags)
    arguments, unknown_words = parser.parse_known_args(line)
    if unknown_words:
        raise UsageError(f"serve does not accept {unknown_words[0]!r:.80}: see localllm serve --help")
    program = sys.executable
    if sys.platform == "win32":  # pythonw.exe opens no window
        windowless = Path(program).with_name("pythonw.exe")
        program = str(windowless) if windowless.exists() else program
    variables = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    task = Task([program, "-m", "localllm", "serve", *line], Path.cwd(), variables, arguments.grace + _STOP_S)
    try:
        service_manager.path.parent.mkdir(parents=True, exist_ok=True)
        service_manager.path.touch(mode=0o600)  # flags may contain keys
        service_manager.path.write_bytes(service_manager.text(task))
    except OSError as error:
        raise UsageError(
            f"{path_text(service_manager.path)} cannot be written ({error.strerror}): check its folder"
        ) from None
    say(f"{path_text(service_manager.path)} was written")
    for command in service_manager.install:
        if failure := _run_command(command):
            raise UsageError(f"{service_manager.name} could not start the service: {failure} (the file is kept)")
    say(f"the service is running: {service_manager.hint}")


def _run_command(command: Sequence[str]) -> str | None:
    """Run a command.  Returns the error message if it fails, or None."""
    import subprocess

    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})"
    return None if result.returncode == 0 else (result.stderr or result.stdout).strip() or f"{command[0]} failed"


COMMAND = Command(
    "install [-- FLAGS OF SERVE] | status | uninstall",
    "run the server in the background, started at login",
    [flag("action install|status|uninstall", "what to do"), flag("flags FLAG", "flags of localllm serve", nargs="*")],
    run,
    """\
localllm service install -- -m qwen.gguf --lan creates a systemd unit (Linux), a launchd agent (macOS) or a task of
the Task Scheduler (Windows), and starts it.  The service runs localllm serve with these flags, in this folder and as
this user.  It is started when the user logs in, and restarted when it fails.  It uses the current values of the
environment variables that localllm config lists; set keys with --api-key-file.
""",
)
