"""The compiler of kernels: errors, instruction sets, and the cache that processes share."""

from __future__ import annotations

import ctypes
import errno
import importlib
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import KernelError, NotEnoughMemoryError
from localllm.kernels.code_cache import cache_fault, cache_root
from localllm.kernels.cpu import matmul
from localllm.kernels.cpu.codes import load_bits, lut_op
from localllm.kernels.cpu.compiler import (
    Variant,
    addresses,
    assembly,
    kernel,
    variant,
)
from localllm.kernels.cpu.dots import dot32_s8, dot32_u4
from localllm.kernels.cpu.simd import load_f32, load_i64, store_atomic, store_f32, store_f32x16, to_float, zero_i32x16
from localllm.kernels.cpu.target import ISA_VARIABLE, TARGETS, Target, available, choose
from localllm.kernels.cpu.templates import device, static_range
from localllm.kernels.cpu.tiles import TILES
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType
from tests.helpers.other_system import use_folders_of
from tests.helpers.tiny_models import tiny_gguf

ROOT = Path(localllm.__file__).resolve().parents[1]

targets = pytest.mark.parametrize("target", available(), ids=lambda t: t.name)


@device
def weighted(x, w):
    return x * w


@kernel
def scale_and_add(begin, end, x, y, weight: float, addend: float):
    """Set y[i] = weight * x[i] + N * addend, in float32."""
    for i in range(begin, end):
        value = weighted(load_f32(x + 4 * i), weight)
        for _ in static_range(N):
            value += addend
        store_f32(y + 4 * i, value)


def call(v: Variant, *arguments: float, end: int) -> None:
    """Run units 0 … end - 1 of a kernel."""
    packed = b"".join(struct.pack("<f4x" if isinstance(a, float) else "<q", a) for a in arguments)
    memory = ctypes.create_string_buffer(packed)
    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(addresses([v])[v])
    entry(ctypes.addressof(memory), 0, end)


@targets
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_kernel_computes_the_results_of_its_python_code(target: Target, n: int) -> None:
    x, y = np.arange(10, dtype=np.float32), np.full(10, -1, np.float32)
    call(variant(scale_and_add, target, N=n), x.ctypes.data, y.ctypes.data, 0.5, 0.25, end=7)
    np.testing.assert_array_equal(y[:7], 0.5 * x[:7] + n * 0.25)
    np.testing.assert_array_equal(y[7:], -1)


def test_variants_differ_by_target_and_constants() -> None:
    first, second = (variant(scale_and_add, t, N=n) for t, n in ((TARGETS[0], 1), (TARGETS[1], 1)))
    symbols = {first.symbol, second.symbol, variant(scale_and_add, TARGETS[0], N=2).symbol}
    assert len(symbols) == 3
    assert variant(scale_and_add, TARGETS[0], N=1, M=2) == variant(scale_and_add, TARGETS[0], M=2, N=1)
    assert first == variant(scale_and_add, TARGETS[0], N=1)


# -- Errors --------------------------------------------------------------------------------------------------------


@kernel
def calls_nothing_known(begin, end, x):
    unheard_of(x)


@kernel
def mixes_types(begin, end, x):
    store_f32(x, load_i64(x) + load_f32)


@kernel
def calls_a_library(begin, end, x):
    store_f32(x, math.erf(load_f32(x)))


@kernel
def is_fine(begin, end, x):
    store_atomic(x, load_i64(x) + 1)


@pytest.mark.parametrize("broken", [calls_nothing_known, mixes_types, calls_a_library], ids=lambda k: k.name)
def test_a_kernel_that_does_not_compile_is_named(broken: Any) -> None:
    with pytest.raises(KernelError, match=broken.name):
        addresses([variant(broken, choose())])


def test_other_kernels_compile_after_a_failure() -> None:
    number = np.zeros(1, np.int64)
    with pytest.raises(KernelError):
        addresses([variant(is_fine, choose()), variant(calls_nothing_known, choose())])
    call(variant(is_fine, choose()), number.ctypes.data, end=1)
    assert number[0] == 1


# -- Instruction sets ----------------------------------------------------------------------------------------------


@kernel
def compiled_with_little_memory(begin, end, x):
    store_f32(x, 2.0)


def test_compiling_is_refused_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))  # an empty cache
    wanted = [variant(compiled_with_little_memory, choose())]
    with monkeypatch.context() as short:
        short.setattr("localllm.kernels.cpu.host._system_memory", lambda: 40 << 20)
        with pytest.raises(NotEnoughMemoryError, match=r"^to compile kernels .* takes .* is available: "):
            addresses(wanted)
    there = addresses(wanted)
    monkeypatch.setattr("localllm.kernels.cpu.host._system_memory", lambda: 0)
    assert addresses(wanted) == there


