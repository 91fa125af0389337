"""Generate text for all rows of a dataset on several machines with Ray Data (https://docs.ray.io).

    ds = ray.data.read_parquet("prompts/")
    generate(ds, "/models/qwen.gguf", actors=3, temperature=0).write_parquet("answers/")

Each actor loads the model. If a machine fails, Ray evaluates its rows on other machines; greedy decoding, or a seed,
gives the same text everywhere. With `resume`, a later run continues after the rows that an earlier run wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray.data
from ray.data.checkpoint import CheckpointConfig

from localllm.catalog.find import model_path
from localllm.llm import load


class Generator:
    """An actor with a model: adds a column of generated texts to a batch of rows."""

    def __init__(
        self, model: str | None, column: str, output: str, options: Mapping[str, Any], load_options: Mapping[str, Any]
    ) -> None:
        self._llm = load(model_path(model), **{"parallel": None, **load_options})
        self._column, self._output, self._options = column, output, options

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [prompt if isinstance(prompt, str) else list(prompt) for prompt in batch[self._column]]
        completions = self._llm.generate_many(prompts, **self._options)
        return {**batch, self._output: np.array([completion.text for completion in completions], dtype=object)}


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
    """Return the dataset with a column of generated texts.

    Args:
        model: argument of `localllm.load` on each machine; None for the demo model.
        column: column of prompts: strings, or chats as lists of messages.
        output: name of the new column.
        actors: number of actors, or minimum and maximum between which Ray chooses.
        batch_size: rows that an actor evaluates together. A failure loses or keeps a whole batch.
        threads: processors per actor.
        load_options: other keyword arguments of `localllm.load`.
        options: keyword arguments of `LLM.generate`, such as ``max_tokens``.
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
    """Make Ray record written rows in a folder, and skip them in later runs, until a run has written all rows.

    Args:
        folder: folder that all machines can access, or an address such as ``s3://…``.
        id_column: column that identifies rows. The dataset must be read from files and written to files.
    """
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(id_column, folder)
