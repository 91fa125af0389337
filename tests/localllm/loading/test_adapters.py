"""Low-rank adapters: comparison with transformers and peft, several in one batch, and rejected files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.loading.adapters import merge, read_adapter
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.gguf_writer import finish
from tests.helpers.tiny_models import CONFIG, config, interleave_pairs, random_weights, tiny_gguf

Array = NDArray[np.float32]

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 21)]
#: Hugging Face's name of a layer's matrix, GGUF's name, and its rows and columns.
MATRICES = {
    "self_attn.q_proj": ("attn_q", 64, 64),
    "self_attn.k_proj": ("attn_k", 32, 64),
    "self_attn.o_proj": ("attn_output", 64, 64),
    "mlp.gate_proj": ("ffn_gate", 172, 64),
    "mlp.down_proj": ("ffn_down", 64, 172),
}


def pairs(seed: int, rank: int) -> dict[str, tuple[Array, Array]]:
    """Return A and B of every layer, with Hugging Face's names."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return rng.normal(0, max(shape[1], 1) ** -0.5, shape).astype(np.float32)

    return {
        f"model.layers.{i}.{name}": (matrix(rank, n_in), matrix(n_out, rank))
        for i in range(CONFIG["num_hidden_layers"])
        for name, (_, n_out, n_in) in MATRICES.items()
    }


def write_peft(folder: Path, seed: int, rank: int = 4, alpha: float = 8, **more: Any) -> Path:
    """Write an adapter folder in the format of peft's ``save_pretrained``."""
    folder.mkdir()
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": matrix
        for name, both in pairs(seed, rank).items()
        for part, matrix in zip("AB", both, strict=True)
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": [*MATRICES], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"} | more))
    return folder


