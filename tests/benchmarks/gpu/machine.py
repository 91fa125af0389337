"""The devices of a run, real or emulated, and measurements of their limits."""

from __future__ import annotations

import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from psutil import virtual_memory

import localllm
from localllm.bench.profile import DeviceCeilings
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.cpu.host import cpu_model, usable_cpus
from localllm.kernels.cuda import roofline
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.kernels.cuda.driver import Driver
from localllm.kernels.cuda.roofline import Stopwatch
from localllm.kernels.cuda.step import NODE_BYTES
from localllm.llm import LLM
from localllm.loading.devices import Device
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu import layers
from tests.benchmarks.gpu.installed import missing, versions
from tests.benchmarks.gpu.layers import Layer
from tests.benchmarks.gpu.sections import Row
from tests.helpers.synthetic import SHAPES, Shape

if TYPE_CHECKING:
    from tests.cuda_on_cpu.emulated_driver import EmulatedDriver

T = GGMLType
#: Launches of a forward pass with 32 layers.
_GAPS = 356
#: Device memory that a new process uses at most, and the warning if less is free.
_OWN_BYTES, _OTHERS = 2 << 30, "; other programs use it, so times are unreliable: stop them"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        formats: formats of products.
        products: name, rows of each matrix of a launch, and columns.
        rows: tokens of products.
        copied: bytes of weights that products use in turn, several times the size of the caches.
        heads: query heads, key heads, and head size.
        decode: number and length of sequences for decoding attention.
        prefill: tokens of a prompt for attention.
        chunks: tokens at the end of a sequence, and its length.
        layers: other kinds of layers: the width of the input, and a function that adds one to a graph.
        batches: number of sequences, tokens of each, and their length, for these layers.
        model, file_types: shape and file types of whole models.
        prompts, generated, depth, long, sequences, replays: sizes for whole models.
        transferred: bytes of a copy between devices or over the bus.
    """

    formats: tuple[GGMLType, ...]
    products: tuple[tuple[str, tuple[int, ...], int], ...]
    rows: tuple[int, ...]
    copied: int
    heads: tuple[int, int, int]
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    layers: Mapping[str, tuple[int, Layer]]
    batches: tuple[tuple[int, int, int], ...]
    model: Shape
    file_types: tuple[str, ...]
    prompts: tuple[int, ...]
    generated: int
    depth: int
    long: int
    sequences: int
    replays: int
    transferred: int


#: A model with 8B parameters, with the shape of Llama 3.
FULL = Sizes(
    formats=(T.Q4_0, T.Q4_K, T.Q8_0, T.F16, T.Q6_K, T.Q5_K, T.Q4_1, T.Q5_0, T.Q5_1, T.MXFP4, T.BF16),
    products=(
        ("qkv", (4096, 1024, 1024), 4096),
        ("output", (4096,), 4096),
        ("gate+up", (14336, 14336), 4096),
        ("down", (4096,), 14336),
    ),
    rows=(1, 2, 4, 8, 32, 64, 128, 512, 2048),
    copied=512 << 20,
    heads=(32, 8, 128),
    decode=((1, 512), (1, 4096), (1, 32768), (8, 4096), (32, 1024)),
    prefill=(512, 2048, 16384),
    chunks=((512, 4096), (512, 32768)),
    layers={
        "DeepSeek V2 Lite's attention": (
            2048,
            partial(layers.latent_attention, n_heads=16, key_dim=128, value_dim=128, n_rotated=64, latent=512),
        ),
        "gpt-oss's attention": (
            2880,
            partial(layers.attention, n_heads=64, n_kv_heads=8, dim=64, window=128),
        ),
        "Qwen 3 Next's delta net": (2048, partial(layers.delta_net, n_key_heads=16, n_heads=32, dim=128)),
        "Mamba 2's scan": (2048, partial(layers.scan, n_heads=64, dim=64, state_dim=128)),
        "Qwen 3's experts": (2048, partial(layers.mixture, n_experts=128, k=8, n_ff=768)),
    },
    batches=((1, 1, 4096), (32, 1, 1024), (1, 512, 4096)),
    model=SHAPES["llama-8b"],
    file_types=("q4_0", "q4_k_m", "q8_0", "f16"),
    prompts=(512, 4096),
    generated=64,
    depth=512,
    long=32768,
    sequences=32,
    replays=1000,
    transferred=1 << 28,
)
#: The most important sizes, for a run of minutes.
QUICK = replace(
    FULL,
    formats=(T.Q4_K, T.Q6_K, T.Q8_0, T.F16, T.Q4_0),
    products=(FULL.products[2], FULL.products[3]),
    rows=(1, 8, 128, 2048),
    copied=256 << 20,
    decode=((1, 4096), (1, 32768), (32, 1024)),
    prefill=(4096,),
    chunks=((512, 32768),),
    file_types=("q4_k_m", "q8_0", "f16"),
    long=16384,
    replays=200,
)
#: Sizes for emulated devices, whose kernels are slow.
TINY = Sizes(
    formats=(T.Q4_0,),
    products=(("qkv", (64, 32, 32), 64),),
    rows=(1,),
    copied=1 << 13,
    heads=(4, 2, 16),
    decode=((1, 70),),
    prefill=(20,),
    chunks=(),
    layers={"delta net": (64, partial(layers.delta_net, n_key_heads=2, n_heads=4, dim=16))},
    batches=((1, 2, 5),),
    model=Shape("llama", 2, 64, 192, 4, 2, 300, 256, 10_000.0, 1e-5, tied=False),
    file_types=("q4_0",),
    prompts=(20,),
    generated=2,
    depth=5,
    long=70,
    sequences=2,
    replays=3,
    transferred=1 << 12,
)


def chosen(sizes: Sizes, *, quick: bool, types: str) -> Sizes:
    """Return the sizes of a run: `QUICK` instead of `FULL`, and only some types of models; `TINY` is unchanged."""
    if sizes is not FULL:
        return sizes
    sizes = QUICK if quick else sizes
    return replace(sizes, file_types=tuple(types.split(","))) if types else sizes


@dataclass
class Machine:
    """The devices, and how models are loaded on them.

    Attributes:
        make_backend: creates the backend of a device.
        scratch: a folder for models.
        repetitions: number of timings of a piece of work.
        least_launches: launches of one kernel that are timed at once.
    """

    driver: Driver
    sizes: Sizes
    scratch: Path
    make_backend: Callable[[Driver, int], CUDABackend]
    repetitions: int = 5
    least_launches: int = 16
    is_emulated: bool = False
    _ceilings: dict[int, DeviceCeilings] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.driver.device_count

    def ceilings(self, device: int) -> DeviceCeilings:
        """Return the ceilings of a device, measured on the first call."""
        if device not in self._ceilings:
            self._ceilings[device] = self.measure_ceilings(device)
        return self._ceilings[device]

    def measure_ceilings(self, device: int) -> DeviceCeilings:
        most = roofline.CUDARoofline(self.driver, device)
        rates = {kind: most.rate(kind) for kind in most.kinds}
        return DeviceCeilings(most.copy_bandwidth(), most.read_bandwidth(), rates)

    def load(self, path: Path, device: str, **options: Any) -> LLM:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # contexts longer than the model was trained on
            return localllm.load(path, device=device, **options)


@contextmanager
def real(scratch: Path) -> Iterator[Machine]:
    """Yield the GPUs of this machine.  Raises DeviceError if it has no GPU."""
    driver = open_driver()
    yield Machine(driver, FULL, scratch, CUDABackend)


@contextmanager
def emulated(
    scratch: Path, driver: EmulatedDriver | None = None, make_backend: Callable[..., CUDABackend] | None = None
) -> Iterator[Machine]:
    """Yield emulated GPUs (by default two) with small sizes, to try a run."""
    from tests.cuda_on_cpu import emulated_driver
    from tests.helpers.backends import emulated_cuda

    driver = driver or emulated_driver.EmulatedDriver(2, memory=1 << 26)
    make_backend = make_backend or emulated_cuda

    def devices(name: str, **_: Any) -> tuple[Device, ...]:
        host = Device("cpu", "kernels", 1, 1, CPUBackend(threads=1), lambda: None)
        numbers = [] if name == "cpu" else [int(n) for n in name.removeprefix("cuda:").split(",")]
        gpus = (
            Device(f"cuda:{i}", "CUDA", 1, 1, make_backend(driver, i), lambda: None, lambda: 1 << 40) for i in numbers
        )
        return (host, *gpus)

    with ExitStack() as stack:
        for name, value in {
            "localllm.loading.load.open_devices": devices,
            "localllm.kernels.cuda.cupy_driver.open_driver": lambda: driver,
            "localllm.kernels.cuda.roofline.ROUNDS": 1,
            "localllm.kernels.cuda.roofline.MAX_BYTES": 1 << 12,
            "localllm.kernels.cuda.profile.MIN_LAUNCHES": 1,
            "localllm.bench.profile._REPETITIONS": 1,
        }.items():
            stack.enter_context(patch(name, value))
        yield Machine(driver, TINY, scratch, make_backend, repetitions=1, least_launches=1, is_emulated=True)


# -- Sections ------------------------------------------------------------------------------------------------------


def environment(machine: Machine) -> Iterator[Row]:
    """Return hardware and software."""
    yield {"what": "processor", "value": f"{cpu_model()}, {usable_cpus()} usable"}
    yield {"what": "Python, localllm", "value": f"{platform.python_version()}, {localllm.__version__}"}
    yield {"what": "memory, disk", "value": " and ".join(map(_free, (virtual_memory(), disk_usage(machine.scratch))))}
    row: Row = {"what": "packages", "value": ", ".join(f"{name} {version}" for name, version in versions().items())}
    if needs := missing():
        row["fault"] = f"not installed, or with another version: {', '.join(needs)}"
    yield row
    for device in range(machine.count):
        p, memory = machine.driver.properties(device), machine.driver.memory_info(device)
        yield {
            "what": f"cuda:{device}",
            "value": f"{p.name}, compute capability {p.capability[0]}.{p.capability[1]}, {p.n_multiprocessors} "
            f"multiprocessors, {memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
            + _OTHERS
            * (memory.total - memory.free > _OWN_BYTES),
        }
    yield {"what": "NVIDIA's driver", "value": _driver_version()}
    try:
        import cupy

        yield {"what": "CuPy", "value": cupy.__version__}
        yield {"what": "NVRTC", "value": ".".join(map(str, cupy.cuda.nvrtc.getVersion()))}
        yield {"what": "CUDA runtime", "value": str(cupy.cuda.runtime.runtimeGetVersion())}
    except (ImportError, RuntimeError, OSError) as error:
        yield {"what": "CuPy", "value": f"not available: {error}"}


def _free(space: Any) -> str:
    return f"{getattr(space, 'available', space.free) / 1e9:.0f} of {space.total / 1e9:.0f} GB free"


def _driver_version() -> str:
    command = [
        "nvidia-smi",
        "--query-gpu=driver_version,mig.mode.current,clocks.sm,clocks.mem,temperature.gpu,utilization.gpu",
        "--format=csv",
    ]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
        return "; ".join(said.splitlines())
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def ceilings(machine: Machine) -> Iterator[Row]:
    """Measure the limits of each device, of a library's matrix product if installed, and of the bus."""
    for device in range(machine.count):
        most = machine.ceilings(device)
        name = f"cuda:{device}"
        yield {"device": name, "what": "copy, bytes read and written", "B/s": most.copy}
        yield {"device": name, "what": "read", "B/s": most.read}
        for kind, rate in most.rates.items():
            yield {"device": name, "what": f"mma.sync, {kind}", "FLOP/s": rate}
        yield from _graph(machine, device)
        yield from _bus(machine, device)
    if machine.sizes is FULL and (rate := _library_rate()) is not None:
        yield {
            "device": "cuda:0",
            "what": "bf16 product of 8192 x 8192 x 8192 by cuBLAS, through torch",
            "FLOP/s": rate,
        }


