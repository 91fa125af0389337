"""``localllm generate``: a prompt goes in, text comes out."""

from __future__ import annotations

import argparse
import codecs
import json
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.argument_types import whole
from localllm.cli.defaults import apply_settings, load_options, template_variables, without_line_end
from localllm.cli.machine_warnings import too_many_threads
from localllm.cli.parser import LEFT_OUT, Command, flag, several
from localllm.cli.shared_flags import (
    ENDING,
    HUB,
    LORA,
    LOUDNESS,
    MODEL,
    PRESETS,
    RUNNING,
    SAMPLING,
    SEEING,
    SPECULATION,
    SYSTEM,
    options,
)
from localllm.console import (
    LoadStatus,
    StatusLine,
    detail,
    is_terminal,
    model_line,
    placement_lines,
    quantity,
    say,
    visible,
    visible_line,
    warn,
)
from localllm.errors import UsageError
from localllm.files import read_text
from localllm.options.declared import CheckedOptions, Sampling, declared

if TYPE_CHECKING:
    from localllm.generation.completion import Completion, Stream
    from localllm.llm import LLM
    from localllm.loading.model_info import ModelInfo
    from localllm.loading.placement import Format, Placement, Plan
    from localllm.loading.progress import LoadPlan
    from localllm.options.settings import Settings
    from localllm.options.types import LoadProgress

#: Seconds of waiting for a prompt after which that is said.
_PATIENCE_SECONDS = 1.0


def run(arguments: argparse.Namespace) -> None:
    settings = apply_settings(arguments)
    options = generation_options(arguments, settings)
    # Complains about a setting before a model is loaded for nothing.
    sampling = CheckedOptions.of(options).sampling
    if sampling.grammar_kind is not None:
        from localllm.sampling.grammar import check_grammar  # imported here: it takes a while

        check_grammar(sampling)
    prompt = _prompt(arguments)
    if arguments.chat and not prompt:
        raise UsageError("--chat needs a prompt, the message to answer: give it with -p")
    if not arguments.quiet and arguments.threads and (complaint := too_many_threads(arguments.threads)):
        warn(complaint)
    with LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load_model(arguments, arguments.model, progress, plan_reporter(progress, arguments.quiet))
    with llm:
        if not arguments.quiet:
            describe(llm.info, verbose=arguments.verbose)
        status = StatusLine(enabled=not arguments.quiet)
        options["progress"] = lambda n, total: status.show(f"reading the prompt: {n:,} of {total:,} tokens")
        with _start(llm, prompt, arguments, options, settings) as stream:
            if arguments.json:
                completion = stream.read()
                status.clear()
                print(json.dumps(as_json(llm, completion), ensure_ascii=False, allow_nan=False))
            else:
                _print_text(stream, status, quiet=arguments.quiet)
            if not arguments.quiet:
                _report(stream, verbose=arguments.verbose)


def load_model(
    arguments: argparse.Namespace, path: str | None, progress: LoadProgress | None, planned: LoadPlan | None = None
) -> LLM:
    """Loads a model, or without a path the demo model, as the command line says: devices, context, threads, …."""
    from localllm.llm import load
    from localllm.loading.progress import ShowsFormats, formats_text

    status: object = progress

    def show_plan(plan: Plan) -> None:
        if isinstance(status, ShowsFormats):
            status.formats = formats_text(plan)
        if planned is not None:
            planned(plan)

    llm = load(path, **load_options(arguments, path), progress=progress, planned=show_plan)
    llm.template_variables = template_variables(arguments)
    return llm


# -- What was asked for --------------------------------------------------------------------------------------------