def write_gguf(path: Path, seed: int, rank: int = 4, alpha: float = 8, architecture: str = "llama") -> Path:
    """Write the same adapter in the format of llama.cpp's converter."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs(seed, rank).items():
        _, _, i, stem = name.split(".", 3)
        ours = MATRICES[stem][0]
        if ours in ("attn_q", "attn_k"):
            b = interleave_pairs(b, {"attn_q": 4, "attn_k": 2}[ours])
        writer.add_tensor(f"blk.{i}.{ours}.weight.lora_a", a)
        writer.add_tensor(f"blk.{i}.{ours}.weight.lora_b", np.ascontiguousarray(b))
    finish(writer)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("base") / "base.gguf")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters in both formats and with several ranks."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_peft(folder / "a", 1),
        "b": write_gguf(folder / "b.gguf", 2, rank=8),
        "c": write_peft(folder / "c", 3, rank=2, use_rslora=True),
        "d": write_gguf(folder / "d.gguf", 4, rank=16, alpha=16),
    }


@pytest.fixture(scope="module")
def llm(base: Path, adapters: dict[str, Path]) -> Iterator[localllm.LLM]:
    with localllm.load(base, device="cpu", context=128, parallel=8, adapters=adapters) as llm:
        yield llm


def logits_of(llm: localllm.LLM, **shares: float) -> Array:
    """Return the logprobs of all tokens after `IDS`."""
    reply = llm.generate(IDS, max_tokens=1, temperature=0.0, logprobs=300, adapters=shares)
    assert reply.logprobs is not None
    top = reply.logprobs[0].top
    return np.array([logprob for _, logprob in sorted(top)])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns in peft
def test_a_peft_adapter_gives_the_logits_of_transformers_and_peft(base: Path, adapters: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")
    peft = pytest.importorskip("peft", reason="needs peft")
    settings = config()
    kind = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager").eval().float()
    model.load_state_dict({name: torch.from_numpy(w) for name, w in random_weights(settings).items()}, strict=False)
    tuned = peft.PeftModel.from_pretrained(model, adapters["a"])
    with torch.no_grad():
        theirs = torch.log_softmax(tuned(torch.tensor([IDS])).logits[0, -1], -1).numpy()
    with localllm.load(base, device="reference", context=64, adapters={"a": adapters["a"]}) as llm:
        assert np.abs(logits_of(llm, a=1.0) - theirs).max() < 1e-3 * np.abs(theirs).max()
        assert np.abs(logits_of(llm) - theirs).max() > 0.1


def test_a_trace_reads_the_values_with_adapters(llm: localllm.LLM) -> None:
    plain, adapted = (llm.trace(IDS, ["layers.0.*", "logits"], adapters=shares) for shares in ({}, {"a": 0.5}))
    np.testing.assert_array_equal(plain["layers.0.input"], adapted["layers.0.input"])
    assert all(
        not np.array_equal(plain[name], adapted[name])
        for name in plain
        if name != "layers.0.input" and not name.endswith("values")
    )
    logits = adapted["logits"][-1].astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    np.testing.assert_allclose(logits_of(llm, a=0.5), logprobs, atol=1e-5)


def test_requests_with_different_adapters_share_a_batch(llm: localllm.LLM) -> None:
    choices: list[dict[str, float]] = [
        {}, {"a": 1}, {"b": 1}, {"c": 0.5}, {"d": 1}, {"a": 0.7, "b": -0.3}, {"a": 0.5, "c": 1, "d": 0.2}, {"b": 0},
    ]  # fmt: skip
    alone = [llm.generate(IDS, max_tokens=12, temperature=0.0, adapters=each).ids for each in choices]
    assert alone[0] == alone[7]
    assert len({*map(tuple, alone)}) >= 6
    llm.forget()
    streams = [llm.stream(IDS, max_tokens=12, temperature=0.0, adapters=each) for each in choices]
    assert [stream.read().ids for stream in streams] == alone
    # Cached tokens are reused with the same adapter only.
    assert llm.generate(IDS, max_tokens=1, adapters={"a": 1}).usage.cached_tokens == len(IDS) - 1
    assert llm.generate(IDS, max_tokens=1, adapters={"a": 0.25}).usage.cached_tokens == 0


def test_a_server_with_adapters(base: Path, adapters: dict[str, Path], llm: localllm.LLM) -> None:
    """Requests use the default scales unless they set their own; /lora-adapters changes the defaults."""
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    http_server = pytest.importorskip("tests.helpers.http_server", reason="needs the extra 'serve'")
    load = http_server.demo(path=base, context=128, adapters={"a": adapters["a"], "b": adapters["b"]})
    settings = {"prompt": IDS, "temperature": 0, "n_predict": 12}

    def expected(**shares: float) -> str:
        return llm.generate(IDS, max_tokens=12, temperature=0.0, adapters=shares).text

    with http_server.serving(load, adapters={"a": 1.0, "b": 0.0}) as server:

        def text(**more: Any) -> str:
            answer = httpx.post(server.url + "/completion", json=settings | more, timeout=60)
            return str(answer.json()["content"])

        assert text() == expected(a=1)
        assert text(lora=[{"id": 1, "scale": 0.5}]) == expected(b=0.5)
        assert text(lora=[]) == expected()
        url = server.url + "/lora-adapters"
        assert httpx.get(url).json()[0] == {"id": 0, "path": "a", "scale": 1.0}
        assert httpx.post(url, json=[{"id": 1, "scale": -0.3}]).json()[1]["scale"] == -0.3
        assert text() == expected(b=-0.3)
        for wrong in ([{"id": 2, "scale": 1}], [{"id": -1, "scale": 1}], [{"id": 0}], {"id": 0, "scale": 1}):
            assert httpx.post(url, json=wrong).status_code == 400
        assert httpx.get(url).json()[1]["scale"] == -0.3


def test_each_model_of_a_server_has_its_own_adapters(
    base: Path, adapters: dict[str, Path], llm: localllm.LLM
) -> None:
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    http_server = pytest.importorskip("tests.helpers.http_server", reason="needs the extra 'serve'")
    models = pytest.importorskip("localllm.server.models", reason="needs the extra 'serve'")
    load = {name: http_server.demo(path=base, context=128, adapters={name: adapters[name]}) for name in ("a", "b")}
    sources = {
        "first": models.Preset(None, load["a"], adapters={"a": 1.0}),
        "second": models.Preset(None, load["b"], adapters={"b": 0.5}),
        "plain": None,
    }
    with http_server.serving(http_server.demo(path=base, context=128), sources=sources) as server:

        def text(model: str, **more: Any) -> str:
            body = {"model": model, "prompt": IDS, "temperature": 0, "n_predict": 12, **more}
            return str(httpx.post(server.url + "/completion", json=body, timeout=60).json()["content"])

        def expected(**scales: float) -> str:
            return llm.generate(IDS, max_tokens=12, temperature=0.0, adapters=scales).text

        assert text("first") == expected(a=1)
        assert text("second") == expected(b=0.5)
        assert text("second", lora=[{"id": 0, "scale": 1.0}]) == expected(b=1)
        assert text("plain") == expected()
        url = server.url + "/lora-adapters"
        assert httpx.get(url).json() == [{"id": 0, "path": "a", "scale": 1.0}]
        assert httpx.get(url, params={"model": "second"}).json() == [{"id": 0, "path": "b", "scale": 0.5}]
        assert httpx.get(url, params={"model": "plain"}).json() == []
        httpx.post(url, params={"model": "second"}, json=[{"id": 0, "scale": 0}]).raise_for_status()
        assert text("second") == expected()
        assert text("first") == expected(a=1)
        body = {"model": "plain", "prompt": IDS, "lora": [{"id": 0, "scale": 1}]}
        assert "plain has no adapters" in httpx.post(server.url + "/completion", json=body).json()["error"]["message"]


def test_adding_an_adapter_later_is_the_same(base: Path, adapters: dict[str, Path], llm: localllm.LLM) -> None:
    with localllm.load(base, device="cpu", context=128) as other:
        before = other.generate(IDS, max_tokens=8, temperature=0.0).ids
        other.load_adapter("x", adapters["b"])
        other.load_adapter("y", adapters["a"])
        assert other.generate(IDS, max_tokens=8, temperature=0.0).ids == before
        for name, same in (("x", "b"), ("y", "a")):
            ours = other.generate(IDS, max_tokens=8, temperature=0.0, adapters={name: 1.0}).ids
            assert ours == llm.generate(IDS, max_tokens=8, temperature=0.0, adapters={same: 1.0}).ids
        with pytest.raises(UsageError, match="no adapter 'z': the loaded adapters are 'x', 'y'"):
            other.generate("a", adapters={"z": 1.0})


def test_a_merged_model_is_the_model_with_the_adapters(
    base: Path, adapters: dict[str, Path], llm: localllm.LLM, tmp_path: Path
) -> None:
    with GGUFFile.open(base) as file:
        parts = [(read_adapter(name, adapters[name], file), share) for name, share in (("a", 1.0), ("b", 0.5))]
        target = tmp_path / "merged.gguf"
        assert [*merge(file, parts, target)] == [*file.tensors]
        with pytest.raises(localllm.LocalLLMError, match="already exists"):
            [*merge(file, parts, target)]
        with pytest.raises(UsageError, match="is the model itself"):
            [*merge(file, parts, base)]
    with localllm.load(target, device="cpu", context=128) as merged:
        np.testing.assert_allclose(logits_of(merged), logits_of(llm, a=1.0, b=0.5), atol=0.02)


def changed(kind: str, part: str, folder: Path) -> tuple[Path, Path, Any]:
    """Write a tiny model's file, a PEFT adapter for one of its matrices, and the model merged with it."""
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.models.tiny import TINY, make_model, write

    model = make_model(TINY[kind])
    path = write(folder / "base.gguf", TINY[kind], model)
    name = next(key for key in model.state_dict() if key.endswith(f".{part}.weight"))
    weight = model.state_dict()[name]
    rng = np.random.default_rng(5)
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, weight.shape[1]), (weight.shape[0], 2)))
    adapter = folder / "adapter"
    adapter.mkdir()
    stem = "base_model.model." + name.removesuffix(".weight")
    write_safetensors(adapter / "adapter_model.safetensors", {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b})
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    weight += weight.new_tensor(b @ a)
    return path, adapter, model


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("llama", "k_proj"),
        ("gptneox", "query_key_value"),
        ("gemma4-dense", "k_proj"),
        ("granitehybrid", "k_proj"),
        ("lfm2", "q_proj"),
        ("nemotron-h", "q_proj"),
    ],
)
def test_a_peft_adapter_changes_its_target_rows(kind: str, part: str, tmp_path: Path) -> None:
    """Compare with a checkpoint into which the adapter is merged before conversion."""
    path, adapter, model = changed(kind, part, tmp_path)
    from tests.models.tiny import TINY, write

    merged = write(tmp_path / "merged.gguf", TINY[kind], model)
    with GGUFFile.open(path) as before, GGUFFile.open(merged) as after:
        ((target, (a, b)),) = read_adapter("a", adapter, before).parts.items()
        old, new = (file.tensors[target].data.view(np.float32) for file in (before, after))
        np.testing.assert_allclose(old + b @ a, new, atol=0.02)  # bfloat16


