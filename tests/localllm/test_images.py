"""Prompts with images in the library: functions that return ids return the ids of the text only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm import Sampling
from localllm.chat.reply import ReplyParser
from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.media import Embeddings, MediaTokens, PreparedMedia, PromptMedia
from localllm.engine.runner import ModelRunner
from localllm.gguf import GGUFFile
from localllm.kernels.reference import ReferenceBackend
from localllm.models.registry import read_model
from localllm.options.declared import CheckedOptions
from tests.helpers.tiny_models import tiny_gguf


class OnesEncoder:
    def encode(self, pictures: Sequence[PreparedMedia]) -> Generator[None, None, list[Embeddings]]:
        yield
        return [np.full((each.n_tokens, 1, 64), 0.1 * len(each.key), np.float32) for each in pictures]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repeat_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5),
        Sampling(temperature=0, dry_multiplier=1.0, logprobs=2),
        Sampling(temperature=1.0, seed=3, regex="[a-d]{1,6}"),
    ],
)
def test_ids_of_images_reach_nothing_that_reads_ids(sampling: Sampling, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with localllm.load(path, device="reference", context=96) as llm:
        with GGUFFile.open(path) as file:
            graph = read_model(file, 96, sees=True).graph
            sizes = {"n_pages": (12,) * len(graph.windows), "max_tokens": 32, "max_outputs": 32}
            step = ReferenceBackend().compile(graph, **sizes)
        runner = ModelRunner(step, n_vocab=llm.info.n_vocab, context=96, max_tokens=32)
        seeing = Engine(EngineLoop(runner, encoder=OnesEncoder()))
        opened, llm._engine = llm._engine, seeing
        picture = PreparedMedia(b"a picture", 9)
        ids = (1, 5, 9, *picture.ids, 5, 9, 7)
        given = CheckedOptions(sampling=sampling, max_tokens=6, speculate="lookup")
        stream = llm._start(
            list(ids), given, continuation=False, truncatable=False, media=PromptMedia((MediaTokens(3, picture),))
        )
        done = stream.read()
        assert done.usage.prompt_tokens == len(ids)
        assert min(done.ids) >= 0
        assert len(done.ids) == 6 or done.finish_reason == "stop"
        assert seeing.counts.encoded == 1
        assert stream.tokens[: len(ids)] == ids
        assert ReplyParser.after(stream.tokens[: len(ids)], llm.tokenizer) is not None
        seeing.close()
        llm._engine = opened
