"""Reading values inside a model: traces, and values during a generation."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, ContextLengthError, NotEnoughMemoryError, OutputError, UsageError
from localllm.convert.safetensors import read_header
from localllm.engine.probe import Probe
from localllm.inspection import trace as trace_module
from localllm.inspection.positions import select
from tests.helpers.tiny_models import tiny_gguf

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 90)]
OTHER = [int(i) for i in np.random.default_rng(2).integers(3, 300, 70)]
NAMES = ["layers.*.output", "layers.*.attention", "layers.1.keys", "final_norm", "logits"]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_gguf(tmp_path_factory.mktemp("trace") / "m.gguf", "qwen3_moe")
    with localllm.load(path, device=request.param, context=128, parallel=8) as llm:
        yield llm


def equal(a: dict[str, Any], b: dict[str, Any], rows: Any = slice(None)) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name][rows], err_msg=name)


def test_values_belong_together(llm: LLM) -> None:
    values = llm.trace(IDS, ["*", "layers.*.*"])
    assert list(values) == list(llm.graph)
    assert all(array.shape == (len(IDS), llm.graph[name].width) for name, array in values.items())
    assert values["layers.0.experts"].dtype == np.int32
    np.testing.assert_array_equal(values["layers.0.output"], values["layers.1.input"])
    streams = values["layers.0.input"] + values["layers.0.attention"] + values["layers.0.mlp"]
    np.testing.assert_allclose(streams, values["layers.0.output"], atol=1e-5)
    best = np.argsort(-values["layers.2.router"], axis=1)[:, :3]
    np.testing.assert_array_equal(np.sort(best), np.sort(values["layers.2.experts"]))
    np.testing.assert_array_equal(values["logits"], llm.logits(IDS))


def test_values_do_not_depend_on_the_cache_or_other_requests(llm: LLM) -> None:
    llm.forget()
    alone = llm.trace(IDS, NAMES)
    equal(llm.trace(IDS, NAMES), alone)
    assert llm.generate(IDS, max_tokens=1).usage.cached_tokens == len(IDS) - 1, "the trace fills the shared cache"
    llm.forget()
    plain = llm.generate(IDS[:60], max_tokens=3, temperature=0)
    llm.forget()
    streams = [llm.stream(IDS[:60], max_tokens=3, temperature=0) for _ in range(2)]
    many = llm.trace([OTHER, IDS, IDS[:40]], NAMES)
    equal(many[1], alone)
    equal(many[2], alone, slice(40))
    assert {stream.read().ids for stream in streams} == {plain.ids}


class LateOutput(trace_module._Output):
    """An output that receives its fourth piece immediately before the reader counts the first one."""

    n = 0

    @property
    def _n_read(self) -> int:
        return self.n

    @_n_read.setter
    def _n_read(self, n: int) -> None:
        if n == 1:
            self._values(np.array([3]), {})
            assert self.is_full
        self.n = n


def test_the_engine_is_woken_if_it_paused_before_a_piece_was_counted() -> None:
    prompt = trace_module.TracedPrompt([1] * 9, select(None, 9), Probe(("a",)))
    output = LateOutput(0, prompt, queue.SimpleQueue())
    for position in range(3):
        output._values(np.array([position]), {})
    assert [output.count_read() for _ in range(4)] == [True, False, False, False]


def test_a_full_cache_evaluates_tokens_again_and_reports_them_once(tmp_path: Path) -> None:
    with localllm.load(tiny_gguf(tmp_path / "m.gguf"), device="reference", context=96, parallel=1) as llm:
        alone = [llm.trace(ids, "layers.*.output") for ids in (IDS[:70], OTHER)]
        streams = [llm.stream(IDS[i : i + 40], max_tokens=30, temperature=0, ignore_eos=True) for i in range(3)]
        together = llm.trace([IDS[:70], OTHER], "layers.*.output")
        for actual, expected in zip(together, alone, strict=True):
            equal(actual, expected)
        assert [len(stream.read().ids) for stream in streams] == [30] * 3


def test_values_that_are_evaluated_again_are_reported_once() -> None:
    reported = list[tuple[list[int], list[float]]]()
    keep = lambda positions, values: reported.append((positions.tolist(), values["a"][:, 0].tolist()))  # noqa: E731
    probe = Probe(("a",), on_values=keep, values_from=1)
    rows = np.arange(8, dtype=np.float32)[:, None]
    for start, stop in ((0, 3), (0, 3), (2, 6), (6, 7)):
        probe.report(stop, {"a": rows[start:stop]})
    assert reported == [([1, 2], [1, 2]), ([3, 4, 5], [3, 4, 5]), ([6], [6])]


def test_a_trace_leaves_the_bits_of_the_cache(llm: LLM) -> None:
    llm.forget()
    expected = llm.logits(IDS, last=1)
    llm.forget()
    llm.trace(IDS[:-1], ["*", "layers.*.*"])
    np.testing.assert_array_equal(llm.logits(IDS, last=1), expected)


@pytest.mark.parametrize(
    ("positions", "rows"),
    [(-1, [89]), ([5, 0, -2, 5], [0, 5, 88]), (range(4, 8), range(4, 8)), (slice(-3, None), [87, 88, 89])],
    ids=str,
)
def test_positions(llm: LLM, positions: Any, rows: Any) -> None:
    equal(llm.trace(IDS, NAMES, positions=positions), llm.trace(IDS, NAMES), [*rows])


def test_pieces_arrive_in_order_and_pause_the_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MAX_UNREAD", 1)
    whole = llm.trace([IDS, OTHER], ["layers.*.output"])
    next_position = [0, 0]
    for piece in llm.stream_trace([IDS, OTHER], "layers.*.output"):
        first = next_position[piece.prompt]
        assert piece.positions.tolist() == list(range(first, first + len(piece.positions)))
        equal(piece.values, whole[piece.prompt], piece.positions)
        next_position[piece.prompt] += len(piece.positions)
    assert next_position == [len(IDS), len(OTHER)]
    unfinished = llm.stream_trace([IDS, OTHER], "logits")
    next(unfinished)
    unfinished.close()
    equal(llm.trace(IDS, "layers.*.output"), whole[0])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_trace_is_written_to_a_file(llm: LLM, tmp_path: Path, suffix: str) -> None:
    path, told = tmp_path / f"trace{suffix}", list[tuple[int, int]]()
    names = ["layers.*.output", "layers.0.experts"]
    llm.save_trace(path, [IDS, OTHER], names, positions=slice(None, 50), progress=lambda *n: told.append(n))
    if suffix == ".npz":
        with np.load(path) as file:
            stored = {name: file[name] for name in file}
    else:
        stored = {name: tensor.read() for name, tensor in read_header(path).items()}
    expected = llm.trace([IDS, OTHER], names, positions=slice(None, 50))
    equal(stored, {f"{i}/{name}": array for i in (0, 1) for name, array in expected[i].items()})
    assert told[-1] == (100, 100)
    (piece,) = llm.stream_trace(IDS[:4], "layers.0.experts")
    assert piece.values["layers.0.experts"].dtype == np.int32
    llm.save_trace(path, IDS, "logits")
    assert [*(np.load(path) if suffix == ".npz" else read_header(path))] == ["logits"]


@pytest.mark.parametrize("name", ["trace.npz", "trace.safetensors"])
def test_an_old_file_stays_until_the_new_one_is_complete(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")

    def fail(n: int, total: int) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        llm.save_trace(path, IDS, "logits", progress=fail)

    def full(stream: Any, **arrays: Any) -> None:
        stream.write(b"new")
        raise OSError(28, "No space left on device")

    if name.endswith("npz"):
        monkeypatch.setattr(np, "savez", full)
        with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
            llm.save_trace(path, IDS, "logits")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_values_during_a_generation(llm: LLM) -> None:
    llm.forget()
    plain = llm.generate(IDS[:30], max_tokens=8, temperature=0)
    for _ in range(2):  # the second time, the prompt is cached
        pieces: list[tuple[list[int], dict[str, Any]]] = []

        def keep(positions: Any, values: dict[str, Any], pieces: list[Any] = pieces) -> None:
            pieces.append((positions.tolist(), values))

        reply = llm.generate(
            IDS[:30],
            max_tokens=8,
            temperature=0,
            watch=["layers.1.output", "logits"],
            on_values=keep,
        )
        assert reply.ids == plain.ids
        assert [positions for positions, _ in pieces] == [[29 + i] for i in range(8)]
        whole = llm.trace(IDS[:30] + list(reply.ids[:-1]), ["layers.1.output", "logits"], positions=slice(29, None))
        equal({name: np.concatenate([values[name] for _, values in pieces]) for name in whole}, whole)


def test_an_error_of_the_receiver_ends_only_its_request(llm: LLM) -> None:
    def fail(positions: Any, values: Any) -> None:
        raise ZeroDivisionError("mine")

    other = llm.stream(IDS, max_tokens=5, temperature=0)
    with pytest.raises(ZeroDivisionError, match=r"mine"):
        llm.generate(OTHER, max_tokens=5, watch="logits", on_values=fail)
    assert len(other.read().ids) == 5


def test_a_program_that_does_not_fit_in_memory_ends_only_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(n_bytes: int, purpose: str) -> None:
        raise NotEnoughMemoryError(f"{purpose} takes {n_bytes} bytes")

    with localllm.load(tiny_gguf(tmp_path / "m.gguf"), device="cpu", context=128, parallel=4) as llm:
        other = llm.stream(IDS, max_tokens=20, temperature=0, ignore_eos=True)
        monkeypatch.setattr("localllm.kernels.cpu.backend.check_memory", refuse)
        with pytest.raises(
            NotEnoughMemoryError, match=r"^a program that reads or changes values inside the model takes"
        ):
            llm.trace(OTHER, "layers.*.output")
        assert len(other.read().ids) == 20
        monkeypatch.undo()
        expected = llm.trace(OTHER, "layers.*.output")
        refusals = [NotEnoughMemoryError("full")]
        monkeypatch.setattr("localllm.kernels.cpu.backend.check_memory", lambda *_: raise_next(refusals))
        equal(llm.trace(OTHER, "layers.0.output"), {"layers.0.output": expected["layers.0.output"]})
        assert not refusals, "the program of all outputs was dropped"


def raise_next(errors: list[NotEnoughMemoryError]) -> None:
    if errors:
        raise errors.pop()


def test_unembed_computes_the_logits_of_streams(llm: LLM) -> None:
    values = llm.trace(IDS, ["layers.2.output", "logits"])
    llm.forget()
    plain = llm.generate(IDS[:60], max_tokens=3, temperature=0)
    streams = [llm.stream(IDS[:60], max_tokens=3, temperature=0) for _ in range(2)]
    rows = np.concatenate([values["layers.2.output"]] * 2)  # more than the context
    np.testing.assert_array_equal(llm.unembed(rows), np.concatenate([values["logits"]] * 2))
    assert {stream.read().ids for stream in streams} == {plain.ids}
    assert llm.unembed(rows[:0]).shape == (0, 300)


def test_unembed_leaves_the_cache_alone(llm: LLM) -> None:
    llm.forget()
    expected = llm.logits([0] * 20)
    llm.forget()
    llm.unembed(llm.trace(IDS[:20], "layers.2.output")["layers.2.output"])
    np.testing.assert_array_equal(llm.logits([0] * 20), expected)


def test_bad_streams(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^streams has the shape \[64\], but must be \[n, 64\]$"):
        llm.unembed(np.zeros(64))
    with pytest.raises(UsageError, match=r"^streams has the shape \[2, 63\]"):
        llm.unembed(np.zeros((2, 63)))
    for value in (np.nan, 1e300):
        with pytest.raises(UsageError, match=r"^streams has NaN or infinity: "):
            llm.unembed(np.full((2, 64), value))
    for streams in ("abc", [[1], [2, 3]], {}, [[10**400] * 64], np.full((1, 64), "1"), np.ones((1, 64)) * 1j):
        with pytest.raises(UsageError, match=r"(?s)^streams is .*, but must be an array of real numbers \[n, 64\]$"):
            llm.unembed(streams)  # type: ignore[arg-type]


def test_a_list_of_arrays_is_a_list_of_prompts(llm: LLM) -> None:
    values = llm.trace([np.array(IDS), range(3, 9)], "logits")
    assert [len(of_prompt["logits"]) for of_prompt in values] == [len(IDS), 6]


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


def test_bad_arguments(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'position': did you mean 'positions'\?$"):
        llm.trace(IDS, "logits", position=-1)  # type: ignore[call-overload]
    for positions in ("last", b"last", 1.5, True, (i for i in (0,)), [0, None], [1.0], slice(0, 9, 0), slice("a")):
        with pytest.raises(UsageError, match=r"^positions is "):
            llm.trace(IDS, "logits", positions=positions)  # type: ignore[arg-type]
    for positions in (range(10**12), range(-(10**12), 0), [10**400], -91, [0, 90]):
        with pytest.raises(UsageError, match=r"^positions is .*, but must be from -90 to 89, for a prompt of 90 tok"):
            llm.trace(IDS, "logits", positions=positions)
    for positions in (np.broadcast_to(0, 10**12), Endless()):
        with pytest.raises(UsageError, match=r"but must be at most 180 numbers, for a prompt of 90 tokens$"):
            llm.trace(IDS, "logits", positions=positions)
    for positions in ([], slice(90, None), slice(10**30, None), slice(-(10**30), -(10**30)), np.zeros(0, np.int64)):
        with pytest.raises(UsageError, match=r"^positions select no token of a prompt of 90 tokens$"):
            llm.trace(IDS, "logits", positions=positions)
    equal(llm.trace(IDS, "logits", positions=slice(5, 10**30, 10**30)), llm.trace(IDS, "logits", positions=5))
    for names in ([], 3, [3], [None], b"logits", ["logits", 3]):
        with pytest.raises(UsageError, match=r"^names is .*, but must be a name of a value, or a list of names$"):
            llm.trace(IDS, names)  # type: ignore[arg-type]
    for name in ("", "*" * 5000 + "x", "x" * 100_000):
        with pytest.raises(UsageError, match=r"^names: the model has no value .*nearest names are"):
            llm.trace(IDS, name)
    with pytest.raises(ContextLengthError):
        llm.trace(IDS * 2, "logits")
    with pytest.raises(UsageError, match=r"^path is 'a.txt', but must be the name of a .safetensors or .npz file$"):
        llm.save_trace(tmp_path / "a.txt", IDS, "logits")
    for name in ("missing/a.npz", "missing/a.safetensors", "a\0.npz", "a\0.safetensors"):
        with pytest.raises(OutputError):
            llm.save_trace(tmp_path / name, IDS, "logits")
    with pytest.raises(UsageError, match=r"^watch needs a function that receives the values: pass on_values$"):
        llm.generate(IDS, watch="logits")
    with pytest.raises(UsageError, match=r"^watch: the model has no value 'x'; the nearest"):
        llm.generate(IDS, watch="x", on_values=print)
    with pytest.raises(UsageError, match=r"^watch is "):
        llm.generate(IDS, watch=3, on_values=print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^on_values is 3, but must be a function of positions and values"):
        llm.generate(IDS, watch="logits", on_values=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^on_values gets no values: name them in watch$"):
        llm.generate(IDS, on_values=print)
    monkeypatch.setattr(trace_module, "available_memory", lambda: 1000)
    with pytest.raises(
        NotEnoughMemoryError, match=r"name fewer values or positions, or use stream_trace or save_trace$"
    ):
        llm.trace(IDS, "logits")


def test_requests_without_watch_run_the_untouched_program(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.engine.runner import ModelRunner

    def refuse(*_: Any) -> Any:
        raise AssertionError("a request without watch compiled a program")

    llm.trace(OTHER, "logits")
    monkeypatch.setattr(ModelRunner, "variant", refuse)
    ids = list[Any]()
    threads = [threading.Thread(target=lambda: ids.append(llm.generate(IDS, max_tokens=3).ids)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 3
