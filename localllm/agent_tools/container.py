"""A tool that runs shell commands in a container of Podman or Docker, without a network.

The container sees one folder. The image must be on this machine, because a command must not download programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from localllm.agent_tools.tool import CALL_SECONDS, AgentTool, IsStopped, text_argument, text_parameters
from localllm.errors import UsageError
from localllm.shell import bounded_output, decoded

#: Maximum output of a command in bytes.
_MAX_OUTPUT = 1 << 20
#: Time limit in seconds for ending a container.
_END_SECONDS = 10.0
#: The folder in the container.
_WORK = "/work"
_LIMITS = ["--network=none", "--cap-drop=all", "--security-opt=no-new-privileges", "--pids-limit=512", "--memory=4g"]
#: A shell that runs its argument, and reports an error.
_SHELL = ["sh", "-c", 'sh -c "$1"; status=$?; [ $status = 0 ] || echo "(exit status $status)"', "sh"]


def command_tool(image: str, folder: Path | None) -> AgentTool:
    """Return a tool that runs commands in a container with ``folder``, which the commands may change.

    Raises UsageError if neither Podman nor Docker is installed, or a name is invalid.
    """
    program = next(filter(None, map(shutil.which, ("podman", "docker"))), None)
    if program is None:
        raise UsageError("commands run in a container, but neither podman nor docker is installed: install one")
    if not re.fullmatch(r"\w[\w./:@-]{0,200}", image, re.ASCII):
        raise UsageError(f"{image!r:.80} is not the name of a container image: give a name such as python:3.13")
    if folder is not None and re.search(r'[,"\n]', str(folder)):
        raise UsageError(f"the path {folder} has a comma, a quotation mark or a line break: rename the folder")
    if folder is not None and (folder / ".git").is_symlink():  # its target would be mounted
        raise UsageError(f"the folder .git in {folder} is a link: choose a folder whose .git is not a link")
    where = f"in the folder {_WORK}, which is the working folder" if folder else "without files of the user"
    description = f"Runs a shell command in a Linux container {where}, without a network, and gives its output."
    parameters = text_parameters("command", command="the command line")
    run = partial(_run, [program, "run", "--rm", *_LIMITS, *_access(program, folder)], image)
    return AgentTool("run_command", description, parameters, run, scope=f"{image} {folder or ''}")


def _access(program: str, folder: Path | None) -> list[str]:
    """Return the arguments that mount the folder, with the user's rights.

    The folder .git is read-only, because git runs the programs in it outside of the container.
    """
    arguments = ["--pull=never", "--tmpfs=/tmp"]
    if Path(program).stem == "podman":
        arguments.append("--security-opt=label=disable")  # SELinux otherwise denies access to the folder
        if sys.platform != "win32" and os.getuid():
            arguments.append("--userns=keep-id")
    elif sys.platform != "win32":
        arguments.append(f"--user={os.getuid()}:{os.getgid()}")
    if folder is not None:
        arguments += [f"--mount=type=bind,source={folder},target={_WORK}", f"--workdir={_WORK}"]
        if (folder / ".git").exists():
            arguments.append(f"--mount=type=bind,source={folder / '.git'},target={_WORK}/.git,readonly")
    return arguments


def _run(start: list[str], image: str, arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    name = f"localllm-{uuid.uuid4().hex}"
    command = [*start, f"--name={name}", image, *_SHELL, text_argument(arguments, "command")]
    try:
        output = bounded_output(command, _MAX_OUTPUT, CALL_SECONDS, is_stopped)
    except (OSError, ValueError) as error:
        raise UsageError(f"the command cannot be run ({error})") from None
    finally:
        # The container outlives its client when the command was stopped.
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([start[0], "kill", name], capture_output=True, timeout=_END_SECONDS, check=False)
    return decoded(output) or "(it printed nothing)"
