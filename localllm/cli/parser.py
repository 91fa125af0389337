"""The command line's grammar: commands, flags, their help, and how their values are read."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from localllm import __version__
from localllm.declared_options import (
    SWITCH,
    CheckedOptions,
    LoadOptions,
    Option,
    Sampling,
    declared,
    default_text,
    flags_of,
)
from localllm.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are `UsageError`, like any other.

    Attributes:
        typed: another program's flag that was typed, by the flag of ours that stands for it.
    """

    typed: Mapping[str, str] = {}

    @property
    def flags(self) -> list[str]:
        """All flags, short ones and long ones."""
        return list(self._option_string_actions)

    @property
    def flag_of(self) -> dict[str, str]:
        """The flag that sets each argument: the first one, where there are several."""
        return {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}

    @property
    def name_of(self) -> dict[str, str]:
        """The argument that each flag sets."""
        return {flag: action.dest for flag, action in self._option_string_actions.items()}

    def error(self, message: str) -> NoReturn:
        if re.match("argument (FILE|-m|-hf).*: not allowed with argument (FILE|-m|-hf)", message):
            message = "a model is named twice: leave one of the names out"
        if (flag := re.match(r"argument ([^:/]+)[^:]*:", message)) and flag[1] in self.typed:
            message = f"argument {self.typed[flag[1]]}{message[flag.end() - 1 :]}"
        if self.prog.endswith("quantize") and "required" in message:
            message = "write localllm quantize FILE OUTPUT TYPE, as in localllm quantize f16.gguf q4.gguf Q4_K_M"
        raise UsageError(f"{message} ({self.prog} --help shows what there is)")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Prints help or the version; argparse's own lets errors of writing pass."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        else:
            print(message, end="", file=file, flush=True)


class _Once(argparse.Action):
    """Takes a value that other flags may repeat and not contradict."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        if getattr(namespace, self.dest) not in (None, value):
            parser.error("keys and values have the same type here: give --cache-type once, for both")
        setattr(namespace, self.dest, value)


class _FromHub(argparse.Action):
    """Names a model that is downloaded if it is not here."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        namespace.model, namespace.download = value, True


