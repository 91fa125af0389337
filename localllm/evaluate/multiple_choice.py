"""Multiple choice by likelihood, as in lm-evaluation-harness: the answer is the likeliest choice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.errors import UsageError, path_text
from localllm.evaluate.perplexity import Estimate
from localllm.files import read_text
from localllm.llm import LLM
from localllm.nesting import parse_json
from localllm.options.checks import as_int
from localllm.parallel import in_order

#: Number of concurrent questions.
_AT_ONCE = 16

#: Called with the number of finished questions, the total number, and the current accuracy.
Progress = Callable[[int, int, float], object]


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str  # prompt for the model, without white space at its end
    choices: Sequence[str]  # the answers; a space separates the prompt and an answer
    answer: int  # index of the correct answer


@dataclass(frozen=True, slots=True)
class Accuracy:
    accuracy: Estimate  # by the likelihood of the answer (``acc`` of lm-evaluation-harness)
    normalized: Estimate  # by the log-likelihood divided by the answer's characters (``acc_norm``)
    chance: float  # expected accuracy of guessing
    n_questions: int
    answers: Sequence[tuple[int, int]]  # index of the likeliest answer to each question: plain, and normalized


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Read questions from a JSONL file with lines ``{"prompt": "…", "choices": ["…", "…"], "answer": 0}``."""
    lines = read_text(path).splitlines()
    questions = [_question(line, f"{path_text(path)}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UsageError(f"{path_text(path)} has no questions: each line must be one as JSON")
    return questions


def _question(line: str, label: str) -> Question:
    try:
        values = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{label} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{label} is not a JSON object with prompt, choices and answer")
    prompt, choices, answer = (values.get(name) for name in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{label}: prompt is {prompt!r:.80}, but must be a string")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise UsageError(f"{label}: choices is {choices!r:.80}, but must be a list of at least two strings")
    position = as_int(answer)
    if position is None or not 0 <= position < len(choices):
        raise UsageError(f"{label}: answer is {answer!r:.80}, but must be a position in choices, from 0 on")
    return Question(prompt.rstrip(), choices, position)


def choices(llm: LLM, questions: Sequence[Question], *, progress: Progress | None = None) -> Accuracy:
    """Return the accuracy of a model on questions."""
    if not questions:
        raise UsageError("there are no questions: give at least one")
    answers: list[tuple[int, int]] = []
    n_right = 0
    for question, likelihoods in zip(questions, _likelihoods(llm, questions), strict=True):
        lengths = [len(choice) for choice in question.choices]
        best, by_length = np.argmax(likelihoods), np.argmax(np.divide(likelihoods, lengths))
        answers.append((int(best), int(by_length)))
        n_right += answers[-1][0] == question.answer
        if progress is not None:
            progress(len(answers), len(questions), n_right / len(answers))
    right = np.array([[a == q.answer for a in both] for both, q in zip(answers, questions, strict=True)], float)
    chance = float(np.mean([1 / len(question.choices) for question in questions]))
    return Accuracy(Estimate.mean(right[:, 0]), Estimate.mean(right[:, 1]), chance, len(questions), answers)


def _likelihoods(llm: LLM, questions: Iterable[Question]) -> Iterator[list[float]]:
    """Yield the log-likelihoods of each question's answers."""

    def work(question: Question) -> list[float]:
        return [score.logprob for score in llm.score(question.prompt, [" " + c for c in question.choices])]

    return in_order(work, questions, _AT_ONCE)
