"""``localllm service``: the files it writes on each platform, and its calls of systemd."""

from __future__ import annotations

import os
import plistlib
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from localllm.cli.commands import service
from localllm.cli.commands.service import Manager, Task, launch_agent, manager, scheduled_task, systemd_unit
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.other_system import use_folders_of

TASK = Task(
    ["/opt/py thon/python", "-m", "localllm", "serve", "-m", 'a "b" 100% $HOME\\<&>.gguf'],
    Path("/home/me/some models"),
    {"LOCALLLM_CACHE": "/tmp/100%"},
    80,
)

LOG = """#!/bin/sh
echo "$@" >> {log}
exit {code}
"""

#: Starts a separate systemd in a mount namespace with an empty /run.
START = """
mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/system; install -d -m 700 "$XDG_RUNTIME_DIR"
/lib/systemd/systemd --user --log-target=null & systemd=$!
trap 'kill $systemd; wait' EXIT
again() { for _ in $(seq 600); do "$@" && return; sleep 0.1; done; echo "in vain: $*"; return 1; }
pid() { systemctl --user show -p MainPID --value localllm; }
again systemctl --user show -p Version > /dev/null
"""

#: The life of a service.
LIFE = """
service() { "$PYTHON" -m localllm service "$@"; }
restarted() { [ "$(pid)" != 0 ] && [ "$(pid)" != "$first" ]; }
service install -- -m demo --port "$PORT"
again curl -sf "http://127.0.0.1:$PORT/health"; service status | grep "active (running)"
first=$(pid); kill -9 "$first"
again restarted; again curl -sf "http://127.0.0.1:$PORT/health"
systemctl --user stop localllm; systemctl --user show -p Result localllm | grep success
[ "$(pid)" = 0 ]; systemctl --user start localllm; last=$(pid)
service uninstall; [ ! -e "/proc/$last" ]; [ ! -e "$XDG_CONFIG_HOME/systemd/user/localllm.service" ]
"""