def generation_options(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    given = vars(arguments)
    options = {name: given[name] for name in (*declared(Sampling), *declared(CheckedOptions)) if name in given}
    if arguments.samplers is not None:
        options |= _only(arguments.samplers)
    if "logprobs" in options and not arguments.json:
        raise UsageError("--logprobs needs --json, which prints them")
    if "speculate" in options and arguments.draft_model is not None:
        raise UsageError("--lookup and --draft-model are two ways to draft tokens: leave one of them out")
    if "draft_max" in options and "speculate" not in options and arguments.draft_model is None:
        raise UsageError("--draft-max needs --lookup or --draft-model, which draft tokens")
    if options.get("draft_max") == "always":
        del options["draft_max"]
        options["draft_always"] = True
    text: Callable[[str, str], str] = _unescaped if given.get("escape") else _valid
    options["stop"] = [text(stop, "--stop") for stop in options.get("stop", ())] or settings.stop
    options["logit_bias"] = dict(arguments.logit_bias)
    if adapters := given.get("lora"):
        options["adapters"] = {str(path): share for path, share in adapters}
    if breakers := options.get("dry_sequence_breakers"):
        options["dry_sequence_breakers"] = [text(b, "--dry-sequence-breaker") for b in breakers if b != "none"]
    return {**settings.sampling, **options}


#: What turns each sampler off, in the order in which localllm has them.
_SAMPLERS: dict[str, dict[str, float]] = {
    "penalties": {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    "dry": {"dry_multiplier": 0},
    "top_n_sigma": {"top_n_sigma": 0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1},
    "top_p": {"top_p": 1},
    "min_p": {"min_p": 0},
    "xtc": {"xtc_probability": 0},
    "temperature": {"temperature": 1},
}


def _only(samplers: Sequence[str]) -> dict[str, float]:
    """Settings that turn off all samplers but these."""
    same = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p"}
    names = [same.get(name, name) for each in samplers if (name := each.strip().replace("-", "_"))]
    if names != [name for name in _SAMPLERS if name in names]:
        raise UsageError(
            f"--samplers is {';'.join(samplers)!r:.80}, but must be some of {';'.join(_SAMPLERS)}, in this order"
        )
    return {key: value for name, off in _SAMPLERS.items() if name not in names for key, value in off.items()}


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.file is not None:
        raise UsageError("-p and -f both give a prompt: leave one of them out")
    if arguments.file is not None:
        return without_line_end(read_text(arguments.file, "the prompt file"))
    if arguments.prompt not in (None, "-"):
        return _unescaped(arguments.prompt, "-p") if arguments.escape else _valid(arguments.prompt, "-p")
    if sys.stdin is None or sys.stdin.closed or (arguments.prompt is None and is_terminal(sys.stdin)):
        return ""
    if arguments.prompt is None and not arguments.quiet:
        _mention_waiting()
    return without_line_end(read_text(sys.stdin.buffer, "standard input"))


def _mention_waiting() -> None:
    """Says what is awaited if nothing comes: a program may have been started with an open pipe by chance."""
    if sys.platform == "win32":  # select knows sockets only
        return
    try:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], _PATIENCE_SECONDS)
    except (OSError, ValueError):  # a stand-in without a file
        return
    if not ready:
        say("localllm: reading the prompt from standard input; -p gives it on the command line")


def _valid(text: str, flag: str) -> str:
    """A text from the command line, where bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{flag} is not valid UTF-8: convert it, or check the terminal's character set") from None
    return text


def _unescaped(text: str, flag: str) -> str:
    r"""``text`` with ``\n``, ``\xHH`` and the like read as in Python's byte strings: HH are bytes of UTF-8."""
    try:
        return codecs.escape_decode(_valid(text, flag).encode())[0].decode()
    except ValueError as error:
        raise UsageError(f"{flag} has an escape that cannot be read ({error}); write \\\\ for a backslash") from None


