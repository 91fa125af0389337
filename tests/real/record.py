"""Record results of other implementations for the tests of the real models.

    python -m tests.real.record      # needs llama-cpp-python, transformers and torch; takes a minute

llama.cpp provides tokens and greedy replies (``recorded/llama_cpp.json``), transformers provides rendered chats and
embeddings (``recorded/transformers.json``).  `tests.benchmarks.real_models` records the distance of logits from
float.
"""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from localllm.gguf import GGUFFile
from tests.benchmarks.real_models import FILES, PROMPTS
from tests.benchmarks.theirs import LlamaCpp
from tests.real import models

RECORDED = Path(__file__).with_name("recorded")
#: Largest number of tokens in a reply.
N_GREEDY = 24

TEXTS = (
    "Hello, world! It's 12:30 on 2024-05-06, isn't it?",
    "  two spaces, a tab\tand\n\n\nthree lines   ",
    "def f(x):\n    return x ** 2  # squares\n\n\tif x != 3.14159: pass",
    "Füße, naïve café, Ærøskøbing, İstanbul, ﬁne, Ω ≈ 3×10⁻⁵",
    "日本語のテキストと中文文本，한국어 문장.",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and combining e\u0301, zero\u200bwidth, nbsp\u00a0here",
    "CamelCaseWord snake_case_word SCREAMING_CASE 1234567890 1,234.56 0x1F",
    "https://example.com/path?query=1&x=%20#top user@example.com C:\\dir\\file",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "I'll they've WE'RE he'd 'tis don't can't",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa        !!!!!!!!!!----------======",
    "<|im_start|>user\nThis is a control token<|im_end|>\n<start_of_turn>and another<end_of_turn>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ꙮ 𓀀 ⁂",
    "\n",
    "",
)

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "  And doubled?\n"},
    ],
    [{"role": "user", "content": "{{ braces }} {% raw %} <b>&amp;</b> 'quotes' \"more\" Füße 日本"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "…"}, {"role": "user", "content": "go on"}],
)

SENTENCES = (
    "A man is eating food.",
    "Someone is having a meal.",
    "The new theory of quantum gravity was received with scepticism.",
    "Wie spät ist es?",
    "a b c " * 60,
    "",
)


def llama_cpp_results(path: Path) -> dict[str, Any]:
    """Return tokens of `TEXTS`, with and without control tokens, and greedy replies to the benchmark's prompts.

    A reply ends with its end token.
    """
    from llama_cpp import Llama

    vocabulary = Llama(str(path), vocab_only=True, verbose=False)
    tokens = [
        [vocabulary.tokenize(text.encode(), add_bos=True, special=special) for special in (False, True)]
        for text in TEXTS
    ]
    end = vocabulary.token_eos()
    greedy = []
    with LlamaCpp(path, repack=True) as model:
        context = model.context(1, 512, flash=True)
        for prompt in PROMPTS:
            ids = vocabulary.tokenize(prompt.encode(), add_bos=True, special=True)
            written = context.measure(ids, N_GREEDY)[2]
            reply = list(takewhile(lambda id_: id_ != end, written))
            greedy.append(
                {"prompt": ids, "reply": reply, "text": vocabulary.detokenize(reply).decode(errors="replace")}
            )
    return {"tokens": tokens, "greedy": greedy}


def rendered_chats(path: Path) -> list[str]:
    """Render `CHATS` with the template of SmolLM2's file."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with GGUFFile.open(path) as file:
        template = file.metadata["tokenizer.chat_template"]
    rendered, _ = render_jinja_template([*CHATS], chat_template=template, add_generation_prompt=True)
    return list(rendered)


def embeddings(folder: Path) -> list[list[float]]:
    """Embed `SENTENCES`: the mean of the last hidden states, normalised, as 1_Pooling and modules.json specify."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for sentence in SENTENCES:
        with torch.no_grad():
            hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        vectors.append([round(x, 5) for x in torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist()])
    return vectors


def main() -> None:
    paths = {name: find() for name, find in FILES.items()} | {"minilm": models.minilm()}
    found = {name: path for name, path in paths.items() if path is not None}
    if len(found) < len(paths):
        raise SystemExit(f"not all models are here: {models.HOW}")
    theirs = {name: llama_cpp_results(found[name]) for name in FILES}
    others = {"chats": rendered_chats(found["smollm2"]), "embeddings": embeddings(found["minilm"])}
    for name, values in (("llama_cpp", theirs), ("transformers", others)):
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        (RECORDED / f"{name}.json").write_text(text.replace("],[", "],\n[").replace("},{", "},\n{") + "\n", "utf-8")


if __name__ == "__main__":
    main()
