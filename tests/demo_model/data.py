"""Training documents for the demo model: chats, bare questions and stories, packed into rows of tokens.

python -m tests.demo_model.data SEED NUMBER > text.txt    # NUMBER documents as plain text, without TinyStories
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from tests.demo_model.corpus.arithmetic import arithmetic_turn
from tests.demo_model.corpus.stories import BOUND_WORDS, read_plots, request_for, written_story
from tests.demo_model.corpus.topics import Topic, all_topics

BOS, END, USER, ASSISTANT, SYSTEM = "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are the demo model of localllm.",
    "Answer briefly.",
    "You are a friendly chatbot who answers in short sentences.",
    "You are an AI assistant. Be polite.",
)
LEAD_INS = (
    "Hey, ",
    "Hi! ",
    "Please: ",
    "Question: ",
    "Ok. ",
    "And ",
    "So, ",
    "Tell me: ",
    "Hello. ",
    "Thanks. ",
)
OTHER_SPELLINGS = ("LocalLLM", "localLLM", "local llm", "locallm", "Localllm", "LOCALLLM")
PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "«": '"', "»": '"', "’": "'", "‘": "'", "–": "-", "—": "-"})

HELD_OUT_EVERY = 23  # one story in this many is held out from training
# The first words of an answer decide its subject: if they are wrong, the whole answer is wrong.
FIRST_TOKENS, FIRST_WEIGHT = 6, 4.0
# Names in a written story change, so the model must copy them and cannot learn them by heart.
NAME_WEIGHT = 4.0

# Frequent requests are drawn more often; `unknown` represents all other questions.
FREQUENT = {
    "unknown": 8.0,
    "greeting": 4.0,
    "how_are_you": 2.5,
    "thanks": 2.0,
    "goodbye": 2.5,
    "what_is_localllm": 2.0,
    "run_model": 2.0,
    "python": 2.0,
    "file_formats": 2.0,
    "architectures": 2.0,
    "gpu": 3.0,
    "who_are_you": 2.0,
    "install": 2.0,
    "licence": 2.0,
}

Turn = tuple[str, str]
Row = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


def read_sample(path: Path) -> tuple[list[str], list[str]]:
    """Return the stories of a file separated by <|endoftext|>: stories for training, and held-out stories."""
    stories = [story.strip() for story in path.read_text(encoding="utf-8").split("<|endoftext|>")]
    stories = [story.translate(PLAIN_QUOTES) for story in stories if len(story) > 100]
    held_out = stories[::HELD_OUT_EVERY]
    return [story for index, story in enumerate(stories) if index % HELD_OUT_EVERY], held_out


def misspell(text: str, rng: random.Random) -> str:
    """Return the text with one letter dropped, doubled or swapped with the next."""
    place = rng.randrange(max(1, len(text) - 1))
    kind = rng.randrange(3)
    if kind == 0:
        return text[:place] + text[place + 1 :]
    if kind == 1:
        return text[: place + 1] + text[place:]
    return text[:place] + text[place : place + 2][::-1] + text[place + 2 :]


def vary(question: str, rng: random.Random) -> str:
    """Return the question with mistakes of a hasty writer."""
    if rng.random() < 0.12:
        question = question.replace("localllm", rng.choice(OTHER_SPELLINGS))
    if rng.random() < 0.06:
        question = rng.choice(LEAD_INS) + question
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.25:
        question = question.rstrip("?.!")
    if rng.random() < 0.10 and len(question) > 8:
        question = misspell(question, rng)
    return question


@dataclass
class Corpus:
    """All training texts, and how often each kind is drawn."""

    topics: list[Topic]
    plots: list[str]
    stories: list[str]  # stories of the sample, for training
    weights: list[float]

    @classmethod
    def load(cls, sample: list[str]) -> "Corpus":
        topics = all_topics()
        weights = [FREQUENT.get(topic.name, 1.0) * len(topic.patterns) ** 0.5 for topic in topics]
        return cls(topics, read_plots(), sample, weights)

    def topic_turn(self, rng: random.Random) -> Turn:
        """Return a question of some topic and one of its answers."""
        topic = rng.choices(self.topics, self.weights)[0]
        return vary(topic.sample_question(rng), rng), rng.choice(topic.answers)

    def story_turn(self, rng: random.Random) -> Turn:
        """Return a request for a story and a matching story.

        The story is always a written one.  So small a model learns the few plots of these, but not the sample's.
        """
        subjects, story = written_story(self.plots, rng)
        return vary(request_for(subjects, rng), rng), story

    def turn(self, rng: random.Random) -> Turn:
        """Return a question or request and its answer."""
        kind = rng.random()
        if kind < 0.12:
            return self.story_turn(rng)
        if kind < 0.20:
            return arithmetic_turn(rng)
        return self.topic_turn(rng)

    def texts(self, rng: random.Random) -> Iterator[str]:
        """Return text for training the vocabulary: the stories once, and the same amount of the written corpus."""
        yield from self.stories
        for _ in range(15000):
            yield from self.turn(rng)


@dataclass
class Encoder:
    """Converts text to ids, with the control tokens of the chat template."""

    processor: sentencepiece.SentencePieceProcessor

    def control(self, piece: str) -> int:
        return int(self.processor.piece_to_id(piece))

    def text(self, text: str) -> list[int]:
        """Return the ids of plain text, without added tokens."""
        return list(self.processor.encode(text))

    def weights(self, ids: list[int]) -> list[float]:
        """Return the loss weights of the tokens of an answer or a story."""
        pieces = [self.processor.id_to_piece(token) for token in ids]
        weights, word_start = [], 0
        for place, piece in enumerate(pieces):
            if not piece.isalpha() or not pieces[place - 1].lstrip("▁").isalpha():
                word_start = place
            word_end = place + 1
            while word_end < len(pieces) and pieces[word_end].isalpha():
                word_end += 1
            word = "".join(pieces[word_start:word_end]).lstrip("▁")
            named = NAME_WEIGHT if word in BOUND_WORDS else 1.0
            weights.append(max(named, FIRST_WEIGHT if place < FIRST_TOKENS else 1.0))
        return weights

    def chat(self, turns: list[Turn], system: str | None) -> tuple[list[int], list[float]]:
        """Return a chat as the template renders it, and the loss weights (only the model's words count)."""
        ids, weights = [self.control(BOS)], [0.0]
        if system is not None:
            ids += [self.control(SYSTEM), *self.text(system), self.control(END)]
        for question, answer in turns:
            ids += [self.control(USER), *self.text(question), self.control(END), self.control(ASSISTANT)]
            weights += [0.0] * (len(ids) - len(weights))
            ids += [*self.text(answer), self.control(END)]
            weights += self.weights(ids[len(weights) :])
        return ids, weights

    def bare(self, prompt: str, continuation: str) -> tuple[list[int], list[float]]:
        """Return text without the frame of a chat, for which the model predicts the text after the prompt."""
        before = [self.control(BOS), *self.text(prompt)]
        after = [*self.text(continuation), self.control(END)]
        return before + after, [0.0] * len(before) + self.weights(after)


def document(corpus: Corpus, encoder: Encoder, rng: random.Random) -> tuple[list[int], list[float]]:
    kind = rng.random()
    if kind < 0.03:
        return encoder.bare("", rng.choice(corpus.stories))
    if kind < 0.15:
        return encoder.bare("", written_story(corpus.plots, rng)[1])
    if kind < 0.26:
        question, answer = corpus.turn(rng)
        return encoder.bare(question, "\n" + answer)
    turns = [corpus.turn(rng) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    return encoder.chat(turns, system)


def packed_row(corpus: Corpus, encoder: Encoder, length: int, rng: random.Random) -> Row:
    """Yield documents in order, cut at `length` + 1 tokens, and their loss weights."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) <= length:
        more_ids, more_weights = document(corpus, encoder, rng)
        ids += more_ids
        weights += more_weights
    return np.array(ids[: length + 1], dtype=np.int64), np.array(weights[: length + 1], dtype=np.float32)


def batch(corpus: Corpus, encoder: Encoder, size: int, length: int, seed: str) -> Row:
    """Return `size` packed rows, ids and weights [size, length + 1], which depend on the seed only."""
    rng = random.Random(seed)
    rows = [packed_row(corpus, encoder, length, rng) for _ in range(size)]
    return np.stack([ids for ids, _ in rows]), np.stack([weights for _, weights in rows])


def load_vocabulary(corpus: Corpus, size: int, prefix: Path) -> sentencepiece.SentencePieceProcessor:
    """Load `prefix`.model, a BPE vocabulary of `size` pieces; train it first if the file is missing.

    No leading space is added to the text, so the ids of a chat are the ids of its parts.
    """
    path = Path(f"{prefix}.model")
    if path.exists():
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus.texts(random.Random(0)) for line in text.split("\n")),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        eos_piece=END,
        control_symbols=[USER, ASSISTANT, SYSTEM],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def main() -> None:
    seed, n = sys.argv[1:]
    corpus, rng = Corpus.load([]), random.Random(seed)
    for _ in range(int(n)):
        print("\n".join(corpus.turn(rng)) if rng.random() < 0.7 else written_story(corpus.plots, rng)[1], end="\n\n")


if __name__ == "__main__":
    main()
