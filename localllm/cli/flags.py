"""What people mean: flags and commands of other programs, and the flags for what the library's errors name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from localllm.errors import UsageError

_WHOLE_LAYERS = "a model is split by layers, see -ngl and --tensor-split; leave it out"
_ONE_ANSWER = "localllm generate answers one prompt: localllm chat is for conversations"
_SERVER = "localllm serve -m FILE serves models to other programs"
_NOT_HERE = "this version of localllm has nothing like it"
_OWN_BATCHES = "localllm chooses the size of its batches itself"
_ON_STDERR = "messages go to standard error, and -q leaves them out"
_IN_FILE = "it is read from the file, leave it out"
_DRAFT_TOO = "what holds for the model holds for the draft model too"

#: Values of flags that may stand alone: -fa, and -fa on.
_SWITCH = re.compile(r"(on|off|auto|true|false|[01])(,(on|off|auto|[01]))*")

#: Flags that change nothing here: how many values they have ("?" is one of `_SWITCH`, or none), and why.
NO_EFFECT = {
    flag: (n_values, reason)
    for flags, n_values, reason in (
        ("-fa --flash-attn --flash-attention", "?", "attention is always computed so"),
        ("-b --batch-size -ub --ubatch-size --n-batch --n-ubatch --num-batch", "1", _OWN_BATCHES),
        ("-np --parallel --n-parallel", "1", "one prompt is one sequence"),
        ("-cb --cont-batching -nocb --no-cont-batching", "0", _OWN_BATCHES),
        ("-tb --threads-batch --n-threads-batch", "1", "-t holds for the prompt too"),
        ("--mlock --use-mlock", "?", "localllm does not pin memory"),
        ("--numa --prio --poll", "1", "the system places and schedules threads"),
        ("--mmap --no-mmap -mmp --use-mmap", "?", "weights are always copied while they are loaded"),
        ("--repack --no-repack -nr", "0", "weights are always repacked for the processor"),
        ("-sm --split-mode", "1", "a model is always split by layers"),
        ("--jinja", "0", "the file's chat template is always used"),
        ("-st --single-turn", "0", "localllm generate answers one prompt, localllm chat goes on"),
        ("--keep --n-keep", "1", "generate --overflow and chat --when-full say what a full context loses"),
        ("--no-context-shift", "0", "the text ends where the context is full"),
        ("--draft-min --draft-n-min --draft-p-min --draft-p-split", "1", "drafts grow with how many are accepted"),
        ("-td --threads-draft -tbd --threads-batch-draft -cd --ctx-size-draft", "1", _DRAFT_TOO),
        ("-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft", "1", _DRAFT_TOO),
        ("--color -co --log-colors", "?", "only the chat app has colours"),
        ("--no-display-prompt --warmup --no-warmup --simple-io --no-escape", "0", "it is always so"),
        ("--nowordwrap --hidethinking", "0", "it is always so"),
        ("--perf --no-perf --log-timestamps --log-prefix --log-disable", "0", _ON_STDERR),
        ("--log-file --log-verbosity -lv", "1", _ON_STDERR),
        ("--offline", "0", "only localllm pull, -hf and -mu ask the hub"),
        ("--keepalive", "1", "a model is in memory for as long as its command runs"),
    )
    for flag in flags.split()
}

#: Other names of flags that localllm has.
SAME = {
    other: ours
    for ours, others in (
        ("--model", "--model-path"),
        ("--hf-repo", "-hfr -mu --model-url"),
        ("--ctx-size", "--n-ctx --num-ctx"),
        ("--predict", "--num-predict"),
        ("--threads", "--n-threads --num-thread"),
        ("--gpu-layers", "--num-gpu"),
        ("--device", "-dev"),
        ("--cache-type", "-ctk --cache-type-k -ctv --cache-type-v --type-k --type-v"),
        ("--stop", "-r --reverse-prompt"),
        ("--chat-template", "--chat-format"),
        ("--samplers", "--sampler-order"),
    )
    for other in others.split()
}

#: Flags that localllm does not have: what to do about them.
ABSENT = {
    flag: advice
    for flags, advice in (
        ("-mg --main-gpu", "GPUs are named in their order with --device, as in --device cuda:1,0"),
        ("-nkvo --no-kv-offload --no-op-offload", _WHOLE_LAYERS),
        ("-ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor", _WHOLE_LAYERS),
        ("-hft --hf-token", "the environment variable HF_TOKEN has the token, or hf auth login keeps it"),
        ("-i --interactive -if --interactive-first -ins --instruct -mli --multiline-input", _ONE_ANSWER),
        ("-o --output --output-file", "the text goes to standard output: send it to a file with > FILE"),
        ("-bf --binary-file --in-file", "-f reads a prompt from a file"),
        ("--format", _NOT_HERE),
        ("--lora --lora-scaled --control-vector --mmproj -mm --image --audio --special", _NOT_HERE),
        ("--sampling-seq --sampler-seq", "--samplers takes names, as in --samplers 'top_k;top_p;temperature'"),
        ("--prompt-cache --prompt-cache-all --slot-save-path", "localllm chat keeps conversations, see --continue"),
        ("--rope-scaling --rope-freq-base --rope-freq-scale --rope-scale --yarn-orig-ctx", _IN_FILE),
        ("--override-kv", "what the file says holds"),
        ("--context-shift", "the text ends where the context is full: see localllm chat --when-full drop"),
        ("--host --port --api-key --alias", _SERVER),
        ("--embedding --embeddings --pooling", _NOT_HERE),
        ("--insecure", "the hub is asked at the address in the environment variable HF_ENDPOINT"),
        ("--modelfile --parameters --template --license", "localllm inspect FILE --metadata shows what a file says"),
    )
    for flag in flags.split()
}

#: Commands of other programs, and what does that here.
OTHER_COMMANDS = {
    command: advice
    for commands, advice in (
        ("run", "localllm chat MODEL talks with a model, localllm generate -m MODEL -p TEXT answers once"),
        ("complete completion cli llama-cli llama-run", "localllm generate -m MODEL -p TEXT lets a model write"),
        ("show info", "localllm inspect FILE shows what is in a file"),
        ("list ls", "localllm models lists the models here"),
        ("download", "localllm pull ORG/REPO[:QUANT] downloads a model"),
        ("settings set", "localllm config shows and changes settings"),
        ("server llama-server", _SERVER),
        ("ps stop", "a model is in memory for as long as its command runs"),
        ("create", "a GGUF file needs no Modelfile: -m names it, and localllm config set keeps settings"),
        ("rm cp push", "models are plain files, whose paths localllm models --json lists"),
        ("signin signout login", "hf auth login tells the hub who you are"),
    )
    for command in commands.split()
}

_SINGLE_DASH = re.compile(r"-[a-z][a-z-]+")
_FLAG = re.compile(r"--?[a-zA-Z][\w-]*")


def check_command(word: str, commands: Collection[str]) -> None:
    """Raises:
    UsageError: ``word``, the first one of a command line, is not a command; names the one that was meant.
    """
    if word in commands or word in ("-h", "--help", "--version"):
        return
    there_are = f"there are {', '.join(commands)}"
    if word.startswith("-"):
        raise UsageError(f"a command comes first, as in localllm generate {word}: {there_are}")
    if word.lower().endswith(".gguf"):
        raise UsageError(f"{word!r} is not a command: localllm generate -m FILE lets a model write")
    meant = nearest(word, commands)
    advice = f"did you mean {meant}?" if meant else OTHER_COMMANDS.get(word, there_are)
    raise UsageError(f"there is no command {word!r}: {advice}")


def in_our_flags(words: Sequence[str], known: Collection[str]) -> tuple[list[str], str | None]:
    """A command line with the flags of other programs in ours, and without those that change nothing here.

    Args:
        words: of the command line, after the command.
        known: the command's flags.

    Returns:
        The words, and a warning of what was left out, if anything was.

    Raises:
        UsageError: there is a flag that localllm does not have, or a long one with a single dash.
    """
    ours: list[str] = []
    left_out: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in known and flag.startswith("--"):
            flag = flag.replace("_", "-")
        if SAME.get(flag) in known and flag not in known:
            flag = SAME[flag]
        if flag in known or not _FLAG.fullmatch(flag):
            ours.append(flag + equals + value)
        elif flag in NO_EFFECT and "--device" in known:
            n_values, left_out[flag] = NO_EFFECT[flag]
            if rest and not equals and (n_values == "1" or (n_values == "?" and _SWITCH.fullmatch(rest[0]))):
                rest.pop(0)
        elif flag in ABSENT:
            raise UsageError(f"there is no flag {flag}: {ABSENT[flag]}")
        elif _SINGLE_DASH.fullmatch(flag) and "-" + flag in known:
            raise UsageError(f"there is no flag {flag}: did you mean -{flag}?")
        else:
            ours.append(word)
    if not left_out:
        return ours + rest, None
    change = "change" if len(left_out) > 1 else "changes"
    return ours + rest, f"{', '.join(left_out)} {change} nothing here: {'; '.join(dict.fromkeys(left_out.values()))}"


def strange_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line that look like flags and are none; a short flag's number may follow at once."""
    if "--" in words:
        words = words[: words.index("--")]
    flags = [word.partition("=")[0] for word in words]
    return [flag for flag in flags if _FLAG.fullmatch(flag) and flag not in known and not _has_number(flag, known)]


