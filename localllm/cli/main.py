"""The command ``localllm``: reads the command line, runs one command, and turns whatever ends it into an exit code.

What a command needs is imported when it runs, so that ``localllm --help`` does not wait for numpy.

Exit codes: 0 done; 1 it could not be done; 2 the command line is at fault; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from localllm import __version__
from localllm.cli.terminal import is_terminal, prepare_streams, say, visible_line
from localllm.errors import LocalLLMError, UsageError

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
#: What a shell reports of a program that wrote into a closed pipe (128 + SIGPIPE).
BROKEN_PIPE = 141

#: Environment variable that makes errors show where they happened.
DEBUG_VARIABLE = "LOCALLLM_DEBUG"

#: The module with each command's ``run(arguments) -> exit code``.
COMMANDS = {
    "generate": "localllm.cli.generate",
    "inspect": "localllm.cli.inspect",
    "bench": "localllm.cli.bench",
    "doctor": "localllm.cli.doctor",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code.

    Args:
        argv: without the program's name; by default the process's own.
    """
    prepare_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in argv or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    try:
        with _one_line_warnings():
            code = _run(argv)
        _flush()
        return code
    except BaseException as error:
        return _failure(error, debug)


def _run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = import_module(COMMANDS[arguments.command]).run
    return run(arguments)


def _failure(error: BaseException, debug: bool) -> int:
    """Says in one line what ended the command; returns the exit code."""
    try:
        _flush()
    except (OSError, ValueError):  # the reader is gone, the disk is full, or the stream was closed
        _forget_stdout()
    if isinstance(error, SystemExit):  # --help, --version
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        _end_line()
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if debug:
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        say(f"localllm: error: {visible_line(_sentence(error))}")
    return BAD_USAGE if isinstance(error, UsageError) else FAILED


def _sentence(error: BaseException) -> str:
    if isinstance(error, LocalLLMError):
        return str(error)
    if isinstance(error, MemoryError):
        return "memory ran out: choose a smaller context or a smaller model, or close other programs"
    if isinstance(error, OSError):
        return f"the system refused: {error}"
    return (
        f"something went wrong inside localllm ({type(error).__name__}: {error}): run it again with --debug to see "
        "where, and report it"
    )


def _end_line() -> None:
    """After ^C on a terminal: what comes next begins on a line of its own."""
    for stream in (sys.stderr, sys.stdout):
        if is_terminal(stream):
            with contextlib.suppress(OSError):
                print(file=stream, flush=True)
            return


