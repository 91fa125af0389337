"""``localllm generate``: continue or answer a prompt, and print the text."""

from __future__ import annotations

import argparse
import codecs
import json
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from localllm import console
from localllm.cli import shared_flags as flags
from localllm.cli.argument_types import whole
from localllm.cli.defaults import apply_settings, load_options, template_variables, without_line_end
from localllm.cli.machine_warnings import too_many_threads
from localllm.cli.parser import LEFT_OUT, Command, flag, several
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

#: Seconds without a prompt on standard input before a message is printed.
_PATIENCE_SECONDS = 1.0


def run(arguments: argparse.Namespace) -> None:
    settings = apply_settings(arguments)
    options = generation_options(arguments, settings)
    # Reports an invalid option before a model is loaded.
    sampling = CheckedOptions.of(options).sampling
    if sampling.grammar_kind is not None:
        from localllm.sampling.grammar import check_grammar  # imported here: it takes a while

        check_grammar(sampling)
    prompt = _prompt(arguments)
    if arguments.chat and not prompt:
        raise UsageError("--chat needs a prompt, the message to answer: give it with -p")
    if not arguments.quiet and arguments.threads and (complaint := too_many_threads(arguments.threads)):
        console.warn(complaint)
    with console.LoadStatus(enabled=not arguments.quiet) as progress:
        llm = load_model(arguments, arguments.model, progress, plan_reporter(progress, arguments.quiet))
    with llm:
        if not arguments.quiet:
            describe(llm.info, verbose=arguments.verbose)
        status = console.StatusLine(enabled=not arguments.quiet)
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
    """Load a model with the options of the command line.  Without ``path``, load the demo model."""
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


# -- Options -------------------------------------------------------------------------------------------------------


def generation_options(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    values = vars(arguments)
    options = {name: values[name] for name in (*declared(Sampling), *declared(CheckedOptions)) if name in values}
    if arguments.samplers is not None:
        options |= _only(arguments.samplers)
    if "logprobs" in options and not arguments.json:
        raise UsageError("--logprobs needs --json: add it, or remove --logprobs")
    if "speculate" in options and arguments.draft_model is not None:
        raise UsageError("--lookup and --draft-model cannot be combined: remove either")
    if "draft_max" in options and "speculate" not in options and arguments.draft_model is None:
        raise UsageError("--draft-max needs --lookup or --draft-model: add either")
    if options.get("draft_max") == "always":
        del options["draft_max"]
        options["draft_always"] = True
    text: Callable[[str, str], str] = _unescaped if values.get("escape") else _valid
    options["stop"] = [text(stop, "--stop") for stop in options.get("stop", ())] or settings.stop
    options["logit_bias"] = dict(arguments.logit_bias)
    if adapters := values.get("lora"):
        options["adapters"] = {str(path): share for path, share in adapters}
    if vectors := values.get("control_vectors"):
        from localllm.inspection.steering import Steering  # imported here: few command lines steer

        layers = values["control_vector_layers"]
        options["steer"] = [Steering.from_gguf(path, scale, layers=layers) for path, scale in vectors]
    elif values.get("control_vector_layers"):
        raise UsageError("--control-vector-layer-range needs --control-vector: add it")
    if breakers := options.get("dry_sequence_breakers"):
        options["dry_sequence_breakers"] = [text(b, "--dry-sequence-breaker") for b in breakers if b != "none"]
    return {**settings.sampling, **options}


#: Options that turn each sampler off, in their order of application.
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
    """Return options that turn off all samplers except ``samplers``."""
    same = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p"}
    names = [same.get(name, name) for word in samplers if (name := word.strip().replace("-", "_"))]
    if names != [name for name in _SAMPLERS if name in names]:
        raise UsageError(
            f"--samplers is {';'.join(samplers)!r:.80}, but must list some of {';'.join(_SAMPLERS)}, in this order"
        )
    return {key: value for name, values in _SAMPLERS.items() if name not in names for key, value in values.items()}


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.file is not None:
        raise UsageError("-p and -f cannot be combined: remove either")
    if arguments.file is not None:
        return without_line_end(read_text(arguments.file, "the prompt file"))
    if arguments.prompt not in (None, "-"):
        return _unescaped(arguments.prompt, "-p") if arguments.escape else _valid(arguments.prompt, "-p")
    if sys.stdin is None or sys.stdin.closed or (arguments.prompt is None and console.is_terminal(sys.stdin)):
        return ""
    if arguments.prompt is None and not arguments.quiet:
        _mention_waiting()
    return without_line_end(read_text(sys.stdin.buffer, "standard input"))


def _mention_waiting() -> None:
    """Print a message if standard input sends nothing, because a pipe may be open by accident."""
    if sys.platform == "win32":  # select accepts only sockets
        return
    try:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], _PATIENCE_SECONDS)
    except (OSError, ValueError):  # an object without a file
        return
    if not ready:
        console.say("localllm: reading the prompt from standard input; use -p to write it on the command line")


