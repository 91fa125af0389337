"""Changing values inside a model: steering vectors, control vectors of llama.cpp, and hooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import LLM, ClosedError, GGUFError, ModelError, Steering, UsageError
from localllm.engine import runner
from localllm.kernels.graph import Graph
from localllm.kernels.variants import graph_variant
from tests.helpers.command_line import run_main
from tests.helpers.gguf_writer import finish
from tests.helpers.tiny_models import tiny_gguf

Array = NDArray[np.float32]

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 40)]
OUTPUT = "layers.1.output"


def vector(seed: int, n: int = 64) -> Array:
    return np.random.default_rng(seed).normal(0, 2, n).astype(np.float32)


def write_control_vector(path: Path, vectors: dict[int, Array], architecture: str = "controlvector") -> Path:
    """Write a file as llama.cpp's cvector-generator does."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for layer, direction in vectors.items():
        writer.add_tensor(f"direction.{layer}", direction)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("steering") / "m.gguf")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    with localllm.load(path, device=request.param, context=128, parallel=8) as llm:
        yield llm


def reply(llm: LLM, **options: Any) -> Any:
    return llm.generate(IDS, max_tokens=6, temperature=0, logprobs=3, **options)


def test_each_kind_changes_rows_as_its_formula(llm: LLM) -> None:
    v, unit = vector(1), vector(1) / np.linalg.norm(vector(1))
    plain = llm.trace(IDS, OUTPUT)[OUTPUT]
    along = plain @ unit
    replaced = plain.copy()
    replaced[[3, len(IDS) - 1]] = v
    kinds: list[tuple[Any, Array]] = [
        ({OUTPUT: v}, plain + v),
        (Steering({OUTPUT: v}, scale=-0.5), plain - 0.5 * v),
        (Steering({OUTPUT: v}, "project_out"), plain - np.outer(along, unit)),
        (Steering({OUTPUT: v}, "clamp", low=-1, high=2), plain + np.outer(np.clip(along, -1, 2) - along, unit)),
        (Steering({OUTPUT: v}, "replace", positions=[3, -1]), replaced),
        ([Steering({OUTPUT: v}), Steering({OUTPUT: v}, scale=2)], plain + v + 2 * v),
        ({OUTPUT: v, "layers.1.out*": 2 * v}, plain + v + 2 * v),
    ]
    for steer, expected in kinds:
        np.testing.assert_allclose(llm.trace(IDS, OUTPUT, steer=steer)[OUTPUT], expected, atol=2e-5)


def test_later_values_follow_from_the_changed_ones(llm: LLM) -> None:
    """A replaced stream gives the values of the text whose stream it is."""
    other = [*IDS[:-1], 17]
    stream = llm.trace(other, OUTPUT, positions=-1)[OUTPUT][0]
    steer = Steering({OUTPUT: stream}, "replace", positions=[-1])
    actual = llm.trace(IDS, "logits", positions=-1, steer=steer)["logits"]
    # Layer 2 sees the same streams of all tokens, because only the last token differs.
    np.testing.assert_allclose(actual, llm.trace(other, "logits", positions=-1)["logits"], atol=1e-4)


def test_a_change_of_attention_changes_the_stream(llm: LLM) -> None:
    v = vector(2)
    plain = llm.trace(IDS, ["layers.0.attention", "layers.0.mlp", "layers.0.output", "layers.0.input"])
    values = llm.trace(IDS, [*plain], steer={"layers.0.attention": v})
    np.testing.assert_allclose(values["layers.0.attention"], plain["layers.0.attention"] + v, atol=1e-5)
    np.testing.assert_allclose(
        values["layers.0.output"] - values["layers.0.mlp"],
        plain["layers.0.input"] + values["layers.0.attention"],
        atol=1e-5,
    )


def test_eight_vectors_in_one_batch_have_the_bits_they_have_alone(llm: LLM) -> None:
    choices: list[dict[str, Any]] = [
        {"steer": {OUTPUT: vector(3)}},
        {"steer": {OUTPUT: vector(4)}},
        {"steer": Steering({OUTPUT: vector(3)}, "project_out")},
        {"steer": Steering({"layers.*.output": vector(5)}, scale=0.3)},
        {"steer": {"layers.2.mlp": vector(6)}},
        {"steer": Steering({OUTPUT: vector(4)}, positions=slice(10, None))},
        {"hooks": {OUTPUT: lambda rows, positions: rows * np.float32(1.5)}},
        {},
    ]
    alone = [reply(llm, **choice) for choice in choices]
    assert len({r.ids for r in alone}) >= 6
    llm.forget()
    streams = [llm.stream(IDS, max_tokens=6, temperature=0, logprobs=3, **choice) for choice in choices]
    together = [stream.read() for stream in streams]
    assert [(r.ids, r.logprobs) for r in together] == [(r.ids, r.logprobs) for r in alone]


