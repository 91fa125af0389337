"""Profiles of forward passes: the counted work, and that profiling does not change results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.calls import BatchSizes, Cost
from localllm.kernels.cuda.profile import BusyTime, Profiler, watching
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers import tiny_models
from tests.helpers.backends import emulated_cuda
from tests.helpers.recorder import CacheShape, Ops, SplitOps
from tests.helpers.run_model import Runner, make_batch
from tests.helpers.weights import f32
from tests.kernels.cuda.watched import KernellessDriver

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 70)]
# The tiny model: 3 layers of width 64, 4 query heads and 2 key heads of 16 values, a feed-forward width of 192, and
# 300 tokens.  Its weights are Q4_0, with 18 bytes per block of 32 values.
N_LAYERS, WIDTH, GATE, N_VOCAB = 3, 64, 192, 300


def small(path: Path, kind: str = "llama") -> Path:
    options = {"head_dim": 16, "intermediate_size": GATE, "max_position_embeddings": 1024}
    return tiny_models.tiny_gguf(path / "model.gguf", kind, type=GGMLType.Q4_0, **options)


def packed(n_out: int, n_in: int) -> int:
    """Return the bytes of a matrix of Q4_0, padded to groups of 32 rows and tiles of 128 columns."""
    return -(-n_out // 32) * 32 * -(-n_in // 128) * 128 // 32 * 18


def inputs(n_in: int) -> int:
    """Return the bytes of a row in eight bits: codes, and two floats per 32 values."""
    return -(-n_in // 128) * (128 + 4 * 8)


def test_the_shares_of_a_token(tmp_path: Path) -> None:
    driver = KernellessDriver()
    runner = Runner(small(tmp_path), CUDABackend(driver, 0, compiles_ahead=False))
    profiler = Profiler(repetitions=2, least_launches=1)
    with watching(profiler):
        runner.run((IDS[:1], 40, [2]))
    (profile,) = profiler.profiles.values()
    shares = profile.shares
    assert profile.n_steps == 1
    assert profile.seconds > 0
    assert profile.kernel_seconds == pytest.approx(sum(share.seconds for share in shares.values()))
    assert [(name, share.n, share.n_launches) for name, share in shares.items()] == [
        ("embed", 1, 1),
        ("norm + quantise", 7, 7),
        ("linear attn_q+attn_k+attn_v Q4_0", 3, 3),
        ("rope + append", 3, 3),
        ("attention", 3, 6),
        ("quantise", 3, 3),
        ("linear attn_output Q4_0", 3, 3),
        ("linear ffn_gate+ffn_up Q4_0", 3, 3),
        ("gate + quantise", 3, 3),
        ("linear ffn_down Q4_0", 3, 3),
        ("gather", 1, 1),
        ("linear output Q4_0", 1, 1),
    ]
    seen, row, cached = 41, 4 * WIDTH, 2 * 2 * 2 * 16
    expected = {
        "norm + quantise": Cost(7 * (2 * row + inputs(WIDTH))),
        "linear attn_q+attn_k+attn_v Q4_0": Cost(
            3 * (packed(64, 64) + 2 * packed(32, 64) + inputs(64) + 4 * 128), 3 * 2 * 64 * 128, "int8"
        ),
        "rope + append": Cost(3 * (2 * row + 2 * 4 * 32 + cached)),
        "attention": Cost(3 * (2 * row + seen * cached), 3 * 4 * seen * WIDTH, "f16"),
        "quantise": Cost(3 * (row + inputs(WIDTH))),
        "linear attn_output Q4_0": Cost(3 * (packed(64, 64) + inputs(64) + 2 * row), 3 * 2 * 64 * 64, "int8"),
        "gate + quantise": Cost(3 * (2 * 4 * GATE + inputs(GATE))),
        "linear output Q4_0": Cost(packed(300, 64) + inputs(64) + 4 * 300, 2 * 300 * 64, "int8"),
        "gather": Cost(2 * row),
        "embed": Cost(packed(300, 64) / 300 + row),
    }
    for name, known in expected.items():
        assert shares[name].cost == known, name


def test_the_shares_of_a_mixture(tmp_path: Path) -> None:
    """Tokens use 2 of 4 experts: one token reads half of the experts, and three tokens read 7 / 8 on average."""
    runner = Runner(small(tmp_path, "mixtral"), CUDABackend(KernellessDriver(), 0, compiles_ahead=False))
    row, gate, experts = 4 * WIDTH, 4 * GATE, 4 * packed(GATE, WIDTH)
    for n, used in ((1, 1 / 2), (3, 7 / 8)):
        profiler, pairs = Profiler(repetitions=1, least_launches=1), 2 * n
        with watching(profiler):
            runner.run((IDS[:n], 40, [2]))
        (profile,) = profiler.profiles.values()
        shares = profile.shares
        names = list(shares)
        begin, end = names.index("linear ffn_gate_inp F32"), names.index("gather")
        expected = {
            "linear ffn_gate_inp F32": None,
            "route": Cost(3 * (n * 4 * 4 + pairs * 16)),
            "experts ffn_gate_exps+ffn_up_exps Q4_0": Cost(
                3 * (2 * used * experts + pairs * (inputs(WIDTH) + 2 * gate)),
                3 * 2 * pairs * WIDTH * 2 * GATE,
                "int8",
            ),
            "gate + quantise": Cost(3 * pairs * (2 * gate + inputs(GATE))),
            "experts ffn_down_exps Q4_0 + add": Cost(
                3 * (used * 4 * packed(WIDTH, GATE) + pairs * (inputs(GATE) + 8) + 2 * n * row),
                3 * 2 * pairs * GATE * WIDTH,
                "int8",
            ),
        }
        assert names[begin:end] == list(expected)
        for name, known in expected.items():
            assert shares[name].n == N_LAYERS
            if known is not None:
                assert shares[name].cost == known, name


def test_capped_logits_are_read_and_written(tmp_path: Path) -> None:
    ops = Ops(CUDABackend(KernellessDriver(), 0, compiles_ahead=False))
    table, profiler = ops.load_embedding(f32(np.ones((300, N_VOCAB)))), Profiler(repetitions=1, least_launches=1)
    cache = ops.new_cache(CacheShape(1, 1, 16), 1)
    capped = ops.compile(lambda: ops.softcap(ops.outputs(ops.embed(table)), 30.0), cache, max_tokens=8, max_outputs=8)
    with watching(profiler):
        capped(make_batch([(IDS[:3], 0, [0])], outputs=[0, 2]))
    assert profiler.profiles[0].shares["softcap"].cost == Cost(2 * 2 * 4 * N_VOCAB)


def test_the_positions_that_tokens_of_a_prompt_see() -> None:
    """Tokens at positions 3, 4 and 5 of one sequence, and the first token of another."""
    sizes = BatchSizes(4, 1, ((3, 6), (1, 1)))
    assert sizes.seen(1 << 30) == (4 + 5 + 6 + 1, 6 + 1)
    assert sizes.seen(2) == (2 + 2 + 2 + 1, 4 + 1)
    assert (sizes.rows(0), sizes.rows(1)) == (4, 1)
    batch = make_batch([(IDS[:3], 3, [0]), (IDS[:1], 0, [1])], outputs=[2])
    assert BatchSizes.of(batch) == sizes


def test_the_floor_is_the_longer_of_two_times() -> None:
    rates = {"int8": 50.0, "f16": 10.0, "bf16": 10.0}
    assert Cost(200, 100, "int8").seconds(100.0, rates) == 2
    assert Cost(200, 100, "f16").seconds(100.0, rates) == 10
    assert Cost(200, 100).seconds(100.0, rates) == 2
    assert Cost(1, 2) + Cost(3, 4, "f16") == Cost(4, 6, "f16")


@pytest.mark.parametrize("watch", [BusyTime, lambda: Profiler(repetitions=1, least_launches=2)], ids=["busy", "all"])
def test_profiling_changes_no_bits(tmp_path: Path, watch: type[BusyTime]) -> None:
    """On two devices; the second one changes its hidden states in place."""
    skip_without_tools()
    driver, path = EmulatedDriver(2), small(tmp_path)

    def runner() -> Runner:
        return Runner(path, SplitOps([(emulated_cuda(driver, 0), 1), (emulated_cuda(driver, 1), 2)]), 4)

    def conversation(runner: Runner) -> list[np.ndarray]:
        parts = [(IDS[:9], 0, [1]), (IDS[9:10], 9, [1]), (IDS[10:11], 10, [1]), (IDS[11:12], 11, [1])]
        return [runner.run(part, outputs=[len(part[0]) - 1]) for part in parts]

    expected, looking = conversation(runner()), watch()
    with watching(looking):
        found = conversation(runner())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    if isinstance(looking, BusyTime):
        assert all(seconds > 0 for seconds in looking.seconds().values())
        assert set(looking.seconds()) == {0, 1}
    else:
        profiles = looking.profiles
        assert [profiles[i].n_steps for i in (0, 1)] == [4, 4]
        assert [profiles[i].shares["attention"].n for i in (0, 1)] == [4 * 1, 4 * 2]
