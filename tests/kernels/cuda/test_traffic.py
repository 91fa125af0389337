"""Counts of the memory traffic of kernels."""

from __future__ import annotations

import pytest

from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.kernels.cuda import traffic
from tests.kernels.cuda.test_kernel_mutations import CASES


def test_gathered_rows_take_no_more_sectors_than_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Three rows of 530 values."""
    skip_without_tools()
    writes = [row for row in traffic.counts_of("gather_rows") if row.is_write]
    assert [(row.space, row.bytes_per_lane, row.ideal) for row in writes] == [("global", 16, 3 * -(-4 * 530 // 32))]
    assert traffic.main(["gather_rows"]) == 0
    assert "elementwise.cu:" in capsys.readouterr().out


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert traffic.main([]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == list(CASES)
