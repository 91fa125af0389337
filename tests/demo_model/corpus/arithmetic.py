"""Sums small enough for a very small model to know by heart."""

import random

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
QUESTIONS = ("What is {0}?", "How much is {0}?", "{0} = ?", "{0}?", "Calculate {0}.", "What's {0}?", "{0}")


def arithmetic_turn(rng: random.Random) -> tuple[str, str]:
    """A question and its answer: a sum or difference up to ten, or a product of numbers up to five."""
    operator = rng.choice("++-*")
    limit = 5 if operator == "*" else 10
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if operator == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[operator]
    spoken = {"+": "plus", "-": "minus", "*": "times"}[operator]
    style = rng.random()
    if style < 0.5:
        text = f"{a} {operator} {b}"
    elif style < 0.6:
        text = f"{a}{operator}{b}"
    elif style < 0.8:
        text = f"{a} {spoken} {b}"
    else:
        text = f"{WORDS[a]} {spoken} {WORDS[b]}"
    return rng.choice(QUESTIONS).format(text), f"{a} {spoken} {b} is {result}."
