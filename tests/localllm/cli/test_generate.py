"""``localllm generate``: the library's text, for every source of the prompt and form of output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM
from localllm.cli.commands.generate import formats_line
from localllm.loading.placement import Format
from tests.helpers.command_line import (
    LIMIT,
    Outcome,
    environment,
    on_terminal,
    read_all,
    run_main,
    run_on_terminal,
    run_process,
    running,
)
from tests.helpers.data import ROOT
from tests.helpers.tiny_models import config, random_weights, write_gguf

#: Chat template of the tiny model.
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"

#: Token of a byte in the tiny model's vocabulary.
FIRST_BYTE = 3

Generate = Callable[..., Outcome]


def tiny_model(path: Path, **metadata: Any) -> Path:
    settings = config()
    return write_gguf(path, settings, random_weights(settings), metadata=metadata)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    return tiny_model(tmp_path_factory.mktemp("generate") / "plain.gguf")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("generate") / "chatty.gguf", **{"tokenizer.chat_template": TEMPLATE})


@pytest.fixture(scope="module")
def llm(chatty: Path) -> Iterator[LLM]:
    with localllm.load(chatty, device="reference") as llm:
        yield llm


@pytest.fixture
def generate(capfdbinary: pytest.CaptureFixture[bytes], plain: Path) -> Generate:
    """Run ``localllm generate`` with the plain model and 12 tokens by default."""

    def run(*arguments: object, model: Path = plain) -> Outcome:
        given = ("generate", "-m", model, "--device", "reference", "-n", 12, *arguments)
        return run_main(capfdbinary, *given)

    return run


@pytest.fixture
def give_stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


# The text.


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_only_a_terminal_gets_a_last_line_end_and_controls_spelled_out(generate: Generate, plain: Path) -> None:
    """The model writes ESC twice."""
    flags = ["-q", "-p", "a", "-n", "2", "--temp", "0", "-l", f"{FIRST_BYTE + 0x1B}+1000"]
    assert generate(*flags).out == "\x1b\x1b"
    screen = run_on_terminal(["generate", "-m", plain, "--device", "reference", *flags])
    assert screen == (0, "\\x1b\\x1b\r\n")


@pytest.mark.linux("a simulation imports more")
def test_a_warm_start_does_without_numba_and_jinja2(generate: Generate, plain: Path) -> None:
    """These modules would take most of the time to the first token; so would rich."""
    arguments = ["-p", "the", "--temp", 0, "--device", "cpu", "-t", 1, "-q"]
    generate(*arguments)  # compiles the kernels if necessary
    command = [str(part) for part in ("generate", "-m", plain, "-n", 2, *arguments)]
    code = f"import sys\nfrom localllm.cli.main import main\nmain({command})\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=LIMIT
    )
    loaded = set(done.stderr.split())
    assert "localllm.kernels.cpu.backend" in loaded
    assert not loaded & {"numba", "jinja2", "rich", "gguf", "torch", "numpy.ma", "http", "ssl", "email", "asyncio"}
    ours = "convert", "quantize", "server", "tui", "chat.sandbox", "loading.vision", "library.listing"
    assert not loaded & {f"localllm.{name}" for name in ours}


def test_settings_reach_the_sampler(generate: Generate, llm: LLM) -> None:
    flags = {
        "--temp": ("temperature", 1.7),
        "--top-k": ("top_k", 30),
        "--top-p": ("top_p", 0.9),
        "--min-p": ("min_p", 0.01),
        "--typical": ("typical_p", 0.97),
        "--repeat-penalty": ("repeat_penalty", 1.3),
        "--repeat-last-n": ("repeat_last_n", 5),
        "--presence-penalty": ("presence_penalty", 0.2),
        "--frequency-penalty": ("frequency_penalty", 0.1),
        "--dry-multiplier": ("dry_multiplier", 0.8),
        "--dry-base": ("dry_base", 1.5),
        "--dry-allowed-length": ("dry_allowed_length", 1),
        "--dry-penalty-last-n": ("dry_penalty_last_n", 40),
        "--xtc-probability": ("xtc_probability", 0.5),
        "--xtc-threshold": ("xtc_threshold", 0.05),
        "--mirostat": ("mirostat", 2),
        "--mirostat-ent": ("mirostat_tau", 4.0),
        "--mirostat-lr": ("mirostat_eta", 0.2),
        "--seed": ("seed", 7),
    }
    seen: list[Any] = []
    real = LLM.stream

    def stream(self: LLM, prompt: str, **options: Any) -> Any:
        seen.append(options)
        return real(self, prompt, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "stream", stream)
        given = [part for flag, (_, value) in flags.items() for part in (flag, value)]
        more = ["-l", "5+1.5", "-l", "6-inf", "--ignore-eos", "--dry-sequence-breaker", ";", "--stop", "zq"]
        outcome = generate("-q", "-p", "the", *given, *more)
    expected = dict(flags.values()) | {
        "logit_bias": {5: 1.5, 6: -float("inf")},
        "ignore_eos": True,
        "dry_sequence_breakers": [";"],
        "stop": ["zq"],
        "max_tokens": 12,
    }
    assert {name: seen[0][name] for name in expected} == expected
    assert set(seen[0]) == {*expected, "progress"}
    assert outcome.out == llm.generate("the", **expected).text


def test_no_limit_of_tokens(generate: Generate) -> None:
    """-1 and -2 continue to the end of the context."""
    for n in (-1, -2):
        outcome = generate("-q", "-p", "the", "-c", 30, "-n", n, "--ignore-eos", "--json")
        assert json.loads(outcome.out)["finish_reason"] == "length"
        usage = json.loads(outcome.out)["usage"]
        assert usage["total_tokens"] in (30, 31)  # the last token need not be evaluated
    assert generate("-q", "-p", "the", "-n", 0).out == ""


# The prompt.


def test_prompts_from_everywhere(
    generate: Generate, give_stdin: Callable[[bytes], None], llm: LLM, tmp_path: Path
) -> None:
    prompt = "the schöne\nday"
    expected = llm.generate(prompt, temperature=0, max_tokens=12).text
    greedy = ("-q", "--temp", 0)
    file = tmp_path / "prompt.txt"
    assert generate(*greedy, "-p", prompt).out == expected
    assert generate(*greedy, "-e", "-p", r"the sch\xc3\xb6ne\nday").out == expected
    for data in (
        prompt.encode(),
        f"{prompt}\n".encode(),
        f"{prompt}\r\n".encode(),
        b"\xef\xbb\xbf" + prompt.encode(),
    ):
        file.write_bytes(data)
        assert generate(*greedy, "-f", file).out == expected
        give_stdin(data)
        assert generate(*greedy).out == expected
        give_stdin(data)
        assert generate(*greedy, "-p", "-").out == expected


def test_only_one_line_end_is_dropped(generate: Generate, give_stdin: Callable[[bytes], None], llm: LLM) -> None:
    give_stdin(b"the\n\n")
    outcome = generate("-q", "--temp", 0)
    assert outcome.out == llm.generate("the\n", temperature=0, max_tokens=12).text


@pytest.mark.parametrize("flags", [["-p", ""], ["-p", "-"], []])
def test_the_empty_prompt_is_bos(
    generate: Generate, give_stdin: Callable[[bytes], None], llm: LLM, chatty: Path, flags: list[str]
) -> None:
    """Also with a chat template, because there is no message to answer."""
    give_stdin(b"\n")
    outcome = generate("-q", "--temp", 0, *flags, model=chatty)
    assert outcome.out == llm.generate([1], temperature=0, max_tokens=12).text


def test_stdin_that_is_not_utf8(generate: Generate, give_stdin: Callable[[bytes], None], tmp_path: Path) -> None:
    give_stdin(b"caf\xe9 and more")
    outcome = generate("-q")
    assert outcome.code == 2
    assert outcome.error() == "standard input is not valid UTF-8: byte 3 is 0xe9; convert it to UTF-8"
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfeh\x00i\x00")
    outcome = generate("-f", file)
    assert outcome.code == 2
    assert "prompt.txt is not valid UTF-8: byte 0 is 0xff" in outcome.error()


def test_a_process_without_stdin(generate: Generate, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert generate("-q", "--temp", 0).out == llm.generate("", temperature=0, max_tokens=12).text


@pytest.mark.skipif(sys.platform == "win32", reason="select does not support pipes on Windows")
def test_waiting_for_stdin_is_said(generate: Generate, plain: Path) -> None:
    arguments = ["generate", "-m", plain, "--device", "reference", "--temp", "0", "-n", "3"]
    with running(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            b"localllm: reading the prompt from standard input; use -p to write it on the command line\n"
        )
        out, _ = process.communicate(b"the\n")
    assert out.decode() == generate("--temp", 0, "-n", 3, "-p", "the").out


# Chats.


def test_a_prompt_is_a_message_where_the_model_has_a_template(
    generate: Generate, llm: LLM, chatty: Path, plain: Path
) -> None:
    greedy = {"temperature": 0, "max_tokens": 12}
    answer = llm.chat([{"role": "user", "content": "the day"}], **greedy).text
    continued = llm.generate("the day", **greedy).text
    assert answer != continued
    flags = ("-q", "--temp", 0, "-p", "the day")
    assert generate(*flags, model=chatty).out == answer
    assert generate(*flags, "--chat", model=chatty).out == answer
    assert generate(*flags, "-cnv", model=chatty).out == answer
    assert generate(*flags, "--no-chat", model=chatty).out == continued
    assert generate(*flags, "-no-cnv", model=chatty).out == continued
    assert generate(*flags, model=plain).out == continued


def test_a_model_without_a_template_says_that_it_continues(generate: Generate, chatty: Path, plain: Path) -> None:
    flags = ("--temp", 0, "-p", "the day", "-n", 1)
    hint = "this model has no chat template, so it continues the prompt.  For answers"
    assert generate(*flags, model=plain).err.count(hint) == 1
    for outcome in (
        generate(*flags, model=chatty),
        generate(*flags, "--no-chat", model=plain),
        generate(*flags, "-q", model=plain),
    ):
        assert hint not in outcome.err


def test_system_prompts(generate: Generate, llm: LLM, chatty: Path, plain: Path) -> None:
    messages = [{"role": "system", "content": "be\nkind"}, {"role": "user", "content": "hello"}]
    expected = llm.chat(messages, temperature=0, max_tokens=12).text
    flags = ("-q", "--temp", 0, "-p", "hello", "-e", "-sys", r"be\nkind")
    assert generate(*flags, model=chatty).out == expected
    outcome = generate(*flags, model=plain)
    assert outcome.code == 2
    assert outcome.error() == ("--system-prompt needs a chat: add --chat, because the model has no chat template")
    outcome = generate("-q", "-p", "", "-sys", "be kind", model=chatty)
    assert outcome.error() == "--system-prompt needs a chat: add a prompt with -p"


def test_a_prompt_that_never_ends(generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("localllm.files.MAX_TEXT_BYTES", 1 << 20)
    path = tmp_path / "prompt"
    path.write_bytes(b"a" * (1 << 20) + b"b")
    outcome = generate("-q", "-f", path)
    assert outcome.code == 2
    assert outcome.error() == f"the prompt file {path} is larger than 1 MiB, the maximum for text: shorten it"


@pytest.mark.filterwarnings("default")
def test_a_chat_with_a_model_that_has_no_template_warns(generate: Generate, plain: Path) -> None:
    outcome = generate("-q", "--temp", 0, "-p", "hello", "--chat", model=plain)
    assert outcome.code == 0
    assert re.fullmatch(r"localllm: warning: \S+plain.gguf has no chat template: .*\n", outcome.err)


# What comes out.


def test_json(generate: Generate, llm: LLM, plain: Path) -> None:
    outcome = generate("-p", "the", "--temp", 0, "--json", "--logprobs", 2)
    expected = llm.generate("the", temperature=0, max_tokens=12, logprobs=2)
    found = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert found["model"] == str(plain)
    assert (found["device"], found["threads"]) == ("reference", 1)
    assert (found["text"], tuple(found["ids"])) == (expected.text, expected.ids)
    assert found["finish_reason"] == expected.finish_reason
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 12)
    assert usage["total_tokens"] == 14
    assert found["timings"]["prefill_tokens"] == 2
    assert found["timings"]["decode_tokens"] == 11
    assert found["timings"]["decode_tokens_per_s"] > 0
    assert expected.logprobs is not None
    for entry, choice in zip(found["logprobs"], expected.logprobs, strict=True):
        assert entry["id"] == choice.id
        assert entry["text"] == llm.tokenizer.token_text(choice.id)
        assert entry["logprob"] == pytest.approx(choice.logprob, abs=1e-4)
        assert [top["id"] for top in entry["top"]] == [id_ for id_, _ in choice.top]


def test_what_is_said_beside_the_text(generate: Generate, plain: Path) -> None:
    quiet, normal, verbose = (
        generate("-p", "the", "--no-chat", "--temp", 0, *flags) for flags in (["-q"], [], ["-v"])
    )
    assert quiet.err == ""
    assert quiet.out == normal.out == verbose.out
    first, empty, last = normal.err.splitlines()
    assert empty == ""  # if text and statistics share a destination, the statistics start on a new line
    assert first.startswith(f"{plain.name}: llama, ")
    assert "reference (numpy), 1 thread, 128 tokens of context" in first
    assert re.fullmatch(r"prompt 2 tokens, [\d.]+ tok/s; answer 12 tokens, cut off, [\d.]+ tok/s", last)
    lines = verbose.err.splitlines()
    assert lines[0] == first
    named = {line[2:22].strip() for line in lines if line.startswith("  ")}
    assert {"file", "embedding", "layers 0-2", "output", "total", "prefill", "first token", "decode"} <= named


def test_the_demo_model_drafts(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    flags = ("--device", "reference", "-n", 8, "--draft-model", "demo", "--json")
    outcome = run_main(capfdbinary, "generate", "-p", "What is localllm?", *flags)
    assert outcome.code == 0
    assert json.loads(outcome.out)["drafts"] is not None
    assert "draft model localllm demo: " in outcome.err


def test_guessing_ahead_gives_the_same_text(generate: Generate, plain: Path) -> None:
    prompt = ("-p", "the cat the cat the cat", "--temp", 0, "-n", 40, "--ignore-eos")
    expected = generate(*prompt)
    assert "drafted" not in expected.err
    for flags in (["--lookup"], ["-md", plain], ["--draft-model", plain, "--draft-max", 3, "-v"]):
        outcome = generate(*prompt, *flags)
        assert (outcome.code, outcome.out) == (0, expected.out)
        some, none = r"[\d,]+ tokens?, [\d,]+ accepted \(\d+%\)", "no tokens, because drafting was not expected to be"
        assert re.search(rf"^drafted ({some}|{none} faster)$", outcome.err, re.MULTILINE)
        assert ("draft model" in outcome.err) == ("--lookup" not in flags)
    assert re.search(r"decode .* in \d+ steps$", outcome.err, re.MULTILINE)
    details = [line[2:22].strip() for line in outcome.err.splitlines() if line.startswith("  ")]
    assert details[: details.index("total")] == 2 * details[: details.index("total") // 2]
    assert "layers 0-2" in details
    assert "drafted no tokens" in generate(*prompt, "-n", 1, "--lookup").err
    found = json.loads(generate(*prompt, "--lookup", "--json", "-q").out)["drafts"]
    assert found.keys() == {"drafted", "accepted", "share", "steps"}
    assert json.loads(generate(*prompt, "--json", "-q").out)["drafts"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lookup", "-md", "x.gguf"], "--lookup and --draft-model cannot be combined"),
        (["--draft-max", 3], "--draft-max needs --lookup or --draft-model"),
        (["--lookup", "--draft-max", 0], "'0' is not a whole number from 1 to 64"),
        (["--lookup", "--draft-max", 1000], "'1000' is not a whole number from 1 to 64"),
    ],
)
def test_bad_flags_of_guessing(generate: Generate, flags: list[Any], words: str) -> None:
    outcome = generate("-p", "a", *flags)
    assert outcome.code == 2
    assert words in outcome.error()


def test_formats_of_weights() -> None:
    formats = [Format("Q4_K", "Q4_K", 520_000_000), Format("IQ2_XS", "LUT_IQ2_16", 12_300_000)]
    assert formats_line(formats) == "Q4_K 520 MB, IQ2_XS read as LUT_IQ2_16 12.3 MB"


def test_more_threads_than_processors(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.cpu.host.usable_cpus", lambda: 2)
    flags = ("-p", "the", "-n", 1, "--device", "reference", "-t")
    assert generate(*flags, 2).err.splitlines()[0].startswith("plain.gguf")
    assert generate(*flags, 3).err.splitlines()[0] == (
        "localllm: warning: -t 3 is more than the 2 processors here, which is slow: use fewer threads"
    )
    assert generate(*flags, 3, "-q").err == ""


def test_the_output_is_utf8_whatever_the_locale(generate: Generate, plain: Path) -> None:
    biases = [part for byte in "€".encode() for part in ("-l", f"{FIRST_BYTE + byte}+50")]
    flags = ["-q", "-p", "a", "-n", "30", "--temp", "2", "-s", "1", *biases]
    arguments = ["generate", "-m", plain, "--device", "reference", *flags]
    env = environment(LC_ALL="C", LANG="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    outcome = run_process(arguments, env=env)
    assert outcome.code == 0
    assert outcome.err == ""
    assert not outcome.out.isascii()
    assert outcome.out == generate(*flags).out


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """Like a program that a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize("json_flag", [False, True])
def test_an_interrupt_stops_it_at_once(plain: Path, json_flag: bool) -> None:
    endless = ["-n", "-1", "-c", "100000", "--ignore-eos", "--temp", "3"]
    arguments = ["generate", "-m", plain, "--device", "reference", "-p", "a", *endless, *["--json"] * json_flag]
    with running(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]  # a warning of the long context, and the placement
        assert b"warning" in lines[0]
        assert b"tokens of context" in lines[1]
        if not json_flag:
            assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert all(b"chat template" in line for line in err.splitlines())  # the hint may follow the first text
    assert not (json_flag and out)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.usefixtures("ignored_interrupts")
