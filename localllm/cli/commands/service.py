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


#: Folder of the service of the machine: its working directory and its home.
_STATE = Path("/var/lib") / _NAME

#: Default user of the service of the machine.
_USER = "localllm"

#: Lines of the log that ``localllm service logs`` shows.
_N_LINES = "200"

#: Restrictions of the service of the machine.  ``PrivateDevices`` and ``ProtectClock`` (by its implied
#: ``DeviceAllow``) would hide GPUs, and ``MemoryDenyWriteExecute`` would forbid compiled kernels.  Without
#: ``RuntimeDirectoryPreserve``, a restart removes the socket of a second server from the runtime directory.
_HARDENING = """\
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateMounts=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
LockPersonality=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
StateDirectory=localllm
CacheDirectory=localllm
RuntimeDirectory=localllm
RuntimeDirectoryPreserve=restart
StateDirectoryMode=0700
CacheDirectoryMode=0700
RuntimeDirectoryMode=0755"""

#: Seconds from the end of the last reply (``--grace``) until a server that does not stop is killed.
_STOP_S = 20


class Task(NamedTuple):
    """A service to install."""

    command: Sequence[str]
    folder: Path  # working directory of the command
    variables: Mapping[str, str]  # environment variables
    stop_s: int  # seconds until a server that does not stop is killed
    reloads: bool = False  # whether SIGHUP reads files again
    user: str = ""  # of a service of the machine; empty for a service of the current user
    written: Sequence[Path] = ()  # folders of files that it creates, in addition to its own
    has_low_port: bool = False  # whether it listens on a port below 1024


class Manager(NamedTuple):
    """The service manager of a platform: the file that describes a service, and the commands for it."""

    name: str
    path: Path
    text: Callable[[Task], bytes]
    install: Sequence[Sequence[str]]
    uninstall: Sequence[Sequence[str]]  # while the file exists
    uninstalled: Sequence[Sequence[str]]  # after the file is removed
    status: Sequence[str]
    logs: Sequence[str]  # shows the end of the log, with "-f" also new lines; empty without a log
    hint: str


def manager(*, system: bool = False) -> Manager:
    """Return the service manager of this platform.

    ``system``: of the machine, instead of the current user's.  Raises UsageError on platforms without systemd.
    """
    if system and sys.platform != "linux":
        raise UsageError("--system needs systemd, which only Linux has: leave --system out")
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
            [],
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
            ["tail", "-n", _N_LINES, str(_log())],
            f"it starts when you log in; its log is {_log()}",
        )
    scope = [] if system else ["--user"]
    systemctl = ["systemctl", *scope]
    folder = Path("/etc/systemd/system") if system else user_config_path() / "systemd" / "user"
    hint = "it starts at boot" if system else "it starts at login (loginctl enable-linger: at boot)"
    return Manager(
        "systemd",
        folder / f"{_NAME}.service",
        systemd_unit,
        [[*systemctl, "daemon-reload"], [*systemctl, "enable", _NAME], [*systemctl, "restart", _NAME]],
        [[*systemctl, "disable", "--now", _NAME]],
        [[*systemctl, "daemon-reload"]],
        [*systemctl, "status", "--no-pager", _NAME],
        ["journalctl", *scope, "--no-pager", "-n", _N_LINES, "-u", _NAME],
        f"{hint}; its log: localllm service logs{' --system' * system}",
    )


def _log() -> Path:
    return user_log_path() / "localllm.log"


def systemd_unit(task: Task) -> bytes:
    """Return a unit of systemd (systemd.service(5); quoting as in systemd.syntax(7))."""

    def quoted(word: str) -> str:
        word = re.sub(r'([\\"])', r"\\\1", word).replace("%", "%%").replace("\n", "\\n")
        return f'"{word}"'

    reload = ["ExecReload=/bin/kill -HUP $MAINPID"] if task.reloads else []
    lines = [
        "[Unit]",
        f"Description=localllm serve, language models for {'this machine' if task.user else 'one user'}",
        *(["After=network-online.target", "Wants=network-online.target"] if task.user else []),
        "",
        "[Service]",
        "ExecStart=" + " ".join(quoted(word).replace("$", "$$") for word in task.command),
        *reload,
        f"WorkingDirectory={str(task.folder).replace('%', '%%')}",
        *(f"Environment={quoted(f'{name}={value}')}" for name, value in task.variables.items()),
        "Restart=on-failure",
        "RestartSec=2",
        f"TimeoutStopSec={task.stop_s}",
    ]
    if task.user:
        capabilities = "CAP_NET_BIND_SERVICE" if task.has_low_port else ""
        lines += [f"User={task.user}", _HARDENING.format(capabilities=capabilities)]
        lines += [f"ReadWritePaths={quoted(f'-{folder}')}" for folder in task.written]
    lines += ["", "[Install]", f"WantedBy={'multi-user' if task.user else 'default'}.target"]
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
    action = arguments.action
    if action != "install" and (arguments.forwarded or arguments.user):
        refused = "--user" if arguments.user else "flags of serve"
        raise UsageError(f"{action} accepts no {refused}: write localllm service {action}")
    if arguments.follow and action != "logs":
        raise UsageError(f"{action} does not accept --follow: localllm service logs --follow shows new lines")
    service_manager = manager(system=arguments.system)
    if action == "install":
        _install(service_manager, arguments)
        return 0
    if action == "uninstall":
        _uninstall(service_manager)
        return 0
    if not service_manager.path.exists():
        install = "localllm service install" + " --system" * arguments.system
        say(f"no service is installed: {install} -- FLAGS OF SERVE installs it")
        return 1
    if action == "logs":
        if not service_manager.logs:
            raise UsageError(
                f"{service_manager.name} keeps no log: run localllm serve in a terminal to see its messages"
            )
        return _show([*service_manager.logs, *["-f"] * arguments.follow])
    say(f"service defined in {path_text(service_manager.path)}:")
    return _show(service_manager.status)


