"""Tiny models of every architecture in files of llama.cpp's own converter: logits against those of transformers.

    python -m tests.benchmarks.converted LLAMA_CPP [NAME …] [--fuse] [--binding PYTHON]

LLAMA_CPP is the folder of its source, as the sdist of llama-cpp-python has it; ``--binding`` a Python that has the
binding.  With ``--fuse``, query, key and value are one tensor, and so are experts' gate and up.  Prints of each the
largest error of our file's logits, of the converted file's and of llama.cpp's on that, over the largest logit; the
exit code is 1 if a converted file does not load or one of ours is beyond 1e-3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import LocalLLMError
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import TINY, make_model, write

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


#: What the configurations of released models say otherwise than transformers writes them now.
RELEASED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gpt2": {"n_ctx": 128},
    "gptneox": {"model_type": "released", "rotary_pct": 0.5},
    "gptneox-serial": {"model_type": "released", "rotary_pct": 0.5},
    "granitehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitehybrid-moe": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "mamba2": {"intermediate_size": None},
    "minimax-m2": {"rotary_dim": 8},
    "nemotron-h": {
        "model_type": "released",
        "num_hidden_layers": 5,
        "layers_block_type": None,
        "hybrid_override_pattern": "M-*M-",
        "num_experts_per_tok": None,
    },
}


def release(name: str, folder: Path) -> None:
    """Writes a model's configuration as released ones are."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | RELEASED.get(name, {})
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


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
        command = [options.binding, "-c", COMPUTE, str(converted), ",".join(map(str, IDS)), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        theirs = f"{largest_error(np.load(out), expected):9.1e}" if out.exists() else done.stderr.strip()[-80:]
    print(f"{name:20} {own:9.1e} {error:9.1e} {theirs}", flush=True)
    return max(own, error) < 1e-3


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
