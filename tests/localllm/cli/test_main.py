"""The command line as a whole: help, exit codes, and one clear sentence for every error."""

from __future__ import annotations

import errno
import os
import re
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import localllm
from localllm.cli.argument_types import logit_bias
from localllm.cli.commands import doctor
from localllm.cli.main import main
from localllm.cli.parser import command_names
from localllm.errors import UsageError
from localllm.kernels.cpu.target import TARGETS, available
from localllm.kernels.cuda import installation
from localllm.sampling import Sampling
from tests.helpers.command_line import LIMIT, Outcome, environment, run_main, run_process, running
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import write_gguf as write_any_gguf
from tests.helpers.tiny_models import config, random_weights, tiny_gguf, write_gguf

Run = Callable[..., Outcome]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    return lambda *arguments: run_main(capfdbinary, *arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf")


# Help and version.


def test_version(run: Run) -> None:
    assert run("--version") == Outcome(0, f"localllm {localllm.__version__}\n", "")


@pytest.mark.parametrize("command", [None, *command_names()])
def test_help(run: Run, command: str | None) -> None:
    outcome = run(*filter(None, [command, "--help"]))
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.startswith(f"usage: localllm {command or '[-h]'}")
    for name in [command] if command else command_names():
        assert name in outcome.out


def test_help_tells_the_defaults_that_hold(run: Run) -> None:
    """The defaults of sampling are in `Sampling` and repeated in the help."""
    text = " ".join(run("generate", "--help").out.split())
    stated = dict(re.findall(r"--([a-z-]+) [XN] [^(]*\(default: (-?[\d.]+)\)", text))
    names = {"top-nsigma": "top_n_sigma", "typical-p": "typical_p"}
    names |= {"mirostat-ent": "mirostat_tau", "mirostat-lr": "mirostat_eta"}
    defaults = vars(Sampling())
    checked = set()
    for flag, value in stated.items():
        name = names.get(flag, flag.replace("-", "_"))
        if name in defaults and name != "seed":
            assert float(value) == defaults[name], flag
            checked.add(name)
    numbers = {name for name, value in defaults.items() if isinstance(value, int | float) and value is not False}
    assert checked == numbers - {"seed"}


@pytest.mark.linux("a simulation imports more")
def test_help_does_not_wait_for_the_heavy_packages() -> None:
    lines = [
        ["--version"],
        ["--help"],
        ["genrate"],
        ["generate", "--nonsense"],
        ["models", "--json"],  # whose details were cached before
        *([name, flag] for name in command_names() for flag in ("--help", "-Q")),
    ]
    # In another process too: this one does not see the models of Python packages.
    subprocess.run(
        [sys.executable, "-m", "localllm", "models", "--json"], check=True, capture_output=True, timeout=LIMIT
    )
    code = f"import sys\nfrom localllm.cli.main import main\nfor line in {lines}: main(line)\n"
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=LIMIT
    )
    loaded = set(done.stderr.split())
    assert "localllm.cli.main" in loaded
    assert not loaded & {"numpy", "numba", "llvmlite", "jinja2", "rich", "psutil", "gguf", "tokenizers"}


@pytest.mark.linux("Windows needs more modules")
@pytest.mark.parametrize(("words", "most"), [("--help", 64), ("genrate", 64), ("models --json", 42)])
def test_commands_that_load_nothing_import_few_modules(words: str, most: int) -> None:
    assert main(["models", "--json"]) == 0  # caches the details of models
    code = f"import sys\nfrom localllm.cli.main import main\nmain({words.split()})\n"
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without site, whose .pth files may import anything
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=LIMIT,
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert "localllm.cli.main" in loaded
    slow = {"asyncio", "http.client", "multiprocessing", "ssl", "subprocess", "urllib.request"}
    assert not set(loaded) & slow
    # Modules of the standard library differ between Python versions.
    assert sum(name.partition(".")[0] not in sys.stdlib_module_names for name in loaded) <= most


def test_python_m_localllm_is_the_command() -> None:
    assert run_process(["generate", "--nonsense"]).code == 2


# Bad usage: exit code 2.

