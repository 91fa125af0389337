"""Memory plans compared with manual calculations for the published shape of TinyLlama 1.1B."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localllm.engine import runner
from localllm.engine.runner import MAX_TOKENS
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.backend import Backend, Footprint, Progress, Step, weights_of
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.graph import CACHE_TYPES, CacheType, Graph, Weight
from localllm.kernels.split import MICRO_BATCH
from localllm.loading.devices import Device
from localllm.loading.placement import (
    MIN_CONTEXT,
    OVERHEAD_BYTES,
    SHORT_CONTEXT,
    Memory,
    Placement,
    Planner,
    fit,
    missing_memory,
    widened,
)
from localllm.models.config import ModelConfig
from localllm.models.registry import Model, read_model
from localllm.quant.types import GGMLType
from tests.helpers.hybrid import N_VOCAB, WINDOW, hybrid

LAYERS, WIDTH, FF, KV_WIDTH, VOCABULARY = 22, 2048, 5632, 256, 32000


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: GGMLType = GGMLType.F16

    @property
    def data(self) -> np.ndarray:
        return np.broadcast_to(np.uint8(0), (*self.shape[:-1], 2 * self.shape[-1]))

    def drop_pages(self) -> None: ...


@functools.cache
def tensors(*, tied: bool = False) -> dict[str, Weight]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        shapes["output.weight"] = (VOCABULARY, WIDTH)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": (KV_WIDTH, WIDTH),
            f"blk.{i}.attn_v.weight": (KV_WIDTH, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (FF, WIDTH),
            f"blk.{i}.ffn_up.weight": (FF, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, FF),
        }
    return {name: Tensor(name, shape) for name, shape in shapes.items()}


METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.embedding_length": WIDTH,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": FF,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["x"] * VOCABULARY,
}


@dataclass(frozen=True)
class File:
    tensors: dict[str, Weight]
    metadata: Mapping[str, Any] = field(default_factory=lambda: METADATA)


@functools.cache
def model(tied: bool = False, cache_type: CacheType = "f16") -> Model:
    return read_model(File(tensors(tied=tied)), cache_type=cache_type)


CONFIG: ModelConfig = model().config

#: Bytes of one token's float16 keys and values.
TOKEN_BYTES = LAYERS * KV_WIDTH * 2 * 2
IN_LAYERS = 2 * LAYERS * (2 * WIDTH * WIDTH + 2 * KV_WIDTH * WIDTH + 3 * WIDTH * FF + 2 * WIDTH)
HEAD = 2 * (VOCABULARY * WIDTH)


#: Bytes per token of a step's scratch memory, and per output.
SCRATCH, LOGITS = 4 * (3 * FF + 2 * WIDTH), 4 * VOCABULARY


Measure = Callable[..., Footprint]


def never_loaded(progress: Progress | None) -> Step:
    raise AssertionError("nothing is loaded here")


def footprint(
    graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
) -> Footprint:
    """A device that stores weights in the file's format, and caches without padding."""
    weights = tuple(use.packed(use.weight.type.name, use.weight.data.nbytes) for use in weights_of(graph))
    caches = {layer: n_pages[0] * 16 * cache.bytes_per_token() for layer, cache in graph.caches.items()}
    has_output = any(node.layer == "output" for node in graph.nodes)
    buffers = max_tokens * SCRATCH + (max_outputs * LOGITS if has_output else 0)
    return Footprint(weights, caches, buffers, never_loaded)


@dataclass(frozen=True)
class Plans(Backend):
    """A backend that only reports the memory of graphs."""

    footprint: Measure
    page_size: int = 16
    name: str = "plans"
    step_tokens: int = 512


def device(name: str = "cpu", footprint: Measure = footprint, page_size: int = 16) -> Device:
    return Device(name, f"kernels of {name}", 1, 1, Plans(footprint, page_size), lambda: None)


def cpu_planner(backend: CPUBackend, model: Model, parallel: int = 1) -> Planner:
    return Planner("it", model, (Device("cpu", "", 2, 2, backend, lambda: None),), {"cpu": 0}, parallel)


