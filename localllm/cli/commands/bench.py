"""``localllm bench``: measure how fast a model runs, and what share of the machine's limits it reaches."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.argument_types import model_file as model_name, numbers, whole
from localllm.cli.defaults import apply_settings, load_options, model_file
from localllm.cli.machine_warnings import disturbance, too_many_threads
from localllm.cli.parser import HIDDEN, Command, flag, several
from localllm.cli.shared_flags import DEVICE
from localllm.console import LoadStatus, model_line, quantity, visible_line, warn
from localllm.errors import UsageError
from localllm.kernels.cpu.host import OtherLoad, cpu_model
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.bench.model_speed import Measurement
    from localllm.bench.profile import DeviceCeilings
    from localllm.bench.workload import Test
    from localllm.llm import LLM
    from localllm.loading.model_info import ModelInfo

_COLUMNS = "{:<18} {:>7} {:>18} {:>11} {:>11} {:>6} {:>10}"


def run(arguments: argparse.Namespace) -> int:
    if arguments.serve:
        return _measure_server(arguments)
    from localllm.bench.model_speed import measure, profile
    from localllm.bench.profile import check_profiled
    from localllm.bench.workload import make_tests
    from localllm.loading.prediction import Predictor

    settings = apply_settings(arguments, skip=["threads", "model"])  # both may have several values
    tests = make_tests(arguments.prompts, arguments.generations, arguments.depths, arguments.pairs)
    if arguments.profile and arguments.form not in ("table", "json"):
        raise UsageError(f"--profile needs -o table or -o json, not -o {arguments.form}: choose one of these")
    threads_of_tests = arguments.threads or [settings.threads]
    if complaint := too_many_threads(max(n or 1 for n in threads_of_tests)):
        warn(complaint)
    names = [*arguments.files, *arguments.model] or [settings.model] * (not arguments.downloads)
    models = [{"model": name} for name in names]
    models += [{"model": name, "download": True, "quiet": arguments.quiet} for name in arguments.downloads]
    ceilings: dict[str, DeviceCeilings] = {}
    form, other_load, n_shown = arguments.form, OtherLoad(), 0
    scatter, busy = 1.0, 0.0
    for path in [model_file(model, settings) for model in models]:
        measured: list[Measurement] = []
        for threads in threads_of_tests:
            with _load(arguments, path, threads, tests) as llm:
                info = llm.info
                if arguments.profile:
                    check_profiled(info)
                if form == "table" and not measured:
                    print(*[""] * bool(n_shown), model_line(info, arguments.threads or ()), "", sep="\n")
                    print(_COLUMNS.format(*_HEAD), flush=True)
                of_run = {"isa": arguments.isa, "quiet": arguments.quiet}
                predictor = Predictor.of(
                    info.path, info.placement, info.threads, decode_threads=info.decode_threads, isa=arguments.isa
                )
                for test in tests:
                    measurement = measure(llm, test, arguments.repetitions, **of_run, predictor=predictor)
                    _show(form, info, measurement, is_first=not n_shown)
                    n_shown += 1
                    if arguments.profile and test.kind != "pg":
                        measurement = replace(measurement, profiles=tuple(profile(llm, test, ceilings)))
                    measured.append(measurement)
        busy = other_load.cpus()
        if form == "json":
            report = as_json(info, measured, busy)
            print(json.dumps(report, ensure_ascii=False, allow_nan=False), flush=True)
        elif form == "table":
            lines = [f"{m.test.name}: {m.experts}" for m in measured if m.experts]
            lines += [
                f"{m.test.name}: drafted {d.drafted:,} tokens, {d.accepted:,} accepted ({d.share:.0%})"
                for m in measured
                if (d := m.drafts)
            ]
            print(*[""] * bool(lines), *lines, sep="\n", end="\n" * bool(lines), flush=True)
            for gpu_profile in (p for measurement in measured for p in measurement.profiles):
                print("", *gpu_profile.lines(), sep="\n", flush=True)
        scatter = max(scatter, *(measurement.scatter for measurement in measured))
    if complaint := disturbance(busy, scatter):
        warn(complaint)
    return 0


# -- Output --------------------------------------------------------------------------------------------------------


#: Fields of a measurement that only ``-o json`` prints.
_JSON_ONLY = ("n_tokens", "depth", "repetitions", "experts", "drafted", "accepted")
_HEAD = ("test", "threads", "tok/s", "achieved", "ceiling", "share", "predicted")


def _show(form: str, info: ModelInfo, measurement: Measurement, *, is_first: bool) -> None:
    """Print a measurement as a row, with a header above the first row (a table's header is already printed)."""
    if form == "table":
        print(_COLUMNS.format(*measurement.cells()), flush=True)
    elif form == "md":
        name = f"{visible_line(info.name or info.path.name)} {info.file_type}".replace("|", "\\|")
        row = dict(zip(_HEAD, measurement.cells(), strict=True))
        row = {"model": name, "size": quantity(info.n_bytes, "B"), "device": info.device} | row
        rule = ["---", *["---:"] * (len(row) - 1)]
        for cells in (row, rule, row.values()) if is_first else (row.values(),):
            print("|", " | ".join(cells), "|", flush=True)
    elif form != "json":
        values = {**_model_fields(info), **measurement.as_json(), "test": measurement.test.name}
        values = {key: value for key, value in values.items() if key not in _JSON_ONLY}
        if form == "jsonl":
            print(json.dumps(values, ensure_ascii=False, allow_nan=False), flush=True)
            return
        csv.writer(sys.stdout, lineterminator="\n").writerows([values, values.values()][not is_first :])
        sys.stdout.flush()


def _model_fields(info: ModelInfo) -> dict[str, Any]:
    names = ("architecture", "file_type", "n_parameters", "n_bytes", "device", "kernels", "cache_type")
    return {"model": str(info.path)} | {name: getattr(info, name) for name in names}


def as_json(info: ModelInfo, measured: Sequence[Measurement], other_cpus: float) -> dict[str, Any]:
    """Return the results as JSON values.  ``other_cpus``: number of processors that other programs kept busy."""
    results = [measurement.as_json() for measurement in measured]
    machine = {"localllm": __version__, "cpu": cpu_model()}
    return {**machine, **_model_fields(info), "other_cpus": other_cpus, "results": results}


# -- Measuring -----------------------------------------------------------------------------------------------------


def _load(arguments: argparse.Namespace, path: str | Path | None, threads: int | None, tests: Sequence[Test]) -> LLM:
    from localllm.llm import load
    from localllm.loading.load import LONG_CONTEXT

    # A context longer than in training affects a model's answers, but not its speed.
    warnings.filterwarnings("ignore", LONG_CONTEXT)
    context = max(test.context for test in tests)
    with LoadStatus(enabled=not arguments.quiet) as progress:
        return load(path, **load_options(arguments, path, threads=threads, context=context), progress=progress)


def _measure_server(arguments: argparse.Namespace) -> int:
    """Measure a server with many clients, for each model and number of clients."""
    from localllm.bench.serving import LONGEST, Load, our_address, ours, started, table

    if arguments.rate is not None and arguments.rate <= 0:
        raise UsageError("--rate must be above 0")
    mean_prompt, mean_reply = arguments.prompts[0], arguments.generations[0]
    longest = LONGEST * (2 * mean_prompt + mean_reply)  # a word may be two tokens
    names = [*arguments.files, *arguments.model] or ["demo"]
    code = 0
    for name in names:
        for n_clients in arguments.clients:
            threads = arguments.threads[0] if arguments.threads else None
            with started(ours(name, n_clients, longest, threads), our_address) as url:
                Load(url, 1, 1, mean_prompt=8, mean_reply=2).run()  # loads the model
                load = Load(url, n_clients, arguments.requests, arguments.rate, mean_prompt, mean_reply)
                load.run()
            if load.errors:
                warn(f"{len(load.errors)} of {load.n_requests} requests failed: {load.errors[0]}")
                code = 1
            summary = {"model": name, **load.summary()}
            print(json.dumps(summary) if arguments.form in ("json", "jsonl") else table(summary), flush=True)
    return code


COMMAND = Command(
    "[FILE …] [options]",
    "measure how fast a model runs here",
    [
        flag("files FILE", "GGUF files (default: the demo model); also -m FILE", model_name, nargs="*"),
        several("-m --model FILE", HIDDEN, model_name),
        several("-hf --hf-repo FILE", HIDDEN, model_name, dest="downloads"),
        *(
            flag(names, text, numbers, dest=dest, default=default)
            for names, dest, default, text in (
                ("-p --n-prompt N,…", "prompts", [512], "tokens of the prompt to evaluate; 0: no such test"),
                ("-n --n-gen N,…", "generations", [128], "tokens to generate; 0: no such test"),
                ("-d --n-depth N,…", "depths", [0], "tokens in the cache before the test"),
                ("-t --threads N,…", "threads", None, "threads (default: one per physical core)"),
            )
        ),
        several(
            "-pg --n-prompt-gen N,M",
            "one test of a prompt of N tokens and M generated after it",
            numbers,
            dest="pairs",
        ),
        flag("-r --repetitions N", "repetitions of each test", whole(1), default=5),
        *DEVICE,
        flag("--profile", "show how the time on GPUs is spent, by operation"),
        [
            flag(
                "-o --output table|md|csv|jsonl|json",
                "format of the results: jsonl is one line per test, json one line per model",
                dest="form",
                default="table",
            ),
            flag("--json", "short for -o json", dest="form", action="store_const", const="json"),
        ],
        flag("-q --quiet", "show no progress"),
        "measuring a server with many clients",
        flag("--serve", "start a server for each FILE and measure it"),
        flag("--clients N,…", "number of clients; each sends one request at a time", numbers, default=[8]),
        flag("--requests N", "total number of requests", whole(1), default=64),
        flag("--rate R", "requests per second (default: a client sends its next request after a reply)", float),
    ],
    run,
    """\
-p, -n, -d and -t accept lists, such as -t 1,2.  The test pp512 evaluates a prompt of 512 tokens, and tg128 generates
128 tokens one at a time.  pp512+tg128 does both.  "@ d1024" means that the cache contains 1,024 tokens beforehand.

"share" is the result in percent of a ceiling of this machine.  The ceiling is measured alternately with the test, on
the same number of threads.  For tg it is the speed of reading the bytes that a token needs; for pp it is the speed of
multiplying numbers.  On a GPU it is the speed of copying within GPU memory (bytes read plus bytes written) or of
multiplying on tensor cores.  A share above 100% means that other programs were busy while the ceiling was measured.

"predicted" is the result that localllm inspect --plan predicts, from the model's operations and the rates of this
processor's kernels.

--profile also lists the kernels of a step by operation, for each test and GPU: number of launches, time, share of
the time, bytes and operations per second, and their share of the GPU's ceilings.  Only bytes and operations that the
computation needs are counted.  "at work" is the share of the time in which the GPU ran kernels.

If the model is larger than memory, bench also shows the share of the experts that was in memory, the speed of reading
the other experts, and the speed at which the disk reads parts of the file that are not in the system's cache.

--serve measures `localllm serve` with clients, which send prompts of -p tokens and read replies of -n on average.
It shows tokens and requests per second, the time to the first token, and the time between tokens (50th, 95th and 99th
percentile).
""",
    aliases="llama-bench llama-batched-bench",
)