def _has_number(flag: str, known: Collection[str]) -> bool:
    """Whether it is a short flag with a number, as ``-t4``: ``-np`` is no ``-n p``."""
    return flag[:2] in known and flag[2:3].isdigit()


def unknown_words(words: Sequence[str], known: Collection[str]) -> str:
    """A sentence on words of a command line that nothing is known of."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if flags:
        meant = nearest(flags[0], known)
        return f"there is no flag {flags[0]}" + (f": did you mean {meant}?" if meant else "")
    if "--prompt" in known:
        return f"{words[0]!r} stands alone: give a prompt with -p TEXT (in quotes), and a model with -m FILE"
    return f"it is not clear what {words[0]!r} is for"


def nearest(word: str, words: Collection[str]) -> str | None:
    """The word that was meant: one that differs in a letter or two; None if there is none."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return near[0] if near and len(word) > 3 else None


def in_flags(text: str, flags: Mapping[str, str], settled: Mapping[str, str] = MappingProxyType({})) -> str:
    """What the library says of an argument, in flags: "top_k is -3", "pass device='cpu'", "in logit_bias".

    Args:
        text: a sentence.
        flags: the flag of each argument, by its name in the library.
        settled: what to call those in place of a flag that the settings file gave.
    """
    names = "|".join(flags)

    def assigned(match: re.Match[str]) -> str:
        value = match[2].strip("'")
        return f"{flags[match[1]]} {value.replace(',', '') if value[0].isdigit() else value}"

    text = re.sub(rf"^({names})(?= is )", lambda match: settled.get(match[1], flags[match[1]]), text)
    text = re.sub(rf"\b(?<=in )({names})\b(?= is outside)", lambda match: flags[match[1]], text)
    return re.sub(rf"\b({names})=('[^']*'|[\w.,]*\w)", assigned, text)
