"""Compare predicted speeds with measurements, for random models of several shapes.

    python -m tests.benchmarks.predictions                                 # writes 20 GB of models
    python -m tests.benchmarks.predictions llama-1.1b:q4_0 llama-1.1b:q4_0:q8_0 qwen3moe-7b:q4_k_m@2.5
    python -m tests.benchmarks.predictions model.gguf

A model is SHAPE:FILE_TYPE, optionally with :CACHE_TYPE and @GIGABYTES of memory, or a file.  The speed of memory
drifts.  Therefore, in each round the rates of this machine's kernels are measured again, and then the model; the
bandwidth is measured next to both, and the rate of generation is predicted for the bandwidth during the model's
measurement.  The medians of all rounds count.  Errors are the prediction relative to the measurement.  With a limit
of memory, the system drops experts from its cache after each read, as on a machine without memory to spare.  The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import localllm
from localllm.bench.ceilings import ceiling
from localllm.bench.model_speed import measure
from localllm.bench.workload import ModelCost, Test
from localllm.cli.machine_warnings import disturbance
from localllm.kernels.code_cache import cache_root
from localllm.kernels.cpu import expert_pool
from localllm.kernels.cpu.host import OtherLoad
from localllm.loading.load import LONG_CONTEXT, plan_file
from localllm.loading.prediction import Predictor
from localllm.options.declared import LoadOptions
from tests.benchmarks.experts import UncachedFile
from tests.helpers.synthetic import made_gguf

#: Dense, hybrid, window and mixture models of 0.5 to 8 billion parameters, and experts that stay in the file.
MODELS = (
    "qwen2-0.5b:q8_0",
    "llama-1.1b:q4_0",
    "llama-1.1b:q4_k_m:q8_0",
    "llama-1.1b:f16",
    "llama-1.1b:iq3_s",
    "llama-8b:q4_k_m",
    "qwen35-0.8b:q4_k_m",
    "gemma3-4b:q4_k_m",
    "qwen3moe-7b:q4_k_m",
    "deepseek3-2.6b:q8_0",
    "qwen3moe-7b:q4_k_m@3",
)
GENERATION = Test("tg", 32, 0)
#: Tests: evaluation of a prompt, and generation after few and after many tokens.
TESTS = (Test("pp", 512, 0), GENERATION, Test("tg", 32, 4096))
#: Largest error that the goal allows.
GOAL = 0.1

#: The class that reads experts with the system's cache.
CACHED_FILE = expert_pool._ExpertFile

_COLUMNS = "{:<26} {:<14} {:>10} {:>10} {:>7}"


def compare(name: str, folder: Path, rounds: int, threads: int | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each test of a model."""
    model, _, gigabytes = name.partition("@")
    shape, *types = model.split(":")
    path = Path(model) if model.endswith(".gguf") else made_gguf(folder, shape, types[0])
    context = max(test.context for test in TESTS)
    options: dict[str, Any] = {"device": "cpu", "context": context, "cache_type": types[1] if types[1:] else "f16"}
    options |= {"threads": threads, **({"max_memory": float(gigabytes)} if gigabytes else {})}
    vars(expert_pool)["_ExpertFile"] = UncachedFile if gigabytes else CACHED_FILE
    warnings.filterwarnings("ignore", LONG_CONTEXT)
    placement = plan_file(LoadOptions(path=path, **options)).placement
    predictions, measurements = defaultdict[Test, list[float]](list), defaultdict[Test, list[float]](list)
    with localllm.load(path, **options) as llm, ExitStack() as stack:
        bandwidth = ceiling(llm.info, GENERATION, ModelCost.of(llm.info), None, stack)
        assert bandwidth is not None
        for _ in range(rounds):
            for stored in [] if (root := cache_root()) is None else root.glob("rates-*.json"):
                stored.unlink()
            before = bandwidth()
            predictor = Predictor.of(path, placement, threads)
            of_rates = (before + bandwidth()) / 2
            for test in TESTS:
                result = measure(llm, test, 1, predictor=predictor)
                drift = result.ceilings[0] / of_rates if test.kind == "tg" and not placement.pool else 1.0
                predictions[test].append((result.predicted or 0.0) * drift)
                measurements[test] += result.rates
    for test in TESTS:
        predicted, measured = statistics.median(predictions[test]), statistics.median(measurements[test])
        figures = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        rounds_of = {"predictions": predictions[test], "measurements": measurements[test]}
        yield {"model": name, "test": test.name, **figures, **rounds_of}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--folder", type=Path, default=Path("benchmark-models"), help="where models are written")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int)
    arguments = parser.parse_args()
    print(_COLUMNS.format("model", "test", "predicted", "measured", "error"))
    rows, other_load = list[dict[str, Any]](), OtherLoad()
    for name in arguments.models:
        for row in compare(name, arguments.folder, arguments.rounds, arguments.threads):
            figures = f"{row['predicted']:,.1f}", f"{row['measured']:,.1f}", f"{row['error']:+.0%}"
            print(_COLUMNS.format(row["model"], row["test"], *figures), flush=True)
            rows.append(row)
    if complaint := disturbance(other_load.cpus(), 1.0):
        print(complaint, file=sys.stderr)
    errors = [abs(row["error"]) for row in rows]
    print(json.dumps({"rows": rows, "median_error": statistics.median(errors), "largest_error": max(errors)}))
    return int(max(errors) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
