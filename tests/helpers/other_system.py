"""A simulation of Windows or macOS on Linux, as far as possible, for a whole test run.

    TEST_AS=win32 python -m pytest …
    TEST_AS=darwin python -m pytest …

localllm, the tests and their child processes then see another ``sys.platform`` and ``os.name``, modules without the
names that Python lacks there (according to typeshed, which mypy includes), and neither ``/proc`` nor ``/sys``.
platformdirs returns the folders of that system.  Other packages see the real system.  On Windows, text files use code
page 1252 with CR LF, reserved characters are invalid in names, symbolic links need privileges, and open files can
neither be removed nor replaced (`tests.helpers.windows`).

A test that cannot run this way is marked ``posix`` or ``linux``, or has a ``skipif``, with the reason.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import ctypes
import errno
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SYSTEM, MISSING_NAMES = "TEST_AS", "TEST_AS_MISSING"
#: Modules whose names differ between systems.
NAMES = """
    os sys signal mmap socket select time subprocess asyncio ctypes fcntl termios resource pwd grp tty pty readline
    curses msvcrt
"""
MODULES = NAMES.split()
_NT_SIGNS = frozenset('<>:"|?*')
_HERE = Path(__file__).parent
_open, _import = io.open, builtins.__import__


def locking(descriptor: int, mode: int, n_bytes: int) -> None:
    """`msvcrt.locking`, for a byte after the end of the file: Windows prevents other writes to locked bytes."""
    import fcntl

    assert (mode, n_bytes) == (MSVCRT.LK_NBLCK, 1)
    assert os.lseek(descriptor, 0, os.SEEK_CUR) >= os.fstat(descriptor).st_size
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


MSVCRT = SimpleNamespace(LK_NBLCK=2, locking=locking)


KERNEL32 = SimpleNamespace(
    SwitchToThread=ctypes.CDLL(None).sched_yield,
    IsProcessorFeaturePresent=lambda number: False,
    GetSystemCpuSetInformation=lambda *_: 0,
)


def missing_names(module: str, platform: str) -> list[str] | None:
    """Return the names that a module lacks on a system, or None if the system lacks the module."""
    stubs = Path(importlib.util.find_spec("mypy").origin).parent / "typeshed" / "stdlib"  # type: ignore
    path = stubs / f"{module}.pyi"
    tree = ast.parse((path if path.exists() else stubs / module / "__init__.pyi").read_text())
    here, there = _names(tree.body, sys.platform), _names(tree.body, platform)
    return sorted(here - there) if there or not here else None


def _names(body: list[ast.stmt], platform: str) -> set[str]:
    found: set[str] = set()
    for node in body:
        match node:
            case ast.If():
                system = SimpleNamespace(platform=platform, version_info=sys.version_info)
                holds = eval(compile(ast.Expression(node.test), "", "eval"), {"sys": system, "TYPE_CHECKING": True})
                found |= _names(node.body if holds else node.orelse, platform)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {alias.asname for alias in names if alias.asname}
    return {name for name in found if not name.startswith("_") or name == "_exit"}


class Elsewhere:
    """A module with some names removed and others replaced; changes to other names also change the real module."""

    __slots__ = ("_missing", "_module", "_others")

    def __init__(self, module: ModuleType, missing: list[str], others: dict[str, Any]) -> None:
        for name, value in zip(self.__slots__, (frozenset(missing), module, others), strict=True):
            object.__setattr__(self, name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Attributes, including the values that monkeypatch restores."""
        found = {name: value for name, value in vars(self._module).items() if name not in self._missing}
        return found | self._others

    def __getattr__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        if name in self._missing:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r} on this system")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._others or name in self._missing:
            self._others[name] = value
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._others:
            del self._others[name]
        else:
            delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__)


def _is_ours(module: dict[str, Any] | None) -> bool:
    name = str((module or {}).get("__package__") or (module or {}).get("__name__"))
    return name.partition(".")[0] in ("localllm", "tests") and (module or {}).get("__name__") not in _REAL


_REAL = (__name__, "tests.helpers.windows", "tests.helpers.fork")