def _valid(text: str, flag: str) -> str:
    """Return an argument unchanged.  Bytes that are not UTF-8 are lone surrogates in it, and an error."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{flag} is not valid UTF-8: convert it, or check the terminal's character set") from None
    return text


def _unescaped(text: str, flag: str) -> str:
    r"""Replace ``\n``, ``\xHH`` and other escapes of Python's byte strings in ``text``.  HH are bytes of UTF-8."""
    try:
        return codecs.escape_decode(_valid(text, flag).encode())[0].decode()
    except ValueError as error:
        raise UsageError(f"{flag} contains an invalid escape ({error}): write \\\\ for a backslash") from None


def _start(
    llm: LLM, prompt: str, arguments: argparse.Namespace, options: dict[str, Any], settings: Settings
) -> Stream:
    as_chat = arguments.chat if arguments.chat is not None else bool(prompt) and llm.has_chat_template
    if arguments.chat is None and prompt and not as_chat and not arguments.quiet:
        console.say(
            "localllm: this model has no chat template, so it continues the prompt.  For answers, use an instruct "
            "version of the model, or add --chat-template; --no-chat hides this message"
        )
    if not as_chat:
        if arguments.system is not None:
            missing = [] if prompt else ["a prompt with -p"]
            if arguments.chat is False:
                missing.append("--chat instead of --no-chat")
            elif not llm.has_chat_template:
                missing.append("--chat, because the model has no chat template")
            raise UsageError(f"--system-prompt needs a chat: add {' and '.join(missing)}")
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
    return llm.stream_chat(messages, parse=False, **options)  # reasoning is printed unchanged


# -- Output --------------------------------------------------------------------------------------------------------


def _print_text(stream: Stream, status: console.StatusLine, *, quiet: bool) -> None:
    """Print the text as it arrives, with visible control characters if standard output is a terminal."""
    show: Callable[[str], str] = console.visible if console.is_terminal(sys.stdout) else str
    last = ""
    for chunk in stream:
        status.clear()
        if chunk.text:
            last = chunk.text
            print(show(chunk.text), end="", flush=True)
    if not last.endswith("\n"):
        if console.is_terminal(sys.stdout):
            print(flush=True)
        elif not quiet and last:  # if stderr is shown in the same place, the next message starts on a new line
            console.say("")


def as_json(llm: LLM, completion: Completion) -> dict[str, Any]:
    """Return a completion and the model's properties as JSON values."""
    info, values = llm.info, completion.to_dict()
    del values["reasoning"], values["tool_calls"]  # the text contains both
    for entry in values["logprobs"] or ():
        for token in (entry, *entry["top"]):
            token["text"] = llm.tokenizer.token_text(token["id"])
    of_model = {name: getattr(info, name) for name in ("device", "kernels", "threads", "decode_threads")}
    return {"model": str(info.path), **of_model, **values}


def plan_reporter(progress: console.LoadStatus, quiet: bool) -> LoadPlan:
    """Return a callback that prints the plan of a model with layers on GPUs before the model is loaded."""

    def show(plan: Plan) -> None:
        if quiet or not plan.has_gpus:
            return
        progress.close()
        console.say(f"plan with {plan.placement.context:,} tokens of context:")
        for title, placement in (("", plan.placement), ("draft model:", plan.draft)):
            if placement is not None:
                for line in (
                    *filter(None, [title]),
                    *(f"  {line}" for line in console.placement_lines(placement, plan.free)),
                ):
                    console.say(line)
        if plan.encoder is not None:
            _say_detail("encoder", console.visible_line(str(plan.encoder)))
        _say_total(plan.placement, plan.draft)

    return show