def _flush() -> None:
    """Writes out what stdout holds back: here a failure is still reported, at the interpreter's end it is not."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _forget_stdout() -> None:
    """Sends what cannot be written to nowhere, so that the interpreter does not complain of it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Shows warnings as messages of the program, not as places in its source."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(f"localllm: warning: {visible_line(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# -- The command line ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are `UsageError`, like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help shows what there is)")


class _Formatter(argparse.HelpFormatter):
    """Help with room for long flags, and with the line breaks of the text at its end."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="localllm",
        description="Runs large language models on the machine you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"localllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_arguments, usage, summary, details in (
        ("generate", _add_generate, "[-m FILE] [-p TEXT] [options]", "let a model write", GENERATE_DETAILS),
        ("inspect", _add_inspect, "FILE [options]", "show what is in a GGUF file", ""),
        ("bench", _add_bench, "[-m FILE] [options]", "measure how fast a model runs here", BENCH_DETAILS),
        ("doctor", _add_doctor, "[--json]", "show what is installed and what runs here, and mend it", ""),
    ):
        command = commands.add_parser(
            name,
            usage=f"localllm {name} {usage}",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=details,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show where in the program an error happened")
    return parser


GENERATE_DETAILS = """\
Without -m the small demo model that comes with localllm writes.  Without -p and -f the prompt is read from
standard input, unless that is a terminal; the empty prompt lets the model begin by itself.  One line end at the
end of a prompt from a file or from standard input is dropped.

If the model has a chat template, the prompt is given to it as a user's message, and the model answers; --no-chat
lets it go on with the text instead.  The empty prompt is never a message.

The text goes to standard output as it comes, all else to standard error.
"""

BENCH_DETAILS = """\
-p, -n, -d and -t take lists, such as -t 1,2.  pp512 is the evaluation of a prompt of 512 tokens, tg128 the
generation of 128 tokens, one after the other, and @ d1024 means that 1,024 tokens stand before them.

The share of the machine compares each result with a ceiling that is measured in turn with it, on as many threads:
for tg how fast they read as many bytes as a token needs, for pp how fast they multiply.
"""


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser.add_argument_group("model"))
    _add_prompt(parser.add_argument_group("prompt"))
    _add_ending(parser.add_argument_group("where the text ends"))
    _add_sampling(parser.add_argument_group("how the next token is chosen"))
    _add_output(parser.add_argument_group("output"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-m", "--model", metavar="FILE", help="a GGUF file (default: the demo model)")
    group.add_argument(
        "-c",
        "--ctx-size",
        "--context",
        dest="context",
        type=int,
        metavar="N",
        help="tokens of context (default: as many as the model was trained on, at most 4,096)",
    )
    _add_device(group)
    group.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: one a physical core)")


def _add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or reference (default: auto)")
    group.add_argument(
        "--isa", metavar="NAME", help="the instruction set of the kernels (localllm doctor lists them)"
    )


def _add_prompt(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    group.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    group.add_argument(
        "-sys", "--system-prompt", "--system", dest="system", metavar="TEXT", help="a message before the user's"
    )
    group.add_argument(
        "-cnv",
        "--chat",
        dest="chat",
        action="store_true",
        default=None,
        help="give the prompt as a user's message (default: if the model has a chat template)",
    )
    group.add_argument(
        "-no-cnv", "--no-chat", dest="chat", action="store_false", help="go on with the prompt as it is"
    )
    group.add_argument(
        "-e",
        "--escape",
        action="store_true",
        help=r"read \n, \t, \\, \xHH and the like in -p, --system-prompt and --stop as those characters",
    )
    group.add_argument(
        "--overflow",
        metavar="POLICY",
        default=argparse.SUPPRESS,
        help="a prompt too long for the context is an error, or with 'truncate' loses its oldest part "
        "(default: error)",
    )


def _add_ending(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "--predict",
        "--max-tokens",
        dest="max_tokens",
        type=int,
        metavar="N",
        default=-1,
        help="tokens at most (default: -1, until the model ends or the context is full)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="end before this text (may be given several times)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not let the model end its text")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    def add(*flags: str, name: str, kind: type = float, text: str) -> None:
        # What is not given is left to localllm.Sampling's own defaults.
        metavar = "N" if kind is int else "X"
        group.add_argument(*flags, dest=name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)

    add("--temp", "--temperature", name="temperature", text="0 always takes the likeliest (default: 0.8)")
    add("--top-k", name="top_k", kind=int, text="of the K likeliest only; 0 is off (default: 40)")
    add("--top-p", name="top_p", text="of the likeliest that make up this probability; 1 is off (default: 0.95)")
    add("--min-p", name="min_p", text="at least so likely, relative to the likeliest; 0 is off (default: 0.05)")
    add("--typical", "--typical-p", name="typical_p", text="locally typical sampling; 1 is off (default: 1.0)")
    add("--repeat-penalty", name="repeat_penalty", text="on tokens that occurred; 1 is off (default: 1.0)")
    add("--repeat-last-n", name="repeat_last_n", kind=int, text="among the last N; -1 is all (default: 64)")
    add("--presence-penalty", name="presence_penalty", text="on tokens that occurred (default: 0.0)")
    add("--frequency-penalty", name="frequency_penalty", text="on each time that they did (default: 0.0)")
    add("--dry-multiplier", name="dry_multiplier", text="DRY against repetition; 0 is off (default: 0.0)")
    add("--dry-base", name="dry_base", text="(default: 1.75)")
    add("--dry-allowed-length", name="dry_allowed_length", kind=int, text="(default: 2)")
    add("--dry-penalty-last-n", name="dry_penalty_last_n", kind=int, text="-1 is all (default: -1)")
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="DRY follows no repetition across this text; in place of the default ones, which 'none' clears",
    )
    add("--xtc-probability", name="xtc_probability", text="how often XTC acts; 0 is off (default: 0.0)")
    add("--xtc-threshold", name="xtc_threshold", text="above 0.5 it never does (default: 0.1)")
    add("--mirostat", name="mirostat", kind=int, text="2 is mirostat 2; 0 is off (default: 0)")
    add("--mirostat-ent", name="mirostat_tau", text="its target in bits, tau (default: 5.0)")
    add("--mirostat-lr", name="mirostat_eta", text="its learning rate, eta (default: 0.1)")
    group.add_argument(
        "-l",
        "--logit-bias",
        type=logit_bias,
        action="append",
        metavar="ID±X",
        default=[],
        help="add X to the logit of a token: 15043+1, 15043-0.5, 15043-inf (may be given several times)",
    )
    add("-s", "--seed", name="seed", kind=int, text="of the random numbers; -1 draws a fresh one (default: -1)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object at the end, no text as it comes")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="with --json: log-probabilities of each token and of the N likeliest",
    )
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="print nothing but the text and errors")
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="print what runs where, what it takes, and all timings"
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a GGUF file, or any file of a split one")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--metadata", action="store_true", help="the metadata only")
    only.add_argument("--tensors", action="store_true", help="the tensors only")
    parser.add_argument("--full", action="store_true", help="long texts and arrays in full")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", metavar="FILE", help="a GGUF file (default: the demo model)")
    for flag, long, name, default, text in (
        ("-p", "--n-prompt", "prompts", [512], "tokens of a prompt to evaluate; 0 is none"),
        ("-n", "--n-gen", "generations", [128], "tokens to generate; 0 is none"),
        ("-d", "--n-depth", "depths", [0], "tokens that stand before"),
        ("-t", "--threads", "threads", None, "threads"),
    ):
        shown = "one a physical core" if default is None else default[0]
        parser.add_argument(
            flag, long, dest=name, type=numbers, metavar="N,…", default=default, help=f"{text} (default: {shown})"
        )
    parser.add_argument("-r", "--repetitions", type=int, metavar="N", default=5, help="repetitions (default: 5)")
    _add_device(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON after the table")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 128,512") from None


def logit_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit: ``15043+1``."""
    for sign in "+-":
        id_, found, bias = text.partition(sign)
        if found:
            with contextlib.suppress(ValueError):
                return int(id_), float(sign + bias)
    raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 15043+1 or 15043-inf")


def options_of(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the arguments ``names`` that were given."""
    given = vars(arguments)
    return {name: given[name] for name in names if name in given}
