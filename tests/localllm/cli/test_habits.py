"""Command lines from the documentation of llama.cpp, llama-cpp-python and Ollama.

Each works as documented, warns in one line, or fails with a sentence that names localllm's flag.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm import LLM, load  # load is imported before it is patched: the package caches it
from localllm.chat import CHATML
from localllm.cli.foreign_flags import in_our_command
from localllm.cli.main import main
from localllm.kernels.cuda import installation
from tests.helpers.command_line import run_main
from tests.helpers.tiny_models import config, random_weights, write_gguf

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
CUT = {"temperature": 1, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "dry_multiplier": 0}
SERVER = "localllm serve -m FILE serves models to other programs"
HUB = "https://huggingface.co/org/repo"

#: Command line; start of the warning or error ("" without); arguments of loading and generating.
LINES: list[tuple[str, str, dict[str, Any]]] = [
    # llama-cli: llama.cpp's README and tools/main/README.md, with `localllm generate` instead.
    ("generate -m model.gguf -p 'I believe the meaning of life is' -n 8 -no-cnv", "", {"max_tokens": 8}),
    ("generate -m model.gguf -f prompt.txt -n 4 --temp 0.7 -s 42", "", {"temperature": 0.7, "seed": 42}),
    ("generate -m model.gguf -sys 'Be brief' -cnv -p hi -n 4", "", {}),
    ("generate -m model.gguf -i -p hi", "error: there is no flag -i: localllm generate answers one prompt", {}),
    ("generate -p hi --mmproj missing.gguf", "error: missing.gguf does not exist: check the path", {}),
    ("generate -m model.gguf -md draft.gguf -p hi -n 4 --draft-max 4", "", {"draft_max": 4}),
    ("generate -m model.gguf -md draft.gguf -p hi -n 4 --draft-min 1 -ngld 99", "warning: --draft-min, -ngld", {}),
    ("generate -hf org/repo -p hi -n 4", "", {}),
    ("generate -hf org/repo:Q8_0 -p hi -n 4 --offline", "warning: --offline has no effect", {}),
    ("generate --hf-repo org/repo --hf-file m-Q8_0.gguf -p hi -n 4", "", {}),
    (f"generate -mu {HUB}/resolve/main/m-Q8_0.gguf?download=true -p hi -n 4", "", {}),
    ("generate -mu https://example.com/m.gguf -p hi", "error: https://example.com/m.gguf is not an address on", {}),
    (f"generate -m {HUB} -p hi -n 4", "", {}),
    ("generate -m model.gguf -hf org/repo -p hi", "error: a model is named twice: remove one of the names", {}),
    ("generate --version", "", {}),
    ("-m model.gguf -p hi", "error: the first word must be a command, such as localllm", {}),
    ("generate --list-devices", "", {}),
    # llama-bench and the rest of llama.cpp's tools.
    ("bench -m model.gguf -p 8 -n 4 -r 1 -o md", "", {}),
    ("bench -m model.gguf -p 8,16 -n 0 -r 1 -fa 1 -mmp 0 -ngl 0", "warning: -fa, -mmp have no effect", {}),
    ("bench -m model.gguf -m draft.gguf -p 0 -n 0 -pg 8,4 -r 1 -o jsonl", "", {}),
    ("bench -m model.gguf -p 8 -o sql", "error: argument -o/--output: invalid choice: 'sql' (choose from", {}),
    ("bench -p 8-16+2", "error: argument -p/--n-prompt: '8-16+2' is not a list of whole numbers, such as", {}),
    ("bench -m model.gguf -ngl 0,99", "error: argument -ngl/--gpu-layers/--n-gpu-layers: '0,99' is not one whol", {}),
    ("llama-bench -m model.gguf -p 8 -n 0 -r 1", "", {}),
    ("llama-server --help", "", {}),
    ("llama-cli -m model.gguf -p hi -n 4 -no-cnv", "", {"max_tokens": 4}),
    ("llama-perplexity -m model.gguf -f long.txt -c 16 --chunks 1", "", {}),
    ("perplexity -m model.gguf -f long.txt -c 16 --save-all-logits base.logits", "", {}),
    ("perplexity -m model.gguf -f long.txt -c 16 --kl-divergence", "error: --kl-divergence needs --kl-divergenc", {}),
    ("perplexity -m model.gguf -f long.txt -c 16 --kl-divergence-base kl.logits", "", {}),
    ("perplexity -m model.gguf -f long.txt --kl-divergence-base read.logits --kl-divergence", "", {}),
    ("evaluate -m model.gguf -f long.txt --ppl-stride 8", "error: there is no flag --ppl-stride: chunks do not", {}),
    ("evaluate -m model.gguf -f long.txt --hellaswag", "error: there is no flag --hellaswag: localllm evaluate", {}),
    ("llama-imatrix -m model.gguf -f long.txt -c 16 -o im.gguf --chunks 1", "", {}),
    ("llama-quantize draft.gguf small.gguf 7 2 --allow-requantize --dry-run", "", {}),
    ("llama-quantize --pure --token-embedding-type f16 draft.gguf small.gguf Q4_0 --dry-run", "", {}),
    ("llama-quantize draft.gguf small.gguf Q4_0 --leave-output-tensor", "error: there is no flag --leave-output", {}),
    ("llama-quantize draft.gguf Q4_K_M", "error: write localllm quantize FILE OUTPUT TYPE, such as localllm", {}),
    ("llama-tokenize -m model.gguf -p hi", "error: there is no command 'llama-tokenize': use LLM.tokenize", {}),
    # Ollama: `ollama --help` and its README, with `localllm` instead of `ollama`.
    ("help", "", {}),
    ("help generate", "", {}),
    ("run lama3.2", "error: 'lama3.2' is not the name of a model on the hub: did you mean llama3.2 or", {}),
    ("run model.gguf hi -n 4", "", {"max_tokens": 4}),
    ("generate model.gguf hi -n 4", "", {"max_tokens": 4}),
    ("generate hi -n 4 -m model.gguf", "", {"max_tokens": 4}),
    ("generate tell me", "error: unexpected argument 'tell': write quotes around a prompt", {}),
    ("generate org/repo", "error: no prompt for the model 'org/repo': write localllm generate -m org/repo", {}),
    ("chat -m model.gguf -p hi", "error: there is no flag -p: localllm generate -m MODEL -p TEXT answers a prom", {}),
    ("config get num_ctx", "error: there is no setting 'num_ctx': did you mean context?", {}),
    ("quantize draft.gguf small.gguf q4km", "error: there is no type 'q4km': did you mean Q4_K_M? There are F32", {}),
    ("chat model.gguf hi -n 4", "", {"max_tokens": 4}),
    ("chat -m model.gguf 'hi there' -n 4", "", {"max_tokens": 4}),
    ("chat model.gguf hi -n 4 there", "error: too many arguments, starting with 'there'", {}),
    ("run model.gguf --verbose hi -n 4", "", {"max_tokens": 4}),
    ("run model.gguf hi there --verbose -n 4", "", {"max_tokens": 4}),
    ("run --num-ctx 64 model.gguf hi -n 4", "", {"context": 64}),
    ("version", "", {}),
    ("-v", "", {}),
    ("config set num_ctx 8192", "error: there is no setting 'num_ctx': did you mean context? localllm config", {}),
    ("config set temperature 0.5", "error: there is no setting 'temperature': did you mean sampling.temperature", {}),
    ("serve --help", "", {}),
    ("create mymodel -f ./Modelfile", "error: there is no command 'create': no Modelfile is needed", {}),
    ("show model.gguf", "", {}),
    ("list", "", {}),
    ("ls", "", {}),
    ("generate -m model -p hi -n 4", "", {}),
    ("generate -m modle.gguf -p hi", "error: modle.gguf does not exist: did you mean model.gguf?", {}),
    ("serve --models missing.toml", "error: the file of models missing.toml cannot be read", {}),
    ("llama-embedding -m model.gguf -p hi", "error: model.gguf generates text, ", {}),
    ("ps --url http://127.0.0.1:9", "error: no server answers at http://127.0.0.1:9 (", {}),
    ("stop llama3.2 --url http://127.0.0.1:9", "error: no server answers at http://127.0.0.1:9 (", {}),
    ("cp llama3.2 mine", "error: there is no command 'cp': models are plain files, whose paths localllm models", {}),
    ("rm llama3.2", "error: there is no file or model 'llama3.2' here: localllm models lists the names", {}),
    ("pull llama3.2:4b", "error: 'llama3.2:4b' is not the name of a model on the hub: the tags of llama3.2 are", {}),
    (
        "pull xyzzy",
        "error: 'xyzzy' is not the name of a model on the hub: write ORG/REPO, or ORG/REPO:QUANT; localllm search",
        {},
    ),
    (
        "generate -m llama3.2:1b -p hi",
        "error: llama3.2:1b is not on this machine: localllm pull llama3.2:1b down",
        {},
    ),
    (
        "generate -m xyzzy:1b -p hi",
        "error: there is no file or model 'xyzzy:1b' here: localllm models lists the names",
        {},
    ),
    ("generate -m hf.co/org/repo:Q8_0 -p hi -n 4 --keepalive 5m", "warning: --keepalive has no effect", {}),
    # llama-cpp-python: `python3 -m llama_cpp.server`, whose flags are the keywords of its Llama.
    ("generate --model model.gguf --n_ctx 64 --n_gpu_layers -1 -p hi -n 4", "", {"context": 64}),
    ("generate --model model.gguf --n_threads 1 --n_batch 64 -p hi -n 4", "warning: --n-batch has n", {"threads": 1}),
    ("generate --model model.gguf --chat_format chatml --seed 7 -p hi -n 4", "", {"chat_template": CHATML}),
    (
        "generate --model model.gguf --host 0.0.0.0 --port 8000",
        f"error: there is no flag --host: {SERVER}",
        {},
    ),
]


#: Flags after a prompt, and the same.
WITH_A_PROMPT: list[tuple[str, str, dict[str, Any]]] = [
    ("-ngl 99", "warning: -ngl has no effect, because no GPU", {}),
    ("-ngl 99 --device cuda", "error: no CUDA device can be used: NVIDIA's driver is", {}),
    ("-ngl all", "warning: -ngl has no effect, because no GPU", {}),
    ("-ngl auto", "", {"n_gpu_layers": None}),
    ("-ngl -1", "", {"n_gpu_layers": None}),
    ("-c 0", "", {"context": 128}),
    ("-c 64 --keep 0", "warning: --keep has no effect", {"context": 64}),
    ("-b 512 -ub 256", "warning: -b, -ub have no effect: localllm chooses", {}),
    ("-fa", "warning: -fa has no effect: attention is always", {}),
    ("-fa on --mlock", "warning: -fa, --mlock have no effect", {}),
    ("--flash-attn auto", "warning: --flash-attn has no effect", {}),
    ("--no-mmap --numa distribute", "warning: --no-mmap, --numa have no effect", {}),
    ("--jinja --color", "warning: --jinja, --color have no effect", {}),
    ("--color on --no-warmup --simple-io", "warning: --color, --no-warmup, ", {}),
    ("--log-disable --no-perf", "warning: --log-disable, --no-perf have no effect", {}),
    ("--no-display-prompt -st", "warning: --no-display-prompt, -st have no effect", {}),
    ("-np 4 -cb", "warning: -np, -cb have no effect: this command runs one prompt", {}),
    ("-t 1 -tb 8", "warning: -tb has no effect: -t sets the threads for", {"threads": 1}),
    ("-sm row", "warning: -sm has no effect, because no GPU", {}),
    ("-mg 1", "error: there is no flag -mg: --device names GPUs in order", {}),
    ("-ts 3,1", "warning: --tensor-split has no effect, because no GPU", {}),
    ("-dev CUDA0", "error: no CUDA device can be used: NVIDIA's driver is not", {}),
    ("-ctk q8_0 -ctv q8_0", "", {"cache_type": "q8_0"}),
    ("--cache-type-v q4_0 --cache-type-k q8_0", "", {"cache_type": "q8_0/q4_0"}),
    ("-ctk q5_0", "", {"cache_type": "q5_0/f16"}),
    ("-ctk q4_1", "error: argument -ctk/--cache-type-k: 'q4_1' is not one of 'f16', 'q8_0', 'q5_0', 'q4_0'", {}),
    ("-n -2 --ignore-eos -c 16", "", {"max_tokens": None, "ignore_eos": True}),
    ("--top-k 40 --top-p 0.9 --min-p 0.1", "", {"top_k": 40, "min_p": 0.1}),
    ("--samplers 'top_k;temperature' --temp 1", "", CUT),
    ("--samplers 'temperature;top_k'", "error: --samplers is 'temperature;top_k', but", {}),
    ("--sampling-seq edkypmxt", "error: there is no flag --sampling-seq: --samplers", {}),
    ("--repeat-penalty 1.1 --repeat-last-n 64", "", {"repeat_penalty": 1.1}),
    ("--mirostat 2 --mirostat-lr 0.1", "", {"mirostat": 2}),
    ("-l 15-inf", "", {"logit_bias": {15: float("-inf")}}),
    ("-r User: --reverse-prompt Bot:", "", {"stop": ["User:", "Bot:"]}),
    ("--chat-template chatml", "", {"chat_template": CHATML}),
    ("--chat-template nobody", "error: there is no chat template 'nobody': remove", {}),
    ("--chat-template-file t.jinja", "", {"chat_template": TEMPLATE}),
    ("-o out.txt", "error: there is no flag -o: the text is printed to standard output: ", {}),
    ("--grammar 'root ::= \"a\"'", "", {"grammar": 'root ::= "a"'}),
    ("--grammar-file bad.gbnf", "error: --grammar-file is not valid GBNF: Unexpected", {}),
    ("-jf bad.gbnf", "error: -jf is 'root::=x[', but must be a JSON schema", {}),
    ("--grammar 'root::=x['", "error: --grammar is not valid GBNF: Unexpected end", {}),
    ("--top-nsigma 1", "", {"top_n_sigma": 1}),
    ("--top-n-sigma -1", "", {"top_n_sigma": -1}),
    ("--reasoning-budget 0 --reasoning-format none", "warning: --reasoning-f", {}),
    ("--chat-template-kwargs '[]'", "error: argument --chat-template-kwargs: '[]' is", {}),
    ("-j '{}'", "", {"json_schema": "{}"}),
    ("--lora-scaled a.gguf:1", "error: there is no flag --lora-scaled: use --lora ADAPTER=X", {}),
    ("--rope-scaling yarn", "error: there is no flag --rope-scaling: the value is read", {}),
    ("-ot exps=CPU -ncmoe 3 -cmoe", "", {}),
    ("-ot exps=Vulkan0", "error: argument -ot/--override-tensor: 'exps=Vulkan0' is not rules", {}),
    ("-otd exps=CPU", "error: there is no flag -otd: the layers of a draft model are not divided", {}),
    ("--prompt-cache c.bin", "error: there is no flag --prompt-cache: localllm chat", {}),
    ("--verbose-prompt", "error: there is no flag --verbose-prompt (see localllm", {}),
    ("--format json", "error: there is no flag --format: -j SCHEMA requests JSON", {}),
]
LINES += [(f"generate -m model.gguf -p hi -n 4 {flags}", said, does) for flags, said, does in WITH_A_PROMPT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and a model in a hub cache."""
    folder, settings = tmp_path_factory.mktemp("habits"), config()
    snapshot = folder / "hub" / "models--org--repo" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    for path in (folder / "model.gguf", folder / "draft.gguf", snapshot / "m-Q8_0.gguf"):
        weights = random_weights(settings)
        write_gguf(path, settings, weights, metadata={"tokenizer.chat_template": TEMPLATE, "general.name": path.stem})
    (folder / "prompt.txt").write_text("hi\n")
    (folder / "long.txt").write_text("A dog that could not sleep. " * 9)
    (folder / "t.jinja").write_text(TEMPLATE)
    (folder / "bad.gbnf").write_text("root::=x[")
    (folder / "config.toml").write_text('device = "reference"\n')
    with contextlib.chdir(folder):
        line = "perplexity --device reference -m model.gguf -f long.txt -c 16 --kl-divergence-base read.logits"
        assert main(shlex.split(line)) == 0
    return folder