class _Formatter(argparse.HelpFormatter):
    """Help with room for long flags, and with the line breaks of the text at its end."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def make_parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and that of each command in it."""
    parser = Parser(
        prog="localllm",
        description="Runs large language models on the machine you have.",
        allow_abbrev=False,
    )
    version = f"localllm {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--list-devices", action="store_true", help="show what --device can name here")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_arguments, usage, summary, details in (
        ("generate", _add_generate, "[-m FILE] [[-p] TEXT] [options]", "let a model write", GENERATE_DETAILS),
        ("chat", _add_chat, "[FILE] [options]", "talk with a model", CHAT_DETAILS),
        ("inspect", _add_inspect, "[FILE] [options]", "show what is in a GGUF file", ""),
        ("serve", _add_serve, "[-m FILE …] [options]", "serve models to other programs over HTTP", SERVE_DETAILS),
        ("bench", _add_bench, "[FILE …] [options]", "measure how fast a model runs here", BENCH_DETAILS),
        (
            "doctor",
            _add_doctor,
            "[-v] [--json]",
            "show what runs here, and what to do about the rest",
            "",
        ),
        ("models", _add_models, "[FOLDER …] [--json]", "list the models on this machine", MODELS_DETAILS),
        ("pull", _add_pull, "ORG/REPO[:FILE or QUANT] [-q]", "download a model from the hub", PULL_DETAILS),
        ("convert", _add_convert, "FOLDER [OUTPUT] [options]", "make a GGUF file of a checkpoint", CONVERT_DETAILS),
        ("quantize", _add_quantize, "FILE OUTPUT TYPE [options]", "make a model smaller", QUANTIZE_DETAILS),
        (
            "imatrix",
            _add_imatrix,
            "FILE [OUTPUT] -f TEXT [options]",
            "measure which weights matter to a text",
            IMATRIX_DETAILS,
        ),
        ("merge", _add_merge, "FILE OUTPUT --lora ADAPTER[=X]", "write a model with adapters in its weights", ""),
        ("embed", _add_embed, "[-m FILE] [TEXT …] [options]", "make vectors of texts, or rank them", EMBED_DETAILS),
        ("evaluate", _add_evaluate, "[FILE] -f TEXT [options]", "measure what a model knows", EVALUATE_DETAILS),
        (
            "config",
            _add_config,
            "[path | get KEY | set KEY VALUE | unset KEY] [--json]",
            "show or change settings",
            "",
        ),
    ):
        command = parsers.add_parser(
            name,
            usage=f"localllm {name} {usage}",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=details,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        add_arguments(command)
        command.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
        command.add_argument("--debug", action="store_true", help="show where in the program an error happened")
    return parser, parsers.choices


GENERATE_DETAILS = """\
Without -m the model that the settings name writes (localllm config), or else the small demo model that comes with
localllm, which -m demo names.  What the settings say holds wherever no flag says otherwise.

The prompt is TEXT.  Without it and -f it is read from standard input, unless that is a terminal; the empty one lets
the model begin by itself.  One line end at the end of a prompt from a file or from standard input is dropped.

If the model has a chat template, the prompt is given to it as a user's message, and the model answers; --no-chat
lets it go on with the text instead.  The empty prompt is never a message.

The text goes to standard output as it comes, all else to standard error.  Into a file or a pipe it goes byte for
byte, and no line end is added; on a terminal one is, and control characters are spelled out.
"""

EMBED_DETAILS = """\
The model is one that is made for it: BERT, Nomic Embed, ModernBERT, EmbeddingGemma, Qwen3-Embedding, and rerankers.

A JSON array of numbers a text goes to standard output, vectors of length 1; with --query a JSON object with score and
text, the best first.
"""

CHAT_DETAILS = """\
Without a file the small demo model that comes with localllm answers.  Chats are saved as they are written.

With --plain, or where standard input or output is not a terminal, the chat goes line by line: a backslash at the end
of a line goes on with the next one, three quotation marks begin and end a block, and /help lists commands.  Replies
go to standard output, all else to standard error.
"""

SERVE_DETAILS = """\
Programs made for the APIs of OpenAI (http://127.0.0.1:8080/v1), Anthropic and Ollama (http://127.0.0.1:8080) or
llama.cpp's server can use it.  Each model is loaded when it is first asked for.  Without -m there are the model that
the settings name, or else the demo model, and all that localllm models lists.

Only programs on this machine reach it, and no page of a browser, unless --host and --cors-origin say otherwise.  The
environment variable LOCALLLM_API_KEY gives API keys too, with commas between them.
"""

CONVERT_DETAILS = """\
Reads safetensors, also split, of F32, F16, BF16, FP8, MXFP4 and NVFP4, and INT4 as GPTQ, AWQ and compressed-tensors
have it, whose integers are kept as Q4_0 or Q4_1 unless --type says otherwise.  Of models that see or hear it converts
what writes.  What would not load is refused before anything is written.  After Ctrl-C or a crash the same
command goes on where it stopped.
"""

QUANTIZE_DETAILS = """\
Mixes give the tensors that matter most better types: Q4_K_M, Q5_K_M, Q6_K, IQ4_XS, Q3_K_M, IQ3_M and Q2_K are
common; any unknown TYPE lists all.  Types below 3 bits need --imatrix.

--target-size and --target-kl choose a type for each tensor: what its precision is worth to the text is measured, and
bytes go where they lessen the model's divergence from the original (Kullback-Leibler, in nats a token) most.

The error of a tensor is the root of its squared error over that of its squares, weighted by importance.
"""

IMATRIX_DETAILS = """\
The model reads the text, some thousands of words of what it is used for; 50 pieces do, 200 are better.  What is
measured helps `localllm quantize --imatrix` to keep what matters: start from the F16 file or a large quantisation.
Ctrl-C ends early and keeps what was measured so far.  A name that ends in .dat gives the older format of llama.cpp.
"""

EVALUATE_DETAILS = """\
-f measures the perplexity of a text, in chunks of which the second halves count, as llama.cpp does.  --save-logits
keeps what the model thought of it, and with --base-logits another model is compared with that: Kullback-Leibler
divergence, change of probability, and how often both have the same likeliest token.  The file is llama.cpp's.

--compare measures several models against FILE, and draws their divergence over their size; --svg does so in a file.

--choices takes questions, in each line {"prompt": "...", "choices": ["...", "..."], "answer": 0}, and counts how
often the likeliest answer is the right one.
"""

BENCH_DETAILS = """\
-p, -n, -d and -t take lists, such as -t 1,2.  pp512 is the evaluation of a prompt of 512 tokens, tg128 the
generation of 128 tokens, one after the other, pp512+tg128 one after the other, and @ d1024 means that 1,024 tokens
stand before them.

The share of the machine compares each result with a ceiling that is measured in turn with it, on as many threads:
for tg how fast they read as many bytes as a token needs, for pp how fast they multiply.  On a GPU that is how fast
it copies in its memory (bytes read and written), and how fast its tensor cores multiply.  More than 100 % means that
other programs were busy while the ceiling was measured.

--profile adds for each test, and each GPU, what the kernels of a step take, by operation: its launches, its time and
its share, the bytes and operations that it cannot do without a second, and how near that is to the GPU's ceilings.
"at work" is the part of the time in which the GPU had any of this to do.

--serve measures `localllm serve` with clients that send prompts of -p and read replies of -n tokens on average: how
many tokens and requests it does a second, and the time to the first token and between tokens (50 %, 95 % and 99 % of
them take no longer).
"""

MODELS_DETAILS = """\
Without a folder, lists the GGUF files in those that the setting model_folders names (localllm config set
model_folders ~/models), and in the cache of the Hugging Face hub.  Each can be named as listed wherever a command
takes a model.
"""

PULL_DETAILS = """\
The model goes into the cache of the Hugging Face hub, and every command then takes its name in place of a path.
ORG/REPO:Q4_K_M chooses a file by its quantisation, ORG/REPO:NAME.gguf by its name; ORG/REPO alone the only one, or
Q4_K_M.  The address of a page of the hub, or of a file there, names a model too.  What was fetched before it was
interrupted is kept, and the same command goes on from there.
"""


def _add_generate(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    _add_model(model)
    _add_lora(model)
    _add_prompt(parser.add_argument_group("prompt"))
    _add_ending(parser.add_argument_group("where the text ends"))
    _add_sampling(parser.add_argument_group("how the next token is chosen"))
    _add_speculation(parser.add_argument_group("speculative decoding: the same text, sooner"))
    _add_output(parser.add_argument_group("output"))


def _add_chat(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    _add_file(model.add_mutually_exclusive_group(), "a GGUF file (default: the demo model)")
    _add_running(model)
    _add_lora(model)
    _add_conversation(parser.add_argument_group("conversation"))
    _add_ending(parser.add_argument_group("where replies end"))
    _add_sampling(parser.add_argument_group("how the next token is chosen"))
    _add_speculation(parser.add_argument_group("speculative decoding: the same text, sooner"))
    _add_loudness(parser.add_argument_group("output").add_mutually_exclusive_group())
    parser.set_defaults(escape=False)


def _add_conversation(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--plain", action="store_true", help="line by line, without a screen of its own")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--continue", dest="resume", action="store_true", help="go on with the last chat")
    which.add_argument("--session", metavar="ID", help="go on with this chat; the beginning of its id is enough")
    which.add_argument("--list", dest="list_chats", action="store_true", help="list the chats, and their ids")
    group.add_argument("-sys", "--system", "--system-prompt", dest="system", metavar="TEXT", help="the system prompt")
    group.add_argument("--prefix", metavar="TEXT", help="what replies begin with")
    group.add_argument(
        "--when-full",
        choices=("ask", "drop", "summarise", "stop"),
        metavar="WHAT",
        default="ask",
        help="when the context is full: ask, drop the oldest turns, summarise them, or stop (default: ask)",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "-m",
        "--model",
        type=model_file,
        metavar="FILE",
        help="a GGUF file, or ORG/REPO[:QUANT] of one that was pulled (default: the demo model)",
    )
    _add_hub(which)
    _add_running(group)


def _add_hub(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        *("-hf", "--hf-repo"),
        action=_FromHub,
        type=model_file,
        metavar="ORG/REPO[:QUANT]",
        help="the same, or a page's address, downloaded if it is not here",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    _add_context(group)
    _add_device(group)
    group.add_argument("-hff", "--hf-file", dest="hub_file", metavar="NAME", help="the file of -hf")
    group.add_argument(
        "--chat-template", metavar="TEXT", help="jinja2 in place of the file's own template, or 'chatml'"
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="read it from a file")
    _add_declared(group, LoadOptions, "threads")


def _add_declared(group: argparse._ActionsContainer, cls: type, *names: str, **more: Any) -> None:
    """Adds flags for options that `localllm.declared_options` has; without names for all that have a flag.

    What is not given is None for those of `LoadOptions`, which the settings file may have, and left out for the rest.
    """
    for name, option in declared(cls).items():
        if name not in (names or declared(cls)) or not option.flags:
            continue
        default = default_text(cls, name)
        note = "may be given several times" if more.get("action") == "append" else f"default: {default}"
        arguments: dict[str, Any] = {
            "dest": name,
            "default": None if cls is LoadOptions else argparse.SUPPRESS,
            "help": option.brief,
        }
        if option.kind is SWITCH:
            arguments["action"] = "store_true"
        else:
            value = {"type": reader(option), "metavar": option.kind.metavar, "help": f"{option.brief} ({note})"}
            arguments |= value | more
        group.add_argument(*flags_of(name, option), **arguments)


def _add_context(group: argparse._ActionsContainer) -> None:
    option, default = declared(LoadOptions)["context"], default_text(LoadOptions, "context")
    text = f"{option.brief}; 0 is as many as the model was trained on (default: {default})"
    _add_declared(group, LoadOptions, "context", type=whole(0), help=text)


def _add_device(group: argparse._ActionsContainer) -> None:
    _add_placement(group)
    _add_cache_type(group)
    _add_declared(group, LoadOptions, "isa")


def _add_placement(group: argparse._ActionsContainer) -> None:
    _add_declared(group, LoadOptions, "device", "tensor_split", "split_mode")
    _add_declared(group, LoadOptions, "n_gpu_layers", type=layers)


def _add_cache_type(group: argparse._ActionsContainer) -> None:
    _add_declared(group, LoadOptions, "cache_type", action=_Once)


def _add_prompt(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    group.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    group.add_argument(
        "-sys", "--system-prompt", "--system", dest="system", metavar="TEXT", help="a message before the user's"
    )
    group.add_argument(
        "-cnv",
        "--chat",
        "--conversation",
        dest="chat",
        action="store_true",
        default=None,
        help="give the prompt as a user's message (default: if the model has a chat template)",
    )
    group.add_argument(
        "-no-cnv",
        "--no-chat",
        "--no-conversation",
        dest="chat",
        action="store_false",
        help="go on with the prompt as it is",
    )
    group.add_argument(
        "-e",
        "--escape",
        action="store_true",
        help=r"read \n, \t, \\, \xHH and the like in -p, --system-prompt and --stop as those characters",
    )
    _add_declared(group, CheckedOptions, "overflow")


def _add_ending(group: argparse._ArgumentGroup) -> None:
    _add_declared(group, CheckedOptions, "max_tokens", type=token_limit)
    _add_declared(group, CheckedOptions, "ignore_eos")
    _add_declared(group, CheckedOptions, "stop", action="append")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    _add_declared(group, Sampling)
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="DRY follows no repetition across this text; in place of the default ones, which 'none' clears",
    )
    for flags, name in ((("-jf", "--json-schema-file"), "json_schema"), (("--grammar-file",), "grammar")):
        text = f"read {flags[-1].removesuffix('-file')} from a file"
        group.add_argument(*flags, dest=name, type=text_file, metavar="FILE", default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--samplers",
        type=lambda text: text.split(";"),
        metavar="NAME;…",
        help="only these, such as top_k;top_p;temperature; the order is always llama.cpp's default one",
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        type=logit_bias,
        action="append",
        metavar="ID±X",
        default=[],
        help="add X to the logit of a token: 15043+1, 15043-0.5, 15043-inf (may be given several times)",
    )


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lookup",
        dest="speculate",
        action="store_const",
        const="lookup",
        default=argparse.SUPPRESS,
        help="draft tokens from what the text or the prompt had before",
    )
    _add_declared(group, LoadOptions, "draft_model", type=model_file)
    _add_declared(group, CheckedOptions, "draft_max")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object at the end, no text as it comes")
    group.add_argument(
        "--logprobs",
        type=whole(0),
        metavar="N",
        default=argparse.SUPPRESS,
        help="with --json: log-probabilities of each token and of the N likeliest",
    )
    _add_loudness(group.add_mutually_exclusive_group())


def _add_loudness(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument("-q", "--quiet", action="store_true", help="print nothing but the text and errors")
    group.add_argument(
        "-v", "--verbose", action="store_true", help="print what runs where, what it takes, and all timings"
    )


def _add_file(group: argparse._MutuallyExclusiveGroup, text: str) -> None:
    """The model as a word of its own, or behind -m."""
    group.add_argument(
        "model", nargs="?", type=model_file, metavar="FILE", default=argparse.SUPPRESS, help=f"{text}; also -m FILE"
    )
    group.add_argument("-m", "--model", type=model_file, metavar="FILE", help=argparse.SUPPRESS)
    _add_hub(group)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_file(
        parser.add_mutually_exclusive_group(), "a GGUF file, or any file of a split one (default: the demo model)"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--metadata", action="store_true", help="the metadata only")
    only.add_argument("--tensors", action="store_true", help="the tensors only")
    only.add_argument("--plan", action="store_true", help="what would run where, and the memory it would take")
    planning = parser.add_argument_group("with --plan, as generate has them")
    _add_context(planning)
    _add_declared(planning, LoadOptions, "threads")
    _add_placement(planning)
    _add_cache_type(planning)
    parser.add_argument("--full", action="store_true", help="long texts and arrays in full")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FOLDER OUTPUT",
        help="a folder with config.json, *.safetensors and tokenizer, or ORG/REPO on the hub; and the file to write "
        "(default: NAME-TYPE.gguf)",
    )
    _add_output_file(parser)
    parser.add_argument(
        "--type", metavar="TYPE", help="a type or mix of types, such as Q8_0 (default: as it is stored)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show types and sizes, and write nothing")
    parser.add_argument("--allow-requantize", action="store_true", help="take tensors that are quantised already")
    _add_writing(parser)


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-nan", action="store_true", help="make values that are NaN or infinite 0")
    parser.add_argument("-t", "--threads", type=whole(1), metavar="N", help="threads (default: one a processor)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_output_file(parser: argparse.ArgumentParser) -> None:
    """The file to write behind a flag, in place of a word: `name_words`."""
    parser.add_argument("-o", "--output", type=Path, metavar="OUTPUT", help="the same as the word OUTPUT")


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE OUTPUT TYPE",
        help="a GGUF file, or any file of a split one; the file to write; and a type or mix of types, such as Q4_K_M",
    )
    _add_output_file(parser)
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-size", type=size, metavar="SIZE", help="choose types so that the file takes so much, as in 4.2GB"
    )
    target.add_argument(
        "--target-kl", type=divergence, metavar="X", help="choose types so that the divergence is at most X nats"
    )
    parser.add_argument("-f", "--file", dest="text", type=Path, metavar="FILE", help="a text to measure types on")
    parser.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="an importance matrix, as GGUF or in the old format"
    )
    parser.add_argument(
        *("--tensor", "--tensor-type"),
        dest="overrides",
        type=override,
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        help="a type for tensors with such names; may be given several times, and the first that fits counts",
    )
    for flag, pattern in (
        ("--output-tensor-type", r"^output\.weight$"),
        ("--token-embedding-type", r"^token_embd\."),
    ):
        parser.add_argument(
            flag,
            dest="overrides",
            type=partial(_typed, pattern),
            action="append",
            metavar="TYPE",
            help=f"the same as --tensor '{pattern}=TYPE'",
        )
    parser.add_argument("--pure", action="store_true", help="TYPE for all tensors that are quantised")
    parser.add_argument("--keep-split", action="store_true", help="write as many files as the model has")
    parser.add_argument("--dry-run", action="store_true", help="show types and sizes, and write nothing")
    parser.add_argument("--allow-requantize", action="store_true", help="take tensors that are quantised already")
    _add_writing(parser)


def _add_lora(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    parser.add_argument(
        "--lora",
        type=share,
        action="append",
        default=[],
        required=required,
        metavar="ADAPTER[=X]",
        help="a low-rank adapter, as GGUF or a folder of PEFT's, and how much of it (default: 1); may be given "
        "several times",
    )


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE OUTPUT",
        help="a GGUF file, or any file of a split one; and the file to write",
    )
    _add_output_file(parser)
    _add_lora(parser, required=True)
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_embed(parser: argparse.ArgumentParser) -> None:
    _add_model(parser.add_argument_group("model"))
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a text (default: the lines of standard input)")
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="read texts from a file, one a line")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="stands before each text, as 'search_query: '")
    parser.add_argument("--dimensions", type=whole(1), metavar="N", help="the first N values of each vector only")
    parser.add_argument("--query", metavar="TEXT", help="with a reranker: the texts by how well they answer this")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but vectors and errors")