#: A server with restrictions.
RESTRICTED = """
systemctl --user start localllm; again curl -sf "http://127.0.0.1:$PORT/health"
grep -E "Seccomp:.2" "/proc/$(pid)/status"; grep -E "CapBnd:.0000000000000000" "/proc/$(pid)/status"
curl -sf "http://127.0.0.1:$PORT/v1/completions" -d '{"prompt": "Hello", "max_tokens": 4}' | grep text_completion
if nsenter -t "$(pid)" -m test -w "$PYTHONPATH"; then exit 1; fi
nsenter -t "$(pid)" -m test -w "$XDG_CONFIG_HOME/home"
systemctl --user stop localllm; systemctl --user show -p Result localllm | grep success
"""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Log file of a program that replaces systemctl."""
    monkeypatch.setattr(sys, "platform", "linux")
    use_folders_of("linux", monkeypatch.setattr)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("LOCALLLM_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    pretend(tmp_path, 0)
    return tmp_path / "log"


def pretend(folder: Path, code: int) -> None:
    program = folder / "systemctl"
    program.write_text(LOG.format(log=folder / "log", code=code))
    program.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="needs sh")
def test_a_unit_is_installed_shown_and_removed(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    absent = run_main(capfdbinary, "service", "status")
    assert (absent.code, "service install -- FLAGS" in absent.err) == (1, True)
    outcome = run_main(capfdbinary, "service", "install", "--", "-m", "my model.gguf", "--lan", "--ctx-size", "4096")
    assert outcome.code == 0, outcome.err
    assert "the service is running" in outcome.err
    path = manager().path
    lines = path.read_text().splitlines()
    words = '"-m" "localllm" "serve" "-m" "my model.gguf" "--lan"'
    assert [line for line in lines if line.startswith(f'ExecStart="{sys.executable}" {words}')]
    assert f"WorkingDirectory={systemctl.parent}" in lines
    assert 'Environment="HF_HUB_OFFLINE=1"' in lines
    assert "TimeoutStopSec=30" in lines  # 10 seconds for replies and 20 to stop
    assert path.stat().st_mode & 0o777 == 0o600
    assert run_main(capfdbinary, "service", "install", "--", "--grace", "60").code == 0
    assert "TimeoutStopSec=80" in path.read_text().splitlines()
    assert run_main(capfdbinary, "service", "status").code == 0
    assert run_main(capfdbinary, "service", "uninstall").code == 0
    assert not path.exists()
    assert systemctl.read_text(encoding="utf-8").splitlines() == [
        "--user daemon-reload",
        "--user enable localllm",
        "--user restart localllm",
        "--user daemon-reload",
        "--user enable localllm",
        "--user restart localllm",
        "--user status --no-pager localllm",
        "--user disable --now localllm",
        "--user daemon-reload",
    ]
    assert "no service was removed" in run_main(capfdbinary, "service", "uninstall").err


@pytest.mark.skipif(sys.platform == "win32", reason="needs sh")
def test_what_cannot_be_done_is_said(systemctl: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert "no flag --nonsense" in run_main(capfdbinary, "service", "install", "--", "--nonsense").err
    assert "accepts no flags" in run_main(capfdbinary, "service", "status", "--", "-m").err
    assert not manager().path.exists()
    pretend(systemctl.parent, 1)
    outcome = run_main(capfdbinary, "service", "install")
    assert outcome.code == 2
    assert "systemd could not start the service: systemctl failed" in outcome.err


SYSTEM = TASK._replace(
    reloads=True,
    user="daemon",
    written=[Path("/srv/some prompts 100%"), Path("/run/other")],
    has_low_port=True,
    variables={"HOME": "/var/lib/localllm"},
)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize(("task", "scope"), [(TASK, ["--user"]), (SYSTEM, [])], ids=["user", "system"])
def test_systemd_understands_the_unit(task: Task, scope: list[str], tmp_path: Path) -> None:
    path = tmp_path / "localllm.service"
    path.write_bytes(systemd_unit(task._replace(command=[sys.executable, *task.command[1:]], folder=Path("/"))))
    done = subprocess.run(
        ["systemd-analyze", "verify", *scope, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert str(path) not in done.stderr
    assert "localllm.service" not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_service_of_the_machine_is_restricted(tmp_path: Path) -> None:
    """systemd rates a unit from 0 (restricted) to 10; a unit without restrictions has 9.6."""
    path = tmp_path / "localllm.service"
    path.write_bytes(systemd_unit(SYSTEM._replace(has_low_port=False)))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs sh")
def test_a_service_of_the_machine(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = systemctl.parent / "system" / "localllm.service"
    path.parent.mkdir()
    real = service.manager

    def in_folder(*, system: bool = False) -> Manager:
        return real(system=system)._replace(path=path) if system else real()

    monkeypatch.setattr(service, "manager", in_folder)
    flags = ["-m", "/srv/a.gguf", "--keys", "/etc/localllm/keys.toml", "--host", "127.0.0.1,unix:/run/x/llm.sock"]
    flags += ["--prompt-cache", "/srv/prompts", "--responses", "/srv/responses", "--grace", "60"]
    for more in (["--user", "nobody"], ["--user", "nobody", "--system"]):
        outcome = run_main(capfdbinary, "service", "install", *more, "--", *flags)
        assert outcome.code == (0 if "--system" in more else 2)
    assert "--user needs --system" in run_main(capfdbinary, "service", "install", "--user", "nobody").err
    lines = path.read_text().splitlines()
    for line in (
        "User=nobody",
        "WorkingDirectory=/var/lib/localllm",
        'Environment="HOME=/var/lib/localllm"',
        "ExecReload=/bin/kill -HUP $MAINPID",
        "TimeoutStopSec=80",
        'ReadWritePaths="-/srv/prompts"',
        'ReadWritePaths="-/srv/responses"',
        'ReadWritePaths="-/run/x"',
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
        "RuntimeDirectoryPreserve=restart",  # the socket of a second server stays
        "WantedBy=multi-user.target",
    ):
        assert line in lines, line
    assert (
        run_main(capfdbinary, "service", "install", "--system", "--user", "nobody", "--", "--port", "443").code == 0
    )
    lines = path.read_text().splitlines()
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE" in lines
    assert not any(line.startswith("ExecReload") for line in lines)  # SIGHUP would end the server
    (systemctl.parent / "model.gguf").write_text("")
    for words, expected in (
        (["--user", "no-such-user"], "useradd --system --home-dir /var/lib/localllm no-such-user"),
        (["--user", "nobody", "--", "-m", "model.gguf"], f"write {systemctl.parent / 'model.gguf'}"),
        (["--user", "nobody", "--", "--model=model.gguf"], "is relative to this folder"),
    ):
        assert expected in run_main(capfdbinary, "service", "install", "--system", *words).err
    assert run_main(capfdbinary, "service", "status", "--system").code == 0
    assert run_main(capfdbinary, "service", "uninstall", "--system").code == 0
    assert not path.exists()
    assert "service install --system -- FLAGS" in run_main(capfdbinary, "service", "status", "--system").err
    calls = systemctl.read_text(encoding="utf-8").splitlines()
    assert calls[:3] == ["daemon-reload", "enable localllm", "restart localllm"]
    assert calls[-3:] == ["status --no-pager localllm", "disable --now localllm", "daemon-reload"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs sh")
def test_the_log_is_shown(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (systemctl.parent / "systemctl").rename(systemctl.parent / "journalctl")
    assert run_main(capfdbinary, "service", "logs").code == 1
    manager().path.parent.mkdir(parents=True)
    manager().path.write_text("")
    assert run_main(capfdbinary, "service", "logs").code == 0
    assert run_main(capfdbinary, "service", "logs", "--follow").code == 0
    assert systemctl.read_text(encoding="utf-8").splitlines() == [
        "--user --no-pager -n 200 -u localllm",
        "--user --no-pager -n 200 -u localllm -f",
    ]
    assert "does not accept --follow" in run_main(capfdbinary, "service", "status", "--follow").err
    assert "accepts no --user" in run_main(capfdbinary, "service", "logs", "--user", "nobody").err
    monkeypatch.setenv("PATH", str(systemctl.parent / "empty"))
    assert "journalctl cannot be run" in run_main(capfdbinary, "service", "logs").err
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "getuid", lambda: 501, raising=False)
    assert "--system needs systemd" in run_main(capfdbinary, "service", "logs", "--system").err


needs_a_private_systemd = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or not Path("/lib/systemd/systemd").exists()
    or subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"], stderr=subprocess.DEVNULL, check=False
    ).returncode,
    reason="needs systemd, and permission to hide /run",
)


def live(script: str, folder: Path, **variables: str) -> None:
    """Run a script in a mount namespace, in which it can start a separate systemd of the user."""
    folders = {"XDG_RUNTIME_DIR": "/run/user/0", "XDG_CONFIG_HOME": str(folder)}
    life = subprocess.run(
        ["unshare", "-m", "bash", "-exo", "pipefail", "-c", START + script],
        env=os.environ | folders | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert life.returncode == 0, life.stdout + life.stderr


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@needs_a_private_systemd
def test_systemd_starts_it_again_when_it_is_killed_and_stops_it(tmp_path: Path) -> None:
    live(LIFE, tmp_path, PORT=free_port())


@needs_a_private_systemd
def test_a_restricted_server_works(tmp_path: Path) -> None:
    """The system calls and files of the restrictions are enough to compile kernels and to write a reply.

    A systemd of the user cannot apply a few of the restrictions in a namespace.
    """
    port, home = free_port(), tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "localllm", "serve", "-m", "demo", "--port", port]
    variables = {"HOME": str(home), "PYTHONPATH": str(ROOT), "LOCALLLM_CACHE": str(home / "cache")}
    unit = systemd_unit(Task(command, home, variables, 20, user="root", written=[home])).decode()
    omitted = ("ControlGroups", "Hostname", "KernelLogs", "KernelTunables", "Proc")
    lines = [line for line in unit.splitlines() if not line.startswith(tuple(f"Protect{name}=" for name in omitted))]
    path = tmp_path / "systemd" / "user" / "localllm.service"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(line for line in lines if line not in ("User=root", "PrivateTmp=yes")))
    live(RESTRICTED, tmp_path, PORT=port)


def test_systemd_s_words_are_quoted() -> None:
    text = systemd_unit(TASK).decode()
    assert r'"a \"b\" 100%% $$HOME\\<&>.gguf"' in text
    assert "WorkingDirectory=/home/me/some models\n" in text
    assert 'Environment="LOCALLLM_CACHE=/tmp/100%%"' in text


def test_launchd_gets_a_property_list(monkeypatch: pytest.MonkeyPatch) -> None:
    values = plistlib.loads(launch_agent(TASK))
    assert values["ProgramArguments"] == TASK.command
    assert values["KeepAlive"] == {"SuccessfulExit": False}
    assert values["ExitTimeOut"] == 80
    assert values["EnvironmentVariables"] == TASK.variables
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "getuid", lambda: 501, raising=False)
    found = manager()
    assert found.path.name == "localllm.serve.plist"
    assert found.install == [["launchctl", "bootstrap", "gui/501", str(found.path)]]


def test_windows_gets_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ElementTree.fromstring(scheduled_task(TASK))
    space = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
    assert task.findtext(f".//{space}Command") == TASK.command[0]
    assert task.findtext(f".//{space}Arguments") == subprocess.list2cmdline(TASK.command[1:])
    assert task.findtext(f".//{space}WorkingDirectory") == str(TASK.folder)
    monkeypatch.setattr(sys, "platform", "win32")
    assert manager().install[0][:4] == ["schtasks", "/Create", "/F", "/TN"]
