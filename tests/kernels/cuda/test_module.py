"""The compilation of CUDA sources: flat sources, options, errors, and the cache on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.errors import DeviceError, KernelError
from localllm.kernels.buffers import Buffer
from localllm.kernels.cuda import module as loader
from localllm.kernels.cuda.calls import DeviceRows
from localllm.kernels.cuda.driver import Launch
from localllm.kernels.cuda.module import (
    FOLDER,
    ModuleCompiler,
    architecture,
    compile_source,
    flat_source,
    kernel_arguments,
    kernel_parameters,
    options,
    with_arguments,
)
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.fake_cupy import FakeNVRTC
from tests.kernels.cuda.conftest import SOURCES

ROTATE_BACK = Launch("append", "rotate_back", {}, (1,), (32,))
CONSTANT = 'extern "C" __global__ void constant(int* x) { *x = VALUE; }\n'


def write(folder: Path, **files: str) -> Path:
    """Write sources; the keyword ``name_cu`` is the file name.cu."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "room" / "cuda"
    folder.parent.mkdir()
    return folder


@pytest.fixture
def binding() -> Any:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    from cupy.cuda import nvrtc as found

    return found


# -- The source ----------------------------------------------------------------------------------------------------


def test_a_flat_source(sources: Path) -> None:
    write(
        sources,
        a_cu='#include "b.cuh"\nint a;\n  #  include "c.cuh"  // again\nint end;\n',
        b_cuh='#pragma once\n#include "c.cuh"\nint b;',
        c_cuh="#pragma once\n#if 1\nint c;\n#endif\n",
    )
    assert flat_source("a", sources).splitlines() == [
        '#line 1 "room/cuda/a.cu"',
        '#line 1 "room/cuda/b.cuh"',
        "",
        '#line 1 "room/cuda/c.cuh"',
        "",
        "#if 1",
        "int c;",
        "#endif",
        '#line 3 "room/cuda/b.cuh"',
        "int b;",
        '#line 2 "room/cuda/a.cu"',
        "int a;",
        '#line 4 "room/cuda/a.cu"',
        "int end;",
    ]


def test_a_header_that_is_not_there(sources: Path) -> None:
    write(sources, a_cu='#include "none.cuh"')
    with pytest.raises(KernelError, match=r"the CUDA source none\.cuh cannot be read"):
        flat_source("a", sources)


@pytest.mark.parametrize("name", ["../a", "a.cu", "", "A"])
def test_names_of_modules(sources: Path, name: str) -> None:
    with pytest.raises(KernelError, match="is not the name of a CUDA module"):
        flat_source(name, sources)


def test_parameters_are_read_from_the_source() -> None:
    assert list(kernel_parameters("append")["rotate_back"]) == ["header", "n_heads", "out", "out_stride"]
    tiles = ["units", "scales", "n_rows", "n_tokens", "n_tiles"]
    matrices = [f"{name}{i}" for i in range(3) for name in ("weights", "bias", "residual", "y", "n_out", "stride")]
    experts = ["k", "share", "experts", "places"]
    assert list(kernel_parameters("matvec")["matvec"]) == [*tiles, *matrices]
    assert list(kernel_parameters("matvec")["matvec_experts"]) == [*tiles, *experts, *matrices]
    types = {name: type.name for name, type in kernel_parameters("pack")["pack"].items()}
    assert types["row_bytes"] == types["n_rows"] == "an int"
    assert types["rows"] == "a pointer"


