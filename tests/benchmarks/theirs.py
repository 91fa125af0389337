"""llama.cpp through the C functions of its Python binding, so that no Python code counts in its times.

``pip install llama-cpp-python`` compiles it in ten minutes on two cores.  Only these benchmarks use it.
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
from numpy.typing import NDArray

from localllm.engine.cache import common_prefix
from tests.benchmarks.results import Array

#: Largest number of tokens in a call.
N_BATCH = 512
#: Values of ``GGML_TYPE_…`` for the types of a cache.
_TYPES = {"f16": 1, "q8_0": 8, "q5_0": 6, "q4_0": 2}
#: A number above the layers of any model.
_ALL_LAYERS = 999

#: Callbacks that llama.cpp keeps a pointer to.
_keep: list[object] = []


def _binding() -> Any:
    """Return the module of the C functions, with logging switched off."""
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
    """Return the version of the binding, and the processor features of llama.cpp."""
    features = _binding().llama_print_system_info().decode()
    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')} ({features.strip()})"


def has_gpu() -> bool:
    """Return whether llama.cpp is installed with GPU support."""
    return find_spec("llama_cpp") is not None and bool(_binding().llama_supports_gpu_offload())


class LlamaCpp:
    """A model in llama.cpp; a context manager.

    Args:
        path: the file.
        repack: whether to repack weights for this processor (``use_extra_bufts``).
        on_gpu: whether all layers are on GPUs.
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
        """Return a context with its cache and threads; it lives as long as the model."""
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
        """Free a context before the model."""
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
    """A sequence of tokens in llama.cpp; `LlamaCpp.context` creates it."""

    def __init__(self, api: Any, handle: Any, n_vocab: int, *, repack: bool, flash: bool) -> None:
        self.repack, self.flash = repack, flash
        self._api, self._handle, self._n_vocab = api, handle, n_vocab
        self._memory = api.llama_get_memory(handle)
        self._ids: list[int] = []

    @property
    def setting(self) -> str:
        return f"{'repack' if self.repack else 'no repack'}, {'flash' if self.flash else 'no flash'}"

    def forget(self) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self._ids = []

    def evaluate(self, ids: Sequence[int]) -> float:
        """Evaluate the tokens that are not cached, at least the last one; return the seconds."""
        n_kept = min(common_prefix(self._ids, ids), len(ids) - 1)
        if not self._api.llama_memory_seq_rm(self._memory, 0, n_kept, -1):  # recurrent states cannot be truncated
            self.forget()
            n_kept = 0
        self._ids = list(ids)
        start = time.perf_counter()
        for first in range(n_kept, len(ids), N_BATCH):
            self._decode(ids[first : first + N_BATCH])
        self._wait()
        return time.perf_counter() - start

    def generate(self, n: int) -> tuple[float, list[int]]:
        """Generate n tokens greedily; return the seconds and the tokens."""
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
        """Return seconds for the uncached part of the prompt, seconds for n further tokens, and the tokens."""
        if forget:
            self.forget()
        return self.evaluate(ids), *self.generate(n)

    def evaluate_singly(self, n: int) -> float:
        """Return the seconds to evaluate n tokens one by one from an empty cache, without choosing tokens."""
        self.forget()
        start = time.perf_counter()
        for _ in range(n):
            self._decode([1])
        self._wait()
        return time.perf_counter() - start

    def logits(self, ids: Sequence[int]) -> Array:
        """Return the logits after the last token: [n_vocab]."""
        self.evaluate(ids)
        return self._view().copy()

    def all_logits(self, ids: Sequence[int]) -> Array:
        """Return the logits after each token: [T, n_vocab]."""
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

    def save(self, path: Path) -> None:
        """Write the cache to a file, with the function of llama-server's ``--slot-save-path``."""
        ids = (ctypes.c_int32 * len(self._ids))(*self._ids)
        if not self._api.llama_state_seq_save_file(self._handle, str(path).encode(), 0, ids, len(self._ids)):
            raise SystemExit(f"llama.cpp cannot write {path}")

    def restore(self, path: Path, n_tokens: int) -> None:
        """Read a file of `save` of at most ``n_tokens`` tokens."""
        ids, n = (ctypes.c_int32 * n_tokens)(), ctypes.c_size_t()
        file = str(path).encode()
        if not self._api.llama_state_seq_load_file(self._handle, file, 0, ids, n_tokens, ctypes.byref(n)):
            raise SystemExit(f"llama.cpp cannot read {path}")
        self._ids = ids[: n.value]

    def state(self) -> tuple[NDArray[np.uint8], list[int]]:
        """Return a copy of the cache and its tokens, with the function of llama-server's ``--cache-ram``."""
        data = np.empty(self._api.llama_state_seq_get_size(self._handle, 0), np.uint8)
        self._api.llama_state_seq_get_data(self._handle, _bytes_of(data), data.size, 0)
        return data, list(self._ids)

    def set_state(self, data: NDArray[np.uint8], ids: Sequence[int]) -> None:
        """Replace the cache by a copy from `state`."""
        if not self._api.llama_state_seq_set_data(self._handle, _bytes_of(data), data.size, 0):
            raise SystemExit("llama.cpp cannot restore its cache")
        self._ids = list(ids)

    def close(self) -> None:
        self._api.llama_free(self._handle)

    def _decode(self, ids: Sequence[int]) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if self._api.llama_decode(self._handle, self._api.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit(f"llama.cpp cannot evaluate {len(ids)} tokens")

    def _wait(self) -> None:
        self._api.llama_synchronize(self._handle)

    def _view(self) -> Array:
        """Return a view of the logits after the last token, in llama.cpp's memory."""
        pointer = self._api.llama_get_logits_ith(self._handle, -1)
        logits: Array = np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))
        return logits