BAD_USAGE = {
    "a share of an adapter that is none": (["merge", "a.gguf", "b.gguf", "--lora", "c.gguf=nan"], "not ADAPTER[=X]"),
    "unknown command": (["genrate"], "there is no command 'genrate': did you mean generate? localllm generate"),
    "a command in capitals": (["GENERATE"], "there is no command 'GENERATE': did you mean generate? localllm gen"),
    "a strange command": (["xyzzy"], "there is no command 'xyzzy': the commands are generate, chat, serve, "),
    "no command but a file": (["model.gguf"], "'model.gguf' is not a command: localllm generate -m model.gguf"),
    "unknown flag": (["generate", "--tmp", "1"], "there is no flag --tmp: did you mean --temp? localllm generate"),
    "a flag with its value": (["generate", "--tempp=1"], "did you mean --temp? localllm generate --temp=1 -m"),
    "no value": (["generate", "--model=--"], "'--' is not a value of --model"),
    "a short flag": (["generate", "-nx", "4"], "there is no flag -nx (see localllm generate --help)"),
    "one dash too few": (["generate", "-temp", "1"], "there is no flag -temp: did you mean --temp?"),
    "a schema that is not JSON": (["generate", "-j", "{a"], "argument -j/--json-schema: '{a' is not valid JSON"),
    "two files": (["inspect", "a.gguf", "b.gguf"], "too many arguments, starting with 'b.gguf'"),
    "a value of a strange flag": (["bench", "-m", "a.gguf", "-c", "16"], "there is no flag -c (see localllm bench"),
    "a value at its flag": (["generate", "-t4x"], "argument -t/--threads: '4x' is not a whole number of at least 1"),
    "no path": (["generate", "-m", ""], "argument -m/--model: the path is empty: name a GGUF file"),
    "an address": (["generate", "-m", "https://example.com/a/b.gguf"], "a/b.gguf is not an address on the hub"),
    "not a number": (["generate", "--temp", "warm"], "--temp/--temperature: 'warm' is not a finite number"),
    "not a whole number": (["generate", "--top-k", "1.5"], "--top-k: '1.5' is not a whole number of at least 0"),
    "temperature": (["generate", "-p", "x", "--temp", "-1"], "--temp/--temperature: '-1' is not a finite number"),
    "temperature NaN": (["generate", "-p", "x", "--temp", "nan"], "'nan' is not a finite number"),
    "top k": (["generate", "-p", "x", "--top-k", "-3"], "--top-k: '-3' is not a whole number of at least 0"),
    "top p": (["generate", "-p", "x", "--top-p", "1.5"], "--top-p: '1.5' is not a number from 0 to 1"),
    "mirostat 1": (["generate", "-p", "x", "--mirostat", "1"], "--mirostat: '1' is not 0 (off) or 2"),
    "mirostat rate": (["generate", "-p", "x", "--mirostat-lr", "-1"], "'-1' is not a finite number of at least 0"),
    "seed": (["generate", "-p", "x", "-s", "-2"], "'-2' is not a whole number from 0 to 2^64 - 1; remove the flag"),
    "seed of letters": (["generate", "--seed", "x"], "-s/--seed: 'x' is not a whole number from 0 to 2^64 - 1"),
    "large seed": (["generate", "--seed", str(1 << 64)], "is not a whole number from 0 to 2^64 - 1"),
    "tokens": (["generate", "-p", "x", "-n", "-5"], "'-5' is not a whole number of at least 0, or -1 for no limit"),
    "threads": (["generate", "-p", "x", "-t", "0"], "-t/--threads: '0' is not a whole number of at least 1"),
    "overflow": (["generate", "-p", "x", "--overflow", "wrap"], "--overflow: 'wrap' is not one of 'error', 'trunc"),
    "empty stop": (["generate", "-p", "x", "--stop", ""], "argument --stop: '' is not a non-empty string"),
    "bias": (["generate", "-l", "five"], "'five' is not a token id and a number"),
    "bias NaN": (["generate", "-p", "x", "-l", "5+nan"], "'5+nan' is not a token id and a number"),
    "bias infinite": (["generate", "-p", "x", "-l", "5+inf"], "'5+inf' is not a token id and a number"),
    "logprobs without JSON": (["generate", "-p", "x", "--logprobs", "2"], "--logprobs needs --json"),
    "two prompts": (["generate", "-p", "x", "-f", "y"], "-p and -f cannot be combined"),
    "no prompt file": (["generate", "-f", "nowhere/prompt.txt"], "the prompt file nowhere/prompt.txt cannot be read"),
    "chat about nothing": (["generate", "--chat", "-p", ""], "--chat needs a prompt"),
    "bad escape": (["generate", "-e", "-p", "\\x4"], "-p contains an invalid escape"),
    "prompt not UTF-8": (["generate", "-p", "caf\udce9"], "-p is not valid UTF-8"),
    "quiet and verbose": (["generate", "-q", "-v"], "not allowed with argument"),
    "list of numbers": (["bench", "-p", "1,x"], "'1,x' is not a list of whole numbers"),
    "negative depth": (["bench", "-d", "-1"], "-d is -1, but must be a whole number of at least 0"),
    "repetitions": (["bench", "-r", "0"], "-r/--repetitions: '0' is not a whole number of at least 1"),
    "a pair of one": (["bench", "-pg", "512"], "-pg is 512, but must be two whole numbers of at least 1, as 512,128"),
    "a profile as Markdown": (["bench", "--profile", "-o", "md"], "--profile needs -o table or -o json, not -o md"),
    "nothing to measure": (["bench", "-p", "0", "-n", "0"], "no test is left to measure"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_bad_usage(run: Run, tiny: Path, arguments: list[str], words: str) -> None:
    if arguments[:1] == ["generate"] and "-m" not in arguments:
        arguments = [*arguments, "-m", str(tiny), "--device", "reference"]
    outcome = run(*arguments)
    assert outcome.code == 2
    assert words in outcome.error()
    assert f"-{words}" not in outcome.error()


def test_bias_of_a_token_outside_the_vocabulary(run: Run, tiny: Path) -> None:
    outcome = run("generate", "-q", "-m", tiny, "--device", "reference", "-p", "x", "-l", "300+1")
    assert outcome.code == 2
    assert outcome.error() == "token 300 in -l is outside the vocabulary of 300 tokens"


# Failures: exit code 1.


@pytest.mark.parametrize("arguments", [["generate", "-p", "x", "-m"], ["inspect"], ["bench", "-m"]], ids=str)
def test_files_that_are_no_model(run: Run, tiny: Path, tmp_path: Path, arguments: list[str]) -> None:
    missing, folder, text, empty, cut = (tmp_path / name for name in ("missing", "folder", "text", "empty", "cut"))
    folder.mkdir()
    text.write_text("no model at all, but long enough to be one")
    empty.write_bytes(b"")
    cut.write_bytes(tiny.read_bytes()[:-1000])
    words = {
        missing: "does not exist",
        folder: "is a directory",
        text: "not a GGUF file",
        empty: "is empty",
        cut: "cut",
    }
    for path, expected in words.items():
        outcome = run(*arguments, path)
        assert outcome.code == 1
        assert path.name in outcome.error()
        assert expected in outcome.error()


def changed(path: Path, **metadata: object) -> Path:
    """Write a tiny model with changed metadata (underscores for dots), None removes a key."""
    settings = config()
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_gguf(path, settings, random_weights(settings), metadata=keys)


BROKEN_MODELS = {
    "layers": ({"llama__block_count": 7}, "llama.block_count is 7, but the file has tensors of 3 layers"),
    "shapes": ({"llama__feed_forward_length": 64}, "the hyper-parameters require"),
    "epsilon": ({"llama__attention__layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon is -1.0, but must be"),
    "vocabulary": ({"tokenizer__ggml__scores": [0.0] * 17}, "scores"),
    "no vocabulary": ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model"),
}


@pytest.mark.parametrize(("metadata", "words"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_models_that_are_broken(run: Run, tmp_path: Path, metadata: dict[str, object], words: str) -> None:
    path = changed(tmp_path / "broken.gguf", **metadata)
    outcome = run("generate", "-m", path, "--device", "reference", "-p", "x")
    assert outcome.code == 1
    assert words in outcome.error()


def test_an_unsupported_architecture_is_named_with_the_list_of_those_there_are(run: Run, tmp_path: Path) -> None:
    path = write_any_gguf(tmp_path / "other.gguf", {"general.architecture": "mamba\x1b[31m"})
    outcome = run("generate", "-m", path, "-p", "x")
    assert outcome.code == 1
    assert "mamba" in outcome.error()
    assert "docs/models.md" in outcome.error()
    assert "\x1b" not in outcome.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.parametrize("kibibytes", [300_000, 420_000])
def test_a_short_address_space_is_said(tmp_path: Path, kibibytes: int) -> None:
    """Libraries fail in their own way there: LLVM ends the process."""
    limited = ("sh", "-c", f'ulimit -v {kibibytes}; exec "$@"', "sh")
    env = environment(LOCALLLM_CACHE=str(tmp_path), OPENBLAS_NUM_THREADS="1")
    outcome = run_process(["generate", "-q", "-t", "1", "-p", "x", "-n", "1"], prefix=limited, env=env)
    assert outcome.code == 1
    assert f"{kibibytes * 1024 / 1e9:.2f} GB (ulimit -v)" in outcome.error()
    assert "raise the limit" in outcome.error()


def test_a_context_too_large_for_the_memory_says_the_flag(run: Run, tiny: Path) -> None:
    outcome = run("generate", "-m", tiny, "--device", "reference", "-p", "x", "-c", 10**12)
    assert outcome.code == 1
    assert re.search(r"load it with -c \d+ or less", outcome.error())


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "is not valid (line 1)"),
        ("{{ raise_exception('no users here') }}", "refuses these messages: no users here"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "the chat template of"),
    ],
)
def test_bad_templates(run: Run, tmp_path: Path, template: str, words: str) -> None:
    path = changed(tmp_path / "template.gguf", tokenizer__chat_template=template)
    outcome = run("generate", "-q", "-m", path, "--device", "reference", "-p", "x")
    assert outcome.code == 1
    assert words in outcome.error()
    assert run("generate", "-q", "-m", path, "--device", "reference", "-p", "x", "-n", "1", "--no-chat").code == 0


@pytest.mark.parametrize(
    ("device", "code", "words"),
    [
        ("cuda", 1, "NVIDIA's driver is not installed"),
        ("cuda:1", 1, "NVIDIA's driver is not installed"),
        ("tpu", 1, "there is no device 'tpu'"),
    ],
)
def test_devices_that_are_not_there(
    run: Run, tiny: Path, device: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "driver_cuda", lambda: None)
    outcome = run("generate", "-m", tiny, "--device", device, "-p", "x")
    assert outcome.code == code
    assert words in outcome.error()


def test_instruction_sets_that_are_not_there(run: Run, tiny: Path) -> None:
    unknown = run("generate", "-m", tiny, "--isa", "mmx", "-p", "x")
    assert unknown.code == 2
    assert "there is no instruction set called 'mmx'" in unknown.error()
    here = {target.name for target in available()}
    other = next(target.name for target in TARGETS if target.name not in here)
    foreign = run("generate", "-m", tiny, "--isa", other, "-p", "x")
    assert foreign.code == 1
    assert f"this processor does not execute {other} code" in foreign.error()
    reference = run("generate", "-m", tiny, "--device", "reference", "--isa", "generic", "-p", "x")
    assert reference.code == 2
    assert "--isa generic chooses the CPU's kernels, but --device reference has none" in reference.error()


def test_an_instruction_set_that_is_there(run: Run, tiny: Path) -> None:
    best = available()[0].name
    outcome = run("generate", "-m", tiny, "--isa", best, "-t", "1", "-p", "x", "-n", "1")
    assert outcome.code == 0
    assert f"for {best})" in outcome.err


# Exceptions in main().


@pytest.fixture
def broken_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make ``localllm doctor`` raise an exception."""

    def install(error: BaseException) -> None:
        def fail(arguments: object) -> int:
            raise error

        monkeypatch.setattr(doctor, "COMMAND", replace(doctor.COMMAND, run=fail))

    return install


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("two\nlines \x1b[1m"), 2, r"two\nlines \x1b[1m"),
        (MemoryError(), 1, "memory ran out"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "memory ran out: "),
        (PermissionError(13, "Permission denied", "x.gguf"), 1, "Permission denied: 'x.gguf'"),
        (ZeroDivisionError("division by zero"), 1, "in localllm (ZeroDivisionError: division by zero)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_exception_is_one_sentence(
    run: Run, broken_command: Callable[[BaseException], None], error: Exception, code: int, words: str
) -> None:
    broken_command(error)
    outcome = run("doctor")
    assert outcome.code == code
    assert words in outcome.error()


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_where_it_happened(
    run: Run,
    broken_command: Callable[[BaseException], None],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    broken_command(UsageError("a fault"))
    if how == "variable":
        monkeypatch.setenv("LOCALLLM_DEBUG", "1")
    outcome = run("doctor", *["--debug"] * (how == "flag"))
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1] == "localllm: error: a fault"


def test_an_interrupt_is_exit_code_130(run: Run, broken_command: Callable[[BaseException], None]) -> None:
    broken_command(KeyboardInterrupt())
    assert run("doctor") == Outcome(130, "", "")


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(arguments: object) -> int:
        warnings.warn("mind\nthis", stacklevel=2)
        return 0

    monkeypatch.setattr(doctor, "COMMAND", replace(doctor.COMMAND, run=warn))
    assert run("doctor") == Outcome(0, "", "localllm: warning: mind\\nthis\n")


@pytest.mark.filterwarnings("default")
def test_warnings_name_flags(run: Run, tiny: Path) -> None:
    outcome = run("generate", "-m", tiny, "--device", "reference", "-p", "a", "-n", "1", "-c", "1000")
    assert re.match(r"localllm: warning: the model was trained on [\d,]+ .*: with -c 1000 its", outcome.err)


# Streams.


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGPIPE")
def test_a_reader_who_leaves_ends_it_quietly(tiny: Path) -> None:
    arguments = ["generate", "-m", tiny, "--device", "reference", "-q", "-p", "a", "-n", "-1", "--ignore-eos"]
    with running(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141  # 128 + SIGPIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tiny: Path) -> None:
    with open("/dev/full", "wb") as full:
        outcome = run_process(["inspect", tiny], stdout=full)
    assert outcome.code == 1
    assert outcome.error().startswith("standard output cannot be written (No space left on device): free disk space")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_help_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        outcome = run_process(["generate", "--help"], stdout=full)
    assert outcome.code == 1
    assert outcome.error().startswith("standard output cannot be written (No space left on device): free disk space")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_messages_that_cannot_be_written_stop_nothing(run: Run, tiny: Path) -> None:
    arguments = ["generate", "-m", tiny, "--device", "reference", "-p", "a", "-n", "3", "--temp", "0"]
    expected = run(*arguments, "-q")
    outcome = run_process([*arguments, "-v"], prefix=["sh", "-c", 'exec "$@" 2>/dev/full', "sh"])
    assert outcome == Outcome(0, expected.out, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs non-blocking pipes")
def test_output_that_does_not_wait_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = "import localllm.console as t; t.prepare_streams(); print('a' * 300_000, end='', flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=writer, cwd=ROOT) as process:
        os.close(writer)
        with open(reader, "rb") as file:
            select.select([file], [], [])
            time.sleep(0.05)  # the pipe is full by now
            assert file.read() == b"a" * 300_000
        assert process.wait() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that can close streams")
@pytest.mark.parametrize(("closed", "code"), [("<&-", 0), ("2>&-", 0), (">&-", 1), ("<&- >&- 2>&-", 1)])
def test_closed_streams(run: Run, tiny: Path, closed: str, code: int) -> None:
    arguments = ["generate", "-m", tiny, "--device", "reference", "-p", "a", "-n", "3", "--temp", "0"]
    expected = run(*arguments, "-q")
    outcome = run_process(arguments, prefix=["sh", "-c", f'exec "$@" {closed}', "sh"])
    assert outcome.code == code
    assert outcome.out == ("" if code else expected.out)
    assert "Traceback" not in outcome.err
    if closed == ">&-":
        assert outcome.error().startswith("standard output is closed")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that can close streams")
def test_a_debug_trace_does_not_go_to_the_output(tmp_path: Path) -> None:
    prefix = ["sh", "-c", 'exec "$@" 2>&-', "sh"]
    assert run_process(["inspect", tmp_path, "--debug"], prefix=prefix) == Outcome(1, "", "")


def test_main_takes_the_arguments_of_the_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["localllm", "--version"])
    assert main() == 0


@pytest.mark.parametrize(
    ("text", "bias"),
    [
        ("5+1", (5, 1.0)),
        ("5-0.5", (5, -0.5)),
        ("5-1e-3", (5, -1e-3)),
        ("5-1e+3", (5, -1e3)),
        ("5-inf", (5, -float("inf"))),
    ],
)
def test_logit_biases(text: str, bias: tuple[int, float]) -> None:
    assert logit_bias(text) == bias