def test_arguments_are_converted_and_ordered_as_declared() -> None:
    q = DeviceRows(buffer=Buffer(256), width=5, slot=0)
    assert with_arguments(ROTATE_BACK, n_heads=3, out=q, header=None).arguments == (0, 3, q.buffer, 32)
    header, n_heads, out, stride = with_arguments(ROTATE_BACK, n_heads=3, out=None, header=q.buffer).arguments
    assert (header, out) == (q.buffer, 0)
    assert [type(x) for x in (n_heads, out, stride)] == [np.int32, np.uint64, np.int32]
    sizes = {"n_rows": 1, "row_bytes": 1 << 40, "n_in": 2, "n_tiles": 3}
    packed = kernel_arguments("pack", "pack", rows=None, packed=None, **sizes)
    assert [type(x) for x in packed] == [np.uint64, np.uint64, np.int32, np.int64, np.int32, np.int32]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"header": None}, "but arguments are missing: n_heads, out, out_stride$"),
        ({"header": None, "heads": 3, "out": None}, "but arguments are missing: n_heads; unknown: heads$"),
        ({"header": None, "n_heads": 3.0, "out": None}, r"takes n_heads as an int, not 3\.0$"),
        ({"header": 1, "n_heads": 3, "out": None}, "takes header as a pointer, not 1$"),
    ],
)
def test_arguments_of_a_wrong_name_or_type_are_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(KernelError, match=f"the kernel rotate_back .*{fault}"):
        with_arguments(ROTATE_BACK, **arguments)


def test_options() -> None:
    chosen = options({"TOKENS": 4, "FORMAT": "Q4_0"}, "sm_86")
    assert chosen[-3:] == ("-arch=sm_86", "-DFORMAT=Q4_0", "-DTOKENS=4")
    assert set(chosen[:-3]) == set(loader.OPTIONS)


@pytest.mark.parametrize(
    ("capability", "supported", "expected"),
    [
        ((8, 6), (75, 80, 86, 90), "sm_86"),
        ((12, 1), (75, 80, 90, 120), "compute_120"),  # drivers compile PTX for newer devices
        ((8, 9), (75, 80, 90), "compute_80"),
    ],
)
def test_the_architecture_for_a_device(
    capability: tuple[int, int], supported: tuple[int, ...], expected: str
) -> None:
    assert architecture(capability, supported) == expected


def test_a_device_that_nvrtc_no_longer_supports() -> None:
    with pytest.raises(DeviceError, match=r"for compute capability 8\.0 and above, but the device has 7\.5"):
        architecture((7, 5), (80, 90))


# -- NVRTC ---------------------------------------------------------------------------------------------------------


def test_every_source_of_ours_is_flat() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.cu"))
    for name in names:
        assert "#include" not in flat_source(name), name


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_every_source_compiles(binding: Any, architecture: str) -> None:
    source = flat_source("arithmetic", SOURCES)
    compiled = compile_source(source, "arithmetic", options({}, architecture), binding)
    assert compiled.binary.startswith(b"\x7fELF")
    assert compiled.log == ""


def test_common_compiles_alone(binding: Any) -> None:
    """A source may include common.cuh without using its functions."""
    source = "".join(loader._flatten("common.cuh", FOLDER, set()))
    compiled = compile_source(source + CONSTANT, "common", options({"VALUE": 1}, "sm_75"), binding)
    assert compiled.log == ""


def test_ptx_and_the_log(binding: Any) -> None:
    source = flat_source("arithmetic", SOURCES)
    ptx = compile_source(source, "arithmetic", options({"STEP": 3}, "compute_80"), binding).binary.decode()
    assert ".target sm_80" in ptx
    assert 'sources/arithmetic.cu"' in ptx  # line numbers of the real file
    log = compile_source(source, "a", (*options({}, "sm_80"), "--ptxas-options=-v"), binding).log
    assert "Compiling entry function 'reverse' for 'sm_80'" in log


def test_errors_name_the_real_file(sources: Path, binding: Any) -> None:
    wrong = "\n".join(f"int f{i}() {{ return unknown{i}; }}" for i in range(5))
    write(sources, a_cu='#include "b.cuh"\n\nint x = ;\n', b_cuh=f"// first\nstatic int unused;\n{wrong}\n")
    with pytest.raises(KernelError) as caught:
        compile_source(flat_source("a", sources), "a", options({}, "sm_80"), binding)
    text = str(caught.value)
    assert text.startswith("the CUDA module a does not compile with NVRTC 1")
    assert "-arch=sm_80" in text
    assert 'room/cuda/b.cuh(3): error: identifier "unknown0" is undefined' in text
    assert "unknown2" in text


# -- The cache -----------------------------------------------------------------------------------------------------


class CountingNVRTC(FakeNVRTC):
    def __init__(self, version: int = 0) -> None:
        super().__init__()
        self.version = version

    def getVersion(self) -> tuple[int, int]:
        return 13, self.version