def _add_imatrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE OUTPUT",
        help="a GGUF file, or any file of a split one, also -m FILE; and the file to write (default: imatrix.gguf)",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-m", "--model", type=model_file, metavar="FILE", help=argparse.SUPPRESS)
    _add_hub(group)
    _add_output_file(parser)
    parser.add_argument("-f", "--file", dest="text", type=Path, required=True, metavar="TEXT", help="a text to read")
    parser.add_argument(
        "-c", "--context", type=whole(8), metavar="N", default=512, help="tokens of a piece (default: 512)"
    )
    parser.add_argument("--chunks", type=whole(1), metavar="N", help="pieces to read (default: all of the text)")
    parser.add_argument(
        "--in-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an importance matrix to add to; may be given several times",
    )
    parser.add_argument(
        "--hessian",
        action="store_true",
        help="measure how columns go together, too: a large file, with which quantize loses much less",
    )
    parser.add_argument("-t", "--threads", type=whole(1), metavar="N", help="threads (default: one a physical core)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("models")
    model.add_argument(
        "-m",
        "--model",
        dest="models",
        action="append",
        type=model_file,
        metavar="FILE",
        default=[],
        help="a GGUF file, or ORG/REPO[:QUANT] of one that was pulled; may be given several times",
    )
    model.add_argument(
        "-a", "--alias", dest="aliases", action="append", metavar="NAME", default=[], help="another name of the first"
    )
    model.add_argument("--ttl", type=whole(1), metavar="S", help="unload a model after S seconds without a request")
    _add_running(model)
    _add_lora(model)
    model.add_argument(
        "-np",
        "--parallel",
        type=whole(1),
        metavar="N",
        default=4,
        help="requests of full length that the cache of each model has room for (default: 4)",
    )
    model.add_argument(
        "--prompt-cache",
        "--slot-save-path",
        dest="prompts",
        type=Path,
        metavar="DIR",
        help="keep what was evaluated of prompts in DIR while a model is not loaded",
    )
    _add_listening(parser.add_argument_group("who may ask"))
    output = parser.add_argument_group("output")
    output.add_argument("--stats", action="store_true", help="show throughput, queue and cache as they change")
    output.add_argument("-q", "--quiet", action="store_true", help="print nothing but the address and errors")


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port",
        type=whole(0, below=65536),
        metavar="N",
        default=8080,
        help="port; 0 is any that is free (default: 8080)",
    )
    for flag, name, metavar, text in (
        ("--api-key", "api_keys", "KEY", "let in those who have this key, and share the models evenly between keys"),
        ("--allow-host", "hosts", "NAME", "answer to this name of the machine, too"),
        ("--cors-origin", "origins", "ORIGIN", "let pages of this origin ask, such as https://example.org; * is any"),
    ):
        group.add_argument(
            flag, dest=name, action="append", metavar=metavar, default=[], help=f"{text}; may be given several times"
        )
    group.add_argument(
        "--max-queue", type=whole(1), metavar="N", default=256, help="requests that may wait (default: 256)"
    )
    group.add_argument(
        "--max-body", type=whole(1), metavar="MiB", default=32, help="size of a request at most (default: 32)"
    )
    group.add_argument(
        "--grace",
        type=whole(0),
        metavar="S",
        default=10,
        help="seconds that replies have to end after Ctrl-C (default: 10)",
    )
    group.add_argument(
        "--responses",
        type=Path,
        metavar="FOLDER",
        help="keep responses there, for previous_response_id after a restart",
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=model_file, metavar="FILE", help="GGUF files (default: the demo model); also -m FILE"
    )
    for flags, name in ((("-m", "--model"), "model"), (("-hf", "--hf-repo"), "downloads")):
        parser.add_argument(
            *flags, dest=name, action="append", type=model_file, default=[], metavar="FILE", help=argparse.SUPPRESS
        )
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
    parser.add_argument(
        *("-pg", "--n-prompt-gen"),
        dest="pairs",
        type=numbers,
        action="append",
        metavar="N,M",
        default=[],
        help="a prompt of N tokens, and M generated after it, as one test (may be given several times)",
    )
    parser.add_argument("-r", "--repetitions", type=whole(1), metavar="N", default=5, help="repetitions (default: 5)")
    _add_device(parser)
    parser.add_argument("--profile", action="store_true", help="show what the time on GPUs goes to, by operation")
    serving = parser.add_argument_group("a server with many clients, in place of tests")
    serving.add_argument("--serve", action="store_true", help="start a server for each FILE, and measure it")
    serving.add_argument(
        "--clients",
        type=numbers,
        metavar="N,…",
        default=[8],
        help="clients, each with a request at a time (default: 8)",
    )
    serving.add_argument("--requests", type=whole(1), metavar="N", default=64, help="requests in all (default: 64)")
    serving.add_argument(
        "--rate", type=float, metavar="R", help="requests that arrive a second (default: each client's as it is free)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        *("-o", "--output"),
        dest="form",
        choices=("table", "md", "csv", "jsonl", "json"),
        metavar="FORM",
        default="table",
        help="table, md, csv, jsonl (a line a test) or json (a line a model) (default: table)",
    )
    form.add_argument(
        "--json",
        dest="form",
        action="store_const",
        const="json",
        help="print one JSON object a model, all on one line",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_file(parser.add_mutually_exclusive_group(), "a GGUF file (default: the demo model)")
    parser.add_argument("-f", "--file", metavar="FILE", help="the text")
    parser.add_argument(
        "-c",
        "--ctx-size",
        "--context",
        dest="context",
        type=whole(4),
        metavar="N",
        help="tokens of a chunk (default: 512)",
    )
    parser.add_argument("--chunks", type=whole(1), metavar="N", help="the first N chunks only")
    parser.add_argument(
        "--save-logits",
        "--save-all-logits",
        dest="save_logits",
        type=Path,
        metavar="FILE",
        help="keep the logits in a file, with which other models are compared",
    )
    parser.add_argument(
        "--base-logits",
        "--kl-divergence-base",
        dest="base_logits",
        type=Path,
        metavar="FILE",
        help="compare with the model whose logits the file has; it has the text, too",
    )
    parser.add_argument(
        "--compare", nargs="+", type=model_file, metavar="FILE", help="compare these models with the first one"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what --compare finds into an SVG file, too")
    parser.add_argument("--choices", type=Path, metavar="FILE", help="multiple choice: a JSONL file of questions")
    _add_device(parser)
    _add_declared(parser, LoadOptions, "threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no more than JSON and errors")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that was looked at")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="list the models in these instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=model_file, metavar="ORG/REPO[:…]", help="what to download")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("path", "get", "set", "unset"),
        help="by default shows what is in force, and why",
    )
    parser.add_argument("key", nargs="?", metavar="KEY", help="such as context or sampling.temperature")
    parser.add_argument("value", nargs="?", metavar="VALUE", help="a text, a number, or a list as in TOML")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