def _start(
    llm: LLM, prompt: str, arguments: argparse.Namespace, options: dict[str, Any], settings: Settings
) -> Stream:
    as_chat = arguments.chat if arguments.chat is not None else bool(prompt) and llm.has_chat_template
    if arguments.chat is None and prompt and not as_chat and not arguments.quiet:
        say(
            "localllm: this model has no chat template, so it continues the prompt.  For answers choose an instruct "
            "version of the model, or add --chat-template; --no-chat hides this message"
        )
    if not as_chat:
        if arguments.system is not None:
            missing = [] if prompt else ["a prompt with -p"]
            if arguments.chat is False:
                missing.append("--chat instead of --no-chat")
            elif not llm.has_chat_template:
                missing.append("--chat, as the model has no chat template")
            raise UsageError(f"--system-prompt needs a chat: give {' and '.join(missing)}")
        media = {"images": arguments.images, "audio": arguments.audio}
        return llm.stream(prompt, **options, **{name: paths for name, paths in media.items() if paths})
    content: Any = [{"type": "image", "image": path} for path in arguments.images]
    content += [{"type": "audio", "audio": path} for path in arguments.audio]
    content = [*content, {"type": "text", "text": prompt}] if content else prompt
    messages = [{"role": "user", "content": content}]
    if arguments.system is not None:
        text = _unescaped if arguments.escape else _valid
        messages.insert(0, {"role": "system", "content": text(arguments.system, "--system-prompt")})
    elif settings.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    stream = llm.stream_chat(messages, **options)
    stream.parser = None  # thoughts are shown as they are written
    return stream


# -- What comes out ------------------------------------------------------------------------------------------------


def _print_text(stream: Stream, status: StatusLine, *, quiet: bool) -> None:
    """Prints the text as it comes; on a terminal, which obeys control characters, with those spelled out."""
    show: Callable[[str], str] = visible if is_terminal(sys.stdout) else str
    last = ""
    for chunk in stream:
        status.clear()
        if chunk.text:
            last = chunk.text
            print(show(chunk.text), end="", flush=True)
    if not last.endswith("\n"):
        if is_terminal(sys.stdout):
            print(flush=True)
        elif not quiet and last:  # where both go to one place, what follows begins on a line of its own
            say("")


def as_json(llm: LLM, completion: Completion) -> dict[str, Any]:
    """A completion as JSON values, with what it came from."""
    info, values = llm.info, completion.to_dict()
    del values["reasoning"], values["tool_calls"]  # the text has both, as the model wrote them
    for entry in values["logprobs"] or ():
        for each in (entry, *entry["top"]):
            each["text"] = llm.tokenizer.token_text(each["id"])
    of_model = {name: getattr(info, name) for name in ("device", "kernels", "threads", "decode_threads")}
    return {"model": str(info.path), **of_model, **values}


def plan_reporter(progress: LoadStatus, quiet: bool) -> LoadPlan:
    """A callback that prints the plan of a model with layers on GPUs, before it is loaded."""

    def show(plan: Plan) -> None:
        if quiet or not plan.has_gpus:
            return
        progress.close()
        say(f"the plan, with {plan.placement.context:,} tokens of context:")
        for title, placement in (("", plan.placement), ("draft model:", plan.draft)):
            if placement is not None:
                for line in (
                    *filter(None, [title]),
                    *(f"  {line}" for line in placement_lines(placement, plan.free)),
                ):
                    say(line)
        if plan.encoder is not None:
            _say_detail("sees by", visible_line(str(plan.encoder)))
        _say_total(plan.placement, plan.draft)

    return show


def describe(info: ModelInfo, *, verbose: bool) -> None:
    for title, each in (("", info), ("draft model ", info.draft)):
        if each is not None:
            say(title + model_line(each))
            if verbose:
                _list_parts(each)
    if verbose:
        _say_total(info.placement, None if info.draft is None else info.draft.placement)


def _say_total(placement: Placement, draft: Placement | None) -> None:
    included = "Python and kernels" if draft is None else "draft model, Python and kernels"
    total = placement.total + (0 if draft is None else draft.total)
    _say_detail("in all", f"{quantity(total, 'B')}, {included} included")


def _list_parts(info: ModelInfo) -> None:
    """Says what a model consists of, and the bytes that its parts take."""
    _say_detail("file", visible_line(str(info.path)))
    if formats := info.formats:
        _say_detail("formats", formats_line(formats))
    for line in placement_lines(info.placement):
        say(f"  {line}")
    if info.encoder is not None:
        _say_detail("sees by", visible_line(str(info.encoder)))


