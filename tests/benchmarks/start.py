"""Measure the stages of a start, from the launch of Python to the first token, and commands that load no model.

    python -m tests.benchmarks.start model.gguf
    python -m tests.benchmarks.start model.gguf -r 5 --binding /path/to/python   # a Python with llama-cpp-python

The result is the best time of each stage over several processes, in milliseconds, with warm caches.  The second
column is the processor time of all threads, which other programs disturb less.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.measure import _THEIR_START, StartError, seconds_to_line

#: Runs `localllm generate` and prints the end of each stage: (stage, seconds since the launch, processor seconds).
_STAGES = """
import sys, time
launched, model = float(sys.argv[1]), sys.argv[2]
marks = []
def mark(stage): marks.append((stage, time.monotonic() - launched, time.process_time()))
mark("Python")
import gc
gc.set_threshold(100_000)
import localllm.cli.main
mark("imports: command line")
import numpy
mark("imports: numpy")
import localllm.llm
mark("imports: library")
import localllm.kernels.cpu.backend
mark("imports: kernels")
from localllm.loading import load
def marked(owner, name, stage):
    function = getattr(owner, name)
    def call(*args, **more):
        result = function(*args, **more)
        mark(stage)
        return result
    setattr(owner, name, call)
marked(load, "_read", "command line, header, graph")
marked(load, "_open_devices", "threads")
marked(load, "_plan_with_block", "plan")
marked(load, "_load", "weights packed")
marked(load._TokenizerReader, "result", "vocabulary, remaining wait")
marked(localllm.llm.LLM, "_chat_encoder", "chat template compiled")
marked(localllm.llm.LLM, "stream_chat", "prompt's tokens")
class Out:
    def write(self, text):
        if text.strip():
            mark("first token")
    def __getattr__(self, name):
        return getattr(sys.__stdout__, name)
sys.stdout = Out()
code = localllm.cli.main.main(["generate", "-q", "-m", model, "-p", "hi", "-n", "1", "--temp", "0"])
import json
print(json.dumps(marks), file=sys.__stdout__)
sys.exit(code)
"""

#: Commands that load no model.
COMMANDS = {"--help": ["--help"], "models": ["models"], "a typing mistake": ["genrate"]}


def stages(model: Path) -> dict[str, tuple[float, float]]:
    """Return seconds and processor seconds of each stage in one process."""
    command = [sys.executable, "-c", _STAGES, str(time.monotonic()), str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found, seconds, cpu = dict[str, tuple[float, float]](), 0.0, 0.0
    for stage, at, used in json.loads(done.stdout.splitlines()[-1]):
        before = found.get(stage, (0.0, 0.0))
        found[stage] = before[0] + at - seconds, before[1] + used - cpu
        seconds, cpu = at, used
    return found | {"in all": (seconds, cpu)}


def answer(words: list[str]) -> tuple[float, float]:
    """Return seconds and processor seconds of a command."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "localllm", *words], capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-r", type=int, default=3, help="processes (default: 3), after one to warm the caches")
    parser.add_argument("-t", type=int, default=2, help="threads of llama.cpp (default: 2)")
    parser.add_argument("--binding", metavar="PYTHON", help="a Python with llama-cpp-python, for comparison")
    arguments = parser.parse_args()
    # Compile modules once, as for users.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    settings = ["repack", "plain"] if arguments.binding else []
    rows: dict[str, list[tuple[float, float]]] = {}
    for n in range(1 + arguments.r):
        found = stages(arguments.model)
        for name, words in COMMANDS.items():
            found[name] = answer(words)
        for repack in list(settings):
            command = [arguments.binding, "-c", _THEIR_START, str(arguments.model), str(arguments.t), repack]
            try:
                found[f"llama.cpp's binding, {repack}"] = seconds_to_line(command), float("nan")
            except StartError as error:
                print(f"without llama.cpp's {repack}: {error}", file=sys.stderr)
                settings.remove(repack)
        for name, times in found.items() if n else ():
            rows.setdefault(name, []).append(times)
    best = {name: [1e3 * min(each) for each in zip(*times, strict=True)] for name, times in rows.items()}
    print("| stage | ms | ms of processors |\n|---|---|---|")
    for name, (wall, cpu) in best.items():
        print(f"| {name} | {wall:.0f} | {'' if cpu != cpu else f'{cpu:.0f}'} |")
    print(
        json.dumps({name: [None if value != value else round(value, 1) for value in of] for name, of in best.items()})
    )


if __name__ == "__main__":
    main()
