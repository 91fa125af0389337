"""A simulation of Windows on Linux, as far as possible, for tests that use the fixture.

Open or mapped files can neither be removed nor renamed, localllm sees ``win32`` as ``sys.platform``, and functions
that Windows lacks are missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.other_system import KERNEL32, MSVCRT

#: Functions missing on Windows or in Python for Windows.
MISSING = "killpg sysconf sched_getaffinity fork getuid geteuid setsid mkfifo register_at_fork"


class Sys:
    """The module `sys` with another platform."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def elsewhere(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Make the loaded modules of localllm see another ``sys.platform``."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "localllm" and hasattr(module, "sys"):
            monkeypatch.setattr(module, "sys", Sys(platform))


def in_use(path: str) -> bool:
    """Return whether this process has the file open or mapped."""
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if os.path.islink(real) or not os.path.isfile(real):
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") == real:
                return True
        except OSError:
            continue
    return any(
        line.rstrip("\n").endswith(f" {real}")
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    )


def refusing(function: Callable[..., Any], n_paths: int) -> Callable[..., Any]:
    """Wrap a function of `os` so that it refuses files in use among its first arguments."""

    def call(*paths: Any, **options: Any) -> Any:
        for path in paths[:n_paths] if "dir_fd" not in options else ():
            if in_use(os.fsdecode(path)):
                raise PermissionError(errno.EACCES, "another process uses it", os.fsdecode(path))
        return function(*paths, **options)

    return call


def keep_files_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make functions of `os`, and thus `pathlib`, refuse files in use and symbolic links, as Windows does."""

    def refused(source: Any, target: Any, *_: Any, **__: Any) -> None:
        error = OSError(errno.EPERM, "A required privilege is not held by the client", os.fsdecode(target))
        error.winerror = 1314  # type: ignore[attr-defined]
        raise error

    for name, n_paths in {"unlink": 1, "remove": 1, "rename": 2, "replace": 2}.items():
        monkeypatch.setattr(os, name, refusing(getattr(os, name), n_paths))
    monkeypatch.setattr(os, "symlink", refused)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if system := os.environ.get("TEST_AS"):
        if system != "win32":
            pytest.skip("simulates Windows")
        return
    elsewhere(monkeypatch, "win32")
    keep_files_in_use(monkeypatch)
    for name in MISSING.split():
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr("localllm.files.msvcrt", MSVCRT, raising=False)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=KERNEL32), raising=False)