def planner(
    config: ModelConfig = CONFIG,
    *,
    tied: bool = False,
    name: str = "the model",
    parallel: int = 1,
    gpus: tuple[int, ...] = (),
    n_gpu_layers: int | None = None,
    tensor_split: tuple[float, ...] | None = None,
) -> Planner:
    """Simulate GPUs with these bytes of memory."""
    free = {"cpu": 0} | {f"cuda:{i}": free for i, free in enumerate(gpus)}
    devices = tuple(map(device, free))
    return Planner(name, Model(config, model(tied).graph), devices, free, parallel, n_gpu_layers, tensor_split)


def plan(planner: Planner, available: int, context: int | None = None) -> Placement:
    [placed] = fit([planner], available, context)
    return placed


def plan_with_draft(
    planner: Planner, draft: Planner, available: int, context: int | None = None
) -> tuple[Placement, ...]:
    return fit([planner, draft], available, context)


def place(
    available: int = 1 << 50,
    *,
    tied: bool = False,
    config: ModelConfig = CONFIG,
    context: int | None = None,
    parallel: int = 1,
) -> Placement:
    return plan(planner(config, tied=tied, parallel=parallel), available, context)


def test_bytes_by_group() -> None:
    placed = place(context=1000)
    embedding, layers, output = placed.groups
    assert (embedding.name, embedding.weights, embedding.kv_cache) == ("embedding", HEAD, 0)
    assert layers.name == "layers 0-21"
    assert layers.weights == IN_LAYERS
    assert layers.kv_cache == 1008 * TOKEN_BYTES, "whole pages of 16 tokens"
    assert output.weights == HEAD + 2 * WIDTH
    assert placed.weights == HEAD + IN_LAYERS + output.weights
    assert placed.multiplied == IN_LAYERS + output.weights
    assert placed.total == placed.weights + placed.kv_cache + placed.scratch + OVERHEAD_BYTES
    assert {group.device for group in placed.groups} == {"cpu"}


def test_a_matrix_that_is_embedding_and_output_counts_once() -> None:
    placed = place(tied=True)
    assert [group.name for group in placed.groups] == ["layers 0-21", "embedding and output"]
    assert [group.weights for group in placed.groups] == [IN_LAYERS, HEAD + 2 * WIDTH]
    assert placed.multiplied == placed.weights


@pytest.mark.parametrize("tied", [False, True])
def test_formats_by_group(tied: bool) -> None:
    """Report every F16 matrix as converted to F32."""
    placed = place(tied=tied)
    held = [
        replace(w, kernel_type="F32" if len(tensors(tied=tied)[w.name].shape) == 2 else "F16", n_bytes=2 * w.n_bytes)
        for group in placed.groups
        for w in group.packed
    ]
    loaded = placed.loaded(held)
    for before, group in zip(placed.groups, loaded.groups, strict=True):
        assert (group.name, group.kv_cache) == (before.name, before.kv_cache)
        assert group.weights == 2 * before.weights == sum(n_bytes for _, _, n_bytes in group.formats)
    layers = next(group for group in loaded.groups if group.name.startswith("layers"))
    norms = 2 * 2 * LAYERS * WIDTH
    assert layers.formats == (("F16", "F32", 2 * (IN_LAYERS - norms)), ("F16", "F16", 2 * norms))
    assert [str(format) for format in layers.formats] == ["F16 read as F32", "F16"]


def test_parallel_sequences_take_a_cache_each() -> None:
    assert place(context=512, parallel=3).kv_cache == 3 * 512 * TOKEN_BYTES