def describe(info: ModelInfo, *, verbose: bool) -> None:
    for title, model in (("", info), ("draft model ", info.draft)):
        if model is not None:
            console.say(title + console.model_line(model))
            if verbose:
                _describe_model(model)
    if verbose:
        _say_total(info.placement, None if info.draft is None else info.draft.placement)


def _say_total(placement: Placement, draft: Placement | None) -> None:
    included = "Python and kernels" if draft is None else "draft model, Python and kernels"
    total = placement.total + (0 if draft is None else draft.total)
    _say_detail("total", f"{console.quantity(total, 'B')}, {included} included")


def _describe_model(info: ModelInfo) -> None:
    """Print a model's file, formats, placement and encoder."""
    _say_detail("file", console.visible_line(str(info.path)))
    if formats := info.formats:
        _say_detail("formats", formats_line(formats))
    for line in console.placement_lines(info.placement):
        console.say(f"  {line}")
    if info.encoder is not None:
        _say_detail("encoder", console.visible_line(str(info.encoder)))


def _say_detail(name: str, text: str) -> None:
    console.say(f"  {console.detail(name, text)}")


def formats_line(formats: Iterable[Format]) -> str:
    """Return the formats of weights and their bytes in memory, as text."""
    return ", ".join(f"{format} {console.quantity(format.n_bytes, 'B')}" for format in formats)


def _report(stream: Stream, *, verbose: bool) -> None:
    usage, timings = stream.usage, stream.timings
    console.say(
        f"prompt {_tokens(usage.prompt_tokens)}, {timings.prefill_tokens_per_s:.1f} tok/s; "
        f"answer {_tokens(usage.completion_tokens)}{', cut off' * (stream.finish_reason == 'length')}, "
        f"{timings.decode_tokens_per_s:.1f} tok/s"
    )
    if (drafts := stream.drafts) is not None:
        if drafts.drafted:
            console.say(f"drafted {_tokens(drafts.drafted)}, {drafts.accepted:,} accepted ({drafts.share:.0%})")
        else:
            console.say("drafted no tokens, because drafting was not expected to be faster")
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
        flags.MODEL,
        flags.HUB,
        flags.PRESETS,
        *flags.RUNNING,
        *flags.MEDIA,
        flags.LORA,
        *flags.STEERING,
        "prompt",
        flag("-p --prompt TEXT", "the prompt; - reads standard input"),
        flag("-f --file FILE", "read the prompt from a file"),
        several("--image FILE", "image file to insert before the prompt", dest="images"),
        several("--audio FILE", "audio file to insert before the prompt (WAV, MP3, FLAC or OGG)", dest="audio"),
        flags.SYSTEM,
        flag(
            "-cnv --chat --conversation",
            "answer the prompt as a user's message (default if the model has a chat template)",
            dest="chat",
            default=None,
        ),
        flag(
            "-no-cnv --no-chat --no-conversation",
            "continue the prompt, without a chat template",
            dest="chat",
            action="store_false",
        ),
        flag("-e --escape", r"interpret escapes such as \n and \xHH in -p, --system-prompt and --stop"),
        *flags.options(CheckedOptions, "overflow"),
        "where the text ends",
        *flags.ENDING,
        *flags.SAMPLING,
        *flags.SPECULATION,
        "output",
        flag("--json", "print one JSON object at the end instead of the text"),
        flag(
            "--logprobs N",
            "with --json: log-probabilities of each token and of the N likeliest tokens",
            whole(0),
            default=LEFT_OUT,
        ),
        flags.LOUDNESS,
    ],
    run,
    """\
Without -m, generate uses the model in the settings (localllm config), or else the small demo model that ships with
localllm (-m demo).  Flags override the settings.

Without TEXT, -p or -f, the prompt is read from standard input, unless that is a terminal.  With an empty prompt, the
model starts a new text.  A newline at the end of a prompt from a file or from standard input is dropped.

If the model has a chat template, the prompt is a user's message, which the model answers; with --no-chat the model
continues the text instead.  An empty prompt is never a message.

The text is printed to standard output as it is generated, and everything else to standard error.  Files and pipes get
exactly the generated bytes; on a terminal a newline is added at the end, and control characters are shown as escapes.
""",
    aliases="complete completion cli llama-cli llama-completion llama-run llama-simple main",
)