@kernel
def products(begin, end, x, w, y):
    """Codes of both kinds, and a table."""
    for v in static_range(8):
        code[v] = load_bits(w + 64 * v, 0, 15)
    sums = dot32_u4(zero_i32x16(), *code[0:8], x)
    for v in static_range(8):
        code[v] = LOOK_UP(code[v])
    store_f32x16(y, to_float(dot32_s8(sums, *code[0:8], x, sums)))


@pytest.mark.skipif(available()[0].family == "aarch64", reason="this LLVM compiles for Arm only")
@pytest.mark.parametrize(
    ("isa", "expected", "forbidden"),
    [
        ("avx512vnni", ["vpdpbusd", "vpshufb", "zmm"], ["vpmaddubsw"]),
        ("avx512", ["vpmaddubsw", "vpshufb", "zmm"], ["vpdpbusd"]),
        ("avxvnni", ["vpdpbusd", "vpshufb", "ymm"], ["zmm", "vpmaddubsw"]),
        ("avx2", ["vpmaddubsw", "vpshufb", "ymm"], ["zmm", "vpdpbusd"]),
        ("generic", ["pmull"], ["ymm", "zmm", "pshufb"]),
    ],
)
def test_products_use_the_instructions_of_their_target(isa: str, expected: list[str], forbidden: list[str]) -> None:
    """The test reads the code, so this processor need not support the instructions."""
    target = next(t for t in TARGETS if t.name == isa)
    code = assembly(variant(products, target, LOOK_UP=lut_op(range(16))), "x86_64-unknown-linux-gnu")
    assert "\tcall" not in code
    for word in expected:
        assert word in code
    for word in forbidden:
        assert word not in code


@pytest.mark.skipif(available()[0].family == "aarch64", reason="this LLVM compiles for Arm only")
@pytest.mark.parametrize("name", ["Q4_0", pytest.param("Q4_K", marks=pytest.mark.ci)])
def test_activations_of_a_batch_are_not_spilled(name: str) -> None:
    """Products read the eighty activations of eight tokens from memory, without slow copies on the stack."""
    target = next(t for t in TARGETS if t.name == "avx2")
    tile, layout = TILES[GGMLType[name]], LAYOUTS[GGMLType[name]]
    constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, "HEADS": False, **tile.constants}
    code = assembly(variant(matmul.matmul_quantised, target, **constants), "x86_64-unknown-linux-gnu")
    read = re.findall(r"\tvp?broadcast\w+\s+-?\d*\(%r", code)
    kept = re.findall(r"\tvp?broadcast\w+\s+-?\d*\(%r.*\n\tvmov\w+\s+%ymm\d+, -?\d*\(%rsp\)", code)
    assert len(read) > 100
    assert len(kept) < 25


# -- The cache -----------------------------------------------------------------------------------------------------

PROBE = """
    import ctypes, sys
    import numpy as np
    from localllm.kernels.cpu.compiler import addresses, kernel, variant
    from localllm.kernels.cpu.simd import load_i64, store_atomic
    from localllm.kernels.cpu.target import choose

    @kernel
    def probe(begin, end, x):
        store_atomic(x, load_i64(x) + 10 * N + {addend})

    variants = [variant(probe, choose(), N=n) for n in range(int(sys.argv[1]))]
    progress = []
    code = addresses(variants, lambda done, total: progress.append((done, total)))
    results = []
    for v in variants:
        number = np.zeros(1, np.int64)
        arguments = np.array([number.ctypes.data])
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code[v])(arguments.ctypes.data, 0, 1)
        results.append(int(number[0]))
    is_bare = "numba" not in sys.modules and (not {links} or "llvmlite.binding" not in sys.modules)
    print(results, progress, not is_bare, sep=";")
"""


#: Whether kernels can be linked without LLVM.
LINKS = sys.platform == "linux" and platform.machine() == "x86_64"


