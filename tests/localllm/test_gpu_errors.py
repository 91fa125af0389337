"""GPU failures that users may see: a typed error with a remedy, never a silent fallback to the CPU."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localllm
from localllm.errors import DeviceError, DeviceLostError, DeviceMemoryError, KernelError, NotEnoughMemoryError
from localllm.kernels.cuda import cupy_driver, installation
from localllm.kernels.cuda.driver import Stream
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import EmulatedGraph
from tests.cuda_on_cpu.fake_cupy import FakeCupy, FakeError
from tests.helpers import tiny_models
from tests.helpers.command_line import run_main
from tests.helpers.gpus import have_gpus
from tests.kernels.cuda.watched import KernellessDriver

PROMPT = [5, 6, 7, 8]
#: Memory for `GPU_OVERHEAD_BYTES` and a tiny model.
ROOMY = 1 << 29


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    return tiny_models.tiny_gguf(folder / "model.gguf", type=GGMLType.Q4_0, head_dim=16, max_position_embeddings=8192)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Simulate a machine with these devices, and return them."""

    def make(driver: EmulatedDriver) -> EmulatedDriver:
        have_gpus(monkeypatch, driver)
        return driver

    return make


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory is freed only with the last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def load(path: Path, **options: Any) -> localllm.LLM:
    return localllm.load(path, **{"device": "cuda", "context": 64, "threads": 1} | options)


def greedy(llm: localllm.LLM, n: int = 6) -> tuple[int, ...]:
    return llm.generate(PROMPT, max_tokens=n, temperature=0, ignore_eos=True).ids


# -- No usable GPU ------------------------------------------------------------------------------------------------


def fake_cupy(**changes: Any) -> Any:
    cupy = FakeCupy([ROOMY], {})
    for name, value in changes.items():
        where, name = (cupy.cuda, name) if hasattr(cupy.cuda, name) else (cupy.cuda.runtime, name)
        setattr(where, name, value)
    return cupy


def missing() -> Any:
    raise RuntimeError("libnvrtc.so.13: cannot open shared object file")


def no_device() -> int:
    raise FakeError(100)


def old_driver() -> int:
    raise FakeError(35)


NVRTC = SimpleNamespace(getVersion=missing)
PROPERTIES = {"name": b"GeForce GTX 1080", "major": 6, "minor": 1, "multiProcessorCount": 20}
PROPERTIES |= {"totalGlobalMem": ROOMY, "sharedMemPerBlockOptin": 48 << 10}


@pytest.mark.parametrize(
    ("cuda", "cupy", "words"),
    [
        (None, None, "NVIDIA's driver is not installed here; install it, or use device='cpu'"),
        ((11, 4), None, r"runs CUDA up to 11\.4, but localllm needs 12\.0: install a newer driver"),
        ((13, 0), None, r'CuPy is not installed; pip install "localllm\[cuda13\]"'),
        ((12, 4), {"getDeviceCount": old_driver}, r"CuPy installed is for CUDA 13\.2, but .* runs up to 12\.4"),
        ((13, 0), {"getDeviceCount": no_device}, "NVIDIA's driver finds none .*CUDA_VISIBLE_DEVICES"),
        ((13, 0), {"nvrtc": NVRTC}, r'NVRTC is missing; pip install "localllm\[cuda13\]"'),
        (
            (13, 0),
            {"getDeviceProperties": lambda device: PROPERTIES},
            r"GTX 1080, has compute capability 6\.1, .* 7\.5",
        ),
    ],
    ids=["no driver", "old driver", "no CuPy", "CuPy too new", "no GPU", "no NVRTC", "GPU too old"],
)
def test_missing_parts_are_named(
    cuda: Any,
    cupy: Any,
    words: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """An explicit request for a GPU fails with an error; a default device reports the fault and uses the CPU."""
    monkeypatch.setattr(installation, "driver_cuda", lambda: cuda)
    if cupy is not None:
        monkeypatch.setattr(cupy_driver, "import_cupy", lambda: fake_cupy(**cupy))
    else:
        monkeypatch.setitem(sys.modules, "cupy", None)
    for device in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=words):
            load(path, device=device)
    outcome = run_main(capfdbinary, "generate", "-m", path, "-p", "the", "-n", 2, "--device", "cuda")
    assert (outcome.code, outcome.out) == (1, "")
    assert "--device" in outcome.error() or "CUDA" in outcome.error()
    if cuda is None:  # no sign of a GPU
        load(path, device="auto").close()
        return
    with pytest.warns(UserWarning, match=f"the model runs on the CPU: .*{words}"), load(path, device="auto") as llm:
        assert llm.info.device == "cpu"


