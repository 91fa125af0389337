"""Graphs that a device and the host compute together: the operations of both, and their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'reference'")

from localllm.errors import KernelError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import weights_of
from localllm.kernels.graph import Graph, Rows, Weight
from localllm.kernels.offload import Offloaded, Receive, Send, offload
from localllm.kernels.operations import HostEdit, Linear
from localllm.loading.overrides import Overrides
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.weights import Tensor
from tests.models.tiny import ENCODER_DECODERS, TINY, make_model, write

EXPERTS = Overrides(n_layers=None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A model with shared experts."""
    path = write(tmp_path_factory.mktemp("shared") / "model.gguf", TINY["glm4moe"], make_model(TINY["glm4moe"]))
    with GGUFFile.open(path) as file:
        return read_model(file).graph


def divided(graph: Graph, *rules: str, n_layers: int | None = 0) -> Offloaded:
    graphs = offload(graph, Overrides(rules, n_layers).is_on_host)
    assert graphs is not None
    return graphs


def names(graph: Graph) -> list[str]:
    return [type(node.operation).__name__ for node in graph.nodes]


def test_the_device_computes_shared_experts_while_the_host_computes_routed_ones(shared: Graph) -> None:
    graphs = divided(shared, n_layers=None)
    device, operations = names(graphs.device), [node.operation for node in graphs.device.nodes]
    n_blocks = device.count("Send")
    assert n_blocks == names(shared).count("Route") > 0
    for number in range(n_blocks):
        first = next(i for i, op in enumerate(operations) if isinstance(op, Send) and op.number == number)
        assert device[first : first + 7] == ["Send", "Linears", "Gated", "Linear", "Add", "Receive", "Add"]
        received = operations[first + 5]
        assert isinstance(received, Receive)
        assert received.number == number
        router = graphs.device.nodes[first - 1].operation
        assert isinstance(router, Linear)
        assert router.result.width == 8
    block = ["Receive", "Route", "ExpertLinears", "Gated", "ExpertOutput", "Send"]
    assert names(graphs.host) == n_blocks * block


def test_only_rows_of_tokens_are_copied(shared: Graph) -> None:
    graphs = divided(shared, n_layers=None)
    copies = [node.operation for node in graphs.device.nodes if isinstance(node.operation, Send | Receive)]
    assert all(x.rows is Rows.TOKENS for copy in copies for x in copy.tensors)
    n_blocks, width, n_experts = len(copies) // 2, 64, 8
    assert graphs.copied_bytes(1) == 4 * n_blocks * (2 * width + n_experts)
    assert graphs.copied_bytes(5) == 5 * graphs.copied_bytes(1)


def test_caches_and_states_stay_on_the_device(shared: Graph) -> None:
    graphs = divided(shared, ".=CPU")
    assert graphs.device.caches == shared.caches
    assert not graphs.host.caches
    assert names(graphs.device).count("Attention") == shared.n_layers
    assert not {"Embed", "Linear", "Linears", "ExpertOutput"} & {*names(graphs.device)}
    assert not {"Attention", "RopeAppend"} & {*names(graphs.host)}
    assert isinstance(graphs.device.nodes[-1].operation, Receive)  # the logits
    assert graphs.device.result.rows is Rows.OUTPUTS


def test_each_weight_is_in_one_of_the_graphs(shared: Graph) -> None:
    for rules, n_layers in (((), None), (("shexp=CPU",), 0), ((r"blk\.1\.=CUDA0", "ffn_=CPU"), 0), ((), 2)):
        graphs = divided(shared, *rules, n_layers=n_layers)
        overrides = Overrides(rules, n_layers)
        on_device, on_host = (
            {w for node in graph.nodes for w in node.operation.weights} for graph in (graphs.device, graphs.host)
        )
        assert not on_device & on_host
        assert on_device | on_host == {w for node in shared.nodes for w in node.operation.weights}
        matrices = {w for w in on_host if len(w.shape) > 1}
        assert matrices == {w for w in on_device | on_host if len(w.shape) > 1 and overrides.is_on_host(w)}


def test_the_graph_of_a_prompt_is_divided_too(tmp_path: Path) -> None:
    entry = ENCODER_DECODERS["t5"]
    with GGUFFile.open(write(tmp_path / "model.gguf", entry, make_model(entry))) as file:
        graph = read_model(file).graph
    for rules in (("ffn=CPU",), ("ffn=CPU", "cross_attn_k=CPU")):
        graphs = divided(graph, *rules)
        on_device, on_host = ({use.weight for use in weights_of(g)} for g in (graphs.device, graphs.host))
        assert not on_device & on_host
        assert on_device | on_host == {use.weight for use in weights_of(graph)}
        assert graphs.device.prompt is not None
        assert (graphs.host.prompt is None) == (len(rules) == 1)


def test_a_graph_without_matrices_on_the_host_is_not_divided(shared: Graph) -> None:
    assert offload(shared, Overrides().is_on_host) is None
    assert offload(shared, Overrides(("no such tensor=CPU",)).is_on_host) is None


def weight(name: str) -> Weight:
    return Tensor(GGMLType.F32, (2, 2), np.empty(0, np.uint8), name)


def test_rules_are_those_of_llama_cpp() -> None:
    """The first rule that matches a part of the name counts, before the number of layers."""
    experts = [
        f"blk.{i}.ffn_{name}_{kind}.weight"
        for i in (0, 9, 10)
        for name in ("up", "gate_up")
        for kind in ("exps", "chexps")
    ]
    others = ["blk.0.ffn_up.weight", "blk.0.ffn_up_shexp.weight", "blk.0.ffn_gate_inp.weight", "token_embd.weight"]
    assert all(EXPERTS.is_on_host(weight(name)) for name in experts)
    assert not any(EXPERTS.is_on_host(weight(name)) for name in others)
    some = Overrides(n_layers=10)
    assert [some.is_on_host(weight(name)) for name in experts] == 8 * [True] + 4 * [False]
    rules = Overrides((r"blk\.[09]\.=CUDA0", "ffn=CPU"), n_layers=None)
    assert [rules.is_on_host(weight(name)) for name in (*experts, *others)] == [
        *(8 * [False]), *(4 * [True]), False, False, False, False
    ]  # fmt: skip


def test_values_of_single_experts_cannot_be_changed_on_the_host(tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "m.gguf", "qwen3_moe")
    with GGUFFile.open(path) as file:
        graph = read_model(file).graph
    changed = Graph(graph.cache_type, nodes=[], caches=graph.caches, windows=graph.windows)
    renewed = {}
    for node in graph.nodes:
        changed.layer = node.layer
        op = node.operation.with_inputs(renewed)
        changed.add(op)
        renewed |= dict(zip(node.operation.results, op.results, strict=True))
        if type(op).__name__ == "Gated":
            renewed[node.operation.results[0]] = changed.add(HostEdit(op.results[0], "rows of experts"))
    with pytest.raises(KernelError, match="cannot be changed on the host"):
        offload(changed, EXPERTS.is_on_host)