def _show(command: Sequence[str]) -> int:
    """Run a command whose output the user sees.  Returns its exit code."""
    import subprocess

    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run ({error.strerror}): check that it is installed") from None


def _uninstall(service_manager: Manager) -> None:
    if not service_manager.path.exists():
        raise UsageError("no service is installed, so no service was removed")
    failures = [_run_command(command) for command in service_manager.uninstall]
    try:
        service_manager.path.unlink()
    except OSError as error:
        raise UsageError(_unwritable(service_manager.path, error)) from None
    failures += [_run_command(command) for command in service_manager.uninstalled]
    say(f"{path_text(service_manager.path)} was removed")
    if failure := next(filter(None, failures), None):
        say(f"{service_manager.name} reported: {failure}")


def _unwritable(path: Path, error: OSError) -> str:
    remedy = "run the command as root" if isinstance(error, PermissionError) else "check its folder"
    return f"{path_text(path)} cannot be written ({error.strerror}): {remedy}"


def _install(service_manager: Manager, arguments: argparse.Namespace) -> None:
    task = _task(arguments)
    try:
        service_manager.path.parent.mkdir(parents=True, exist_ok=True)
        service_manager.path.touch(mode=0o600)  # flags may contain keys
        service_manager.path.write_bytes(service_manager.text(task))
    except OSError as error:
        raise UsageError(_unwritable(service_manager.path, error)) from None
    say(f"{path_text(service_manager.path)} was written")
    for command in service_manager.install:
        if failure := _run_command(command):
            raise UsageError(f"{service_manager.name} could not start the service: {failure} (the file is kept)")
    say(f"the service is running: {service_manager.hint}")


def _task(arguments: argparse.Namespace) -> Task:
    """Return the service with the flags of a command line.  Raises UsageError if serve does not accept them."""
    parser = parser_of("serve")
    line, _, parser.typed = in_our_flags("serve", arguments.forwarded, parser.flags)
    serve, unknown_words = parser.parse_known_args(line)
    if unknown_words:
        raise UsageError(f"serve does not accept {unknown_words[0]!r:.80}: see localllm serve --help")
    program = sys.executable
    if sys.platform == "win32":  # pythonw.exe opens no window
        windowless = Path(program).with_name("pythonw.exe")
        program = str(windowless) if windowless.exists() else program
    variables = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    command = [program, "-m", "localllm", "serve", *line]
    task = Task(command, Path.cwd(), variables, serve.grace + _STOP_S, reloads=serve.keys is not None)
    if not arguments.system:
        if arguments.user:
            raise UsageError("--user needs --system: a service of the current user runs as this user")
        return task
    _check_system(line, arguments.user or _USER)
    sockets = [host.removeprefix("unix:") for host in serve.host.split(",") if host.startswith("unix:")]
    written = [*filter(None, (serve.prompt_cache, serve.responses)), *(Path(path).parent for path in sockets)]
    return task._replace(
        folder=_STATE,
        variables={"HOME": str(_STATE), **variables},
        user=arguments.user or _USER,
        written=[Path(folder) for folder in dict.fromkeys(map(str, written))],
        has_low_port=0 < serve.port < 1024,
    )


def _has_user(name: str) -> bool:
    if sys.platform == "win32":
        return False
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _check_system(line: Sequence[str], user: str) -> None:
    """Raise UsageError if a service of the machine cannot have this user or these words of the command line."""
    if not _has_user(user):
        add = f"useradd --system --home-dir {_STATE} {user}"
        raise UsageError(f"there is no user {user!r:.40}: add one with {add}, or name another with --user")
    for word in line:
        path = word.rpartition("=")[2]
        if not os.path.isabs(path) and os.path.exists(path) and ("/" in path or "." in path):
            raise UsageError(
                f"{word!r:.200} is relative to this folder, but the service runs in {_STATE}: "
                f"write {os.path.abspath(path)}"
            )


def _run_command(command: Sequence[str]) -> str | None:
    """Run a command.  Returns the error message if it fails, or None."""
    import subprocess

    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})"
    return None if result.returncode == 0 else (result.stderr or result.stdout).strip() or f"{command[0]} failed"


COMMAND = Command(
    "install [--system] [-- FLAGS OF SERVE] | status | logs | uninstall",
    "run the server in the background, started at login or at boot",
    [
        flag("action install|status|logs|uninstall", "what to do"),
        flag(
            "--system", "a service of the machine instead of the current user's, with restrictions (systemd, as root)"
        ),
        flag("--user NAME", f"user that runs a service of the machine (default: {_USER})"),
        flag("-f --follow", "show new lines of the log until Ctrl-C"),
    ],
    run,
    """\
localllm service install -- -m qwen.gguf --lan creates a systemd unit (Linux), a launchd agent (macOS) or a task of
the Task Scheduler (Windows), and starts it.  The service runs localllm serve with these flags, in this folder and as
this user.  It is started when the user logs in, and restarted when it fails.  It uses the current values of the
environment variables that localllm config lists; set keys with --api-key-file.

With --system, the service is started at boot, runs as a user without privileges in /var/lib/localllm, and can write
only there and in the folders of --prompt-cache and --responses.
""",
    forwards=True,
)