# -- Memory --------------------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit(
    gpus: Callable[..., Any], path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A requested GPU is rejected before anything is allocated; by default the CPU takes the rest, with a warning."""
    driver = gpus(KernellessDriver(memory=(256 << 20) + 20_000_000))
    with pytest.raises(NotEnoughMemoryError, match=r"3 layers on GPUs need .* GB on cuda:0, which has .* GB free"):
        load(path, n_gpu_layers=3, context=4096)
    assert driver.calls["upload"] == 0
    with pytest.warns(UserWarning, match=r"the GPU has room for .* run on the cpu, slower"):
        load(path, context=4096).close()
    flags = ("generate", "-m", path, "-p", "the", "-n", 2, "--device", "cuda", "-c", 4096, "-ngl", 3)
    outcome = run_main(capfdbinary, *flags)
    assert (outcome.code, outcome.out) == (1, "")
    assert "3 layers on GPUs need" in outcome.error()


def test_memory_that_runs_out_while_loading(gpus: Callable[..., Any], path: Path, no_collector: None) -> None:
    """Every failure reports the numbers and frees all memory, so that a model can be loaded even in the handler."""
    driver = gpus(KernellessDriver(memory=ROOMY))
    driver.memories.fail_allocation = 1000
    load(path).close()
    n_allocations = 1000 - driver.memories.fail_allocation
    assert n_allocations > 30
    for number in range(1, n_allocations + 1):
        driver.memories.fail_allocation = number
        said = load_after_failure(driver, path, again=number % 10 == 0)
        assert re.search(
            r"device 0 cannot allocate [\d,]+ bytes: [\d,]+ of its 536,870,912 bytes are free; use", said
        )
    assert driver.memory_info(0).free == ROOMY


def load_after_failure(driver: EmulatedDriver, path: Path, *, again: bool) -> str:
    """Return the error of loading a model; while it is handled, all memory is free for another model."""
    try:
        load(path)
    except DeviceMemoryError as error:
        said, free = str(error), driver.memory_info(0).free
        if again:
            driver.memories.fail_allocation = None
            with load(path, context=32) as llm:
                assert len(greedy(llm)) == 6
    else:
        return "nothing"
    return said if free == ROOMY else f"{ROOMY - free} bytes are kept"


def test_a_closed_model_gives_all_back(gpus: Callable[..., Any], path: Path, no_collector: None) -> None:
    driver = gpus(KernellessDriver(2, memory=ROOMY))
    for options in ({"device": "cuda:0"}, {"tensor_split": (2, 1)}, {"n_gpu_layers": 2}, {"draft_model": path}):
        llm = load(path, **options)
        greedy(llm)
        llm.generate(PROMPT, max_tokens=2)
        assert driver.memory_info(0).free < ROOMY
        llm.close()
        assert [driver.memory_info(i).free for i in range(2)] == [ROOMY] * 2


def test_another_program_allocates_memory_while_a_model_loads(gpus: Callable[..., Any], path: Path) -> None:
    """Memory that disappears after planning; a smaller model then fits."""
    driver = gpus(KernellessDriver(memory=ROOMY))
    taken: list[Any] = []

    def take(_: object) -> None:
        taken.append(driver.allocate(0, driver.memory_info(0).free - 5_000_000))

    with pytest.raises(
        DeviceMemoryError, match=r"cannot allocate [\d,]+ bytes: [\d,]+ of its 536,870,912 bytes are free"
    ):
        load(path, context=8192, planned=take)
    taken.clear()
    with load(path) as llm:
        assert llm.info.device == "cuda:0"


class Failing(KernellessDriver):
    """A device whose next graph does not fit if ``is_full``."""

    is_full = False

    def end_capture(self, stream: Stream) -> EmulatedGraph:
        graph = super().end_capture(stream)
        if self.is_full:
            self.is_full = False
            raise DeviceMemoryError(0, None, 1000, ROOMY)
        return graph


def test_memory_that_runs_out_while_generating(gpus: Callable[..., Any], path: Path) -> None:
    """Memory for a step's graph is missing; the next text is still generated."""
    driver = gpus(Failing(memory=ROOMY))
    with load(path) as llm:
        driver.is_full = True
        with pytest.raises(
            DeviceMemoryError, match="cannot allocate memory: 1,000 of its 536,870,912 bytes are free"
        ):
            greedy(llm)
        assert len(greedy(llm)) == 6


