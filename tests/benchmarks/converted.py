"""Tiny models of every architecture in files of llama.cpp's own converter: logits against those of transformers.

    python -m tests.benchmarks.converted LLAMA_CPP [NAME …] [--fuse] [--binding PYTHON]

LLAMA_CPP is the folder of its source, as the sdist of llama-cpp-python has it; ``--binding`` a Python that has the
binding.  With ``--fuse``, query, key and value are one tensor, and so are experts' gate and up.  Prints of each the
largest error of our file's logits, of the converted file's and of llama.cpp's on ours, over the largest logit, and
where the two files differ but for `EXCEPTIONS`; the exit code is 1 if they do, a converted file does not load, or one
of ours is beyond 1e-3.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import LocalLLMError
from localllm.gguf import GGUFFile, TensorInfo
from localllm.quant.types import GGMLType
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import TINY, make_model, write

#: Keys that differ on purpose: what is told of a model's origin, of which ours has the name only, and its vocabulary,
#: which is not the model's own here; and what llama.cpp's converter leaves to its reader's defaults.
EXCEPTIONS = re.compile(
    r"general\.(name|size_label|finetune|basename|file_type|version|base_model.*|sampling.*)|tokenizer\..*"
    r"|(gemma2?|gptneox|phi2|stablelm)\.rope\.freq_base|.*\.expert_gating_func|llama4\.attention\.(chunk_size|temperature_.*)"
)

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]

#: Runs the converter with our vocabulary: random models have no tokenizer of their own.
CONVERT = """
import sys
source, folder, out, *flags = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf, conversion, conversion.base, gguf
def set_vocab(self):
    n = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)]
                                    + [b"t%d" % i for i in range(n - 259)])
    self.gguf_writer.add_token_scores([-1000.0] * n)
    self.gguf_writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (n - 259))
find = conversion.get_model_class
def get_model_class(*arguments, **keywords):
    found = find(*arguments, **keywords)
    for kind in (found, *(inner for inner in vars(found).values() if isinstance(inner, type))):
        kind.set_vocab = set_vocab
    found.no_mtp = True
    return found
convert_hf_to_gguf.get_model_class = get_model_class
sys.argv = ["convert", folder, "--outfile", out, "--outtype", "f32", *flags]
convert_hf_to_gguf.main()
"""

#: llama.cpp's logits after each prefix of the tokens in the first file, to the second.
COMPUTE = """
import sys
import numpy as np
from pathlib import Path
from tests.benchmarks.theirs import LlamaCpp
path, ids, out = sys.argv[1:]
ids = [int(i) for i in ids.split(",")]
with LlamaCpp(Path(path), repack=False) as model:
    context = model.context(2, 128, flash=False)
    np.save(out, np.stack([context.logits(ids[: i + 1]) for i in range(len(ids))]))
"""


def largest_error(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def is_same(one: TensorInfo, other: TensorInfo) -> bool:
    """To the rounding of float32, in which some are computed."""
    return one.data.tobytes() == other.data.tobytes() or (
        one.type == GGMLType.F32 and np.allclose(one.data.view(np.float32), other.data.view(np.float32), rtol=1e-6)
    )


def differences(ours: Path, theirs: Path) -> list[str]:
    """Where two files have other keys, values or tensors."""
    with GGUFFile.open(ours) as one, GGUFFile.open(theirs) as other:
        keys = [
            f"{key}: {one.metadata.get(key)} / {other.metadata.get(key)}"
            for key in sorted({*one.metadata, *other.metadata})
            if not EXCEPTIONS.fullmatch(key) and not np.array_equal(one.metadata.get(key), other.metadata.get(key))
        ]
        tensors = [
            f"{name}: {mine and (mine.shape, mine.type.name)} / {its and (its.shape, its.type.name)}"
            for name in sorted({*one.tensors, *other.tensors})
            for mine, its in [(one.tensors.get(name), other.tensors.get(name))]
            if not (mine and its and mine.shape == its.shape and mine.type == its.type and is_same(mine, its))
        ]
    return keys + tensors


#: What the configurations of released models say otherwise than transformers writes them now.
RELEASED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gptneox": {"model_type": "released", "rotary_pct": 0.5},
    "gptneox-serial": {"model_type": "released", "rotary_pct": 0.5},
    "granitehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitehybrid-moe": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "minimax-m2": {"rotary_dim": 8},
    "nemotron-h": {
        "model_type": "released",
        "layers_block_type": None,
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-*M-",
        "num_experts_per_tok": None,
        "n_routed_experts": None,
        "n_group": None,
        "topk_group": None,
        "moe_intermediate_size": None,
        "moe_shared_expert_intermediate_size": None,
    },
}


def release(name: str, folder: Path) -> None:
    """Writes a model's configuration as released ones are."""
    path = folder / "config.json"
    changes = RELEASED.get(name, {})
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: settings[key] for key in settings if changes.get(key, 0) is not None}))


def write_tokenizer(folder: Path, n_vocab: int) -> None:
    """What some converters look up before they write a vocabulary."""
    vocabulary = {f"t{i}": i for i in range(n_vocab)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def compare(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Prints one line; whether our logits of both files are near."""
    import torch

    entry = TINY[name]
    model = make_model(entry)
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    ops = ReferenceOps(np.float32)
    own = largest_error(Runner(write(folder / f"{name}.gguf", entry, model), ops).logits(IDS), expected)
    converted = folder / f"{name}-converted.gguf"
    write_tokenizer(folder / f"{name}.hf", expected.shape[1])
    release(name, folder / f"{name}.hf")
    flags = ["--fuse-qkv", "--fuse-gate-up-exps"] if options.fuse else []
    command = [sys.executable, "-c", CONVERT, str(options.source), str(folder / f"{name}.hf"), str(converted), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name:20} {own:9.1e}  not converted: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return own < 1e-3
    try:
        error = largest_error(Runner(converted, ops).logits(IDS), expected)
    except LocalLLMError as refused:
        print(f"{name:20} {own:9.1e}  {refused}", flush=True)
        return False
    theirs = ""
    if options.binding:
        out = folder / f"{name}.npy"
        command = [options.binding, "-c", COMPUTE, str(folder / f"{name}.gguf"), ",".join(map(str, IDS)), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        theirs = f"{largest_error(np.load(out), expected):9.1e}" if out.exists() else done.stderr.strip()[-80:]
    other = differences(folder / f"{name}.gguf", converted)
    print(f"{name:20} {own:9.1e} {error:9.1e} {theirs}", *other, sep="\n    ", flush=True)
    return max(own, error) < 1e-3 and not other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--binding", metavar="PYTHON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':20} {'our file':>9} {'converted':>9} {'llama.cpp':>9}")
    with tempfile.TemporaryDirectory() as folder:
        good = [compare(name, Path(folder), options) for name in options.names or TINY]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
