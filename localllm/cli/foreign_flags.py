"""Flags and commands of other programs, translated to localllm's."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from localllm.cli.parser import command_aliases, command_names, parser_of
from localllm.errors import UsageError
from localllm.options.foreign_names import split_names
from localllm.shell import join_command

_WHOLE_LAYERS = "models are split by layers: use -ngl and --tensor-split instead"
_WHOLE_DRAFT = "the layers of a draft model are not divided: use a smaller draft model"
_ONE_ANSWER = "localllm generate answers one prompt; localllm chat is for conversations"
_SERVER = "localllm serve -m FILE serves models to other programs"
_QUESTIONS = "localllm evaluate --choices FILE accepts multiple-choice questions, one JSON object per line"
_INSPECT = "localllm inspect FILE --metadata shows the metadata of a file"
_NOT_HERE = "localllm has no equivalent"
_OWN_BATCHES = "localllm chooses its batch sizes itself"
_ON_STDERR = "messages are printed to standard error; -q omits them"
_IN_FILE = "the value is read from the file; remove the flag"
_DRAFT_TOO = "the draft model runs with the options of the model"

#: Values of flags whose value is optional: -fa, and -fa on.
_SWITCH = re.compile(r"(on|off|auto|true|false|[01])(,(on|off|auto|[01]))*")

#: Flags without effect, with the number of their values ("?" is an optional `_SWITCH`) and the reason.
NO_EFFECT = split_names(
    {
        "-fa --flash-attn --flash-attention": ("?", "attention is always computed this way"),
        "-b --batch-size -ub --ubatch-size --n-batch --n-ubatch --num-batch": ("1", _OWN_BATCHES),
        "-np --parallel --n-parallel": ("1", "this command runs one prompt at a time"),
        "-cb --cont-batching -nocb --no-cont-batching": ("0", _OWN_BATCHES),
        "-tb --threads-batch --n-threads-batch": ("1", "-t sets the threads for prompts, too"),
        "--mlock --use-mlock": ("?", "localllm does not pin memory"),
        "--numa --prio --poll": ("1", "the operating system places and schedules threads"),
        "--mmap --no-mmap -mmp --use-mmap": ("?", "weights are always copied when they are loaded"),
        "--repack --no-repack -nr": ("0", "weights are always repacked for the processor"),
        "--jinja --no-jinja": ("0", "the chat template is always used: the file's, or --chat-template"),
        "--reasoning-format": ("1", "reasoning is always separated from the text"),
        "--embedding --embeddings --rerank --reranking": ("0", "the model's file determines its purpose"),
        "--pooling": ("1", _IN_FILE),
        "--mmproj-offload --no-mmproj-offload": ("0", "images are encoded on the CPU"),
        "-kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots": (
            "0",
            "all requests share one cache",
        ),
        "-cram --cache-ram": ("1", "prompts stay in the KV cache; serve --prompt-cache DIR saves them on disk"),
        "-fit --fit": ("?", "options that are not set are always chosen to fit in memory"),
        "-fitt --fit-target -fitc --fit-ctx": ("1", "options that are not set are always chosen to fit in memory"),
        "-st --single-turn": ("0", "localllm generate answers one prompt, localllm chat continues"),
        "--keep --n-keep": ("1", "generate --overflow and chat --when-full set the treatment of a full context"),
        "--no-context-shift": ("0", "the text ends when the context is full"),
        "--draft-min --draft-n-min --draft-p-min --draft-p-split": (
            "1",
            "the length of drafts follows the number of accepted tokens",
        ),
        "-td --threads-draft -tbd --threads-batch-draft -cd --ctx-size-draft": ("1", _DRAFT_TOO),
        "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft": ("1", _DRAFT_TOO),
        "--color -co --log-colors": ("?", "only the chat app has colours"),
        "--no-display-prompt --warmup --no-warmup --simple-io --no-escape": ("0", "localllm always works this way"),
        "--nowordwrap --hidethinking": ("0", "localllm always works this way"),
        "--perf --no-perf --log-timestamps --log-prefix --log-disable": ("0", _ON_STDERR),
        "--log-file --log-verbosity -lv": ("1", _ON_STDERR),
        "--offline": ("0", "only localllm pull, -hf and -mu use the network"),
        "--metrics --slots --props --ui --no-ui --webui --no-webui": (
            "0",
            "the server always has its page, /metrics, /slots and /props",
        ),
        "--cache-reuse --threads-http": ("1", "the server does this automatically"),
        "--backend-sampling --backend_sampling": ("0", "localllm chooses where to sample"),
        "--keepalive": ("1", "the model stays in memory until the command ends"),
        "--perplexity --ppl": ("0", "-f FILE measures the perplexity of the text in FILE"),
    }
)

#: localllm's flags by their other names.
SAME = split_names(
    {
        "--model-path": "--model",
        "-hfr -mu --model-url": "--hf-repo",
        "--no-mmproj-auto": "--no-mmproj",
        "--sleep-idle-seconds": "--ttl",
        "--n-ctx --num-ctx": "--ctx-size",
        "--num-predict": "--predict",
        "--n-threads --num-thread": "--threads",
        "--num-gpu": "--gpu-layers",
        "-dev": "--device",
        "--outfile --output-file": "--output",
        "--type-k": "--cache-type-k",
        "--type-v": "--cache-type-v",
        "-r --reverse-prompt": "--stop",
        "--chat-format": "--chat-template",
        "--sampler-order": "--samplers",
    }
)

#: Flags without an equivalent, with advice.
ABSENT = split_names(
    {
        "-mg --main-gpu": "--device names GPUs in order, such as --device cuda:1,0",
        "-nkvo --no-kv-offload --no-op-offload": _WHOLE_LAYERS,
        "-ncmoed --n-cpu-moe-draft -cmoed --cpu-moe-draft -otd --override-tensor-draft": _WHOLE_DRAFT,
        "-hft --hf-token": "set the environment variable HF_TOKEN, or run hf auth login",
        "-p --prompt": "localllm generate -m MODEL -p TEXT answers a prompt",
        "-i --interactive -if --interactive-first -ins --instruct -mli --multiline-input": _ONE_ANSWER,
        "-o --output --output-file": "the text is printed to standard output: add > FILE to write it to a file",
        "-bf --binary-file --in-file": "-f reads a prompt from a file",
        "--format": '-j SCHEMA requests JSON that follows a schema, -j \'{"type": "object"}\' for any JSON object',
        "--ppl-stride": "chunks do not overlap, and the second half of each chunk counts",
        "--hellaswag --hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice": _QUESTIONS,
        "--multiple-choice-tasks": _QUESTIONS,
        "--leave-output-tensor": "--output-tensor-type F16 keeps the output tensor in F16",
        "--include-weights --exclude-weights": "--imatrix applies to all tensors in its file",
        "--lora": "localllm merge MODEL OUTPUT --lora ADAPTER writes a model with the adapter in its weights",
        "--lora-scaled": "use --lora ADAPTER=X instead",
        "--special": _NOT_HERE,
        "--sampling-seq --sampler-seq": "--samplers accepts names, such as --samplers 'top_k;top_p;temperature'",
        "--prompt-cache --prompt-cache-all --slot-save-path": "localllm chat saves chats, see --continue",
        "--rope-scaling --rope-freq-base --rope-freq-scale --rope-scale --yarn-orig-ctx": _IN_FILE,
        "--override-kv": "metadata in the file cannot be overridden",
        "--context-shift": "the text ends when the context is full; localllm chat --when-full drop drops old turns",
        "--host --port --api-key --alias": _SERVER,
        "--insecure": "set the environment variable HF_ENDPOINT to the address of the hub",
        "--modelfile --parameters --template --license": _INSPECT,
    }
)

#: Commands of other programs without an equivalent, with advice.
OTHER_COMMANDS = split_names(
    {
        "create": "no Modelfile is needed: name the GGUF file with -m, and store settings with localllm config set",
        "cp push": "models are plain files, whose paths localllm models --json lists",
        "signin signout login": "hf auth login signs in to the hub",
        "tokenize llama-tokenize": "use LLM.tokenize in Python, or /tokenize of localllm serve",
        "llama-mtmd-cli": "use localllm generate -m FILE --mmproj FILE --image FILE -p TEXT, or --audio FILE",
    }
)

_FLAG = re.compile(r"--?[a-zA-Z][\w-]*")


def in_our_command(line: Sequence[str]) -> list[str]:
    """Return a command line that starts with a command of localllm, or with a flag of the program."""
    word, *remaining = line
    commands = command_names()
    if word in commands or word in ("-h", "--help", "--version"):
        return [word, *remaining]
    if word in ("version", "-v", "-V"):
        return ["--version"]
    if word == "gguf-merge":
        return ["split", "--merge", *remaining]
    if word == "run":
        return _run(remaining)
    if (ours := command_aliases().get(word)) is not None:
        return [ours, *remaining]
    list_of_commands = f"the commands are {', '.join(commands)}"
    if word.startswith("-"):
        raise UsageError(f"the first word must be a command, such as {_line('generate', *line)}: {list_of_commands}")
    if word.lower().endswith(".gguf"):
        raise UsageError(f"{word!r} is not a command: {_line('generate', '-m', word)} generates text with this model")
    if suggestion := nearest(word.lower(), commands):
        raise UsageError(f"there is no command {word!r}: did you mean {suggestion}? {_line(suggestion, *remaining)}")
    raise UsageError(f"there is no command {word!r}: {OTHER_COMMANDS.get(word, list_of_commands)}")


#: A path in a prompt, as in Ollama, or after @, as in the chat.
_MEDIA = re.compile(
    r"""(?<!\S)@?(\S+\.(?:(?P<image>png|jpe?g|webp|gif|bmp|tiff?|avif)|wav|mp3|flac|ogg))(?=[.,;:!?)\]}]*(?:\s|$))""",
    re.IGNORECASE,
)


def _with_media(prompt: str) -> list[str]:
    """Return the flags of a prompt.  Paths of images and audio are removed from the prompt, as by Ollama."""
    flags = list[str]()

    def flag_of(match: re.Match[str]) -> str:
        path = os.path.expanduser(match[1])
        is_path = match[0].startswith("@") or os.path.dirname(path)
        if not is_path or not os.path.isfile(path):
            return match[0]
        flags.extend(("--image" if match["image"] else "--audio", path))
        return ""

    text = _MEDIA.sub(flag_of, prompt)
    return ["-p", text.strip() if flags else prompt, *flags]


def _run(words_after_run: Sequence[str]) -> list[str]:
    """Return the command line for ``ollama run``: a single answer if there is a prompt, otherwise a chat.

    The model is downloaded if it is not on this machine, as by Ollama.
    """
    for command in ("generate", "chat"):  # the chat has more flags
        parser = parser_of(command)
        try:
            line, _, _ = in_our_flags(command, words_after_run, parser.flags)
            arguments, words = parser.parse_known_args(line)
        except UsageError:
            continue
        words = vars(arguments).get("words") or words
        is_answered = command == "generate" and (len(words) > 1 or arguments.prompt or arguments.file)
        flags = list(words_after_run)
        for word in words:
            flags.remove(word)
        model, prompt = ["-hf", *words[:1]] if words else [], words[1:]
        if is_answered:
            return ["generate", *model, *(_with_media(" ".join(prompt)) if prompt else []), *flags]
        return ["chat", *model, *prompt, *flags]
    return ["chat", *words_after_run]


def _line(*words: str) -> str:
    """Return a command line to copy.  Long words are shortened."""
    return join_command(["localllm", *(word if len(word) <= 60 else f"{word[:57]}..." for word in words)])


def in_our_flags(
    command: str, line: Sequence[str], known_flags: Collection[str]
) -> tuple[list[str], str | None, dict[str, str]]:
    """Translate flags of other programs, and remove flags without effect.

    ``line`` is the command line after the command's name.  Returns the new line, an optional warning about removed
    flags, and the typed flags of other programs by localllm's flag.
    """
    ours, remaining = list[str](), list(line)
    reasons: dict[str, str] = {}
    typed: dict[str, str] = {}
    while remaining and remaining[0] != "--":
        word = remaining.pop(0)
        flag, equals, value = word.partition("=")
        if equals and value == "--":  # argparse converts it to an empty list
            raise UsageError(f"'--' is not a value of {flag}: write a value, or remove the flag")
        if flag not in known_flags and flag.startswith("--"):
            flag = flag.replace("_", "-")
        if SAME.get(flag) in known_flags and flag not in known_flags:
            typed[SAME[flag]] = flag
            flag = SAME[flag]
        if flag in known_flags or not _FLAG.fullmatch(flag):
            ours.append(flag + equals + value)
        elif flag in NO_EFFECT and "--device" in known_flags:
            n_values, reasons[flag] = NO_EFFECT[flag]
            may_be_value = bool(remaining) and (n_values == "1" or _SWITCH.fullmatch(remaining[0]))
            if n_values != "0" and may_be_value and not equals:
                remaining.pop(0)
        elif flag in ABSENT:
            raise UsageError(f"there is no flag {flag}: {ABSENT[flag]}")
        elif flag[:2] in known_flags and flag[2:3].isdigit():  # a short flag with a number: -t4 (not -np)
            ours.append(word)
        else:
            # argparse would first report the value after the flag.
            raise UsageError(_unknown_flag(flag, known_flags, [command, *ours, word, *remaining]))
    if not reasons:
        return ours + remaining, None, typed
    verb = "have" if len(reasons) > 1 else "has"
    explanation = "; ".join(dict.fromkeys(reasons.values()))
    return ours + remaining, f"{', '.join(reasons)} {verb} no effect: {explanation}", typed


def _unknown_flag(flag: str, known_flags: Collection[str], line: list[str]) -> str:
    """Return the message for an unknown flag, with a corrected command line."""
    suggestion = f"-{flag}" if f"-{flag}" in known_flags else nearest(flag, known_flags)
    if suggestion is None:
        return f"there is no flag {flag} (see localllm {line[0]} --help)"
    corrected_line = [re.sub(rf"^{re.escape(flag)}(?==|$)", suggestion, word) for word in line]
    return f"there is no flag {flag}: did you mean {suggestion}? {_line(*corrected_line)}"


def assign_words(words: Sequence[str], arguments: Any) -> None:
    """Assigns positional words whose purpose is clear: a prompt, and a number of threads."""
    values = vars(arguments)
    command, model, (first, *more) = values["command"], values.get("model"), words
    if command != "generate":
        raise UsageError(f"unexpected argument {first!r} (see localllm {command} --help)")
    is_model = not model and (first == "demo" or re.fullmatch(r"\S+(\.gguf|/\S+)", first, re.IGNORECASE))
    if values["prompt"] is not None or values["file"] is not None or len(words) > (2 if is_model else 1):
        raise UsageError(f"unexpected argument {first!r}: write quotes around a prompt, and -m before a model")
    if more:  # generate MODEL PROMPT
        arguments.model, arguments.prompt = words
    elif is_model:
        raise UsageError(f"no prompt for the model {first!r}: write {_line('generate', '-m', first)} -p TEXT")
    else:
        arguments.prompt = first


def nearest(word: str, words: Collection[str]) -> str | None:
    """Return the word that differs in one or two letters; None if no word is similar."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return near[0] if near and len(word) > 3 else None