def test_choosing_tokens_needs_no_additional_device_memory(
    gpus: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned memory is allocated when the model loads; a warning reports host memory that cannot be locked."""
    driver = gpus(KernellessDriver(memory=ROOMY))
    with load(path) as llm:
        before = driver.memory_info(0).free
        with monkeypatch.context() as changed:
            changed.setattr(driver, "pinned", refuse_to_lock)
            with pytest.raises(NotEnoughMemoryError, match="bytes of host memory to lock"):
                llm.generate(PROMPT, max_tokens=1, top_k=200)
        driver.memories.fail_allocation = 1
        llm.generate(PROMPT, max_tokens=1, top_k=200)
        assert driver.memories.fail_allocation == 1
        assert driver.memory_info(0).free == before


def refuse_to_lock(n_bytes: int) -> Any:
    raise NotEnoughMemoryError(f"the system has no {n_bytes:,} bytes of host memory to lock")


def test_host_memory_that_cannot_be_locked(gpus: Callable[..., Any], path: Path) -> None:
    driver = gpus(KernellessDriver(memory=ROOMY))
    driver.pinned = refuse_to_lock
    with pytest.raises(NotEnoughMemoryError, match="bytes of host memory to lock"):
        load(path)
    assert driver.memory_info(0).free == ROOMY


# -- Devices that fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 7, 30])
def test_a_device_that_is_lost(gpus: Callable[..., Any], path: Path, after: int) -> None:
    """A failure during generation is reported then and on every later call, and the model can be closed."""
    driver = gpus(KernellessDriver(2, memory=ROOMY))
    with load(path, device="cuda:0") as llm:
        greedy(llm)
        llm.forget()
        driver.lose(0, after)
        with pytest.raises(DeviceLostError, match="CUDA device 0 is lost"):
            list(llm.stream(PROMPT, max_tokens=40, temperature=0, ignore_eos=True))
        with pytest.raises(DeviceLostError, match="CUDA device 0 is lost"):
            greedy(llm)
    with pytest.raises(DeviceLostError, match="CUDA device 0 is lost"):
        load(path, device="cuda:0")
    with load(path, device="cuda:1") as llm:
        assert len(greedy(llm)) == 6


def test_a_device_that_is_lost_on_the_command_line(
    gpus: Callable[..., Any], path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    driver = gpus(KernellessDriver(memory=ROOMY))
    driver.lose(0, 200)
    outcome = run_main(
        capfdbinary, "generate", "-m", path, "-p", "the", "--device", "cuda", "-n", 100, "--ignore-eos", "-q"
    )
    assert outcome.code == 1
    assert "CUDA device 0 is lost" in outcome.error()


def test_devices_without_access_to_each_other(gpus: Callable[..., Any], path: Path) -> None:
    """Hidden states then move through the host: no error, and no layer on the CPU."""
    gpus(KernellessDriver(2, memory=ROOMY, peers=False))
    with load(path, tensor_split=(2, 1)) as llm:
        assert llm.info.device == "cuda:0 + cuda:1"
        assert len(greedy(llm)) == 6


def test_kernels_that_do_not_compile(gpus: Callable[..., Any], path: Path) -> None:
    driver = gpus(KernellessDriver(memory=ROOMY))

    def refuse(*_: Any) -> None:
        raise KernelError("matmul.cu does not compile: error: no such instruction")

    driver.compile_modules = refuse
    with pytest.raises(KernelError, match="no such instruction"):
        load(path)
