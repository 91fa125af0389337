"""The command ``localllm``: parses the command line, runs one command, and converts errors to an exit code.

Commands import their modules when they run, so that ``localllm --help`` does not wait for numpy.

Exit codes: 0 success; 1 failure; 2 invalid command line.  Ctrl-C ends the process by SIGINT, which shells report as
130.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

from localllm.cli.foreign_flags import assign_words, in_our_command, in_our_flags
from localllm.cli.interrupt import INTERRUPTED, end_at_once
from localllm.cli.parser import command_of, main_parser, parser_of
from localllm.console import discard, is_terminal, prepare_streams, say, visible_line, warn
from localllm.errors import DeviceError, GGUFError, LocalLLMError, NotEnoughMemoryError, Notice, UsageError
from localllm.kernels.cpu.host import MIN_ADDRESS_SPACE, address_space_limit, memory_advice
from localllm.options.declared import in_flags

DONE, FAILED, BAD_USAGE = 0, 1, 2
#: Exit code that shells report for a program that wrote to a closed pipe (128 + SIGPIPE).
BROKEN_PIPE = 141

#: Error numbers of a file that cannot grow: disk full, quota exceeded, or size limit reached.
NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))

#: Maximum characters of an error message, more than the longest path.
_MAX_SHOWN = 6000

#: Environment variable that adds tracebacks to errors.
DEBUG_VARIABLE = "LOCALLLM_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, and returns the exit code.

    ``argv`` omits the program's name.  It defaults to the arguments of the process.
    """
    prepare_streams()
    if argv is not None:
        return _main(list(argv))
    with _interrupts():
        return _main(sys.argv[1:])


def _main(argv: list[str]) -> int:
    debug = "--debug" in argv or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    arguments = argparse.Namespace()
    try:
        with _one_line_warnings():
            code = _run(argv, arguments)
        _flush()
        return code
    except BaseException as error:
        return _failure(error, debug, getattr(arguments, "from_settings", {}))


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Handle Ctrl-C: the first ends the command cleanly, the second immediately, both by SIGINT."""
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, end_at_once):
        # SIGINT is ignored, or has another program's handler.
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    yield
    sys.unraisablehook = sys.__unraisablehook__
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, end_at_once)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            # A module in C may drop exceptions while it is imported: numpy.random does.
            _end_line()
            end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(dropped: sys.UnraisableHookArgs) -> None:
    """Ends the process after an interrupt in a finaliser or callback, where Python drops exceptions."""
    if isinstance(dropped.exc_value, KeyboardInterrupt):
        end_at_once()
    sys.__unraisablehook__(dropped)


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    _parse(argv, arguments)
    if sys.stdout is None:  # after --help, which then goes to stderr
        raise LocalLLMError("standard output is closed, so the result would be lost: redirect it to a file or a pipe")
    return command_of(arguments.command).run(arguments) or DONE


def _parse(argv: Sequence[str], arguments: argparse.Namespace) -> None:
    if not argv or argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    if "--list-devices" in argv:
        arguments.command, arguments.devices = "doctor", True
        return
    name, *line = in_our_command(argv)
    if name.startswith("-"):  # --help, --version
        main_parser().parse_args([name])
    parser = parser_of(name)
    arguments.command = name
    if parser.command.forwards:
        end = line.index("--") if "--" in line else len(line)
        line, arguments.forwarded = line[:end], line[end + 1 :]
    line, notice, parser.typed = in_our_flags(name, line, parser.flags)
    _, words = parser.parse_known_args(line, arguments)
    if parser.command.words is not None:
        parser.assign_positionals([*arguments.words, *words], arguments)
    elif words:
        assign_words(words, arguments)
    if notice is not None and not getattr(arguments, "quiet", False):
        warn(notice)
    if hasattr(arguments, "presets") and isinstance(arguments.__dict__.get("model"), str):
        from localllm.cli.presets import apply_preset, preset_of  # imported here because most commands need no model

        if (preset := preset_of(arguments.model, arguments.presets)) is not None:
            apply_preset(parser, arguments, preset, arguments.model)
            arguments.model = preset["model"]


def _failure(error: BaseException, debug: bool, from_settings: Mapping[str, str]) -> int:
    """Prints the error that ended the command in one line, and returns the exit code.

    ``from_settings``: see `localllm.cli.defaults.apply_settings`.
    """
    try:
        _flush()
    except (OSError, ValueError):  # the pipe or stream is closed, or the disk is full
        discard(sys.stdout)
    if isinstance(error, SystemExit):  # --help, --version
        return error.code if isinstance(error.code, int) else FAILED
    was_interrupted = signal.getsignal(signal.SIGINT) is end_at_once
    # numpy converts an interrupt during its import to an ImportError.
    if isinstance(error, KeyboardInterrupt) or was_interrupted:
        if was_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # no handler works while the interpreter exits
        _end_line()
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if debug:
        import traceback

        say("".join(traceback.format_exception(error)).rstrip("\n"))
    text = visible_line(_sentence(error, from_settings))
    if len(text) > _MAX_SHOWN:
        text = f"{text[: _MAX_SHOWN // 2]} … {text[-_MAX_SHOWN // 2 :]}"
    say(f"localllm: error: {text}")
    return BAD_USAGE if isinstance(error, UsageError) else FAILED


#: Settings that may have caused an error which does not name them.
_CAUSES = (
    (DeviceError, ("device",)),
    (NotEnoughMemoryError, ("context", "n_gpu_layers", "tensor_split")),
    (GGUFError, ("model",)),
)


def _sentence(error: BaseException, from_settings: Mapping[str, str]) -> str:
    if isinstance(error, LocalLLMError):
        text = error.worded(partial(in_flags, from_settings=from_settings))
        suspects = [name for error_type, names in _CAUSES if isinstance(error, error_type) for name in names]
        causes = [from_settings[name] for name in suspects if name in from_settings]
        return f"{text} (from {' and '.join(causes)})" if causes else text
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return f"memory ran out: {memory_advice()}, or choose a smaller context or a smaller model"
    limit = address_space_limit()
    if isinstance(error, OSError | ImportError) and limit is not None and limit < MIN_ADDRESS_SPACE:
        fault = f"the address space of this process is limited to {limit / 1e9:.2f} GB (ulimit -v)"
        return f"{fault}, which is too small to start: raise the limit to {MIN_ADDRESS_SPACE >> 10} or more"
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        # Only the result on standard output is essential.
        return f"standard output cannot be written ({error.strerror}): free disk space, or redirect it elsewhere"
    if isinstance(error, OSError):
        return f"the operating system reported an error: {error}"
    fault = f"unexpected error in localllm ({type(error).__name__}: {error})"
    return f"{fault}: run the command again with --debug for a traceback, and report it"


def _end_line() -> None:
    """Start a new line after ^C on a terminal."""
    for stream in (sys.stderr, sys.stdout):
        if is_terminal(stream):
            with contextlib.suppress(OSError):
                print(file=stream, flush=True)
            return


def _flush() -> None:
    """Flush stdout.  A failure is reported here, but not at the interpreter's end."""
    if sys.stdout is not None:
        sys.stdout.flush()


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show warnings as messages of the program, without source lines."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        warn(message.worded(in_flags) if isinstance(message, Notice) else str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