def _graph(machine: Machine, device: int) -> Iterator[Row]:
    """Measure the time between nearly empty kernels of a graph, and the memory of a node."""
    driver, name = machine.driver, f"cuda:{device}"
    stream, memory = driver.stream(device), driver.allocate(device, 1 << 10)
    module = driver.load_module(device, "elementwise")
    driver.fill(memory, 0, stream)  # a header of no rows
    arguments = [memory, memory, *(np.int32(32),) * 3, memory, *(np.int32(32),) * 2]

    def launch() -> None:
        driver.launch(module, "copy_heads", (1, 1), (32,), arguments, stream)

    launch()
    driver.synchronize(stream)
    free = driver.memory_info(device).free
    driver.begin_capture(stream)
    for _ in range(_GAPS):
        launch()
    graph = driver.end_capture(stream)
    seconds = Stopwatch(driver, stream, machine.repetitions).seconds(lambda: driver.replay(graph, stream))
    yield {"device": name, "what": f"launch of a kernel in a graph of {_GAPS}", "us": 1e6 * seconds / _GAPS}
    taken = (free - driver.memory_info(device).free) / _GAPS
    yield {
        "device": name,
        "what": f"memory of a kernel in it; the plan has {NODE_BYTES / 1e3:.1f} kB",
        "kB": taken / 1e3,
    }


def _bus(machine: Machine, device: int) -> Iterator[Row]:
    driver, n = machine.driver, machine.sizes.transferred
    stream, memory, host = driver.stream(device), driver.allocate(device, n), driver.pinned(n)
    host[:] = 1
    watch = Stopwatch(driver, stream, machine.repetitions)
    up = watch.seconds(lambda: driver.upload(memory, host, stream))
    yield {"device": f"cuda:{device}", "what": "from the host, pinned", "B/s": n / up}
    down = watch.seconds(lambda: driver.download(host, memory, stream))
    yield {"device": f"cuda:{device}", "what": "to the host, pinned", "B/s": n / down}


def _library_rate(n: int = 8192, repetitions: int = 10) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        a @ b
    begin.record()
    for _ in range(repetitions):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return float(2 * n**3 * repetitions / (begin.elapsed_time(end) / 1000))