@pytest.mark.parametrize(("line", "said", "does"), LINES, ids=[line for line, *_ in LINES])
def test_a_command_line(
    folder: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    said: str,
    does: dict[str, Any],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOCALLLM_CONFIG", "config.toml")
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    monkeypatch.setattr(installation, "driver_cuda", lambda: None)
    monkeypatch.setattr("localllm.cli.commands.bench.disturbance", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
    given: dict[str, Any] = {}

    def watched(real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            given.update(keywords)
            return real(*arguments, **keywords)

        return call

    monkeypatch.setattr("localllm.llm.load", watched(load))
    for name in ("stream", "stream_chat"):
        monkeypatch.setattr(LLM, name, watched(getattr(LLM, name)))
    outcome = run_main(capfdbinary, *shlex.split(line))
    warnings = [text for text in outcome.err.splitlines() if text.startswith("localllm: warning: ")]
    if said.startswith("error: "):
        assert outcome.code in (1, 2)
        assert said.removeprefix("error: ") in outcome.error()  # and no additional warning
        return
    assert outcome.code == 0, outcome.err
    assert outcome.out
    assert len(warnings) == bool(said), outcome.err
    assert "".join(warnings).startswith(f"localllm: {said}" if said else "")
    assert {name: given[name] for name in does} == does


def test_there_are_eighty_or_more() -> None:
    assert len({line for line, *_ in LINES}) == len(LINES) >= 80


def test_paths_of_images_and_audio_in_a_prompt_of_run_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "b.JPG", "c.txt", "d.wav"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    sent = in_our_command(["run", "m", "Compare ./a.png, @b.JPG", f"and {tmp_path}/d.wav!", "-n", "4"])
    files = ["--image", "./a.png", "--image", "b.JPG", "--audio", f"{tmp_path}/d.wav"]
    assert sent == ["generate", "-hf", "m", "-p", "Compare ,  and !", *files, "-n", "4"]
    for prompt in ("What is a.png?", "./c.txt @c.txt", "./missing.png", "x./a.png", "@/a.png", "./a.pngs", " ./a "):
        assert in_our_command(["run", "m", prompt]) == ["generate", "-hf", "m", "-p", prompt]