def test_the_plan_uses_the_backends_sizes() -> None:
    """Devices may pad heads or use other types."""
    asked: list[dict[str, Any]] = []

    def said(graph: Graph, **sizes: Any) -> Footprint:
        asked.append(sizes)
        return replace(footprint(graph, **sizes), caches=dict.fromkeys(graph.caches, 12345), buffers=678)

    for cache_type in CACHE_TYPES:
        it = model(cache_type=cache_type)
        placed = plan(Planner("it", it, (device(footprint=said),), {"cpu": 0}, parallel=2), 1 << 50, 1000)
        assert (placed.kv_cache, placed.scratch, placed.cache_type) == (LAYERS * 12345, 678, cache_type)
    sizes = {"n_pages": (2 * 63,), "n_states": 0, "max_tokens": MAX_TOKENS, "max_outputs": (32 << 20) // LOGITS}
    assert asked == len(CACHE_TYPES) * [sizes]


def test_the_cpu_needs_the_scratch_memory_of_512_tokens() -> None:
    """Gate, up, the residual stream and its norm; integers of the widest; logits, and a batch's inputs."""
    scratch = plan(cpu_planner(CPUBackend(threads=2), model()), 1 << 50, 2048).scratch
    activations = 4 * 512 * (2 * FF + 2 * WIDTH)
    assert activations <= scratch <= activations + (64 << 20)


def test_a_gpu_takes_more_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows also get pages for parallel sequences, unless all layers stay on the host."""
    monkeypatch.setattr(runner, "KEPT_BYTES", 0)
    gpu = replace(device("cuda:0"), backend=Plans(footprint, step_tokens=2048))
    it = Planner("it", replace(model(), graph=hybrid()), (device(), gpu), {"cpu": 0, "cuda:0": 1 << 40})
    sizes, on_host = it.sizes(1 << 16), replace(it, n_gpu_layers=0).sizes(1 << 16)
    assert (sizes.max_tokens, on_host.max_tokens, it.sizes(1000).max_tokens) == (2048, 512, 1000)
    assert sizes.n_pages[1] - on_host.n_pages[1] == (2048 - 512) // 16


def grown(placed: Placement) -> int:
    """Return the bytes that grow with the context."""
    return placed.kv_cache + placed.scratch


def test_default_context_is_the_trained_context() -> None:
    assert place().context == 8192
    assert place(config=replace(CONFIG, context_length=2048)).context == 2048
    assert place(config=replace(CONFIG, context_length=1 << 20)).context == 1 << 20
    assert place(context=100_000).context == 100_000


@settings(max_examples=8)
@given(free=st.integers(1 << 27, 1 << 32))
def test_a_long_default_context_uses_half_of_the_free_memory(free: int) -> None:
    config = replace(CONFIG, context_length=1 << 17)
    short = place(context=SHORT_CONTEXT)
    available = short.weights + short.overhead + free
    placed = place(available, config=config)
    if placed.context == SHORT_CONTEXT or free < 2 * grown(short):
        assert placed.context <= SHORT_CONTEXT
        assert placed.total <= available
    else:
        assert grown(placed) <= free / 2
    if SHORT_CONTEXT <= placed.context < config.context_length:
        assert grown(place(context=placed.context + 1024)) > free / 2


def test_a_longer_default_context_pushes_no_layer_off_a_gpu() -> None:
    config = replace(CONFIG, context_length=1 << 17)
    for gigabytes in (1.0, 2.0, 2.3, 2.6, 3.0, 6.0):
        devices = (device(), replace(device("cuda:0"), backend=Plans(footprint)))
        free = {"cpu": 1 << 40, "cuda:0": int(gigabytes * 1e9)}
        planner = Planner("it", replace(model(), config=config), devices, free)
        (placed,) = fit([planner], 1 << 40)
        assert placed.context >= SHORT_CONTEXT
        assert placed.spilled_layers == planner.at(SHORT_CONTEXT).spilled_layers
        on_gpu = placed.on("cuda:0")
        if placed.context > SHORT_CONTEXT:
            assert grown(on_gpu) <= (free["cuda:0"] - on_gpu.weights) / 2


def test_a_server_has_room_for_as_many_as_leave_half_of_the_memory() -> None:
    planner = Planner("it", model(), (device(),))
    one = planner.at(8192)
    for n, free in ((4, 1 << 40), (3, 2 * grown(replace(planner, parallel=3).at(8192))), (1, 2 * grown(one))):
        available = one.weights + one.overhead + free
        (placed,) = fit([planner], available)
        (wider,), (placed,) = widened([planner], (placed,), available)
        assert (placed.context, placed.parallel, wider.parallel) == (8192, n, n)


@settings(max_examples=30)
@given(missing=st.integers(1, 1 << 28))
def test_default_context_shrinks_to_fit(missing: int) -> None:
    full = place(context=SHORT_CONTEXT)
    available = full.total - missing
    try:
        placed = place(available)
    except NotEnoughMemoryError:
        assert place(context=MIN_CONTEXT).total > available
        return
    assert MIN_CONTEXT <= placed.context < SHORT_CONTEXT
    assert placed.total <= available
    assert place(context=placed.context + 16).total > available


def test_an_explicit_context_is_not_shrunk() -> None:
    needed = place(context=4096)
    available = needed.total - 1
    with pytest.raises(NotEnoughMemoryError) as caught:
        place(available, context=4096)
    message = str(caught.value)
    assert f"{needed.total / 1e9:.2f} GB of memory" in message
    assert f"{needed.weights / 1e9:.2f} GB of weights" in message
    assert f"{needed.kv_cache / 1e9:.2f} GB for 4,096 tokens" in message
    assert f"{available / 1e9:.2f} GB is available" in message
    assert "context=4080 or less" in message
    assert place(available, context=4080).context == 4080


def test_no_context_is_advised_if_none_fits() -> None:
    with pytest.raises(NotEnoughMemoryError, match="smaller quantisation") as caught:
        place(IN_LAYERS)
    assert "context=" not in str(caught.value)


# A model and a draft model.

#: A draft model of nearly the same size, and one trained on less context.
DRAFT = planner(name="the draft model small.gguf", tied=True)
SHORT_DRAFT = planner(replace(CONFIG, context_length=1024), name="the draft model small.gguf", tied=True)


def test_a_draft_model_uses_the_models_context_or_its_trained_context() -> None:
    for context in (None, 512, 1024, 4096):
        placed, draft = plan_with_draft(planner(), SHORT_DRAFT, 1 << 50, context)
        assert placed == place(context=context)
        assert draft == SHORT_DRAFT.as_draft(min(placed.context, 1024))


@settings(max_examples=30)
@given(missing=st.integers(1, 1 << 28))
def test_a_default_context_shrinks_until_both_fit(missing: int) -> None:
    full = planner().at(SHORT_CONTEXT).total + DRAFT.as_draft(SHORT_CONTEXT).total
    available = full - missing
    least = planner().at(MIN_CONTEXT).total + DRAFT.as_draft(MIN_CONTEXT).total
    if available < least:
        with pytest.raises(NotEnoughMemoryError):
            plan_with_draft(planner(), DRAFT, available)
        return
    placed, draft = plan_with_draft(planner(), DRAFT, available)
    assert placed.context == draft.context >= MIN_CONTEXT
    assert placed.total + draft.total <= available
    more = placed.context + 16
    assert planner().at(more).total + DRAFT.as_draft(more).total > available


def test_a_draft_models_shorter_context_leaves_the_model_more() -> None:
    available = place(context=4000).total + SHORT_DRAFT.as_draft(1024).total
    placed, draft = plan_with_draft(planner(), SHORT_DRAFT, available)
    assert (placed.context, draft.context) == (4000, 1024)


def test_the_error_names_the_model_that_does_not_fit() -> None:
    small, large = planner(tied=True), planner()
    available = large.at(512).total - 1
    assert small.at(512).total <= available
    with pytest.raises(NotEnoughMemoryError, match=r"^the model needs 2\.\d\d GB .*, but"):
        plan_with_draft(large, replace(small, name="the draft model x.gguf"), available, 512)
    both = r"^the model needs .* and the draft model x\.gguf needs 2\.\d\d GB .*, but .*: leave the draft model out"
    with pytest.raises(NotEnoughMemoryError, match=both):
        plan_with_draft(small, replace(large, name="the draft model x.gguf"), available, 512)
    together = large.at(512).total + DRAFT.as_draft(512).total
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_with_draft(large, DRAFT, together - 1, 512)
    message = str(caught.value)
    assert f"the model needs {large.at(512).total / 1e9:.2f} GB of memory" in message
    assert f"the draft model small.gguf needs {DRAFT.as_draft(512).total / 1e9:.2f} GB" in message
    assert f"{(together - 1) / 1e9:.2f} GB is available: leave the draft model out" in message
    assert plan_with_draft(large, DRAFT, together, 512) == (large.at(512), DRAFT.as_draft(512))


def test_a_context_that_fits_both_models_is_advised() -> None:
    available = planner().at(1008).total + DRAFT.as_draft(1008).total
    with pytest.raises(NotEnoughMemoryError, match="leave the draft model out, load both with context=1008 or less"):
        plan_with_draft(planner(), DRAFT, available, 2048)


def test_the_programs_memory_counts_once() -> None:
    alone, beside = DRAFT.at(512), DRAFT.as_draft(512)
    assert alone.total - beside.total == OVERHEAD_BYTES
    assert replace(beside, overhead=OVERHEAD_BYTES) == alone


# Layers on GPUs.


def test_placement_on_several_devices() -> None:
    """The GPU gets all layers that fit, and norm and output matrix after them."""
    per_layer, output = IN_LAYERS // LAYERS + 1008 * TOKEN_BYTES // LAYERS, HEAD + 2 * WIDTH
    whole = place(context=1000)
    scratch, logits = MICRO_BATCH * SCRATCH, (32 << 20) // LOGITS * LOGITS  # of one micro-batch
    placed = plan(planner(gpus=(5 * per_layer + output + scratch + logits,)), 1 << 50, 1000)
    assert [(g.name, g.device, g.kernels) for g in placed.groups] == [
        ("embedding", "cpu", "kernels of cpu"),
        ("layers 0-16", "cpu", "kernels of cpu"),
        ("layers 17-21", "cuda:0", "kernels of cuda:0"),
        ("output", "cuda:0", "kernels of cuda:0"),
    ]
    assert placed.on("cuda:0").total == 5 * per_layer + output + scratch + logits
    assert (placed.on("cpu").weights, placed.on("cpu").overhead) == (HEAD + 17 * IN_LAYERS // LAYERS, OVERHEAD_BYTES)
    assert placed.on("cpu").total + placed.on("cuda:0").total == placed.total
    assert placed.weights == whole.weights
    assert placed.kv_cache == whole.kv_cache
    assert (placed.devices, placed.spilled_layers) == (("cpu", "cuda:0"), 17)
    assert (placed.layers_on("cpu"), placed.layers_on("cuda:0")) == (17, 5)
    asked_for = plan(planner(gpus=(1 << 40,), n_gpu_layers=5), 1 << 50, 1000)
    assert (asked_for.groups, asked_for.spilled_layers) == (placed.groups, 0)
    assert plan(planner(gpus=(1 << 40,)), 1 << 50).spilled_layers == 0


def test_memory_by_kind_and_what_is_missing() -> None:
    per_layer, output = IN_LAYERS // LAYERS + 1008 * TOKEN_BYTES // LAYERS, HEAD + 2 * WIDTH
    scratch, logits = MICRO_BATCH * SCRATCH, (32 << 20) // LOGITS * LOGITS  # of one micro-batch
    on_gpu = 5 * per_layer + output + scratch + logits
    split = planner(gpus=(on_gpu,))
    placed = plan(split, 1 << 50, 1000)
    assert placed.memory == Memory(placed.total - OVERHEAD_BYTES - on_gpu, on_gpu)
    assert Memory.sum([placed.memory, Memory(1, 2)]) == Memory(placed.memory.host + 1, on_gpu + 2)
    assert missing_memory(split, placed, 1000) == Memory(0, 17 * per_layer)
    chosen = planner(gpus=(1 << 40,), n_gpu_layers=5)
    assert missing_memory(chosen, plan(chosen, 1 << 50, 1000), 1000) == Memory()
    short = place(available := place(context=1024).total)
    assert short.context == 1024
    assert missing_memory(planner(), short, None) == Memory(3 * short.kv_cache)
    assert missing_memory(planner(), short, 1024) == Memory()
    with pytest.raises(NotEnoughMemoryError) as caught:
        place(available, context=2048)
    assert caught.value.missing == place(context=2048).total - available


def test_a_shared_embedding_and_output_matrix_is_on_both_devices() -> None:
    placed = plan(planner(tied=True, gpus=(1 << 40,), n_gpu_layers=2), 1 << 50)
    assert [(g.name, g.device, g.weights) for g in placed.groups if not g.layers] == [
        ("embedding", "cpu", HEAD),
        ("output", "cuda:0", HEAD + 2 * WIDTH),
    ]
    alone = plan(planner(tied=True, gpus=(1 << 40,)), 1 << 50)
    assert [(g.name, g.device) for g in alone.groups] == [
        ("layers 0-21", "cuda:0"),
        ("embedding and output", "cuda:0"),
    ]
    assert alone.on("cpu").total == OVERHEAD_BYTES


def test_pages_are_as_long_as_those_of_every_device() -> None:
    asked: dict[str, set[int]] = {"cpu": set(), "cuda:0": set()}

    def measure(name: str) -> Measure:
        def said(graph: Graph, **sizes: Any) -> Footprint:
            asked[name].add(sizes["n_pages"][0])
            return footprint(graph, **sizes)

        return said

    devices = device("cpu", measure("cpu")), device("cuda:0", measure("cuda:0"), 48)
    plan(Planner("it", model(), devices, {"cpu": 0, "cuda:0": 1 << 40}, n_gpu_layers=3), 1 << 50, 500)
    assert asked == {"cpu": {11 * 3}, "cuda:0": {11}}


def test_a_default_context_shrinks_for_layers_that_must_be_on_a_gpu() -> None:
    needed = planner(gpus=(1 << 40,), n_gpu_layers=LAYERS).at(2000).on("cuda:0").total
    tight = planner(gpus=(needed,), n_gpu_layers=LAYERS)
    assert plan(tight, 1 << 50).context == 2000
    with pytest.raises(NotEnoughMemoryError, match=r"22 layers on GPUs need .* on cuda:0, .* n_gpu_layers=\d+ fits"):
        plan(tight, 1 << 50, 4096)


def test_layers_that_no_device_has_room_for() -> None:
    split = planner(gpus=(1 << 29,))
    on_cpu = split.at(512).on("cpu")
    assert 0 < len([g for g in on_cpu.groups if g.layers]) < LAYERS
    assert plan(split, on_cpu.total, 512).on("cpu") == on_cpu
    with pytest.raises(NotEnoughMemoryError, match=rf"the model needs {on_cpu.total / 1e9:.2f} GB of memory"):
        plan(split, on_cpu.total - 1, 512)


def test_a_draft_model_gets_gpu_memory_first() -> None:
    small = planner(SHORT_DRAFT.model.config, tied=True, gpus=(3 << 30,), name="small")
    placed, draft = plan_with_draft(planner(gpus=(3 << 30,)), small, 1 << 50, 1024)
    assert (draft.devices, draft.overhead) == (("cuda:0",), 0)
    assert placed.on("cuda:0").total + draft.on("cuda:0").total <= 3 << 30
    assert placed.layers_on("cuda:0") < plan(planner(gpus=(3 << 30,)), 1 << 50, 1024).layers_on("cuda:0")
    both = planner(gpus=(3 << 30,), n_gpu_layers=LAYERS)
    with pytest.raises(NotEnoughMemoryError, match="22 layers on GPUs need"):
        plan_with_draft(both, small, 1 << 50, 1024)


def test_windows_and_states_are_planned_as_they_are_taken() -> None:
    backend, graph = CPUBackend(threads=2), hybrid()
    config = replace(CONFIG, n_layers=graph.n_layers, n_vocab=N_VOCAB)
    planner = cpu_planner(backend, Model(config, graph), parallel=2)
    placed = planner.at(1 << 16)
    step = planner.load(placed, None)
    assert step.cache.n_bytes == placed.kv_cache
    assert placed.cache.n_pages == tuple(zip([None, WINDOW], step.cache.n_pages, strict=True))
    assert (placed.cache.n_states, placed.cache.n_snapshots) == (step.cache.n_states, step.cache.n_states - 2)
    assert placed.cache.n_snapshots >= 4
    assert re.fullmatch(
        r"pages of 64 tokens: 2,048 of all tokens, [\d,]+ of a window of 24; [\d,]+ states, [\d,]+ of them snapshots",
        str(placed.cache),
    )


def test_windows_keep_pages_that_are_likely_to_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "KEPT_BYTES", 0)
    graph = hybrid()
    # Windows of 24 tokens use 3 pages of 16: two sequences need twice that, plus the 512 tokens of a step.
    assert runner.n_cache_pages(graph, 4096, 2, 16) == (512, 3 * 2 * 3 + 32)
    assert runner.n_cache_pages(graph, 160, 2, 16) == (20, 20), "at most the pages of all tokens"
    assert runner.n_states(graph, 4096, 2) == 3 * 2
    monkeypatch.setattr(runner, "KEPT_BYTES", 1 << 20)
    page_bytes = 16 * 2 * (2 * 2 * 16 + 5 * 32)
    assert runner.n_cache_pages(graph, 1 << 20, 2, 16)[1] == 2 * 3 + 32 + (1 << 20) // page_bytes
    assert runner.n_states(graph, 1 << 20, 2) == 2 + (1 << 20) // (4 * (3 * 128 + 2 * 4 * 16 * 16))
    assert runner.n_states(graph, 4096, 2) == 2 + 2 * 4096 // 128
    assert runner.n_states(Graph(), 4096, 2) == 0
