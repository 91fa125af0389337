"""The choice of the instruction set to compile for."""

from __future__ import annotations

import pytest

from localllm.errors import DeviceError, UsageError
from localllm.kernels.cpu import target as module
from localllm.kernels.cpu.target import ISA_VARIABLE, TARGETS, available, choose
from tests.helpers.recorder import CPUOps
from tests.helpers.windows import elsewhere


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


def test_the_best_target_is_chosen_and_generic_is_always_available() -> None:
    names = [t.name for t in available()]
    assert names == [t.name for t in TARGETS if t.name in names]
    assert names[-1] == "generic"
    assert choose() is available()[0]


@pytest.mark.parametrize("target", available(), ids=lambda t: t.name)
def test_each_available_target_can_be_forced(monkeypatch: pytest.MonkeyPatch, target: module.Target) -> None:
    assert choose(target.name) is target
    monkeypatch.setenv(ISA_VARIABLE, target.name)
    assert choose() is target
    assert CPUOps(threads=1).target is target
    assert choose("generic").name == "generic"  # an argument overrides the environment


@pytest.mark.parametrize("target", [t for t in TARGETS if t not in available()], ids=lambda t: t.name)
def test_a_target_that_this_processor_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: module.Target
) -> None:
    expected = rf"does not execute {target.name} code; it executes .*generic"
    with pytest.raises(DeviceError, match=expected):
        choose(target.name)
    monkeypatch.setenv(ISA_VARIABLE, target.name)
    with pytest.raises(DeviceError, match=expected):
        CPUOps(threads=1)


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no instruction set called 'mmx'; this processor executes .*generic"):
        choose("mmx")
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(UsageError, match="'sse9'"):
        choose()


def test_an_apple_processor_has_the_dot_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: "arm64-apple-darwin23.1.0")
    elsewhere(monkeypatch, "darwin")
    monkeypatch.setattr(module.host, "_sysctl_int", lambda name: 0)
    assert [t.name for t in available.__wrapped__()] == ["neon", "asimd", "generic"]


def test_every_target_names_a_processor_that_llvm_knows() -> None:
    triples = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
    for target in TARGETS:
        for family, triple in triples.items():
            if target.family in (family, "any"):
                assert target.machine(triple).triple == triple
