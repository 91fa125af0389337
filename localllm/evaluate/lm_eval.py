"""Run lm-evaluation-harness (the package ``lm_eval``) on a localllm model::

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

#: Number of concurrent requests.
_AT_ONCE = 16

#: Default limit of an answer's tokens.
_MAX_TOKENS = 256


class HarnessModel(LM):  # type: ignore[misc]
    """The interface of lm-evaluation-harness to a model. All requests of a task are sent together."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    @property
    def tokenizer_name(self) -> str:
        """Name of the harness's cache of prompts."""
        return self._llm.info.path.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat, for ``simple_evaluate(apply_chat_template=True)``."""
        return self._llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether it is the greedy continuation."""
        numbered = sorted(enumerate(request.args for request in requests), key=lambda item: item[1][0])
        groups = [list(group) for _, group in groupby(numbered, key=lambda item: item[1][0])]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def score(group: list[tuple[int, tuple[str, str]]]) -> list[tuple[float, bool]]:
            scores = self._llm.score(self._prompt(group[0][1][0]), [continuation for _, (_, continuation) in group])
            return [(result.logprob, result.is_greedy) for result in scores]

        for group, scores in zip(groups, in_order(score, groups, _AT_ONCE), strict=True):
            for (number, _), result in zip(group, scores, strict=True):
                results[number] = result
        return results

    def _prompt(self, context: str) -> str | list[int]:
        """Return a context as text; a chat as tokens, because text cannot contain its control tokens."""
        ids = self._llm.tokenize(context, parse_special=True)
        return context if ids == self._llm.tokenize(context) else ids

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each text, evaluated in windows of the context length."""
        return list(in_order(lambda request: self._of_text(request.args[0]), requests, _AT_ONCE))

    def _of_text(self, text: str) -> float:
        ids = self._llm.tokenize(text, add_special=False)
        step = self._llm.info.context - 1
        windows = [ids[start : start + step] for start in range(0, len(ids), step)]
        tokenizer = self._llm.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        starts = [[] if first is None else [first], *(window[-1:] for window in windows[:-1])]
        return sum(self._llm.score(start, [window])[0].logprob for start, window in zip(starts, windows, strict=True))

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the continuation of each context, up to one of the strings ``until``."""
        return list(in_order(lambda request: self._completion(*request.args), requests, _AT_ONCE))

    def _completion(self, context: str, options: dict[str, Any]) -> str:
        call_options: dict[str, Any] = {"stop": options.get("until") or (), "overflow": "truncate", "seed": 0}
        call_options["max_tokens"] = options.get("max_gen_toks", _MAX_TOKENS)
        call_options["temperature"] = (options.get("do_sample", False) and options.get("temperature", 0.0)) or 0.0
        return self._llm.generate(context, parse_special=True, **call_options).text
