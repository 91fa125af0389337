"""llama.cpp through the C functions of its Python binding, so that nothing of Python's is counted against it.

``pip install llama-cpp-python`` compiles it, ten minutes on two cores; only these benchmarks use it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from localllm.engine.cache import common_prefix
from tests.benchmarks.results import Array

#: Tokens that one call evaluates at most.
N_BATCH = 512
#: ``GGML_TYPE_…`` of a cache's types.
_TYPES = {"f16": 1, "q8_0": 8, "q5_0": 6, "q4_0": 2}
#: More layers than a model has.
_ALL_LAYERS = 999

#: Functions that llama.cpp holds on to.
_keep: list[object] = []


def _binding() -> Any:
    """The module of the C functions, told to keep quiet."""
    try:
        import llama_cpp.llama_cpp as binding
    except ImportError:
        raise SystemExit("llama.cpp is missing: pip install llama-cpp-python") from None
    if not _keep:
        _keep.append(binding.llama_log_callback(lambda level, text, data: None))
        binding.llama_log_set(_keep[0], ctypes.c_void_p())
        binding.llama_backend_init()
    return binding


def version() -> str:
    """The binding's version, and what llama.cpp was built for."""
    features = _binding().llama_print_system_info().decode()
    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')} ({features.strip()})"


def has_gpu() -> bool:
    """Whether llama.cpp is here, and computes on GPUs."""
    return find_spec("llama_cpp") is not None and bool(_binding().llama_supports_gpu_offload())


class LlamaCpp:
    """A model in llama.cpp; a context manager.

    Args:
        path: the file.
        repack: whether weights may be copied into layouts for this processor (``use_extra_bufts``).
        on_gpu: whether all layers go to GPUs.
    """

    def __init__(self, path: Path, *, repack: bool, on_gpu: bool = False) -> None:
        self._api = _binding()
        parameters = self._api.llama_model_default_params()
        parameters.use_extra_bufts = repack
        parameters.n_gpu_layers = _ALL_LAYERS if on_gpu else 0
        self._model = self._api.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.repack = repack
        self.n_vocab = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model)))
        self._contexts: list[Context] = []

    def context(self, threads: int, n_tokens: int, *, flash: bool, cache_type: str = "f16") -> Context:
        """A cache and threads of its own; it lives as long as the model."""
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx = n_tokens
        parameters.n_batch = parameters.n_ubatch = N_BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        enabled, disabled = self._api.LLAMA_FLASH_ATTN_TYPE_ENABLED, self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.flash_attn_type = enabled if flash else disabled
        keys, _, values = cache_type.partition("/")
        parameters.type_k, parameters.type_v = _TYPES[keys], _TYPES[values or keys]
        handle = self._api.llama_init_from_model(self._model, parameters)
        if not handle:
            raise SystemExit(f"llama.cpp cannot make a context of {n_tokens} tokens")
        self._contexts.append(Context(self._api, handle, self.n_vocab, repack=self.repack, flash=flash))
        return self._contexts[-1]

    def close_context(self, context: Context) -> None:
        """Gives its memory back before the model's."""
        self._contexts.remove(context)
        context.close()

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._api.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context:
    """A sequence of tokens that llama.cpp works on; `LlamaCpp.context` makes it."""

    def __init__(self, api: Any, handle: Any, n_vocab: int, *, repack: bool, flash: bool) -> None:
        self.repack, self.flash = repack, flash
        self._api, self._handle, self._n_vocab = api, handle, n_vocab
        self._memory = api.llama_get_memory(handle)
        self._ids: list[int] = []

    @property
    def setting(self) -> str:
        """Its settings, in words for the table."""
        return f"{'repack' if self.repack else 'no repack'}, {'flash' if self.flash else 'no flash'}"

    def forget(self) -> None:
        """Empties the cache."""
        self._api.llama_memory_clear(self._memory, True)
        self._ids = []

    def evaluate(self, ids: Sequence[int]) -> float:
        """Evaluates what of ``ids`` is not in the cache, the last token at least; seconds."""
        n_kept = min(common_prefix(self._ids, ids), len(ids) - 1)
        if not self._api.llama_memory_seq_rm(self._memory, 0, n_kept, -1):  # recurrent states cannot be cut
            self.forget()
            n_kept = 0
        self._ids = list(ids)
        start = time.perf_counter()
        for first in range(n_kept, len(ids), N_BATCH):
            self._decode(ids[first : first + N_BATCH])
        self._wait()
        return time.perf_counter() - start

    def generate(self, n: int) -> tuple[float, list[int]]:
        """Goes on greedily for n tokens: seconds, and those."""
        ids = []
        start = time.perf_counter()
        for _ in range(n):
            ids.append(int(self._view().argmax()))
            self._decode(ids[-1:])
        self._wait()
        seconds = time.perf_counter() - start
        self._ids += ids
        return seconds, ids

    def measure(self, ids: Sequence[int], n: int, *, forget: bool = True) -> tuple[float, float, list[int]]:
        """Seconds for what of the prompt is not cached, seconds for n further tokens, and those."""
        if forget:
            self.forget()
        return self.evaluate(ids), *self.generate(n)

    def evaluate_singly(self, n: int) -> float:
        """Seconds to evaluate n tokens one by one from an empty cache, with no choice between them."""
        self.forget()
        start = time.perf_counter()
        for _ in range(n):
            self._decode([1])
        self._wait()
        return time.perf_counter() - start

    def logits(self, ids: Sequence[int]) -> Array:
        """After the last of the tokens: [n_vocab]."""
        self.evaluate(ids)
        return self._view().copy()

    def all_logits(self, ids: Sequence[int]) -> Array:
        """After each of the tokens: [T, n_vocab]."""
        self.forget()
        rows = []
        for first in range(0, len(ids), N_BATCH):
            some = ids[first : first + N_BATCH]
            batch = self._api.llama_batch_init(len(some), 0, 1)
            batch.n_tokens = len(some)
            for i, id_ in enumerate(some):
                batch.token[i], batch.pos[i], batch.logits[i] = id_, first + i, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            if self._api.llama_decode(self._handle, batch):
                raise SystemExit(f"llama.cpp cannot evaluate {len(some)} tokens")
            self._wait()
            pointer = self._api.llama_get_logits(self._handle)
            rows.append(np.ctypeslib.as_array(pointer, shape=(len(some), self._n_vocab)).copy())
            self._api.llama_batch_free(batch)
        return np.concatenate(rows)

    def close(self) -> None:
        self._api.llama_free(self._handle)

    def _decode(self, ids: Sequence[int]) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if self._api.llama_decode(self._handle, self._api.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit(f"llama.cpp cannot evaluate {len(ids)} tokens")

    def _wait(self) -> None:
        self._api.llama_synchronize(self._handle)

    def _view(self) -> Array:
        """The logits after the last token, where llama.cpp has them."""
        pointer = self._api.llama_get_logits_ith(self._handle, -1)
        logits: Array = np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))
        return logits
