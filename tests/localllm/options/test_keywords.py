"""Generation options that do not depend on the generated tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import localllm
from localllm import LLM, UsageError
from tests.helpers.tiny_models import tiny_gguf


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localllm.load(tiny_gguf(tmp_path_factory.mktemp("o") / "m.gguf"), device="reference", context=64) as llm:
        yield llm


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 16), (8, 8), (60, 32), (0, 0)])
def test_a_truncated_prompt_leaves_room_for_the_answer(llm: LLM, max_tokens: int | None, room: int) -> None:
    """A quarter of the context by default, and at most half."""
    done = llm.generate([40] * 100, overflow="truncate", max_tokens=max_tokens, ignore_eos=True)
    assert done.usage.prompt_tokens == 64 - room


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": b"a"},
        {"stop": [1]},
        {"stop": 3},
        {"draft_max": 0},
        {"draft_max": 65},
        {"draft_max": 2.0},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"ignore_eos": 1},
        {"overflow": "wrap"},
        {"overflow": ["error"]},
        {"speculate": "always"},
        {"progress": 3},
        {"sampling": {"temperature": 0}},
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_with_the_options_name(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(options))} is "):
        llm.generate("a", **options)


def test_long_values_are_cut_in_messages(llm: LLM) -> None:
    def says_nothing(ids: Any, logits: Any) -> None: ...

    says_nothing.__name__ = "x" * 10_000
    for options in ({"stop": [5] * 10_000}, {"sampling": "x" * 10_000}, {"processors": (says_nothing,)}):
        with pytest.raises(UsageError) as caught:
            llm.generate("a", **options)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300