def compiler(folder: Path, version: int = 0) -> tuple[ModuleCompiler, CountingNVRTC]:
    binding = CountingNVRTC(version)
    return ModuleCompiler(SimpleNamespace(cuda=SimpleNamespace(nvrtc=binding)), folder), binding


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    loader._prune.cache_clear()
    return tmp_path / "cache" / "cuda"


def test_code_is_cached(sources: Path, cache: Path) -> None:
    write(sources, a_cu='#include "b.cuh"\n' + CONSTANT, b_cuh="")
    code = {}
    for _ in range(2):
        for value in (1, 2):
            code[value] = compiler(sources)[0].binary("a", {"VALUE": value}, "sm_80")
    assert code == {1: b"a VALUE=1", 2: b"a VALUE=2"}
    assert len(list(cache.iterdir())) == 2
    again, binding = compiler(sources)
    again.binary("a", {"VALUE": 1}, "sm_80")
    assert not binding.programs
    # The key contains all that the code depends on: included files, the architecture and the compiler.
    write(sources, b_cuh="// changed")
    again.binary("a", {"VALUE": 1}, "sm_80")
    again.binary("a", {"VALUE": 1}, "sm_90")
    assert len(binding.programs) == 2
    newer, binding = compiler(sources, version=1)
    newer.binary("a", {"VALUE": 1}, "sm_80")
    assert len(binding.programs) == 1
    assert len(list(cache.iterdir())) == 5


def test_damaged_code_is_compiled_again(sources: Path, cache: Path) -> None:
    write(sources, a_cu=CONSTANT)
    compiler(sources)[0].binary("a", {"VALUE": 1}, "sm_80")
    (file,) = cache.iterdir()
    for damage in (b"", file.read_bytes()[:-1], file.read_bytes() + b"x"):
        file.write_bytes(damage)
        assert compiler(sources)[0].binary("a", {"VALUE": 1}, "sm_80") == b"a VALUE=1"
        assert file.read_bytes().endswith(b"a VALUE=1")


def test_modules_are_compiled_once_without_a_cache(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "file"))
    write(sources, a_cu=CONSTANT)
    once, binding = compiler(sources)
    with pytest.warns(UserWarning, match="cannot be saved in") as warnings:
        once.compile([("a", {"VALUE": 1}), ("a", {"VALUE": 2}), ("a", {"VALUE": 1})], "sm_80")
    assert [warning.filename for warning in warnings] == [__file__]
    assert once.binary("a", {"VALUE": 2}, "sm_80") == b"a VALUE=2"
    assert len(binding.programs) == 2


def test_progress(sources: Path, cache: Path) -> None:
    write(sources, a_cu=CONSTANT)
    steps: list[tuple[int, int]] = []
    modules = [("a", {"VALUE": value}) for value in range(3)]
    compiler(sources)[0].compile(modules[:1], "sm_80", lambda *step: steps.append(step))
    assert steps == [(0, 1), (1, 1)]
    compiler(sources)[0].compile(modules, "sm_80", lambda *step: steps.append(step))
    assert steps[2:] == [(0, 2), (1, 2), (2, 2)]
    compiler(sources)[0].compile(modules, "sm_80", lambda *step: steps.append(step))
    assert len(steps) == 5


def test_code_unused_for_a_month_is_removed(sources: Path, cache: Path) -> None:
    write(sources, a_cu=CONSTANT)
    for value in (1, 2):
        compiler(sources)[0].binary("a", {"VALUE": value}, "sm_80")
    (cache / "notes.txt").write_text("somebody's")
    long_ago = time.time() - 31 * 24 * 60 * 60
    for file in cache.iterdir():
        os.utime(file, (long_ago, long_ago))
    compiler(sources)[0].binary("a", {"VALUE": 2}, "sm_80")  # used
    loader._prune.cache_clear()
    compiler(sources)[0].binary("a", {"VALUE": 3}, "sm_80")
    left = sorted(file.read_bytes()[-9:] for file in cache.glob("*.bin"))
    assert left == [b"a VALUE=2", b"a VALUE=3"]
    assert (cache / "notes.txt").exists()
