"""``localllm bench --profile``: time per operation of forward passes on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.bench.ceilings import gpu_index, has_gpu
from localllm.bench.workload import Test
from localllm.console import quantity
from localllm.errors import UsageError
from localllm.loading.model_info import ModelInfo

if TYPE_CHECKING:
    from localllm.kernels.cuda.profile import Profile, Share
    from localllm.kernels.cuda.roofline import Kind
    from localllm.kernels.cuda.step import Watch

#: Generated tokens of a profile; all tokens take the same operations.
_GENERATED = 3
_REPETITIONS = 3
_COLUMNS = "  {:<44} {:>8} {:>10} {:>6} {:>11} {:>13} {:>8}"
_HEAD = ("operation", "launches", "a step", "share", "B/s", "FLOP/s", "of floor")


@dataclass(frozen=True)
class DeviceCeilings:
    """Measured ceilings of a GPU."""

    copy: float  # bytes per second, read and written
    read: float  # bytes per second, read only
    rates: Mapping[Kind, float]  # operations per second


@dataclass(frozen=True)
class DeviceProfile:
    """The profile of a test's forward passes on one GPU."""

    test: Test
    device: str
    profile: Profile
    busy: float  # fraction of the test's time that the GPU computed
    ceilings: DeviceCeilings

    def floor(self, share: Share) -> float:
        """Return the minimum seconds of operations."""
        return share.cost.seconds(self.ceilings.copy, self.ceilings.rates)

    def lines(self) -> Iterator[str]:
        profile = self.profile
        yield (
            f"{self.test.name} on {self.device}: {_milliseconds(profile.seconds / profile.n_steps)} a step, "
            f"{_milliseconds(profile.kernel_seconds / profile.n_steps)} by operation; at work in {self.busy:.0%} of "
            f"the time; copies {quantity(self.ceilings.copy, 'B/s')}"
            + "".join(f", {name} {quantity(rate, 'FLOP/s')}" for name, rate in self.ceilings.rates.items())
        )
        yield _COLUMNS.format(*_HEAD).rstrip()
        for share in sorted(profile.shares.values(), key=lambda share: -share.seconds):
            cost = share.cost
            yield _COLUMNS.format(
                share.name,
                _count(share.n_launches / profile.n_steps),
                _milliseconds(share.seconds / profile.n_steps),
                f"{share.seconds / profile.kernel_seconds:.1%}",
                quantity(cost.n_bytes / share.seconds, "B/s"),
                quantity(cost.n_operations / share.seconds, "FLOP/s") if cost.n_operations else "-",
                f"{self.floor(share) / share.seconds:.0%}",
            ).rstrip()

    def as_json(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "device": self.device,
            "n_steps": profile.n_steps,
            "step_s": profile.seconds / profile.n_steps,
            "kernels_s": profile.kernel_seconds / profile.n_steps,
            "busy": self.busy,
            "ceilings": {"copy": self.ceilings.copy, "read": self.ceilings.read, **self.ceilings.rates},
            "operations": [
                {
                    "name": share.name,
                    "launches": share.n_launches / profile.n_steps,
                    "step_s": share.seconds / profile.n_steps,
                    "share": share.seconds / profile.kernel_seconds,
                    "bytes": share.cost.n_bytes / profile.n_steps,
                    "flop": share.cost.n_operations / profile.n_steps,
                    "kind": share.cost.kind,
                    "floor_s": self.floor(share) / profile.n_steps,
                }
                for share in profile.shares.values()
            ],
        }


def _count(n: float) -> str:
    """Format the number of launches per step; below 1 if only some steps launch the operation."""
    return f"{n:.2g}" if n < 1 else f"{n:,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms"


def check_profiled(info: ModelInfo) -> None:
    """Raise UsageError if no part of a model is on a GPU."""
    if not has_gpu(info):
        raise UsageError(
            f"--profile takes the time of kernels on a GPU, but the model runs on {info.device}: leave it out, or "
            "choose another --device"
        )


def profiles(
    info: ModelInfo, test: Test, rate: Callable[[Test, Watch], float], ceilings: dict[str, DeviceCeilings]
) -> Sequence[DeviceProfile]:
    """Return a profile of a test's forward passes for each GPU of a model.

    Args:
        rate: runs a test with a watch, and returns tokens per second.
        ceilings: ceilings of devices; missing ceilings are measured and added.
    """
    from localllm.kernels.cuda.profile import BusyTime, Profiler

    busy, profiler = BusyTime(), Profiler(_REPETITIONS)
    seconds = test.n / rate(test, busy)
    if test.kind == "tg":  # the time does not include the step of the first token
        seconds *= (test.n + 1) / test.n
    rate(test if test.kind == "pp" else Test("tg", min(test.n, _GENERATED), test.depth), profiler)
    at_work = busy.seconds()
    results = []
    for device in info.placement.devices:
        index = gpu_index(device)
        if index is not None and index in profiler.profiles:
            if device not in ceilings:
                ceilings[device] = _measured(index)
            profile, busy_share = profiler.profiles[index], at_work[index] / seconds
            results.append(DeviceProfile(test, device, profile, busy_share, ceilings[device]))
    return results


def _measured(index: int) -> DeviceCeilings:
    from localllm.kernels.cuda.cupy_driver import open_driver
    from localllm.kernels.cuda.roofline import CUDARoofline

    roofline = CUDARoofline(open_driver(), index)
    rates = {name: roofline.rate(name) for name in roofline.kinds}
    return DeviceCeilings(roofline.copy_bandwidth(), roofline.read_bandwidth(), rates)