# -- Values --------------------------------------------------------------------------------------------------------


#: What the words of commands that write a file are, in their order, and those of them that must be there.
WORDS = {
    "convert": {"model": True, "output": False},
    "quantize": {"model": True, "output": True, "type": False},
    "imatrix": {"model": True, "output": False},
    "merge": {"model": True, "output": True},
}


def name_words(words: Sequence[str], arguments: Any, error: Callable[[str], NoReturn]) -> None:
    """Gives the words of a command that writes a file their names: in order, without those that flags have named.

    Args:
        error: what the parser calls where something is wrong.
    """
    given, kinds = vars(arguments), WORDS[arguments.command]
    names = [name for name in kinds if given.get(name) is None]
    if arguments.command == "quantize" and len(words) == len(names) + 1 and words[-1].isdigit():
        *words, threads = words  # llama-quantize has them there
        arguments.threads = int(threads) or None
    if len(words) > len(names):
        named = {"model": "the model", "output": "the file to write"}
        twice = " or ".join(named[name] for name in kinds if name not in names)
        hint = f": {twice} is named twice, leave one of the names out" if twice else ""
        error(f"there are words too many, from {words[len(names)]!r} on{hint}")
    missing = [name for name in names[len(words) :] if kinds[name]]
    if missing:
        label = {"model": "FOLDER" if arguments.command == "convert" else "FILE", "output": "OUTPUT"}
        error(f"the following arguments are required: {', '.join(label[name] for name in missing)}")
    for name, word in zip(names, words, strict=False):
        try:
            value = Path(word) if name == "output" else model_file(word) if name == "model" else word
        except argparse.ArgumentTypeError as fault:
            error(f"argument FILE: {fault}")
        setattr(arguments, name, value)
    for name in names[len(words) :]:
        setattr(arguments, name, None)


