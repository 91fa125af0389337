"""Sums that are small enough for a very small model to memorise."""

import random

WORDS = ("zero", "one", "two", "three", "four", "five")
QUESTIONS = ("What is {0}?", "How much is {0}?", "{0} = ?", "{0}?", "Calculate {0}.", "What's {0}?", "{0}")


def arithmetic_turn(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer: a sum or a difference of numbers up to five."""
    operator = rng.choice("+-")
    a, b = rng.randint(0, 5), rng.randint(0, 5)
    if operator == "-":
        a, b = max(a, b), min(a, b)
    result = a + b if operator == "+" else a - b
    spoken = "plus" if operator == "+" else "minus"
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
