"""Checks for all drafters: recorded drafts, and equal text with and without drafts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm import LLM

PROMPT = [1, *np.random.default_rng(0).integers(3, 300, 40).tolist()]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


class Round(NamedTuple):
    """One round of drafting."""

    tokens: list[int]  # the text before it
    ids: list[int]  # the drafts
    logits: list[NDArray[np.float32]]  # [rows, n_vocab], of each step


def recorded(monkeypatch: pytest.MonkeyPatch, drafter: type[Any], step: str) -> list[Round]:
    """Record the future rounds of every drafter of a class; ``step`` names the runner's method for its steps."""
    found: list[Round] = []
    draft = drafter._draft

    def record(self: Any, tokens: list[int], n: int) -> list[int]:
        logits: list[NDArray[np.float32]] = []
        run = getattr(self._runner, step)

        def keep(*arguments: Any) -> NDArray[np.float32]:
            rows: NDArray[np.float32] = run(*arguments)
            logits.append(rows.copy())
            return rows

        monkeypatch.setattr(self._runner, step, keep)
        ids: list[int] = draft(self, tokens, n)
        monkeypatch.setattr(self._runner, step, run)
        found.append(Round(list(tokens), ids, logits))
        return ids

    monkeypatch.setattr(drafter, "_draft", record)
    return found


def check_texts(llm: LLM, most: Iterable[int]) -> int:
    """Check that drafts do not change the text: greedy, sampled, after a cut, in chat turns and in parallel requests.

    Returns the number of accepted drafts.
    """
    chat, n_accepted = PROMPT, 0
    for turn in range(4):
        llm.forget() if turn == 1 else None
        expected = llm.generate(chat, **GREEDY, speculate=None)
        sampled = llm.generate(chat, max_tokens=20, temperature=1.0, seed=turn, speculate=None)
        assert expected.drafts is None
        for draft_max in most:
            done = llm.generate(chat, **GREEDY, draft_always=True, draft_max=draft_max)
            assert done.ids == expected.ids
            assert done.drafts is not None
            assert done.drafts.drafted >= 10
            n_accepted += done.drafts.accepted
            done = llm.generate(chat, max_tokens=20, temperature=1.0, seed=turn, draft_always=True)
            assert done.ids == sampled.ids
        # The first turn changes the end of the prompt; later turns extend the chat.
        chat = [*chat[:20], 5, 6, 7] if turn == 0 else [*chat, *expected.ids[:20], 5, 6, 7]
    prompts = [PROMPT[:n] for n in (3, 20, 41)]
    alone = [llm.generate(prompt, **GREEDY, speculate=None).ids for prompt in prompts]
    many = list(llm.generate_many(prompts, **GREEDY, draft_always=True))
    assert [each.ids for each in many] == alone
    assert all(each.drafts is not None and each.drafts.drafted > 10 for each in many)
    return n_accepted
