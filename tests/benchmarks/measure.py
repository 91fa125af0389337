"""Measurements of localllm and llama.cpp, or of localllm with several settings, in one process and in turn.

The machine's speed drifts, so compared values are measured in turn in each round.  The result is the best
round for rates, and the median for shares.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from localllm.gguf import GGUFFile
from localllm.loading.model_info import file_type_name
from tests.benchmarks.ours import Ceilings, Ours
from tests.benchmarks.results import (
    Agreement,
    Line,
    Memory,
    Record,
    Trial,
    best_settings,
    gap,
    relative_error,
)
from tests.benchmarks.theirs import Context, LlamaCpp

#: Tokens of the short measurements that choose llama.cpp's settings.
TRIAL_PROMPT, TRIAL_N = 128, 8
#: Skip flash attention on or off if it is slower by this factor in a trial at an eighth of the depth.
HOPELESS = 1.25
#: Processor time that threads must have had, as a share of the wall time, or the measurement is repeated; and the
#: largest number of tries.  Systems sometimes keep two threads on one processor for seconds.
ENOUGH, TRIES = 0.75, 3
#: Tokens to warm a program up, and the prompt if only decoding is measured.
WARM_UP, SHORT_PROMPT = 33, 32
#: Sequences decoded at once, and the tokens reserved for each.
SEQUENCES, SEQUENCE_ROOM = 8, 256
#: Tokens of the text of a small model.
SMALL_N = 200

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        prompt, n: tokens of the prompt, and decoded tokens.
        depth, deep_n: the same for long contexts.
        repetitions: number of rounds.
    """

    prompt: int
    n: int
    depth: int
    deep_n: int
    repetitions: int


