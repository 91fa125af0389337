"""``localllm doctor``: show the state of the installation and the hardware, with advice on each problem.

A check must not fail: an exception in a check becomes a finding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.parser import Command, flag
from localllm.cli.shared_flags import JSON
from localllm.console import LoadStatus, quantity, visible_line, warn
from localllm.errors import DeviceError, LocalLLMError
from localllm.kernels.cpu import host
from localllm.kernels.cpu.control_groups import cpu_quota
from localllm.kernels.cuda.installation import driver_cuda
from localllm.loading.progress import of_stage
from localllm.options.declared import in_flags
from localllm.shell import join_command
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.kernels.cpu.target import Target

#: Required packages: distribution and module.
PACKAGES = {
    name: {"llvmlite": "llvmlite.binding", "markdown-it-py": "markdown_it", "pillow": "PIL"}.get(name, name)
    for name in (
        *("numpy", "numba", "llvmlite", "gguf", "llguidance", "sentencepiece", "tokenizers", "huggingface_hub"),
        *("jinja2", "rich", "pygments", "psutil", "tomlkit", "platformdirs", "msgspec", "textual", "markdown-it-py"),
        "pillow",
    )
}

#: Packages for computing on GPUs, for each version of CUDA.
CUDA_PACKAGES = (
    ("cupy-cuda13x", "cuda-toolkit[nvrtc,cudart]==13.*"),
    ("cupy-cuda12x", "cuda-toolkit[nvrtc,cudart]==12.*"),
)

#: Processor features (LLVM's names) that kernels use, and features that they could use.
FEATURES = (
    *("avx", "avx2", "fma", "f16c", "bmi2", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    *("neon", "dotprod", "i8mm"),
)
UNUSED_FEATURES = ("avxvnniint8", "avx512bf16", "amx-int8", "amx-bf16", "fullfp16", "bf16", "sve", "sve2")


@dataclass(frozen=True)
class Finding:
    name: str  # subject of the check
    value: str  # result, as text
    advice: str | None = None  # how to fix the problem; None if there is no problem
    broken: bool = False  # localllm cannot run models before this is fixed
    group: str = ""  # "software", "processor", …


#: Findings that are shown without -v, in addition to findings with advice.
_BRIEF = {
    *("localllm", "Python", "processor", "cores", "kernels for", "kernel test", "default threads"),
    *("memory", "NVIDIA GPU", "NVIDIA driver"),
}


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, or with ``--list-devices`` only the devices."""
    if "devices" in arguments:
        return _list_devices()
    with LoadStatus(enabled=not arguments.json) as progress:
        results = list(findings(progress))
    broken = any(finding.broken for finding in results)
    if arguments.json:
        rows = [{"group": finding.group, **asdict(finding)} for finding in results]
        print(json.dumps({"ok": not broken, "findings": rows}, ensure_ascii=False))
    else:
        for line in report(results, brief=not arguments.verbose):
            print(visible_line(line))
    return int(broken)


def report(results: list[Finding], *, brief: bool) -> Iterator[str]:
    """Yield the findings as lines of text; if ``brief``, only the important ones, without their groups."""
    n_broken = sum(finding.broken for finding in results)
    n_all = len(results)
    if brief:
        results = [finding for finding in results if finding.name in _BRIEF or finding.advice or finding.broken]
    width = max(len(finding.name) for finding in results)
    group = ""
    for finding in results:
        if finding.group != group:
            group = finding.group
            if not brief:
                yield group
        mark = "x" if finding.broken else "!" if finding.advice else " "
        yield f"{mark} {finding.name:<{width}}  {finding.value}"
        if finding.advice:
            yield f"  {'':<{width}}  -> {finding.advice}"
    yield ""
    if len(results) < n_all:
        yield f"localllm doctor -v shows all {n_all}"
    are = "is" if n_broken == 1 else "are"
    yield (f"localllm cannot run here: {n_broken} of these {are} broken (x)" if n_broken else "localllm can run here")


