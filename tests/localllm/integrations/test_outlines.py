"""A logits processor of outlines in `LLM.generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import localllm

pytestmark = pytest.mark.filterwarnings("default")


def test_a_logits_processor_of_outlines() -> None:
    processors = pytest.importorskip("outlines.processors", reason="outlines is not installed")
    shapes = list[Any]()

    class OnlyDigits(processors.OutlinesLogitsProcessor):  # type: ignore[misc, name-defined]
        def __init__(self, allowed: list[int]) -> None:
            super().__init__("numpy")
            self.allowed = allowed

        def process_logits(self, input_ids: Any, logits: Any) -> Any:
            shapes.append((input_ids.shape, logits.shape))
            masked = np.full_like(logits, -np.inf)
            masked[:, self.allowed] = logits[:, self.allowed]
            return masked

    with localllm.load(device="cpu") as llm:
        digits = [i for i in range(llm.info.n_vocab) if llm.detokenize([i]) in [*"0123456789"]]
        reply = llm.generate("A number: ", processors=OnlyDigits(digits), max_tokens=5)
        n_prompt = reply.usage.prompt_tokens
        assert len(reply.text) == 5
        assert reply.text.isdecimal()
    assert shapes == [((1, n_prompt + i), (1, llm.info.n_vocab)) for i in range(5)]