def test_an_interrupt_arrives_though_the_tests_ignore_it(plain: Path) -> None:
    test_an_interrupt_stops_it_at_once(plain, False)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_an_interrupt_on_a_terminal_leaves_a_clean_line(plain: Path) -> None:
    endless = ["-n", "-1", "-c", "100000", "--ignore-eos", "-q", "-l", f"{FIRST_BYTE + ord('z')}+1000"]
    arguments = ["generate", "-m", plain, "--device", "reference", "-p", "a", *endless]
    with on_terminal(arguments) as (process, master):
        seen = b""
        while b"zzz" not in seen:
            seen += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        seen += read_all(master)
        assert process.wait() == -signal.SIGINT
    assert re.fullmatch(r"localllm: warning: [^\n]*\r\nz+\r\n", seen.decode())


#: A program that sends itself a SIGINT during an import, and runs a command line.
INTERRUPTED_IMPORT = """
import signal, sys
from localllm.cli.start import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            {interrupt}

class Dropped:
    def __del__(self):  # Python drops its exceptions
        signal.raise_signal(signal.SIGINT)

def suppressed():  # like the C modules of numpy.random
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["localllm", "doctor"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize("module", ["argparse", "localllm.cli.parser", "numpy", "localllm.cli.commands.doctor"])
@pytest.mark.parametrize("interrupt", ["signal.raise_signal(signal.SIGINT)", "Dropped()", "suppressed()"])
def test_an_interrupt_while_modules_are_imported(module: str, interrupt: str) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, interrupt=interrupt)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_interrupts_that_come_thick_and_fast(plain: Path) -> None:
    """The second signal ends the process at any time: while the first is handled, or at the end."""
    endless = ["-n", "-1", "--ignore-eos", "-q", "--temp", "3", "-p", "a"]
    for _ in range(2):
        with running(
            ["generate", "-m", plain, "--device", "reference", *endless],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(1)
            while process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.001)
            assert process.stderr.read() == b""
            assert process.returncode == -signal.SIGINT
