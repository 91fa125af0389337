"""Texts for all rows of a dataset, on several machines, by Ray Data (https://docs.ray.io).

    ds = ray.data.read_parquet("prompts/")
    generate(ds, "/models/qwen.gguf", actors=3, temperature=0).write_parquet("answers/")

Each actor has the model.  Where a machine fails, Ray gives its rows to others; what is greedy, or has a seed, is the
same wherever it is evaluated.  `resume` lets a later run go on where an earlier one ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray.data
from ray.data.checkpoint import CheckpointConfig

from localllm.library.find import model_path
from localllm.llm import load


class Generator:
    """An actor with a model: adds a column of answers to a batch of rows."""

    def __init__(
        self, model: str | None, column: str, output: str, options: Mapping[str, Any], load_options: Mapping[str, Any]
    ) -> None:
        self._llm = load(model_path(model), **{"parallel": None, **load_options})
        self._column, self._output, self._options = column, output, options

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [each if isinstance(each, str) else list(each) for each in batch[self._column]]
        done = self._llm.generate_many(prompts, **self._options)
        return {**batch, self._output: np.array([each.text for each in done], dtype=object)}


def generate(
    dataset: ray.data.Dataset,
    model: str | None = None,
    *,
    column: str = "prompt",
    output: str = "text",
    actors: int | tuple[int, int] = 1,
    batch_size: int = 32,
    threads: int = 2,
    load_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """The dataset with a column more.

    Args:
        model: as `localllm.load` takes it, on each machine; None is the demo model.
        column: has prompts: texts, or lists of messages, which are chats.
        output: the column of answers.
        actors: how many have the model, or between how many Ray chooses.
        batch_size: rows that an actor evaluates together, and that are lost or kept together.
        threads: processors of an actor.
        load_options: other keywords of `localllm.load`.
        options: those of `LLM.generate`, as ``max_tokens``.
    """
    return dataset.repartition(target_num_rows_per_block=batch_size).map_batches(
        Generator,
        fn_constructor_args=(model, column, output, options, {"threads": threads, **(load_options or {})}),
        compute=ray.data.ActorPoolStrategy(size=actors) if isinstance(actors, int) else _pool(*actors),
        batch_size=batch_size,
        num_cpus=threads,
    )


def _pool(least: int, most: int) -> ray.data.ActorPoolStrategy:
    return ray.data.ActorPoolStrategy(min_size=least, max_size=most)


def resume(folder: str, id_column: str = "id") -> None:
    """Has Ray keep in a folder which rows are written, and leave these out of later runs, until one has written all.

    Args:
        folder: that all machines reach, or an address such as ``s3://…``.
        id_column: tells rows apart; datasets have to be read from files and written to files.
    """
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(id_column, folder)
