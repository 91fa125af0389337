"""Count the memory traffic of a kernel in the emulator, without a GPU.

python -m tests.kernels.cuda.traffic           list the available runs, which are the cases of
test_kernel_mutations.py
python -m tests.kernels.cuda.traffic matvec    run one, and list loads and stores, the most wasteful first

For global memory, the table counts sectors of 32 bytes; for shared memory, passes over the banks.  ``ideal`` is the
least number for the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.cuda_on_cpu import build, nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.module import EmulatedModule, Traffic
from tests.kernels.cuda.device import Device
from tests.kernels.cuda.test_kernel_mutations import CASES, TILE_ROWS, ptx_of


class _CountedModule(EmulatedModule):
    """A module that keeps the counts of the last launch of one kernel."""

    def __init__(self, ptx: str, kernel: str) -> None:
        super().__init__(ptx, "check")
        self._kernel = kernel
        self.counts: list[Traffic] = []

    def launch(self, kernel: str, *arguments: Any, **options: Any) -> None:
        is_counted = kernel == self._kernel
        super().launch(kernel, *arguments, **{**options, "count_traffic": is_counted})
        if is_counted:
            self.counts = self.traffic()


class _CountedDriver(EmulatedDriver):
    """A driver that counts the launches of one module."""

    def __init__(self, ptx: str, kernel: str) -> None:
        super().__init__(mode="check")
        self._ptx = ptx
        self.module = _CountedModule(ptx, kernel)

    def _translated(self, ptx: str) -> EmulatedModule:
        return self.module if ptx == self._ptx else super()._translated(ptx)


def counts_of(name: str) -> list[Traffic]:
    """Return the counts of a case's kernel, the most wasteful instruction first."""
    driver = _CountedDriver(ptx_of(name), CASES[name].kernel)
    CASES[name].run(Device(driver, tile_rows=(TILE_ROWS,)))
    return driver.module.counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, metavar="case")
    name = parser.parse_args(arguments).case
    if name is None:
        print("\n".join(CASES))
        return 0
    if reason := nvrtc.missing() or build.missing():
        print(f"kernels cannot be run here: {reason}", file=sys.stderr)
        return 1
    print("memory          bytes a lane  requests     used    ideal  where")
    for row in counts_of(name):
        memory = f"{row.space} {'write' if row.is_write else 'read'}"
        print(f"{memory:14}  {row.bytes_per_lane:12}  {row.requests:8} {row.used:8} {row.ideal:8}  {row.site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