class Probe:
    """Compiles and runs small kernels in a separate process with a separate cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"

    def start(self, *, count: int = 1, addend: int = 1, isa: str = "") -> Any:
        script = self.folder / "probe.py"
        script.write_text(textwrap.dedent(PROBE.format(addend=addend, links=LINKS)))
        return subprocess.Popen(
            [sys.executable, str(script), str(count)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LOCALLLM_CACHE": str(self.cache), ISA_VARIABLE: isa},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def finish(process: Any) -> tuple[list[int], list[tuple[int, int]], bool]:
        """Return the results, the reported progress, and whether numba or an unneeded part of LLVM was imported."""
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        results, progress, numba = (eval(part) for part in out.strip().split(";"))
        return results, progress, numba

    def run(self, **settings: Any) -> tuple[list[int], list[tuple[int, int]], bool]:
        return self.finish(self.start(**settings))

    def files(self) -> list[Path]:
        return sorted(path for path in self.cache.rglob("*") if path.is_file())


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path)


def test_kernels_are_compiled_once_and_then_loaded_without_numba(probe: Probe) -> None:
    assert probe.run(count=2) == ([1, 11], [(0, 2), (1, 2), (2, 2)], True)
    assert probe.run(count=2) == ([1, 11], [], False)
    # Add a variant, then change the source of the kernel.
    assert probe.run(count=3, addend=2) == ([2, 12, 22], [(0, 3), (1, 3), (2, 3), (3, 3)], True)
    assert len(probe.files()) == 5


def test_damaged_files_are_compiled_and_written_again(probe: Probe) -> None:
    probe.run(count=7)
    files = probe.files()
    content = [path.read_bytes() for path in files]
    files[0].write_bytes(b"")
    files[1].write_bytes(content[1][:-7])
    files[2].write_bytes(b"not an object file" * 100)
    files[3].write_bytes(content[3][:300] + bytes([content[3][300] ^ 1]) + content[3][301:])
    files[4].write_bytes(content[4][32:])  # the object without its header
    files[5].write_bytes(content[6])  # a valid file of another kernel
    results, progress, _ = probe.run(count=7)
    assert results == [1, 11, 21, 31, 41, 51, 61]
    assert progress[-1] == (6, 6)
    assert files[6].read_bytes() == content[6]
    assert probe.run(count=7) == (results, [], False)
    assert probe.files() == files


def test_another_processors_kernels_are_not_run(probe: Probe) -> None:
    """Machines share a home, or files of another machine have the names of this machine."""
    best, *_, last = [target.name for target in available()]
    assert probe.run(isa=last)[1]
    others = probe.files()
    assert probe.run(isa=best) == ([1], [(0, 1), (1, 1)], True)
    (own,) = set(probe.files()) - set(others)
    own.write_bytes(others[0].read_bytes())
    assert probe.run(isa=best) == ([1], [(0, 1), (1, 1)], True)
    assert probe.run(isa=best) == ([1], [], False)


def test_processes_may_compile_at_once(probe: Probe) -> None:
    running = [probe.start(count=2) for _ in range(2)]
    assert all(probe.finish(process)[0] == [1, 11] for process in running)
    assert [path.suffix for path in probe.files()] == [".o", ".o"]


@pytest.mark.parametrize("place", ["file", "file/cache"])
def test_kernels_work_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / place))
    x = np.ones(3, np.float32)
    with pytest.warns(UserWarning, match="cannot be saved in"):
        call(variant(scale_and_add, choose(), N=len(place)), x.ctypes.data, x.ctypes.data, 2.0, 1.0, end=3)
    np.testing.assert_array_equal(x, 2 + len(place))
    assert (tmp_path / "file").read_text() == "no folder"


def test_changed_sources_use_another_cache(tmp_path: Path) -> None:
    for room in ("localllm", "kernels", "quant", "models"):
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=ignored)
    script = """
        import sys
        from localllm.kernels.cpu import compiler

        for name in sys.argv:
            if name != "-c":
                with open(name, "a") as file:
                    file.write("# one line more")
            compiler.fingerprint.cache_clear()
            print(compiler._folder())
    """
    needed = ("kernels/cpu/simd.py", "kernels/cache_rounding.py", "quant/bit_packing.py", "quant/packing.py")
    command = [sys.executable, "-c", textwrap.dedent(script), *needed, "quant/encode.py"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    folders = done.stdout.split()
    assert len(set(folders[:-1])) == 1 + len(needed)
    assert folders[-1] == folders[-2]  # kernels do not depend on the last file


def test_progress_may_compile_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called without a lock, so the callback and other threads can compile."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    first, second, third = (variant(scale_and_add, choose(), N=n) for n in (20, 21, 22))
    found: list[Variant] = []

    def progress(done: int, total: int) -> None:
        if not found:
            other = threading.Thread(target=lambda: found.extend(addresses([second, third])), daemon=True)
            other.start()
            other.join(30)
            found.extend(addresses([third]))

    assert addresses([first, second], progress).keys() == {first, second}
    assert found == [second, third, third]


@pytest.mark.filterwarnings("ignore:compiled kernels cannot be saved")
def test_an_error_in_progress_keeps_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache is not writable."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "file"))
    kernels = [variant(scale_and_add, choose(), N=n) for n in (30, 31, 32)]
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        addresses(kernels, stop)
    addresses(kernels, lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (0, 1), (1, 1)]
    x = np.ones(3, np.float32)
    call(kernels[1], x.ctypes.data, x.ctypes.data, 2.0, 1.0, end=3)
    np.testing.assert_array_equal(x, 2 + 31)


def test_whether_the_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    for place, fault in (("new/cache", None), ("file", "Not a directory"), ("file/cache", "Not a directory")):
        monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / place))
        found = cache_fault()
        assert found == fault if sys.platform == "linux" else bool(found) is bool(fault)


@pytest.mark.skipif(sys.platform == "win32", reason="limits are of POSIX")
def test_a_full_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files has the effect of a full disk."""
    import resource

    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        assert cache_fault() == os.strerror(errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cache_fault() is None


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALLLM_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_root() is None
    assert cache_fault() == "this user has no home"
    x = np.ones(3, np.float32)
    with pytest.warns(UserWarning, match="cannot be saved in a folder in the home .this user has no home."):
        call(variant(scale_and_add, choose(), N=40), x.ctypes.data, x.ctypes.data, 2.0, 1.0, end=3)
    np.testing.assert_array_equal(x, 42)


def test_a_cache_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The library and the command line both warn, once per process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "file" / "cache"))
    model = tiny_gguf(tmp_path / "model.gguf")
    for _ in range(2):
        localllm.load(model, device="cpu").close()
        addresses([variant(scale_and_add, choose(), N=41 + len(recwarn))])
    (warning,) = recwarn
    assert re.fullmatch(
        r"compiled kernels cannot be saved in .*file/cache \(Not a directory\), so every start compiles them: free "
        "space there if it is full, or set the environment variable LOCALLLM_CACHE to a writable folder",
        str(warning.message),
    )
    assert warning.filename == __file__


