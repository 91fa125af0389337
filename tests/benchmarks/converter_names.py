"""Read which keys and tensors llama.cpp's converter writes, for `tests/models/test_converter_names.py`.

    python -m tests.benchmarks.converter_names LLAMA_CPP [--headers [NAME ...]]

LLAMA_CPP is the folder of llama.cpp's source, as in the sdist of llama-cpp-python.

The command writes tests/data/converter_names.json: for each architecture that localllm runs, the keys after the
architecture's name, and the names of tensors without their suffix.  It parses the source and does not run it.  A key
belongs to an architecture if ``set_gguf_parameters`` of one of the architecture's classes can reach the code that
writes the key, under any condition.

With ``--headers``, the command also runs the converter on the tiny models of `tests.models.tiny`, and writes
tests/data/converted_headers.json: the keys and the shapes of the tensors of each converted file.  With names, it
replaces only the headers of those models.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import multiprocessing
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import GGUFFile
from localllm.models.registry import ARCHITECTURES

NAMES = Path(__file__).parents[1] / "data/converter_names.json"
HEADERS = NAMES.with_name("converted_headers.json")


def constants(source: Path) -> Any:
    """Return the module of llama.cpp's gguf package that names keys, architectures and tensors."""
    spec = importlib.util.spec_from_file_location("llama_cpp_constants", source / "gguf-py/gguf/constants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys_of_methods(source: Path, module: Any) -> dict[str, set[str]]:
    """Return the keys that each method of the writer adds, such as ``{arch}.context_length``."""
    tree = ast.parse((source / "gguf-py/gguf/gguf_writer.py").read_text("utf-8"))
    keys = defaultdict[str, set[str]](set)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text.startswith("Keys."):
                value = reduce(lambda place, name: getattr(place, name, None), text.split("."), module)
                if isinstance(value, str):
                    keys[function.name].add(value)
    return keys


class Classes:
    """The classes of the converter, by name, with their methods."""

    def __init__(self, source: Path) -> None:
        self.nodes: dict[str, ast.ClassDef] = {}
        for path in sorted((source / "conversion").glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    self.nodes[node.name] = node

    def order(self, name: str) -> list[ast.ClassDef]:
        """Return a class and its bases, each once, in about the order of method resolution."""
        if name not in self.nodes:
            return []
        node, order = self.nodes[name], list[ast.ClassDef]()
        for part in [[node], *(self.order(ast.unparse(base).split(".")[-1]) for base in node.bases)]:
            order = [each for each in order if each not in part] + part
        return order

    def architectures(self, name: str) -> set[str]:
        """Return the names in MODEL_ARCH that a class mentions, as its ``model_arch`` or in code that changes it."""
        for node in self.order(name):
            texts = {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            if found := {text.split(".")[-1] for text in texts if ".MODEL_ARCH." in f".{text}"}:
                return found
        return set()

    def calls(self, name: str, method: str = "set_gguf_parameters") -> Iterator[str]:
        """Return the writer's methods that a method of a class can reach."""
        order, seen, todo = self.order(name), set[tuple[str, str]](), [(name, method, 0)]
        while todo:
            owner, wanted, first = todo.pop()
            nodes = order if owner == name else self.order(owner)
            for i, node in enumerate(nodes[first:], first):
                bodies = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == wanted]
                if not bodies or (node.name, wanted) in seen:
                    if bodies:
                        break
                    continue
                seen.add((node.name, wanted))
                for each in ast.walk(bodies[-1]):
                    if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute):
                        continue
                    target, called = ast.unparse(each.func.value), each.func.attr
                    if target.endswith("gguf_writer"):
                        yield called
                    elif target.startswith("super("):
                        todo.append((owner, called, i + 1))
                    elif target == "self":
                        todo.append((owner, called, 0))
                    elif target in self.nodes:
                        todo.append((target, called, 0))
                break


def read_names(source: Path) -> dict[str, dict[str, list[str]]]:
    """Return keys and tensors of each architecture that localllm supports."""
    module, classes = constants(source), Classes(source)
    methods = keys_of_methods(source, module)
    keys = defaultdict[str, set[str]](set)
    for name in classes.nodes:
        called = [call for method in ("__init__", "set_gguf_parameters") for call in classes.calls(name, method)]
        for architecture in classes.architectures(name):
            for call in called:
                keys[architecture] |= methods[call]
    names = {}
    for member, name in module.MODEL_ARCH_NAMES.items():
        if name in ARCHITECTURES:
            tensors = {module.TENSOR_NAMES[tensor].replace("{bid}", "N") for tensor in module.MODEL_TENSORS[member]}
            own = {key.replace("{arch}.", "", 1) for key in keys[member.name] if key.startswith("{arch}.")}
            names[name] = {"keys": sorted(own), "tensors": sorted(tensors)}
    return names


def header_of(path: Path) -> dict[str, Any]:
    """Return the keys and tensors of a file.

    Keys of the vocabulary and of the file's origin are omitted.  Tensors are grouped by name, with N for the number
    of the layer, and by shape: ``{name: {shape: [numbers of layers]}}``.
    """
    tensors = defaultdict[str, dict[str, list[int]]](lambda: defaultdict(list))
    with GGUFFile.open(path) as file:
        keys = {
            key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
            for key, value in file.metadata.items()
            if key == "general.architecture" or not key.startswith(("general.", "tokenizer."))
        }
        for tensor in file.tensors.values():
            match = re.search(r"blk\.(\d+)\.", tensor.name)
            name = re.sub(r"blk\.\d+\.", "blk.N.", tensor.name)
            tensors[name][" ".join(map(str, tensor.shape))].append(int(match[1]) if match else -1)
    return {"keys": keys, "tensors": tensors}


def convert(source: Path, name: str, folder: Path) -> dict[str, Any] | None:
    """Return the header of a tiny model's file; None if the converter refuses the model."""
    from tests.benchmarks.converted import CONVERT, MODELS, release, write_tokenizer
    from tests.models.tiny import make_model, save

    save(folder, make_model(MODELS[name]))
    write_tokenizer(name, folder, 300)
    release(name, folder)
    out = folder / "model.gguf"
    sys.argv = ["-c", str(source), str(folder), str(out)]
    try:
        exec(CONVERT, {"__name__": "__main__"})
    except BaseException as error:
        print(f"{name}: not converted: {error!r:.200}", flush=True)
        return None
    header: dict[str, Any] = json.loads(json.dumps(header_of(out)))
    return header


def read_headers(source: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the headers of tiny models, each converted in a separate process, because the converter keeps state."""
    for module in [each for each in sys.modules if each.partition(".")[0] == "gguf"]:
        del sys.modules[module]  # PyPI's version, which is older than llama.cpp's
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    for module in ("torch", "transformers", "conversion.base", "convert_hf_to_gguf", "tests.models.tiny"):
        import_module(module)  # once, for all processes
    headers = {}
    context = multiprocessing.get_context("fork")
    for name in names:
        with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
            header = pool.apply(convert, (source, name, Path(folder) / "model"))
        if header is not None:
            headers[name] = header
    return headers


def write_lines(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object with a line per key."""
    lines = [f"{json.dumps(name)}: {json.dumps(values[name], separators=(',', ':'))}" for name in sorted(values)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--headers", nargs="*", metavar="NAME")
    options = parser.parse_args()
    write_lines(NAMES, read_names(options.source))
    if options.headers is not None:
        from tests.benchmarks.converted import MODELS

        known = json.loads(HEADERS.read_text("utf-8")) if options.headers and HEADERS.exists() else {}
        write_lines(HEADERS, known | read_headers(options.source, options.headers or list(MODELS)))


if __name__ == "__main__":
    main()
