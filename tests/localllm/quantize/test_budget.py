"""Types for a size limit: the choice compared with all choices, and the result for a tiny model."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.backend import CPUBackend
from localllm.quant.types import GGMLType
from localllm.quantize import plan, run
from localllm.quantize.budget import TypeChoice, TypeOption, allot, choose_types
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.tiny_models import tiny_gguf

PIECES = [[(7 * i + 3 * j) % 290 + 5 for i in range(64)] for j in range(2)]
TYPES = (GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q5_K, GGMLType.Q8_0)


def options(seed: int, n: int = 5) -> dict[str, list[TypeOption]]:
    rng = np.random.default_rng(seed)
    sizes, losses = rng.integers(1, 50, n), rng.exponential(size=n)
    bits = dict(zip(TYPES, (2, 3, 5, 8), strict=True))
    return {
        f"t{i}": [TypeOption(int(size) * bits[type], loss * 4.0 ** -bits[type], type) for type in TYPES]
        for i, (size, loss) in enumerate(zip(sizes, losses, strict=True))
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_its_size(seed: int) -> None:
    """No choice of at most the same size loses less: a corner of the convex hull is the optimum."""
    given = options(seed)
    every = [(sum(o.n_bytes for o in chosen), sum(o.loss for o in chosen)) for chosen in product(*given.values())]
    loss = float(np.median([loss for _, loss in every]))
    chosen = allot(given, loss=loss).values()
    size, cost = sum(o.n_bytes for o in chosen), sum(o.loss for o in chosen)
    assert cost <= loss
    assert cost <= min(loss for n_bytes, loss in every if n_bytes <= size) + 1e-12


def test_a_size_limit_is_respected_and_used() -> None:
    given = options(0)
    least, most = (sum(f(o.n_bytes for o in each) for each in given.values()) for f in (min, max))
    for n_bytes in (least, (least + most) // 2, most):
        size = sum(o.n_bytes for o in allot(given, n_bytes=n_bytes).values())
        assert size <= n_bytes
        assert n_bytes - size < 50 * 6
    with pytest.raises(UsageError, match=r"smallest file would still be 1 bytes larger"):
        allot(given, n_bytes=least - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "model.gguf"
    return tiny_gguf(path, hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)


def chosen(model: Path, **target: float) -> TypeChoice:
    with GGUFFile.open(model) as file:
        return choose_types(file, PIECES, CPUBackend(1), **target)  # type: ignore[arg-type]


def test_a_file_of_a_size(model: Path, tmp_path: Path) -> None:
    target = model.stat().st_size // 8  # about four bits per weight
    choice = chosen(model, n_bytes=target)
    with GGUFFile.open(model) as file:
        list(run(plan(file, tmp_path / "small.gguf", None, types=choice.types)))
    assert 0.6 * target < (tmp_path / "small.gguf").stat().st_size <= target
    assert chosen(model, n_bytes=2 * target).divergence < choice.divergence


def test_a_divergence_limit_is_respected(model: Path) -> None:
    loose = chosen(model, n_bytes=model.stat().st_size // 8).divergence
    assert chosen(model, divergence=loose / 3).divergence <= loose / 3
    with pytest.raises(UsageError, match=r"divergence stays at 0\.0.*more than 0\.00000: allow a larger one"):
        chosen(model, divergence=1e-9)


def test_the_command_needs_a_text_for_a_target(
    capfdbinary: pytest.CaptureFixture[bytes], model: Path, tmp_path: Path
) -> None:
    for more in (["--target-size", "1MB"], ["Q4_0", "--target-kl", "0.1", "-f", "a"], []):
        outcome = run_main(capfdbinary, "quantize", model, tmp_path / "out.gguf", *more)
        assert outcome.code == 2
        assert "--target-size or --target-kl, with -f and text to measure on" in outcome.err
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text()[:600])
    outcome = run_main(capfdbinary, "quantize", model, tmp_path / "out.gguf", "--target-size", "10B", "-f", text)
    assert "smallest file would still be" in outcome.err
    outcome = run_main(capfdbinary, "quantize", model, tmp_path / "out.gguf", "--target-size", "0.6MB", "-f", text)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("KL divergence 0.")
    assert (tmp_path / "out.gguf").stat().st_size <= 600_000
