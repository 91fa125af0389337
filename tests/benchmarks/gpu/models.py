"""Whole models with random weights: tokens per second, profiles, and checks of the output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np

from localllm.bench.model_speed import Measurement, measure, profile
from localllm.bench.profile import DeviceProfile
from localllm.bench.workload import Test
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu.host import usable_cpus
from localllm.kernels.cuda import lowering, matmul
from localllm.kernels.cuda.cupy_driver import CupyDriver
from localllm.kernels.cuda.profile import BusyTime, watching
from localllm.kernels.cuda.roofline import Stopwatch
from localllm.kernels.cuda.step import CUDAStep
from localllm.kernels.cuda.weights import CUDAWeightLoader, PackedMatrix
from localllm.kernels.graph import Weight
from localllm.llm import LLM
from tests.benchmarks import theirs
from tests.benchmarks.gpu import early
from tests.benchmarks.gpu.kernels import DECODE, FLOAT_DECODE, PREFILL
from tests.benchmarks.gpu.machine import Machine, Sizes
from tests.benchmarks.gpu.sections import Row
from tests.benchmarks.ours import seconds_together
from tests.benchmarks.results import QUANTISED_TOLERANCE
from tests.helpers.synthetic import gguf_bytes, random_gguf

#: Tokens of the prompt for checks of the output.
CHECKED = 40
#: Calls that lose the most time.
N_WORST = 5


def largest_file(sizes: Sizes, *, whole: bool = False) -> int:
    """Return the bytes that the largest model takes on the disk, at least; ``whole``: without holes."""
    n_layers = sizes.model.n_layers if whole or theirs.has_gpu() else min(2, sizes.model.n_layers)
    shape = replace(sizes.model, n_layers=n_layers)
    return max(gguf_bytes(shape, file_type) for file_type in sizes.file_types)


def models(machine: Machine) -> Iterator[Row]:
    """Measure a model in each file type."""
    for file_type in machine.sizes.file_types:
        begin = time.monotonic()
        try:
            with _written(machine, file_type) as path:
                yield {"model": file_type, "test": "written", "s": time.monotonic() - begin}
                yield from _model(machine, path, file_type)
                if file_type == machine.sizes.file_types[0]:
                    yield from _long_context(machine, path, file_type)
        except NotEnoughMemoryError as error:  # a small or shared GPU; the next model may fit
            yield {"model": file_type, "test": f"skipped: {error}"}


@contextlib.contextmanager
def _written(machine: Machine, file_type: str, n_layers: int | None = None, *, whole: bool = False) -> Iterator[Path]:
    """Yield a random model, in whose file repeated layers are holes, and load their matrices by copies on the device.

    With ``whole``, and if llama.cpp can be compared, there are no holes, because several devices or llama.cpp read
    all layers.
    """
    shape = replace(machine.sizes.model, n_layers=n_layers or machine.sizes.model.n_layers)
    path = machine.scratch / f"{file_type}.gguf"
    try:
        random_gguf(path, shape, file_type, repeat_layers=True, holes=not (whole or theirs.has_gpu()))
        with copied_layers():
            yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def copied_layers() -> Iterator[None]:
    """Load each kind of matrix of a layer once per device, and copy it on the device for the other layers."""
    load = CUDAWeightLoader.matrix
    loaded: WeakValueDictionary[tuple[Any, ...], PackedMatrix] = WeakValueDictionary()

    def matrix(loader: CUDAWeightLoader, weight: Weight) -> PackedMatrix:
        block, _, rest = weight.name.partition(".")
        if block != "blk":
            return load(loader, weight)
        kind = id(loader), rest.partition(".")[2], weight.type, weight.shape
        if (like := loaded.get(kind)) is None:
            if not weight.data[:1].any():
                raise AssertionError(f"{weight.name} is a hole in the file, but no matrix like it was loaded before")
            loaded[kind] = like = load(loader, weight)
            return like
        driver, stream = loader._driver, loader._stream
        memory = driver.allocate(loader.device, like.n_bytes)
        driver.copy(memory, like.memory, stream)
        driver.synchronize(stream)
        return replace(like, memory=memory, name=weight.name)

    with mock.patch.object(CUDAWeightLoader, "matrix", matrix):
        yield


def cpu(machine: Machine) -> Iterator[Row]:
    """Compare one layer of the first model on the GPU and on the CPU."""
    file_type, found = machine.sizes.file_types[0], []
    with _written(machine, file_type, n_layers=1) as path:
        for device in ("cuda:0", "cpu"):
            with machine.load(path, device, context=2 * CHECKED) as llm:
                found.append(llm.logits(_ids(llm, CHECKED)))
    error = float(np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1]))
    row: Row = {"model": file_type, "test": "one layer, against the CPU", "error": error}
    if not error <= QUANTISED_TOLERANCE:
        row["fault"] = f"{file_type}: logits differ from the CPU's by {error:.1e}, more than {QUANTISED_TOLERANCE:g}"
    yield row


def _ids(llm: LLM, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, llm.info.n_vocab, n)]


def _model(machine: Machine, path: Path, file_type: str) -> Iterator[Row]:
    sizes, begin = machine.sizes, time.monotonic()
    context = max(*sizes.prompts, sizes.depth + sizes.generated, CHECKED + sizes.generated) + 2
    with machine.load(path, "cuda:0", context=context) as llm:
        yield {"model": file_type, "test": "loaded", "s": time.monotonic() - begin}
        free = machine.driver.memory_info(0).free
        yield _check_text(llm, file_type, sizes.generated)
        yield _check_replays(llm, file_type, sizes.replays)
        tests = [*(Test("pp", n, 0) for n in sizes.prompts), Test("tg", sizes.generated, sizes.depth)]
        for test in tests:
            measured = measure(llm, test, min(3, machine.repetitions))
            yield _measured(file_type, measured)
        profiles = [found for test in tests[-2:] for found in profile(llm, test, {"cuda:0": machine.ceilings(0)})]
        for found in profiles:
            yield from _profiled(file_type, found)
        yield from _worst(file_type, profiles)
        taken = (free - machine.driver.memory_info(0).free) / 1e6
        yield {"model": file_type, "test": "memory taken since, by modules and graphs", "MB": taken}
    yield from _together(machine, path, file_type)
    yield from _llama_cpp(machine, path, file_type)


def _long_context(machine: Machine, path: Path, file_type: str) -> Iterator[Row]:
    """Measure the whole model with a long context."""
    n, long = machine.sizes.generated, machine.sizes.long
    with machine.load(path, "cuda:0", context=long + n + 2) as llm:
        yield _check_text(llm, file_type, n, long)
        yield _measured(file_type, measure(llm, Test("tg", n, long), 1))


def _check_text(llm: LLM, file_type: str, n: int, n_prompt: int = CHECKED) -> Row:
    """Check that tokens decoded in replays of a graph are the most likely tokens of a prefill."""
    prompt = _ids(llm, n_prompt)
    text = list(llm.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True).ids)
    logits = llm.logits(prompt + text, last=n + 1)[:-1]
    is_same = logits.argmax(axis=1).tolist() == text and bool(np.isfinite(logits).all())
    row: Row = {
        "model": file_type,
        "test": f"{n} tokens after {n_prompt}, compared with a prefill",
        "error": "none" if is_same else "yes",
    }
    if not is_same:
        row["fault"] = f"{file_type}: decoded tokens differ from prefilled ones"
    return row


def _check_replays(llm: LLM, file_type: str, n: int) -> Row:
    """Check that replays of one token always give the same bits."""
    ids = _ids(llm, CHECKED)
    llm.logits(ids, last=1)
    first = llm.logits(ids, last=1)  # of one token, as in the loop
    n_other = sum(not np.array_equal(llm.logits(ids, last=1), first) for _ in range(n))
    row: Row = {"model": file_type, "test": f"{n} replays, the same bits", "error": n_other}
    if n_other:
        row["fault"] = f"{file_type}: {n_other} of {n} replays gave other logits"
    return row


def _measured(file_type: str, measured: Measurement) -> Row:
    wanted = FLOAT_DECODE if file_type == "f16" else DECODE
    return {
        "model": file_type,
        "test": measured.test.name,
        "tok/s": float(np.median(measured.rates)),
        "achieved": float(np.median(measured.achieved)),
        "of the ceiling": "" if measured.share is None else f"{measured.share:.0%}",
        "wanted": f"{PREFILL if measured.test.kind == 'pp' else wanted:.0%}",
        "unit": measured.unit,
    }


def _profiled(file_type: str, found: DeviceProfile) -> Iterator[Row]:
    name, steps = f"{found.test.name}, a step", found.profile.n_steps
    yield {
        "model": file_type,
        "test": name,
        "us": 1e6 * found.profile.seconds / steps,
        "of the time": f"{found.busy:.0%}",
    }
    for share in sorted(found.profile.shares.values(), key=lambda share: -share.seconds):
        floor = found.floor(share)
        yield {
            "model": file_type,
            "test": f"{name}: {share.name}",
            "us": 1e6 * share.seconds / steps,
            "of the time": f"{share.seconds / found.profile.kernel_seconds:.1%}",
            "of floor": "" if floor is None else f"{floor / share.seconds:.0%}",
        }


def _worst(file_type: str, profiles: Sequence[DeviceProfile]) -> Iterator[Row]:
    """Yield the calls that take the most time beyond their floor, as a share of their pass."""
    lost = [
        ((share.seconds - found.floor(share)) / found.profile.kernel_seconds, found, share)
        for found in profiles
        for share in found.profile.shares.values()
    ]
    for i, (part, found, share) in enumerate(sorted(lost, key=lambda each: -each[0])[:N_WORST], 1):
        yield {
            "model": file_type,
            "test": f"worst {i}: {found.test.name}: {share.name} ({', '.join(sorted(share.kernels))})",
            "us": 1e6 * share.seconds / share.n_launches,
            "lost": f"{part:.1%}",
            "of floor": f"{found.floor(share) / share.seconds:.0%}",
            "B/s": share.cost.n_bytes / share.seconds,
            "FLOP/s": share.cost.n_operations / share.seconds,
        }


def _together(machine: Machine, path: Path, file_type: str) -> Iterator[Row]:
    """Measure sequences decoded at once, compared with one sequence."""
    n, n_sequences = machine.sizes.generated, machine.sizes.sequences
    with machine.load(path, "cuda:0", context=n + 8, parallel=n_sequences) as llm:
        for many in (1, n_sequences):
            _rate_together(llm, many, n)  # warms up
        one, together = (_rate_together(llm, many, n) for many in (1, n_sequences))
    name = f"{n_sequences} sequences"
    yield {"model": file_type, "test": name, "tok/s": together, "times one": together / one, "wanted": 12}


def _rate_together(llm: LLM, n_sequences: int, n: int) -> float:
    """Return the tokens per second of ``n_sequences`` threads."""
    return n_sequences * n / seconds_together(llm, [[id_] for id_ in _ids(llm, n_sequences)], n)


def _llama_cpp(machine: Machine, path: Path, file_type: str) -> Iterator[Row]:
    """Measure llama.cpp on the same file, if it is installed with GPU support."""
    if not theirs.has_gpu():
        return
    sizes = machine.sizes
    n_prompt = max(sizes.prompts)
    with theirs.LlamaCpp(path, repack=False, on_gpu=True) as model:
        context = model.context(usable_cpus(), n_prompt + sizes.generated + 2, flash=True)
        ids = [int(i) for i in np.random.default_rng(0).integers(0, model.n_vocab, n_prompt)]
        context.measure(ids[:CHECKED], 2)
        prefill = context.measure(ids, 1)[0]
        decode = context.measure(ids[: sizes.depth], sizes.generated)[1]
    yield {"model": file_type, "test": f"llama.cpp, pp{n_prompt}", "tok/s": n_prompt / prefill}
    yield {
        "model": file_type,
        "test": f"llama.cpp, tg{sizes.generated} @ d{sizes.depth}",
        "tok/s": sizes.generated / decode,
    }


# -- Optimisations -------------------------------------------------------------------------------------------------


def variants(machine: Machine) -> Iterator[Row]:
    """Measure decoding with all optimisations, with each one removed, and with all again."""
    left_out: tuple[tuple[str, Any, str, Any], ...] = (
        ("all", None, "", None),
        ("without gates in products", matmul, "_GATED", frozenset()),
        ("formats apart", matmul, "_MIXED", frozenset()),
        ("without codes by attention", lowering, "_CODED_HEAD", 1 << 30),
        ("no step ahead", CUDAStep, "chooses_ahead", False),
        ("weights read next to attention", CUDAStep, "_launch", early.launch_reading_ahead),
        ("all again", None, "", None),
    )
    if not machine.is_emulated and machine.driver.properties(0).capability >= early.CAPABILITY:
        left_out += (("products that start early", CupyDriver, "load_module", early.load_early),)
    for file_type in machine.sizes.file_types[:2]:
        test = Test("tg", machine.sizes.generated, machine.sizes.depth)
        with _written(machine, file_type) as path:
            context = max(test.n + test.depth, CHECKED) + 2
            for name, owner, attribute, value in left_out:
                with contextlib.ExitStack() as stack:
                    if owner is not None:
                        stack.enter_context(mock.patch.object(owner, attribute, value))
                    llm = stack.enter_context(machine.load(path, "cuda:0", context=context))
                    yield {"variant": name, **_measured(file_type, measure(llm, test, min(3, machine.repetitions)))}
                    yield {"variant": name, **_check_replays(llm, file_type, machine.sizes.replays)}


# -- Several devices -----------------------------------------------------------------------------------------------


def several(machine: Machine) -> Iterator[Row]:
    """Measure copies between devices, and a model on one device and, split in both ways, on two."""
    if machine.count < 2:
        yield {"what": "there is only one GPU"}
        return
    yield from _peer_copies(machine)
    file_type = machine.sizes.file_types[0]
    with _written(machine, file_type, whole=True) as path:
        yield from _split(machine, path, file_type)


def _peer_copies(machine: Machine) -> Iterator[Row]:
    driver, n = machine.driver, machine.sizes.transferred
    for source, target in ((0, 1), (1, 0)):
        what = f"copy from cuda:{source} to cuda:{target}"
        if not driver.can_access_peer(target, source):
            yield {"what": f"{what}: no peer access, so hidden states pass through the host"}
            continue
        driver.enable_peer_access(target, source)
        a, b, stream = driver.allocate(source, n), driver.allocate(target, n), driver.stream(target)
        filler = driver.stream(source)
        sent, arrived = np.random.default_rng(source).integers(0, 256, n, np.uint8), np.zeros(n, np.uint8)
        driver.upload(a, sent, filler)
        driver.synchronize(filler)
        seconds = Stopwatch(driver, stream, machine.repetitions).seconds(
            lambda a=a, b=b, s=stream: driver.copy(b, a, s)
        )
        driver.download(arrived, b, stream)
        driver.synchronize(stream)
        row: Row = {"what": what, "B/s": n / seconds}
        if not np.array_equal(arrived, sent):
            row["fault"] = f"{what}: the bytes did not arrive"
        yield row


def _split(machine: Machine, path: Path, file_type: str) -> Iterator[Row]:
    """Check that a split by layers gives the bits of one GPU, and a split by rows nearly the same values."""
    sizes, logits = machine.sizes, []
    n_prompt = max(sizes.prompts)
    context = max(n_prompt, CHECKED) + sizes.generated + 2
    for name, devices, split_mode in (
        ("cuda:0", "cuda:0", None),
        ("cuda:0,1", "cuda:0,1", None),
        ("cuda:0,1 by rows", "cuda:0,1", "row"),
    ):
        with machine.load(path, devices, context=context, split_mode=split_mode) as llm:
            logits.append(llm.logits(_ids(llm, CHECKED)))
            for test in (Test("pp", n_prompt, 0), Test("tg", sizes.generated, 0)):
                yield {"what": f"{file_type} on {name}", **_at_work(llm, test)}
    one, layers, rows = logits
    if not np.array_equal(one, layers):
        yield {"what": "logits", "fault": f"{file_type}: one GPU and two give different logits"}
    error = float(np.abs(rows - one).max() / max(np.abs(one).max(), 1e-30))
    row: Row = {"what": "logits by rows", "error": error}
    if error > QUANTISED_TOLERANCE:
        row["fault"] = f"{file_type} by rows: logits differ by {error:.1e}, more than {QUANTISED_TOLERANCE:g}"
    yield row


def _at_work(llm: LLM, test: Test) -> Row:
    """Return tokens per second, and the mean number of busy GPUs."""
    ids = _ids(llm, test.n if test.kind == "pp" else 1)
    for _ in range(3):  # launch, then capture, then measure
        llm.forget()
        busy = BusyTime()
        with watching(busy):
            n = 0 if test.kind == "pp" else test.n
            done = llm.generate(ids, max_tokens=n, temperature=0, ignore_eos=True)
        seconds = done.timings.prefill_s + done.timings.decode_s
    parts: Sequence[float] = [each / seconds for _, each in sorted(busy.seconds().items())]
    return {
        "test": test.name,
        "tok/s": test.n / seconds,
        "at work": ", ".join(f"{part:.0%}" for part in parts),
        "on average": sum(parts),
    }
