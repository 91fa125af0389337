"""lm-evaluation-harness (the package ``lm_eval``) on a model of ours::

import lm_eval, localllm
from localllm.evaluate.lm_eval import HarnessModel

with localllm.load("model.gguf") as llm:
    print(lm_eval.simple_evaluate(HarnessModel(llm), tasks=["arc_easy"])["results"])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from localllm.errors import UsageError
from localllm.llm import LLM
from localllm.parallel import in_order

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UsageError(f"lm_eval is not there ({error}): pip install lm_eval, and what its tasks need") from None

#: Requests that are under way at once.
_AT_ONCE = 16

#: Tokens of an answer where a task sets no limit.
_MAX_TOKENS = 256


class HarnessModel(LM):  # type: ignore[misc]
    """A model as lm-evaluation-harness asks it; it sends all requests of a task at once."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    @property
    def tokenizer_name(self) -> str:
        """The name of the harness's cache of prompts."""
        return self._llm.info.path.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat, for ``simple_evaluate(apply_chat_template=True)``."""
        return self._llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-likelihood of each (context, continuation), and whether it is the greedy one."""
        numbered = sorted(enumerate(request.args for request in requests), key=lambda each: each[1][0])
        groups = [list(group) for _, group in groupby(numbered, key=lambda each: each[1][0])]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def score(group: list[tuple[int, tuple[str, str]]]) -> list[tuple[float, bool]]:
            scores = self._llm.score(self._prompt(group[0][1][0]), [continuation for _, (_, continuation) in group])
            return [(each.logprob, each.is_greedy) for each in scores]

        for group, scores in zip(groups, in_order(score, groups, _AT_ONCE), strict=True):
            for (number, _), each in zip(group, scores, strict=True):
                results[number] = each
        return results

    def _prompt(self, context: str) -> str | list[int]:
        """A context as text, or of a chat, whose control tokens text cannot have, as tokens."""
        ids = self._llm.tokenize(context, parse_special=True)
        return context if ids == self._llm.tokenize(context) else ids

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of each text, a context's length at a time."""
        return list(in_order(lambda request: self._of_text(request.args[0]), requests, _AT_ONCE))

    def _of_text(self, text: str) -> float:
        ids = self._llm.tokenize(text, add_special=False)
        step = self._llm.info.context - 1
        parts = [ids[start : start + step] for start in range(0, len(ids), step)]
        tokenizer = self._llm.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        starts = [[] if first is None else [first], *(part[-1:] for part in parts[:-1])]
        return sum(self._llm.score(start, [part])[0].logprob for start, part in zip(starts, parts, strict=True))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each context, up to one of the texts ``until``."""
        return list(in_order(lambda request: self._completion(*request.args), requests, _AT_ONCE))

    def _completion(self, context: str, options: dict[str, Any]) -> str:
        given: dict[str, Any] = {"stop": options.get("until") or (), "overflow": "truncate", "seed": 0}
        given["max_tokens"] = options.get("max_gen_toks", _MAX_TOKENS)
        given["temperature"] = (options.get("do_sample", False) and options.get("temperature", 0.0)) or 0.0
        return self._llm.generate(context, parse_special=True, **given).text