def test_caches_unused_for_a_month_are_removed(probe: Probe) -> None:
    """Other folders and files stay."""
    now = time.time()
    ages = {
        "0123456789abcdef": 31,
        "fedcba9876543210": 29,
        "0000000000000000": 31,
        "notes": 99,
        "0123456789ABCDEF": 99,
    }
    for name, days in ages.items():
        folder = probe.cache / name
        folder.mkdir(parents=True)
        for file in ("kernel-avx2-1.o", "tmpabc"):
            (folder / file).write_text("old")
        if name == "0000000000000000":
            (folder / "diary.txt").write_text("mine")
        os.utime(folder, (now - 86400 * days,) * 2)
    (probe.cache / "1111111111111111").write_text("a file")
    probe.run()
    left = {path.name for path in probe.cache.iterdir()}
    (own,) = left - {*ages, "1111111111111111"}
    assert left == {own, "fedcba9876543210", "0000000000000000", "notes", "0123456789ABCDEF", "1111111111111111"}
    assert [path.name for path in (probe.cache / "0000000000000000").iterdir()] == ["diary.txt"]
    assert len(list((probe.cache / "notes").iterdir())) == 2
    # A used cache stays, even without new files.
    os.utime(probe.cache / own, (now - 86400 * 31,) * 2)
    assert probe.run() == ([1], [], False)
    assert (probe.cache / own).stat().st_mtime > now - 86400


def test_kernels_work_after_the_cache_was_removed(probe: Probe) -> None:
    process = probe.start(count=6)
    while process.poll() is None:
        shutil.rmtree(probe.cache, ignore_errors=True)
        time.sleep(0.001)
    assert probe.finish(process)[0] == [1, 11, 21, 31, 41, 51]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/home/me/.cache/localllm/kernels"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/localllm/kernels"),
        ("darwin", {}, "/home/me/Library/Caches/localllm/kernels"),
        ("win32", {}, "/home/me/AppData/Local/localllm/kernels"),
        ("linux", {"XDG_CACHE_HOME": "/xdg", "LOCALLLM_CACHE": "own"}, "own"),
    ],
)
def test_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    use_folders_of(platform, monkeypatch.setattr)
    for name in ("XDG_CACHE_HOME", "LOCALLLM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


TWIN = """
from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.simd import load_i64, store_atomic
from localllm.kernels.cpu.templates import device

@device
def change(x):
    return x {change}

@kernel
def twin(begin, end, x):
    store_atomic(x, change(load_i64(x)))

@kernel
def caller(begin, end, x):
    store_atomic(x, CHANGE(load_i64(x)))
"""


def test_kernels_of_the_same_name_in_different_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a constant has the name: the name and the code of the constant identify machine code."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, change in (("twin_plus", "+ 7"), ("twin_times", "* 100")):
        (tmp_path / f"{name}.py").write_text(TWIN.format(change=change))
    plus, times = importlib.import_module("twin_plus"), importlib.import_module("twin_times")
    number = np.ones(1, np.int64)
    for module, expected in ((plus, 8), (times, 800), (plus, 807)):
        call(variant(module.twin, choose()), number.ctypes.data, end=1)
        assert number[0] == expected
    number[0] = 1
    for module, expected in ((plus, 8), (times, 800), (plus, 807)):
        call(variant(plus.caller, choose(), CHANGE=module.change), number.ctypes.data, end=1)
        assert number[0] == expected
    assert len(list((tmp_path / "cache").rglob("*.o"))) == 4