def findings(progress: LoadStatus | None = None) -> Iterator[Finding]:
    """Run all checks and yield their findings, in the order of the report."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("software", _software),
        ("packages", _packages),
        ("processor", _processor),
        ("kernels", lambda: _kernels(progress)),
        ("memory", _memory),
        ("GPUs", _gpus),
    )
    for group, check in checks:
        try:
            yield from (replace(finding, group=group) for finding in check())
        except Exception as error:
            advice = host.memory_advice() if _has_small_address_space() else "install localllm again"
            yield Finding("check", f"failed: {_error_text(error)}", advice, broken=True, group=group)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, LocalLLMError) else f"{type(error).__name__}: {error}"


def _pip(packages: str) -> str:
    return f"{join_command([sys.executable])} -m pip install {packages}"


# -- Software ------------------------------------------------------------------------------------------------------


def _software() -> Iterator[Finding]:
    from importlib import resources  # imported here: `localllm --help` reads every command

    yield Finding("localllm", f"{__version__}, in {Path(__file__).parents[1]}")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Finding("Python", f"{platform.python_version()} ({platform.python_implementation()}), {system}")
    exists = (resources.files("localllm") / "data" / "demo.gguf").is_file()
    advice = None if exists else "name a GGUF file with -m, or install localllm again"
    yield Finding("demo model", "installed" if exists else "missing", advice)


def _packages() -> Iterator[Finding]:
    for distribution, module in PACKAGES.items():
        version = _version(distribution)
        try:
            importlib.import_module(module)
        except Exception as error:  # a binary package can fail in any way
            state = "missing" if version is None else f"{version}, which cannot be imported ({_error_text(error)})"
            advice = _pip(distribution if version is None else f"--force-reinstall {distribution}")
            if _has_small_address_space():
                advice = host.memory_advice()
            yield Finding(distribution, state, advice, broken=True)
        else:
            yield Finding(distribution, version or "installed, version unknown")


def _has_small_address_space() -> bool:
    """Return whether the address space is limited too much to load libraries."""
    limit = host.address_space_limit()
    return limit is not None and limit < host.MIN_ADDRESS_SPACE


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# -- Processor -----------------------------------------------------------------------------------------------------


def _processor() -> Iterator[Finding]:
    from localllm.kernels.cpu.target import available

    yield Finding("processor", host.cpu_model())
    yield Finding("cores", _cores())
    available_features = host.features()
    used, unused = (", ".join(n for n in names if n in available_features) for names in (FEATURES, UNUSED_FEATURES))
    yield Finding("features", (used or "none that the kernels use") + (unused and f"; not used: {unused}"))
    yield Finding("instruction sets", ", ".join(target.name for target in available()))
    yield _target_finding()


def _target_finding() -> Finding:
    from localllm.kernels.cpu.target import ISA_VARIABLE, available, choose

    forced = os.environ.get(ISA_VARIABLE)
    best = available()[0].name
    try:
        name = choose().name
    except LocalLLMError as error:
        advice = f"unset the environment variable {ISA_VARIABLE}"
        return Finding("kernels for", f"none: {error}", advice, broken=True)
    if forced and name != best:
        advice = f"unset the environment variable {ISA_VARIABLE}: kernels for {best} are faster"
        return Finding("kernels for", f"{name}, forced by {ISA_VARIABLE}", advice)
    slow = "slow: localllm has no kernels for this processor's vector instructions" if name == "generic" else None
    return Finding("kernels for", f"{name}, forced by {ISA_VARIABLE}" if forced else name, slow)


def _cores() -> str:
    import psutil

    physical, logical = psutil.cpu_count(logical=False) or "unknown", psutil.cpu_count() or "unknown"
    return f"{physical} physical, {logical} logical, {host.usable_cpus()} usable by this process"


# -- Kernels -------------------------------------------------------------------------------------------------------


def _kernels(progress: LoadStatus | None) -> Iterator[Finding]:
    from localllm.kernels.code_cache import CACHE_VARIABLE, cache_fault, cache_root
    from localllm.kernels.cpu.target import choose

    folder, fault = cache_root(), cache_fault()
    advice = f"free disk space, allow writing, or name another folder in the environment variable {CACHE_VARIABLE}"
    location = "a folder in the home folder, which does not exist" if folder is None else str(folder)
    state = f", which cannot be written ({fault}): every process compiles the kernels again" if fault else ""
    yield Finding("cache", f"{location}{state}", advice if fault else None)
    try:
        target = choose()
    except LocalLLMError:  # reported by the processor's checks
        yield Finding("kernel test", "not run: there is no instruction set to compile for")
        return
    compiling = None if progress is None else of_stage(progress, "kernels")
    test = _kernel_test(target, compiling)
    yield test
    if not test.broken:  # the measurements use the same kernel
        yield from _threads(target, compiling)


def _threads(target: Target, compiling: Callable[[int, int], None] | None) -> Iterator[Finding]:
    """Report the default number of threads and its measurements."""
    from localllm.kernels.cpu.thread_choice import choose_threads

    choice = choose_threads(target, compiling)
    quota = cpu_quota()
    granted = "" if quota is None else f" (a control group limits this process to {quota:g} processors)"
    yield Finding("default threads", f"{choice.decode} to decode, {choice.cores} for prompts{granted}")
    if choice.curve:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(choice.measured))
        curve = ", ".join(f"{n}: {quantity(rate, 'B/s')}" for n, rate in choice.curve)
        advice = None
        if choice.is_disturbed:
            advice = f"other programs kept {choice.other_cpus:.1f} processors busy: close them and run this again"
        yield Finding("decoded by threads", f"{curve} (measured {when})", advice)


def _kernel_test(target: Target, compiling: Callable[[int, int], None] | None) -> Finding:
    """Compile a kernel or load it from the cache, run it on all threads, and check the result."""
    import numpy as np

    from localllm.kernels.cpu.program import Workers
    from localllm.kernels.cpu.roofline import UNIT, ReadTest, frames_work

    workers = Workers(host.default_threads())
    try:
        test = ReadTest(workers, target, 64 * UNIT, compiling)
        test.bandwidth()
        is_right = frames_work(workers, target, compiling)
    except Exception as error:  # LLVM and the processor can fail in any way
        advice = "report this error; --device reference works without kernels but is slow; or install localllm again"
        return Finding("kernel test", f"failed: {_error_text(error)}", advice, broken=True)
    finally:
        workers.close()
    if not is_right or test.total() != int(test.data.sum(dtype=np.uint64)) % (1 << 32):
        advice = "report this error: do not trust results"
        return Finding("kernel test", "a kernel computed a wrong result", advice, broken=True)
    return Finding("kernel test", f"passed, on {workers.n} thread{'s' * (workers.n != 1)}")


# -- Memory and GPUs -----------------------------------------------------------------------------------------------


def _memory() -> Iterator[Finding]:
    import psutil

    from localllm.loading.placement import OVERHEAD_BYTES

    total, available = psutil.virtual_memory().total, host.available_memory()
    has_room = available >= 2 * OVERHEAD_BYTES
    advice = None if has_room else f"{host.memory_advice()}: hardly any model fits in this memory"
    yield Finding("memory", f"{quantity(total, 'B')}, {quantity(available, 'B')} available", advice)


def _gpus() -> Iterator[Finding]:
    names = nvidia_gpus()
    if not names and not has_nvidia_driver():
        yield Finding("NVIDIA GPU", "none found")
        return
    advice = _gpu_advice()
    for name in names:
        yield Finding("NVIDIA GPU", name, advice)
    if not names:
        yield Finding("NVIDIA driver", "installed, but nvidia-smi lists no GPU", advice)


def _gpu_advice() -> str | None:
    """Return how to enable computing on GPUs, or None if it works."""
    if not any(_version(cupy) for cupy, _ in CUDA_PACKAGES):
        new, old = (_pip(f'{cupy} "{toolkit}"') for cupy, toolkit in CUDA_PACKAGES)
        return f"to compute on it: {new} (with a driver before 580: {old})"
    try:
        check_gpus()
    except DeviceError as error:
        return error.worded(in_flags)
    return None


def check_gpus() -> None:
    """Raises DeviceError if CUDA finds no GPU, or a GPU that localllm cannot use."""
    from localllm.kernels.cuda.cupy_driver import open_driver
    from localllm.kernels.cuda.driver import check_capability

    driver = open_driver()
    for index in range(driver.device_count):
        check_capability(index, driver.properties(index))


def nvidia_gpus() -> list[str]:
    """Return the name, driver and memory of each GPU that ``nvidia-smi`` lists."""
    query = "--query-gpu=name,driver_version,memory.total"
    lines = host.program_output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    return [line.strip() for line in lines if line.count(",") == 2]


def has_nvidia_driver() -> bool:
    """Return whether the driver or its library is installed."""
    return driver_cuda() is not None or Path("/proc/driver/nvidia/version").exists()


def _list_devices() -> int:
    from localllm.kernels.cuda.cupy_driver import open_driver

    memory = next(_memory())
    print(f"cpu     {host.cpu_model()}, {_cores()}; {memory.value}")
    if has_nvidia_driver():
        try:
            driver = open_driver()
            for index in range(driver.device_count):
                free = quantity(driver.memory_info(index).free, "B")
                print(f"cuda:{index}  {visible_line(driver.properties(index).name)}, {free} of memory free")
        except DeviceError as error:
            warn(error.worded(in_flags))
    return 0


COMMAND = Command(
    "[-v] [--json]",
    "check the installation and the hardware, with advice on each problem",
    [flag("-v --verbose", "show every finding"), JSON],
    run,
)