@pytest.mark.parametrize(("kind", "part"), [("qwen35", "in_proj_qkv"), ("falcon-h1", "o_proj")])
def test_a_peft_adapter_for_a_transformed_tensor_is_refused(kind: str, part: str, tmp_path: Path) -> None:
    path, adapter, _ = changed(kind, part, tmp_path)
    with GGUFFile.open(path) as file, pytest.raises(ModelError, match="merge it into its model with PEFT"):
        read_adapter("a", adapter, file)


def test_an_unsuitable_adapter_is_reported(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    wide = tiny_gguf(tmp_path / "wide.gguf", hidden_size=128)
    with GGUFFile.open(wide) as file, pytest.raises(ModelError, match="is for another model"):
        read_adapter("a", adapters["a"], file)
    with GGUFFile.open(base) as file:
        for path, message in (
            (write_gguf(tmp_path / "q.gguf", 1, architecture="qwen2"), "an adapter for qwen2 models"),
            (base, "is not an adapter"),
            (write_peft(tmp_path / "dora", 1, use_dora=True), "use_dora"),
            (write_peft(tmp_path / "ia3", 1, peft_type="IA3"), "of the kind 'IA3'"),
            (write_peft(tmp_path / "huge", 1, lora_alpha=1e300), "has lora_alpha = 1e\\+300"),
            (write_peft(tmp_path / "text", 1, lora_alpha="x"), "has lora_alpha = 'x'"),
            (write_peft(tmp_path / "nan", 1, alpha=float("nan")), "has lora_alpha = nan"),
            (write_peft(tmp_path / "empty", 1, rank=0), "has not two matrices for 'blk.0.attn_q.weight'"),
            (tmp_path, "has no adapter_config.json"),
        ):
            with pytest.raises(ModelError, match=message):
                read_adapter("x", path, file)
        for odd in (np.nan, np.inf):
            folder = write_peft(tmp_path / f"all {odd}", 1)
            tensors = {
                f"base_model.model.{name}.lora_{part}.weight": matrix * np.float32(odd)
                for name, both in pairs(1, 4).items()
                for part, matrix in zip("AB", both, strict=True)
            }
            write_safetensors(folder / "adapter_model.safetensors", tensors)
            with pytest.raises(ModelError, match="that are NaN or infinite"):
                read_adapter("x", folder, file)
        (tmp_path / "dora" / "adapter_config.json").write_text('{"r": 4}')
        (tmp_path / "dora" / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{!")
        with pytest.raises(ModelError, match="not a whole safetensors file"):
            read_adapter("x", tmp_path / "dora", file)
        with pytest.raises(localllm.ModelNotFoundError):
            read_adapter("x", tmp_path / "none", file)
    with localllm.load(base, device="cpu", context=64) as llm:
        with pytest.raises(ModelError):
            llm.load_adapter("x", base)
        assert llm.generate("a", max_tokens=1).usage.completion_tokens == 1
        with pytest.raises(UsageError, match="no adapter is loaded"):
            llm.generate("a", adapters={"x": 1.0})
