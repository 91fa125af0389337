"""Evaluate a file of the demo model: held-out questions answered correctly, loss on held-out stories, and samples.

python -m tests.demo_model.evaluate --stories tinystories_sample.txt
"""

import argparse
import json
import random
from pathlib import Path

import sentencepiece

try:
    import torch
except ImportError as error:
    raise SystemExit(f"measuring needs PyTorch ({error}): pip install '.[reference]' installs it") from None
import torch.nn.functional as F

from tests.demo_model.corpus.arithmetic import arithmetic_turn
from tests.demo_model.corpus.topics import all_topics
from tests.demo_model.data import ASSISTANT, BOS, END, USER, Encoder, read_sample
from tests.demo_model.export import read_gguf
from tests.demo_model.model import DemoConfig, DemoModel
from tests.demo_model.train import ROOT, held_out_loss

SAMPLES = (
    "Tell me a story.",
    "Tell me a story about a dog.",
    "Tell me a story about a robot and a cat.",
    "Can you tell me a story about a teacher?",
)


def chat_prompt(encoder: Encoder, question: str) -> list[int]:
    """Return the ids of a chat with one question, up to the start of the answer."""
    start, end = (
        [encoder.control(BOS), encoder.control(USER)],
        [encoder.control(END), encoder.control(ASSISTANT)],
    )
    return start + encoder.text(question) + end


@torch.no_grad()
def complete(
    model: DemoModel, encoder: Encoder, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0
) -> list[str]:
    """Complete each prompt up to the end token; greedy unless a temperature is given."""
    rows = [list(prompt) for prompt in prompts]
    end, open_rows = encoder.control(END), list(range(len(rows)))
    for _ in range(max_tokens):
        if not open_rows:
            break
        length = max(len(rows[row]) for row in open_rows)
        ids = torch.tensor([rows[row] + [end] * (length - len(rows[row])) for row in open_rows])
        last = torch.tensor([len(rows[row]) - 1 for row in open_rows])
        hidden = model.hidden(ids)[torch.arange(len(open_rows)), last]
        logits = F.linear(hidden, model.token_embd.weight)
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0] if temperature else logits.argmax(-1)
        for row, token in zip(open_rows, chosen.tolist(), strict=True):
            rows[row].append(token)
        open_rows = [row for row in open_rows if rows[row][-1] != end]
    answers = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    return [encoder.processor.decode([token for token in answer if token != end]) for answer in answers]


def ask(model: DemoModel, encoder: Encoder, questions: list[str]) -> list[str]:
    """Return greedy answers, a few questions at a time."""
    prompts = [chat_prompt(encoder, question) for question in questions]
    answers = []
    for first in range(0, len(prompts), 24):
        answers += complete(model, encoder, prompts[first : first + 24], 90)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="stories separated by <|endoftext|>")
    parser.add_argument("--model", type=Path, default=ROOT / "localllm" / "data" / "demo.gguf")
    parser.add_argument("--vocabulary", type=Path, default=ROOT / "build" / "demo_model" / "vocabulary.model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    encoder = Encoder(sentencepiece.SentencePieceProcessor(model_file=str(options.vocabulary)))
    model = read_gguf(options.model, DemoConfig())

    topics = all_topics()
    rng = random.Random("evaluate")
    results = {}
    asked = {
        "held_out": [(topic, question) for topic in topics for question in topic.held_out],
        "trained": [(topic, topic.sample_question(rng)) for topic in topics],
    }
    for name, pairs in asked.items():
        right = 0
        for (topic, question), answer in zip(pairs, ask(model, encoder, [q for _, q in pairs]), strict=True):
            if topic.accepts(answer):
                right += 1
            else:
                print(f"[{name}: {topic.name}] {question}\n    {answer}")
        results[name] = f"{right}/{len(pairs)}"
    sums = [arithmetic_turn(rng) for _ in range(100)]
    answers = ask(model, encoder, [question for question, _ in sums])
    results["sums"] = f"{sum(got == want for got, (_, want) in zip(answers, sums, strict=True))}/100"

    prompts = [chat_prompt(encoder, request) for request in SAMPLES]
    prompts += [[encoder.control(BOS), *encoder.text("Once upon a time")]]
    for temperature in (0.0, 0.7):
        for prompt, text in zip(prompts, complete(model, encoder, prompts, 260, temperature), strict=True):
            print(f"--- {encoder.processor.decode(prompt)} [temperature {temperature}]\n{text}\n")
    _, held_out = read_sample(options.stories)
    results["held_out_story_nll"] = f"{held_out_loss(model, encoder, held_out):.4f}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