def _say_detail(name: str, text: str) -> None:
    say(f"  {detail(name, text)}")


def formats_line(formats: Iterable[Format]) -> str:
    """Formats of weights and their bytes in memory."""
    return ", ".join(f"{format} {quantity(format.n_bytes, 'B')}" for format in formats)


def _report(stream: Stream, *, verbose: bool) -> None:
    usage, timings = stream.usage, stream.timings
    say(
        f"prompt {_tokens(usage.prompt_tokens)}, {timings.prefill_tokens_per_s:.1f} tok/s; "
        f"answer {_tokens(usage.completion_tokens)}{', cut off' * (stream.finish_reason == 'length')}, "
        f"{timings.decode_tokens_per_s:.1f} tok/s"
    )
    if (drafts := stream.drafts) is not None:
        if drafts.drafted:
            say(f"drafted {_tokens(drafts.drafted)}, {drafts.accepted:,} accepted ({drafts.share:.0%})")
        else:
            say("drafted no tokens: not expected to pay")
    if verbose:
        _say_detail("ended by", f"{stream.finish_reason}")
        _say_detail("prefill", f"{timings.prefill_s:.3f} s, {_tokens(timings.prefill_tokens)}")
        _say_detail("first token", f"after {timings.first_token_s:.3f} s")
        steps = "" if drafts is None else f" in {drafts.steps:,} steps"
        _say_detail("decode", f"{timings.decode_s:.3f} s, {_tokens(timings.decode_tokens)}{steps}")


def _tokens(n: int) -> str:
    return f"{n:,} token{'s' * (n != 1)}"


COMMAND = Command(
    "[-m FILE] [[-p] TEXT] [options]",
    "generate text",
    [
        "model",
        MODEL,
        HUB,
        PRESETS,
        *RUNNING,
        *SEEING,
        LORA,
        "prompt",
        flag("-p --prompt TEXT", "the prompt; - reads it from standard input"),
        flag("-f --file FILE", "read the prompt from a file"),
        several("--image FILE", "a picture to put before the prompt", dest="images"),
        several("--audio FILE", "a sound to put before the prompt: WAV, MP3, FLAC or OGG", dest="audio"),
        SYSTEM,
        flag(
            "-cnv --chat --conversation",
            "treat the prompt as a user's message (default if the model has a chat template)",
            dest="chat",
            default=None,
        ),
        flag(
            "-no-cnv --no-chat --no-conversation", "continue the prompt as it is", dest="chat", action="store_false"
        ),
        flag("-e --escape", r"interpret \n, \xHH and the like in -p, --system-prompt and --stop"),
        *options(CheckedOptions, "overflow"),
        "where the text ends",
        *ENDING,
        *SAMPLING,
        *SPECULATION,
        "output",
        flag("--json", "print one JSON object at the end instead of the text"),
        flag(
            "--logprobs N",
            "with --json: log-probabilities of each token and of the N likeliest ones",
            whole(0),
            default=LEFT_OUT,
        ),
        LOUDNESS,
    ],
    run,
    """\
Without -m the model in the settings is used (localllm config), or else the small demo model that ships with
localllm, which can also be named with -m demo.  Flags override the settings.

Without TEXT, -p or -f the prompt is read from standard input, unless that is a terminal.  With an empty prompt the
model begins by itself.  A newline at the end of a prompt from a file or from standard input is dropped.

If the model has a chat template, the prompt is a user's message, which the model answers; with --no-chat the model
continues the text instead.  An empty prompt is never a message.

The text goes to standard output as it is generated, everything else to standard error.  Files and pipes get exactly
the generated bytes; on a terminal a newline is added at the end, and control characters are shown as escapes.
""",
    aliases="complete completion cli llama-cli llama-completion llama-run llama-simple main",
)