def test_a_trace_changes_each_prompt_of_a_list(llm: LLM) -> None:
    changes = [
        [Steering({OUTPUT: vector(3)})],
        [],
        [Steering({"layers.0.mlp": vector(4)}), Steering({OUTPUT: vector(5)})],
    ]
    prompts = [IDS, IDS, IDS[:9]]
    together = llm.trace(prompts, "layers.*.output", steer=changes)
    for prompt, change, values in zip(prompts, changes, together, strict=True):
        for name, rows in llm.trace(prompt, "layers.*.output", steer=change).items():
            np.testing.assert_array_equal(values[name], rows)
    with pytest.raises(
        UsageError, match=r"^steer has lists for 3 prompts, but there are 2: give a list for each prompt$"
    ):
        llm.trace(prompts[:2], OUTPUT, steer=changes)


def test_requests_with_many_programs_compile_each_program_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than `KEPT_VARIANTS` alternate in each step."""
    compiled = list[Any]()

    def counted(graph: Graph, watched: Any, edited: Any) -> Any:
        compiled.append(edited)
        return graph_variant(graph, watched, edited)

    monkeypatch.setattr(runner, "graph_variant", counted)
    names = [f"layers.{layer}.{value}" for layer in range(3) for value in ("attention", "mlp")]
    streams = [llm.stream(IDS, max_tokens=20, ignore_eos=True, steer={name: vector(1)}) for name in names]
    assert [len(stream.read().ids) for stream in streams] == [20] * len(names)
    assert len(names) > runner.KEPT_VARIANTS
    assert len(compiled) < 2 * len(names)


def test_the_cache_is_keyed_by_the_steering(llm: LLM) -> None:
    llm.forget()
    plain, steer = reply(llm), Steering({OUTPUT: vector(3)})
    first = reply(llm, steer=steer)
    assert first.usage.cached_tokens == 0
    again = reply(llm, steer={OUTPUT: vector(3)})
    assert (again.usage.cached_tokens, again.ids) == (len(IDS) - 1, first.ids)
    assert reply(llm, steer=steer.scaled(0.5)).usage.cached_tokens == 0
    assert reply(llm, steer=Steering({OUTPUT: vector(3)}, positions=[0])).usage.cached_tokens == 0
    cached = reply(llm)
    assert (cached.usage.cached_tokens, cached.ids) == (len(IDS) - 1, plain.ids)
    hooked = [reply(llm, hooks={OUTPUT: lambda rows, positions: rows}) for _ in range(2)]
    assert [(r.usage.cached_tokens, r.ids) for r in hooked] == [(0, plain.ids)] * 2


def test_a_control_vector_of_llama_cpp(llm: LLM, tmp_path: Path) -> None:
    vectors = {1: vector(7), 2: vector(8)}
    path = write_control_vector(tmp_path / "v.gguf", vectors)
    expected = reply(llm, steer={"layers.1.output": 0.5 * vectors[1], "layers.2.output": 0.5 * vectors[2]})
    assert reply(llm, steer=Steering.from_gguf(path, 0.5)).ids == expected.ids
    only_second = reply(llm, steer=Steering.from_gguf(path, layers=(2, 9)))
    assert only_second.logprobs == reply(llm, steer={"layers.2.output": vectors[2]}).logprobs
    with pytest.raises(UsageError, match=r"has no vector for the layers 5 to 6: choose others$"):
        Steering.from_gguf(path, layers=(5, 6))
    with pytest.raises(ModelError, match=r"is not a control vector: its general.architecture is 'llama'"):
        Steering.from_gguf(write_control_vector(tmp_path / "x.gguf", vectors, "llama"))
    with pytest.raises(ModelError, match=r"has the tensor 'direction.0' of shape"):
        Steering.from_gguf(write_control_vector(tmp_path / "y.gguf", {0: vector(1)}))
    for number in ("²", "٣", "01", "1 ", "+1", ""):
        with pytest.raises(
            ModelError, match=r"has the tensor 'direction\..*a control vector has vectors direction.1, "
        ):
            Steering.from_gguf(write_control_vector(tmp_path / "z.gguf", {number: vector(1)}))  # type: ignore[dict-item]
    with pytest.raises(GGUFError):
        Steering.from_gguf(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("steer", "message"),
    [
        (
            {"layers.1.outptu": vector(1)},
            "^steer: the model has no value 'layers.1.outptu'; the nearest names are layers.1.output",
        ),
        (
            {OUTPUT: vector(1, 63)},
            r"^steer has a vector of 63 values for layers\.1\.output, whose rows have 64: use a vector that was",
        ),
        ({OUTPUT: [*vector(1)[:-1], np.nan]}, "^steer has NaN or infinity in the vector of 'layers.1.output'"),
        (
            {OUTPUT: np.zeros((2, 64))},
            r"^steer has an array of shape \[2, 64\] for 'layers.1.output': give a vector$",
        ),
        ({OUTPUT: "much"}, "^steer is 'much', but must be an array of real numbers for layers.1.output$"),
        ({OUTPUT: ["1"] * 64}, "^steer is .*, but must be an array of real numbers for layers.1.output$"),
        ({OUTPUT: np.ones(64) * 1j}, "(?s)^steer is .*, but must be an array of real numbers for layers.1.output$"),
        ({OUTPUT: [[1], [2, 3]]}, "^steer is .*, but must be an array of real numbers for layers.1.output$"),
        ({OUTPUT: [10**400] * 64}, "^steer is .*, but must be an array of real numbers for layers.1.output$"),
        ({OUTPUT: [1e300] * 64}, "^steer has NaN or infinity in the vector of 'layers.1.output'"),
        ({OUTPUT: None}, r"^steer has an array of shape \[\] for 'layers.1.output': give a vector$"),
        ({3: vector(1)}, "^steer has the name 3, but names of values are strings$"),
        (
            [{OUTPUT: np.full(64, 3.4e38)}] * 2,
            "^steer makes layers.1.output infinite: use a smaller vector or scale$",
        ),
        (Steering({OUTPUT: vector(1)}, positions=(i for i in (1,))), "^positions is <generator"),
        (Steering({OUTPUT: vector(1)}, positions=slice(None, None, -1)), "^positions is slice"),
        (3, "^steer is 3, but must be a mapping of names to vectors, a Steering, or a list of Steering$"),
        ([{OUTPUT: vector(1)}, 3], "^steer is 3, but must be a mapping of names to vectors"),
        (Steering({OUTPUT: vector(1)}, positions=[40]), "^positions is 40, but must be from -40 to 39"),
    ],
)
def test_bad_vectors(llm: LLM, steer: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(IDS, steer=steer)


def test_bad_settings() -> None:
    for arguments, message in (
        ({"kind": "push"}, "^kind is 'push', but must be one of 'add', 'project_out', 'clamp', 'replace'$"),
        ({"scale": float("nan")}, "^scale is nan, but must be a finite number$"),
        ({"kind": "clamp", "low": 2, "high": 1}, "^low is 2, but must be at most high, 1$"),
        ({"kind": "clamp", "low": "a"}, "^low is 'a', but must be at most high, inf$"),
        ({"kind": "clamp", "low": float("nan")}, "^low is nan, but must be at most high, inf$"),
        ({"kind": "clamp"}, '^"clamp" without limits changes nothing: pass low, high or both$'),
        ({"low": 1}, '^low and high are limits of "clamp": remove them, or pass "clamp" instead of \'add\'$'),
        ({"kind": ["add"]}, r"^kind is \['add'\], but must be one of"),
        ({"scale": "1"}, "^scale is '1', but must be a finite number$"),
        ({"scale": 10**400}, "^scale is 1000.*, but must be a finite number$"),
        ({"scale": 1e38}, "^steer has a vector of 'layers.1.output' that is infinite times the scale 1e\\+38: "),
    ):
        with pytest.raises(UsageError, match=message):
            Steering({OUTPUT: vector(1)}, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^steer has a zero vector for 'layers.1.output', which has no direction$"):
        Steering({OUTPUT: np.zeros(64)}, "project_out")


def test_hooks_get_rows_and_positions(llm: LLM) -> None:
    seen = list[tuple[list[int], Array]]()

    def hook(rows: Array, positions: NDArray[np.int64]) -> Array | None:
        seen.append((positions.tolist(), rows.copy()))
        return rows + 1 if 5 in positions else None

    values = llm.trace(IDS, OUTPUT, hooks={OUTPUT: hook})[OUTPUT]
    positions = [position for of_call, _ in seen for position in of_call]
    assert positions == list(range(len(IDS)))
    changed = np.concatenate([rows + (5 in of_call) for of_call, rows in seen])
    np.testing.assert_array_equal(values, changed)


def test_errors_of_hooks_end_only_their_requests(llm: LLM) -> None:
    plain = reply(llm)

    def fails(rows: Array, positions: Any) -> Array:
        raise ZeroDivisionError("mine")

    def calls(rows: Array, positions: Any) -> Array:
        llm.generate([5], max_tokens=1)
        return rows

    def stops(rows: Array, positions: Any) -> Array:
        raise StopIteration

    def exits(rows: Array, positions: Any) -> Array:
        raise SystemExit(3)

    wrong: list[tuple[Any, type[BaseException], str]] = [
        (fails, ZeroDivisionError, "^mine$"),
        (calls, UsageError, "runs in the model's own thread and cannot wait for the same model"),
        (lambda rows, p: rows[:, :3], UsageError, r"^the hook of layers.1.output returned an array of shape \["),
        (lambda rows, p: rows * np.nan, UsageError, "returned NaN or infinity: return finite numbers$"),
        (lambda rows, p: "text", UsageError, "returned str, but must return an array of real numbers$"),
        (lambda rows, p: rows * 1j, UsageError, "returned ndarray, but must return an array of real numbers$"),
        (lambda rows, p: [[1], [2, 3]], UsageError, "returned list, but must return an array of real numbers$"),
        (lambda rows, p: [[10**400]], UsageError, "returned list, but must return an array of real numbers$"),
        (lambda rows, p: rows * np.float64(1e300), UsageError, "returned NaN or infinity: return finite numbers$"),
        (lambda rows, p: rows[None], UsageError, r"^the hook of layers.1.output returned an array of shape \[1, "),
        (stops, RuntimeError, "^a function given to the model raised StopIteration$"),
        (exits, SystemExit, "^3$"),
    ]
    for hook, kind, message in wrong:
        streams = [llm.stream(IDS, max_tokens=6, temperature=0, logprobs=3) for _ in range(2)]
        steered = llm.stream(IDS, max_tokens=6, temperature=0, hooks={OUTPUT: lambda rows, positions: None})
        with pytest.raises(kind, match=message):
            llm.generate(IDS, max_tokens=6, hooks={OUTPUT: hook})
        assert [stream.read().ids for stream in (*streams, steered)] == [plain.ids] * 3
    with pytest.raises(UsageError, match=r"^hooks is"):
        llm.generate(IDS, hooks={OUTPUT: 3})  # type: ignore[dict-item]


def test_a_steering_shows_its_settings() -> None:
    both = {OUTPUT: vector(1), "layers.2.output": vector(2)}
    assert repr(Steering({OUTPUT: vector(1)}, scale=0.5)) == "Steering(layers.1.output, 'add', scale=0.5)"
    clamp = Steering(both, "clamp", low=-1, positions=[3])
    shown = "layers.1.output … layers.2.output (2 vectors), 'clamp', low=-1, high=inf, positions=[3]"
    assert repr(clamp) == f"Steering({shown})"


def test_vectors_cannot_change_after_they_were_checked() -> None:
    given, steering = vector(1), Steering({OUTPUT: vector(1)}, scale=np.float32(0.5))  # type: ignore[arg-type]
    assert steering.scale == 0.5
    before = Steering({OUTPUT: given}, scale=0.5)
    given += 1
    assert before.digest == steering.digest
    with pytest.raises(ValueError, match="read-only"):
        steering.vectors[OUTPUT][0] = 3


def test_a_changed_steering_uses_no_cached_tokens_of_the_old_one(llm: LLM) -> None:
    steering = Steering({OUTPUT: vector(1)})
    reply(llm, steer=steering)
    steering.scale = -2.0
    changed = reply(llm, steer=steering)
    assert changed.usage.cached_tokens == 0
    assert changed.logprobs == reply(llm, steer=Steering({OUTPUT: vector(1)}, scale=-2.0)).logprobs


def test_each_name_that_matches_a_value_changes_it(llm: LLM) -> None:
    plain, (v, w) = llm.trace(IDS, OUTPUT)[OUTPUT], (vector(1), vector(2))
    for steer in ({"layers.*.output": v, OUTPUT: w}, {OUTPUT: w, "layers.*.output": v}):
        of_first = llm.trace(IDS, OUTPUT, steer={"layers.0.output": v})[OUTPUT]
        np.testing.assert_allclose(llm.trace(IDS, OUTPUT, steer=steer)[OUTPUT], of_first + v + w, atol=2e-5)
    assert not np.allclose(of_first, plain)


def test_a_change_of_the_stream_is_not_in_the_output_of_the_block_before_it(llm: LLM) -> None:
    names = ["layers.1.mlp", OUTPUT, "layers.2.input"]
    plain = llm.trace(IDS, names)
    for name in (OUTPUT, "layers.2.input"):
        values = llm.trace(IDS, names, steer={name: vector(1)})
        np.testing.assert_array_equal(values["layers.1.mlp"], plain["layers.1.mlp"])
        np.testing.assert_allclose(values[OUTPUT], plain[OUTPUT] + vector(1), atol=1e-5)
        np.testing.assert_array_equal(values["layers.2.input"], values[OUTPUT])


def test_a_hook_that_closes_the_model_ends_its_request(path: Path) -> None:
    with localllm.load(path, device="reference", context=64) as llm:

        def close(rows: Array, positions: Any) -> None:
            llm.close()

        with pytest.raises(ClosedError):
            llm.generate(IDS, hooks={OUTPUT: close})


def test_hooks_of_two_models_that_wait_for_each_other(path: Path) -> None:
    both_run = threading.Barrier(2, timeout=60)
    results = list[object]()

    def generate(llm: LLM, other: LLM) -> None:
        def call(rows: Array, positions: Any) -> None:
            both_run.wait()
            other.generate([5], max_tokens=1)

        try:
            results.append(llm.generate([7], max_tokens=1, hooks={OUTPUT: call}).finish_reason)
        except UsageError as error:
            results.append(str(error))

    with localllm.load(path, device="reference") as a, localllm.load(path, device="reference") as b:
        threads = [threading.Thread(target=generate, args=pair) for pair in ((a, b), (b, a))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = "a logits processor or a hook runs in the model's own thread and cannot wait for the same model: "
    assert len(results) == 2
    assert any(str(result).startswith(refused) for result in results)


def test_chosen_experts_cannot_be_changed(tmp_path: Path) -> None:
    with localllm.load(tiny_gguf(tmp_path / "m.gguf", "qwen3_moe"), device="reference", context=64) as llm:
        with pytest.raises(UsageError, match=r"cannot be changed: change layers.0.router$"):
            llm.generate(IDS, steer={"layers.0.experts": [1, 2, 3]})
        chosen = llm.trace(IDS, "layers.0.experts", steer={"layers.0.router": [0, 0, 1e4] + [0] * 6})
        assert (chosen["layers.0.experts"] == 2).any(axis=1).all()


def test_the_command_line_adds_control_vectors(
    path: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    file = write_control_vector(tmp_path / "v.gguf", {1: vector(7), 2: vector(8)})
    flags = ["-m", str(path), "-p", "the", "-n", "6", "--temp", "0", "--no-chat", "--device", "reference", "-q"]

    def text(*more: str) -> str:
        return str(json.loads(run_main(capfdbinary, "generate", *flags, "--json", *more).out)["text"])

    with localllm.load(path, device="reference") as llm:
        for more, steering in (
            (["--control-vector", str(file)], Steering.from_gguf(file)),
            (["--control-vector-scaled", f"{file}:-2.5"], Steering.from_gguf(file, -2.5)),
            (
                ["--control-vector", str(file), "--control-vector-layer-range", "2", "2"],
                Steering.from_gguf(file, layers=(2, 2)),
            ),
        ):
            assert text(*more) == llm.generate("the", max_tokens=6, temperature=0, steer=steering).text
    error = run_main(capfdbinary, "generate", *flags, "--control-vector-layer-range", "1", "2").error()
    assert "--control-vector-layer-range needs --control-vector: add it" in error
    wide = write_control_vector(tmp_path / "wide.gguf", {1: vector(7, 65)})
    error = run_main(capfdbinary, "generate", *flags, "--control-vector", str(wide)).error()
    assert error.startswith("--control-vector has a vector of 65 values for layers.1.output, whose rows have 64: ")
    assert (
        "is not FILE:X, such as happy.gguf:0.8"
        in run_main(capfdbinary, "generate", *flags, "--control-vector-scaled", "a.gguf").error()
    )