def random_ids(path: Path, n: int) -> list[int]:
    """Return a random prompt of n tokens."""
    with GGUFFile.open(path) as file:
        n_vocab = file.tensors["token_embd.weight"].shape[0]
    return [1, *np.random.default_rng(0).integers(min(300, n_vocab // 2), n_vocab, n - 1).tolist()]


def settled(threads: int, measurement: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Repeat a measurement until its threads had processors to themselves, or until `TRIES` is reached."""
    for _ in range(TRIES):
        wall, cpu = time.perf_counter(), time.process_time()
        result = measurement(*arguments, **options)
        if time.process_time() - cpu >= ENOUGH * threads * (time.perf_counter() - wall):
            break
    return result


def trial(path: Path, threads: int, _: Sizes) -> list[Record]:
    """Measure each setting of llama.cpp briefly."""
    ids = random_ids(path, TRIAL_PROMPT)
    found: list[Record] = []
    for repack in (True, False) if _can_repack(path) else (False,):
        with LlamaCpp(path, repack=repack) as model:
            for flash in (True, False):
                context = model.context(threads, TRIAL_PROMPT + 2 * TRIAL_N, flash=flash)
                context.evaluate(ids[:WARM_UP])
                context.generate(1)
                prefill, decode = settled(threads, context.measure, ids, TRIAL_N)[:2]
                found.append(Trial(path.stem, repack, flash, TRIAL_PROMPT / prefill, TRIAL_N / decode))
    return found


_REPACK = """
import sys
from pathlib import Path
from tests.benchmarks.theirs import LlamaCpp
with LlamaCpp(Path(sys.argv[1]), repack=True) as model:
    model.context(1, 64, flash=True).logits([1, 2])
"""


def _can_repack(path: Path) -> bool:
    """Return whether llama.cpp can use repacked weights; with latent attention (DeepSeek), its process aborts."""
    done = subprocess.run([sys.executable, "-c", _REPACK, str(path)], capture_output=True, check=False)
    return done.returncode == 0


# -- Prompts and decoding ------------------------------------------------------------------------------------------


def speed(path: Path, threads: int, sizes: Sizes, tests: Sequence[str], trials: Sequence[Trial]) -> list[Record]:
    """Measure prefill ("pp" in ``tests``) and decoding ("tg"), and compare the outputs."""
    n_prompt = sizes.prompt if "pp" in tests else SHORT_PROMPT
    n = sizes.n if "tg" in tests else TRIAL_N
    ids = random_ids(path, n_prompt)
    n_tokens = n_prompt + n + 2
    prefills: list[list[float]] = []  # per round: seconds of localllm, and of each setting of llama.cpp
    decodes: list[list[float]] = []
    own_shares, highest_shares, bandwidth_shares = [], [], []
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(path, threads, n_tokens))
        theirs = list(_contexts(path, threads, n_tokens, best_settings(trials), stack))
        ceilings = stack.enter_context(Ceilings(ours.info))
        ours.measure(ids[:WARM_UP], 2)
        for context in theirs:
            context.evaluate(ids[:WARM_UP])
        for _ in range(sizes.repetitions):
            before = settled(threads, ceilings.all, n_prompt)
            prefill, decode, our_ids = settled(threads, ours.measure, ids, n)
            after = settled(threads, ceilings.all, n_prompt)
            own, highest, bandwidth = ((a + b) / 2 for a, b in zip(before, after, strict=True))
            own_shares.append(own / prefill)
            highest_shares.append(highest / prefill)
            bandwidth_shares.append(ceilings.decode_bytes(n, n_prompt) * n / decode / bandwidth)
            prefills.append([prefill])
            decodes.append([decode])
            for context in theirs:
                prefill, decode, their_ids = settled(threads, context.measure, ids, n)
                prefills[-1].append(prefill)
                decodes[-1].append(decode)
        found: list[Record] = []
        place = (path.stem, ours.info.file_type, threads)
        if "pp" in tests:
            rates = best_rates(n_prompt, prefills, theirs)
            shares = (statistics.median(own_shares), statistics.median(highest_shares))
            found.append(Line("prefill", *place, f"pp{n_prompt}", *rates, *shares))
        if "tg" in tests:
            rates = best_rates(n, decodes, theirs)
            found.append(Line("decode", *place, f"tg{n}", *rates, statistics.median(bandwidth_shares)))
        found.append(agree(path.stem, threads, "short", ours, theirs[-1], ids, our_ids, their_ids))
    return found


def _contexts(
    path: Path, threads: int, n_tokens: int, settings: Sequence[Trial], stack: ExitStack
) -> Iterator[Context]:
    """Yield llama.cpp with each setting.  Settings with the same packing share a model."""
    models: dict[bool, LlamaCpp] = {}
    for setting in settings:
        if setting.repack not in models:
            models[setting.repack] = stack.enter_context(LlamaCpp(path, repack=setting.repack))
        yield models[setting.repack].context(threads, n_tokens, flash=setting.flash)


def best_rates(n: int, seconds: Sequence[Sequence[float]], theirs: Sequence[Context]) -> tuple[float, float, str]:
    """Return tokens per second of localllm and of llama.cpp's best setting, and that setting.

    ``seconds``: per round, seconds for n tokens of localllm and of each setting of llama.cpp.
    """
    ours, *others = (n / min(column) for column in zip(*seconds, strict=True))
    best = max(range(len(others)), key=others.__getitem__)
    return ours, others[best], theirs[best].setting


def agree(
    model: str,
    threads: int,
    test: str,
    ours: Ours,
    theirs: Context,
    prompt: Sequence[int],
    our_ids: Sequence[int],
    their_ids: Sequence[int],
) -> Agreement:
    """Compare the logits after the prompt, and the greedy texts."""
    a, b = ours.logits(prompt), theirs.logits(prompt)
    error, top_equal = relative_error(a, b), bool(a.argmax() == b.argmax())
    n_equal = next((i for i, (x, y) in enumerate(zip(our_ids, their_ids, strict=True)) if x != y), len(our_ids))
    parting = 0.0
    if n_equal < len(our_ids):
        ids = [*prompt, *our_ids[:n_equal]]
        parting = gap(ours.logits(ids), theirs.logits(ids), our_ids[n_equal], their_ids[n_equal], ours.tolerance)
    return Agreement(model, threads, test, error, ours.tolerance, top_equal, n_equal, len(our_ids), parting)


# -- Long contexts -------------------------------------------------------------------------------------------------


def depth(
    path: Path, threads: int, sizes: Sizes, trials: Sequence[Trial], *, cache_type: str = "f16"
) -> list[Record]:
    """Measure a long prompt, and decoding after it."""
    n_prompt, n = sizes.depth, sizes.deep_n
    ids = random_ids(path, n_prompt)
    n_tokens = n_prompt + n + 2
    shallow, deep, bandwidths = [], [], []
    their_decodes: list[list[float]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(path, threads, n_tokens, cache_type=cache_type))
        ceilings = stack.enter_context(Ceilings(ours.info))
        model = stack.enter_context(LlamaCpp(path, repack=best_settings(trials)[0].repack))
        # llama.cpp reads values in Q8_0 only with flash attention.
        flashes = (True,) if cache_type != "f16" else (True, False)
        all_of_them = [model.context(threads, n_tokens, flash=flash, cache_type=cache_type) for flash in flashes]
        theirs = _hopeful(all_of_them, ids[: n_prompt // 8])
        ours.measure(ids[:WARM_UP], 2)
        prefill = settled(threads, ours.measure, ids, 1)[0]
        their_prefills = [settled(threads, context.measure, ids, 1)[0] for context in theirs]
        for _ in range(sizes.repetitions):
            shallow.append(settled(threads, ours.measure, ids[:1], n, forget=False)[1])
            before = settled(threads, ceilings.bandwidth)
            _, seconds, our_ids = settled(threads, ours.measure, ids, n, forget=False)
            deep.append(seconds)
            bandwidths.append((before + settled(threads, ceilings.bandwidth)) / 2)
            their_decodes.append([])
            for context in theirs:
                _, seconds, their_ids = settled(threads, context.measure, ids, n, forget=False)
                their_decodes[-1].append(seconds)
        place = (path.stem, ours.info.file_type, threads)
        suffix = " q8" if cache_type == "q8_0" else ""
        share = statistics.median(
            ceilings.decode_bytes(n, n_prompt) * n / s / b for s, b in zip(deep, bandwidths, strict=True)
        )
        growth = (min(deep) - min(shallow)) / n
        reading = (ceilings.cache_bytes(n, n_prompt) - ceilings.cache_bytes(n, 0)) / statistics.median(bandwidths)
        note = f"{growth * 1e3:.1f} ms per token more than without a cache; reading it takes {reading * 1e3:.1f}"
        rates = best_rates(n_prompt, [[prefill, *their_prefills]], theirs)
        found: list[Record] = [Line("deep prefill", *place, f"pp{n_prompt}{suffix}", *rates)]
        rates = best_rates(n, [[s, *t] for s, t in zip(deep, their_decodes, strict=True)], theirs)
        found.append(Line("deep decode", *place, f"tg{n}@{n_prompt}{suffix}", *rates, share, note=note))
        found.append(agree(path.stem, threads, f"deep{suffix}", ours, theirs[-1], ids, our_ids, their_ids))
    return found


def q8_depth(path: Path, threads: int, sizes: Sizes, trials: Sequence[Trial]) -> list[Record]:
    """Measure `depth` with the cache in Q8_0."""
    return depth(path, threads, sizes, trials, cache_type="q8_0")


def _hopeful(contexts: list[Context], ids: Sequence[int]) -> list[Context]:
    """Return contexts that are not much slower than another one in everything."""

    def try_out(context: Context) -> tuple[float, float]:
        context.evaluate(ids[:WARM_UP])
        return context.measure(ids, TRIAL_N)[:2]

    seconds = [try_out(context) for context in contexts]
    best = [min(column) for column in zip(*seconds, strict=True)]
    return [
        context
        for context, tried in zip(contexts, seconds, strict=True)
        if any(s <= HOPELESS * b for s, b in zip(tried, best, strict=True))
    ]


# -- Several sequences, small models -------------------------------------------------------------------------------


def batch(path: Path, threads: int, sizes: Sizes) -> list[Record]:
    """Compare several sequences at once, each in a thread, with one sequence."""
    prompts = [[1, 5 + i] for i in range(SEQUENCES)]
    with Ours(path, threads, SEQUENCE_ROOM, parallel=SEQUENCES) as ours:
        ours.measure_together(prompts, 2)
        one, many = [], []
        for _ in range(max(2, sizes.repetitions)):
            one.append(settled(threads, ours.measure_together, prompts[:1], sizes.n))
            many.append(settled(threads, ours.measure_together, prompts, sizes.n))
        rates = (SEQUENCES * sizes.n / min(many), sizes.n / min(one))
        return [
            Line("batch", path.stem, ours.info.file_type, threads, f"{SEQUENCES} at once", *rates, "one sequence")
        ]


def small(path: Path, threads: int, sizes: Sizes) -> list[Record]:
    """Compare localllm's generation with a small model with llama.cpp's evaluation alone."""
    seconds: list[list[float]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(path, threads, SMALL_N + 2))
        models = [stack.enter_context(LlamaCpp(path, repack=repack)) for repack in (True, False)]
        theirs = [m.context(threads, SMALL_N + 2, flash=flash) for m in models for flash in (True, False)]
        for _ in range(2 + sizes.repetitions):
            seconds.append([ours.measure([1], SMALL_N)[1], *(c.evaluate_singly(SMALL_N) for c in theirs)])
        rates = best_rates(SMALL_N, seconds, theirs)
        ids = [1, *range(5, 13)]
        _, _, our_ids = ours.measure(ids, TRIAL_N)
        theirs[0].evaluate(ids)
        _, their_ids = theirs[0].generate(TRIAL_N)
        line = Line("small", path.stem, ours.info.file_type, threads, f"tg{SMALL_N}", *rates)
        return [line, agree(path.stem, threads, "short", ours, theirs[0], ids, our_ids, their_ids)]


# -- Separate processes --------------------------------------------------------------------------------------------

_OUR_START = """
import sys, localllm
llm = localllm.load(sys.argv[1], threads=int(sys.argv[2]), context=512)
next(llm.stream("Once upon a time", max_tokens=1, temperature=0.0))
print("first", flush=True)
"""

_THEIR_START = """
import sys, llama_cpp.llama_cpp as api
from llama_cpp import Llama
default = api.llama_model_default_params
def parameters():
    chosen = default()
    chosen.use_extra_bufts = sys.argv[3] == "repack"
    return chosen
api.llama_model_default_params = parameters
threads = int(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
next(llm.create_completion("Once upon a time", max_tokens=1, temperature=0.0, stream=True))
print("first", flush=True)
"""

_PEAK = """
import sys, localllm
llm = localllm.load(sys.argv[1], threads=int(sys.argv[2]), context=int(sys.argv[3]))
llm.generate([1] * int(sys.argv[4]), max_tokens=8, temperature=0.0, ignore_eos=True)
# Not getrusage, whose peak includes the parent process.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, llm.info.placement.kv_cache)
"""


def start(path: Path, threads: int, sizes: Sizes) -> list[Record]:
    """Return the seconds from the launch of a process to its first token, with warm caches."""
    commands = {
        "localllm": (_OUR_START, str(path), str(threads)),
        "binding, repack": (_THEIR_START, str(path), str(threads), "repack"),
        "binding, no repack": (_THEIR_START, str(path), str(threads), "plain"),
    }
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(1 + sizes.repetitions):
        for name, command in commands.items():
            best[name] = min(best[name], seconds_to_line([sys.executable, "-c", *command]))
    ours = best.pop("localllm")
    setting = min(best, key=best.__getitem__)
    with GGUFFile.open(path) as file:
        file_type = file_type_name(file.metadata, file.tensors.values())
    return [Line("start", path.stem, file_type, threads, "start, s", ours, best[setting], setting)]


def seconds_to_line(command: Sequence[str]) -> float:
    """Return the seconds until a command prints its first line.

    Raises:
        StartError: the command ended without a line.
    """
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        seconds = time.perf_counter() - begin
        _, errors = process.communicate()
    if not line:
        raise StartError(f"{command[0]} started no model: it {how_it_ended(process.returncode, errors)}")
    return seconds


class StartError(Exception):
    """A process ended before its model generated a token."""


def how_it_ended(code: int, errors: str) -> str:
    """Describe the exit code or signal of a process, with the end of its error output."""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"was ended by {name}" if code < 0 else f"exited with code {code}"
    return f"{words}: {errors.strip()[-500:]}" if errors.strip() else f"{words} and wrote nothing"


def peak_memory(path: Path, threads: int, sizes: Sizes) -> list[Record]:
    """Return the peak memory of a process that generates (on Linux)."""
    n_tokens = sizes.prompt + sizes.n + 2
    command = [sys.executable, "-c", _PEAK, str(path), str(threads), str(n_tokens), str(sizes.prompt)]
    peak, cache = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [Memory(path.stem, int(peak), int(cache), path.stat().st_size)]