def model_file(text: str) -> str:
    """What names a model: a path, or ORG/REPO[:…], or the address of one on the hub."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: name a GGUF file")
    if re.match(r"\w+://|www\.", text) and not os.path.exists(text):
        from localllm.library.names import HubName  # imported here: most names are paths

        if HubName.parse(text) is not None:
            return text
        raise argparse.ArgumentTypeError(
            f"{text} is an address, but not one on the hub: download the file and name its path, or name a model "
            "there, ORG/REPO[:QUANT]"
        )
    return text


def text_file(path: str) -> str:
    """The text of a file."""
    from localllm.files import read_text  # imported here: few command lines name one

    try:
        return read_text(path)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(least: int, words: str = "", *, below: float = math.inf) -> Callable[[str], int]:
    """Reads whole numbers from ``least`` on, which ``words`` describe."""
    words = words or f"a whole number of at least {least}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= (value := int(text)) < below:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")

    return read


def reader(option: Option) -> Callable[[str], Any]:
    """Reads values of an option; -1 is llama.cpp's way to leave it open, where that is possible."""
    leave_out = f"; leave it out for {option.none}" if option.none else ""

    def read(text: str) -> Any:
        if text == "-1" and option.none:
            return None
        try:
            if option.kind.read(value := option.kind.parse(text)) is not None:
                return value
        except UsageError as error:  # which says more
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {option.kind.words}{leave_out}")

    return read