def _bytes_of(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class Mtmd:
    """llama.cpp with a text model and a media encoder."""

    def __init__(self, text: Path, encoder: Path, *, threads: int = 2, repack: bool = False) -> None:
        import llama_cpp.mtmd_cpp as api

        self.api, self.model = api, LlamaCpp(text, repack=repack)
        parameters = api.mtmd_context_params_default()
        parameters.use_gpu = parameters.print_timings = parameters.warmup = False
        parameters.n_threads = threads
        self._context = api.mtmd_init_from_file(str(encoder).encode(), self.model._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {encoder}")

    def image(self, pixels: NDArray[np.uint8]) -> Any:
        """Return an image [height, width, 3] as input of `chunks`."""
        data = (ctypes.c_uint8 * pixels.size).from_buffer_copy(pixels.tobytes())
        return self.api.mtmd_bitmap_init(pixels.shape[1], pixels.shape[0], data)

    def audio(self, samples: Array) -> Any:
        """Return audio samples as input of `chunks`."""
        data = (ctypes.c_float * len(samples)).from_buffer_copy(samples.tobytes())
        return self.api.mtmd_bitmap_init_from_audio(len(samples), data)

    def chunks(self, media: Any, before: str = "", after: str = "") -> list[Any]:
        """Return the chunks of a prompt with an image or audio between two texts."""
        api, chunks = self.api, self.api.mtmd_input_chunks_init()
        words = before.encode() + api.mtmd_default_marker() + after.encode()
        text = api.mtmd_input_text(words, len(words), False, True)
        if api.mtmd_tokenize(self._context, chunks, ctypes.byref(text), (api.mtmd_bitmap_p_ctypes * 1)(media), 1):
            raise SystemExit("llama.cpp cannot prepare the media")
        return [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]

    def tokens(self, chunk: Any) -> list[int] | None:
        """Return the ids of a chunk of text; None for media."""
        if self.api.mtmd_input_chunk_get_type(chunk) != self.api.MTMD_INPUT_CHUNK_TYPE_TEXT:
            return None
        n = ctypes.c_size_t()
        ids = self.api.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        return [int(ids[i]) for i in range(n.value)]

    def encode(self, chunk: Any) -> Array:
        """Return the embeddings of a media chunk: [n_tokens, width]."""
        if self.api.mtmd_encode_chunk(self._context, chunk):
            raise SystemExit("llama.cpp cannot encode the media")
        n = self.api.mtmd_input_chunk_get_n_tokens(chunk)
        width = int(self.model._api.llama_model_n_embd_inp(self.model._model))
        return np.ctypeslib.as_array(self.api.mtmd_get_output_embd(self._context), (n, width)).copy()

    def decode(self, chunks: list[Any], n: int) -> list[int]:
        """Return the n ids that follow the chunks."""
        context = self.model.context(2, 1024, flash=False)
        n_past = ctypes.c_int32(0)
        for chunk in chunks:
            if self.api.mtmd_helper_eval_chunk_single(
                self._context, context._handle, chunk, n_past, 0, 512, True, ctypes.byref(n_past)
            ):
                raise SystemExit("llama.cpp cannot evaluate the prompt")
        return context.generate(n)[1]
