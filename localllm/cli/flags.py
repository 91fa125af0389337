"""What people mean: words that the command line does not have, and the flags for what the library's errors name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from localllm.errors import UsageError

_WHOLE_LAYERS = "a model is split by layers, see -ngl and --tensor-split; leave it out"
_NO_DOWNLOADS = "localllm pull ORG/REPO[:QUANT] downloads a model, and -m ORG/REPO[:QUANT] then names it"
_ONE_ANSWER = "localllm generate answers one prompt: localllm chat is for conversations"
_NOT_HERE = "this version of localllm has nothing like it"

#: Flags of llama.cpp that localllm does not have: what to do about them.
_ABSENT = {
    flag: advice
    for flags, advice in (
        ("-mg --main-gpu", "GPUs are named in their order with --device, as in --device cuda:1,0"),
        ("-sm --split-mode -nkvo --no-kv-offload --no-op-offload", _WHOLE_LAYERS),
        ("-ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor", _WHOLE_LAYERS),
        ("-dev", "the device is chosen with --device"),
        ("-fa --flash-attn", "attention is always computed so, leave it out"),
        ("-b --batch-size -ub --ubatch-size", "localllm chooses the size of its batches itself, leave it out"),
        ("-tb --threads-batch", "-t holds for the prompt too"),
        ("--mlock --numa", "localllm does not pin memory, leave it out"),
        ("--no-mmap --mmap -mmp", "weights are always copied while they are loaded, leave it out"),
        ("--no-repack -nr", "weights are always repacked for the processor, leave it out"),
        ("-ctk --cache-type-k -ctv --cache-type-v", "--cache-type holds for keys and values"),
        ("-hf -hfr --hf-repo -hff --hf-file -hft --hf-token -mu --model-url", _NO_DOWNLOADS),
        ("-i --interactive -if --interactive-first -ins --instruct -mli --multiline-input", _ONE_ANSWER),
        ("-st --single-turn", "localllm generate always answers one prompt, leave it out"),
        ("-r --reverse-prompt", "--stop ends the text before another one"),
        ("--jinja", "the file's chat template is always used, leave it out"),
        ("--chat-template --chat-template-file", "from Python there is localllm.load(chat_template=...)"),
        ("--draft-min --draft-p-min --draft-p-split", "drafts grow with how many are accepted"),
        ("-td --threads-draft -tbd --threads-batch-draft", "-t holds for the draft model too"),
        ("-cd --ctx-size-draft", "-c holds for the draft model too"),
        ("-ngld --gpu-layers-draft -devd --device-draft", "--device holds for the draft model too"),
        ("--lora --lora-scaled --control-vector --mmproj --image", _NOT_HERE),
        (
            "--rope-scaling --rope-freq-base --rope-freq-scale --yarn-orig-ctx",
            "it is read from the file, leave it out",
        ),
        ("--no-display-prompt --no-warmup --color -co --simple-io", "it is always so, or not needed: leave it out"),
    )
    for flag in flags.split()
}

#: Commands of other programs, and what does that here.
_OTHER_COMMANDS = {
    "run": "chat",
    "complete": "generate",
    "show": "inspect",
    "info": "inspect",
    "list": "models",
    "ls": "models",
    "download": "pull",
    "settings": "config",
}

_SINGLE_DASH = re.compile(r"-[a-z][a-z-]+")
_FLAG = re.compile(r"--?[a-zA-Z][\w-]*")


def check_command(word: str, commands: Collection[str]) -> None:
    """Raises:
    UsageError: ``word``, the first one of a command line, is no command; names the one that was meant.
    """
    if word in commands or word in ("-h", "--help", "--version"):
        return
    there_are = f"there are {', '.join(commands)}"
    if word.startswith("-"):
        raise UsageError(f"a command comes first, as in localllm generate {word}: {there_are}")
    if word.lower().endswith(".gguf"):
        raise UsageError(f"{word!r} is no command: localllm generate -m FILE lets a model write")
    meant = _OTHER_COMMANDS.get(word) or _nearest(word, commands)
    raise UsageError(f"there is no command {word!r}: " + (f"did you mean {meant}?" if meant else there_are))


def check_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Looks for flags that argparse would take for others, ``-ngl`` for ``-n gl``.

    Args:
        words: of the command line, after the command.
        known: the command's flags.

    Raises:
        UsageError: there is one of llama.cpp's that localllm does not have, or a long one with a single dash.
    """
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag in known:
            continue
        if flag in _ABSENT:
            raise UsageError(f"there is no flag {flag}: {_ABSENT[flag]}")
        if _SINGLE_DASH.fullmatch(flag) and "-" + flag in known:
            raise UsageError(f"there is no flag {flag}: did you mean -{flag}?")


def strange_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line that look like flags and are none; a short flag's value may follow at once."""
    if "--" in words:
        words = words[: words.index("--")]
    flags = [word.partition("=")[0] for word in words]
    return [flag for flag in flags if _FLAG.fullmatch(flag) and flag not in known and not _has_value(flag, known)]


def _has_value(flag: str, known: Collection[str]) -> bool:
    """Whether it is a short flag with its value, as ``-t4``."""
    return flag[1] != "-" and flag[:2] in known


def unknown_words(words: Sequence[str], known: Collection[str]) -> str:
    """A sentence on words of a command line that nothing is known of."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if flags:
        meant = _nearest(flags[0], known)
        return f"there is no flag {flags[0]}" + (f": did you mean {meant}?" if meant else "")
    if "--prompt" in known:
        return f"{words[0]!r} stands alone: give a prompt with -p TEXT (in quotes), and a model with -m FILE"
    return f"it is not clear what {words[0]!r} is for"


def _nearest(word: str, words: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1)), None)


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """What the library says of an argument, in flags: "top_k is -3", "pass device='cpu'", "in logit_bias".

    Args:
        text: a sentence.
        flags: the flag of each argument, by its name in the library.
    """
    names = "|".join(flags)

    def assigned(match: re.Match[str]) -> str:
        value = match[2].strip("'")
        return f"{flags[match[1]]} {value.replace(',', '') if value[0].isdigit() else value}"

    text = re.sub(rf"^({names})(?= is )", lambda match: flags[match[1]], text)
    text = re.sub(rf"\b(?<=in )({names})\b(?= is outside)", lambda match: flags[match[1]], text)
    return re.sub(rf"\b({names})=('[^']*'|[\w.,]*\w)", assigned, text)