def token_limit(text: str) -> int | None:
    """A number of tokens; -1 and -2 are llama.cpp's "no limit" and "until the context is full"."""
    return None if text in ("-1", "-2") else whole(0, "a whole number of at least 0, or -1 for no limit")(text)


def layers(text: str) -> int | None:
    """A number of layers; -1 and "auto" are as many as fit, and "all" is more than a model has."""
    if text in ("auto", "-1"):
        return None
    return 1 << 20 if text == "all" else whole(0, "one whole number of at least 0, 'auto' or 'all'")(text)


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers, such as 128,512 (no ranges)"
        ) from None


def logit_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit: ``15043+1``."""
    for sign in "+-":
        id_, found, bias = text.partition(sign)
        if found:
            with contextlib.suppress(ValueError):
                if not math.isnan(value := float(sign + bias)) and value < math.inf:
                    return int(id_), value
    raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 15043+1 or 15043-inf")


def share(text: str) -> tuple[Path, float]:
    """The path of an adapter, and how much of it: PATH[=X]."""
    path, equals, number = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(number)):
            return Path(path), value
    raise argparse.ArgumentTypeError(f"{text!r} is not ADAPTER[=X], such as style.gguf=0.8")


def size(text: str) -> int:
    """Bytes: a number and B, KB, MB or GB."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]?)B?", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4.2GB or 700MB")
    return int(float(match[1]) * 1000 ** " KMG".index(match[2] or " "))


def divergence(text: str) -> float:
    """A divergence above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a divergence in nats, such as 0.02")


def _typed(pattern: str, type: str) -> tuple[str, str]:
    return pattern, type


def override(text: str) -> tuple[str, str]:
    """A pattern of names and a type: REGEX=TYPE."""
    pattern, equals, type = text.rpartition("=")
    if not equals or not pattern or not type:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE, such as ffn_down=Q6_K")
    return pattern, type
