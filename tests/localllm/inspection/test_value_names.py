"""Names of the values inside a model: their list, patterns, and diagram."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm
from localllm import LLM, UsageError
from localllm.inspection.names import ValueNames
from localllm.kernels.graph import Graph
from tests.helpers.command_line import run_main
from tests.helpers.tiny_models import tiny_gguf

TEXT = """\
embedding    [n_tokens, 64]
layers.0 to layers.2
  input      [n_tokens, 64]
  queries    [n_tokens, 64]
  keys       [n_tokens, 32]
  values     [n_tokens, 32]
  attention  [n_tokens, 64]
  mlp        [n_tokens, 64]
  output     [n_tokens, 64]
final_norm   [n_outputs, 64]
logits       [n_outputs, 300]"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("names") / "m.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with localllm.load(path, device="reference", context=64) as llm:
        yield llm


def test_the_list_of_names(llm: LLM) -> None:
    assert str(llm.graph) == TEXT
    assert llm.graph["layers.1.keys"] == ("n_tokens", 32, False)
    assert len(llm.graph) == len(list(llm.graph)) == 3 + 3 * 7


def test_patterns_match_layers_and_names(llm: LLM) -> None:
    names = llm.graph
    assert names.matching("names", "layers.*.output") == tuple(f"layers.{i}.output" for i in range(3))
    assert names.matching("names", ["logits", "layers.2.*"])[-1] == "logits"
    assert names.matching("names", ["logits", "logits"]) == ("logits",)


def test_an_unknown_name_lists_the_nearest(llm: LLM) -> None:
    with pytest.raises(
        UsageError, match=r"^names names 'layers.1.outptu', .*: the nearest names are layers.1.output,"
    ):
        llm.graph.matching("names", "layers.1.outptu")
    with pytest.raises(UsageError, match=r"nearest names are layers\.\d\.output,"):
        llm.graph.matching("names", "layers.9.output")
    assert ValueNames(Graph()).mermaid() == "flowchart TD"


def test_a_mixture_has_routers_and_experts(tmp_path: Path) -> None:
    with localllm.load(tiny_gguf(tmp_path / "m.gguf", "qwen3_moe"), device="reference", context=64) as llm:
        assert llm.graph["layers.0.router"] == ("n_tokens", 9, False)
        assert llm.graph["layers.0.experts"] == ("n_tokens", 3, True)


def test_the_diagram_connects_the_values(path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = run_main(capfdbinary, "inspect", str(path), "--graph", "mermaid").out.splitlines()
    assert lines[0] == "flowchart TD"
    assert '  embedding["embedding, layers.0.input<br>[n_tokens, 64]"]' in lines
    assert '  layers_0_mlp["layers 0 to 2: mlp, output<br>[n_tokens, 64]"]' in lines
    edges = {tuple(re.findall(r"\w+", line)) for line in lines if "-->" in line}
    streams = [("embedding", "layers_0_attention"), ("layers_0_attention", "layers_0_mlp"), ("final_norm", "logits")]
    heads = {(source, f"layers_0_{name}") for source in ("embedding",) for name in ("queries", "keys", "values")}
    assert {*streams, *heads, ("layers_0_mlp", "layers_0_queries"), ("layers_0_mlp", "final_norm")} <= edges


def test_the_command_line_shows_the_names(path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run_main(capfdbinary, "inspect", str(path), "--graph").out == f"{TEXT}\n"
    values = json.loads(run_main(capfdbinary, "inspect", str(path), "--graph", "--json").out)["values"]
    assert values["layers.2.values"] == {"rows": "n_tokens", "width": 32}