def simulate(platform: str) -> None:
    """Make future imports see another system, in this process and its children."""
    if MISSING_NAMES not in os.environ:
        from localllm.kernels.code_cache import cache_root  # keep using the cache of compiled kernels

        os.environ["LOCALLLM_CACHE"] = str(cache_root() or "")
        for name in [name for name in sys.modules if name.partition(".")[0] == "localllm"]:
            del sys.modules[name]
        os.environ[MISSING_NAMES] = json.dumps({name: missing_names(name, platform) for name in MODULES})
        paths = [str(_HERE / "child_process"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    missing: dict[str, list[str] | None] = json.loads(os.environ[MISSING_NAMES])
    others: dict[str, dict[str, Any]] = {"sys": {"platform": platform}}
    if platform == "win32":
        others |= _windows()
    else:
        others["ctypes"] = {"CDLL": _macos_library}
    found = {
        name: Elsewhere(importlib.import_module(name), names, others.get(name, {}))
        for name, names in missing.items()
        if names is not None and importlib.util.find_spec(name)
    } | {name: Elsewhere(ModuleType(name), [], others[name]) for name in others if not importlib.util.find_spec(name)}

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        first = name.partition(".")[0]
        if level or first not in missing or not _is_ours(globals):
            return _import(name, globals, locals, fromlist, level)
        if first not in found:
            raise ModuleNotFoundError(f"No module named {first!r}", name=first)
        real = _import(name, globals, locals, fromlist, level) if name != "msvcrt" else None
        return real if fromlist and "." in name else found[first]

    builtins.__import__ = imported
    io.open = builtins.open = _opened  # type: ignore[assignment]
    use_folders_of(platform)


def use_folders_of(platform: str, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make platformdirs return the folders of another system."""
    import platformdirs
    from platformdirs import macos, unix, windows

    folders = {"CSIDL_APPDATA": "~/AppData/Roaming", "CSIDL_LOCAL_APPDATA": "~/AppData/Local"}
    replace(windows, "get_win_folder", lambda name: os.path.expanduser(folders[name]))
    systems: dict[str, type] = {"win32": windows.Windows, "darwin": macos.MacOS, "linux": unix.Unix}
    replace(platformdirs, "PlatformDirs", systems[platform])


_C_LIBRARY = ctypes.CDLL(None)


def _macos_library(name: str | None, *more: Any, **options: Any) -> Any:
    """Return a C library without system properties; any other library is missing."""
    if name is None:
        return SimpleNamespace(usleep=_C_LIBRARY.usleep, sysctlbyname=lambda *_: -1)
    raise OSError(f"{name}: no such file")


def _opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *more: Any, **options: Any) -> Any:
    path = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else ""
    if path.startswith(("/proc/", "/sys/")):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"] == "pathlib":
            frame = frame.f_back  # type: ignore[assignment]
        if _is_ours(frame.f_globals):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    if os.environ.get(SYSTEM) == "win32":
        if _NT_SIGNS & set(os.path.basename(path)) and not set("rb") >= set(mode):
            raise OSError(errno.EINVAL, "Invalid argument", path)
        if "b" not in mode and path:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            if "r" not in mode and len(more) < 2 and options.get("newline") is None:
                options["newline"] = "\r\n"
    return _open(file, mode, buffering, encoding, *more, **options)


def _windows() -> dict[str, dict[str, Any]]:
    """Return the replaced names of modules on Windows."""
    import asyncio

    create, signals = subprocess.Popen.__init__, asyncio.SelectorEventLoop

    def started(self: Any, command: Any, *more: Any, creationflags: int = 0, **options: Any) -> None:
        if command[0] == "taskkill":
            command = ["/bin/sh", "-c", f"kill -9 -{command[-1]}"]
        create(self, command, *more, **options, **({"start_new_session": True} if creationflags & 0x200 else {}))

    def unsupported(*_: object) -> None:
        raise NotImplementedError

    codecs.register({"oem": codecs.lookup("cp850")}.get)
    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    signals.add_signal_handler = signals.remove_signal_handler = unsupported  # type: ignore[assignment]
    return {
        "sys": {"platform": "win32"},
        "os": {"name": "nt"},
        "subprocess": {"CREATE_NEW_PROCESS_GROUP": 0x200, "CREATE_NO_WINDOW": 0x08000000},
        "msvcrt": vars(MSVCRT),
        "ctypes": {"windll": SimpleNamespace(kernel32=KERNEL32, ntdll={"__chkstk": KERNEL32.SwitchToThread})},
    }
