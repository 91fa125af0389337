"""Selection, compile-time parameters and launches of the kernels in `attention.cu` for a batch.

Sequences of few tokens are split: each block computes a split of the visible positions, and a second kernel merges
the splits.  Other sequences are prefilled: each block computes a tile of rows over all visible positions.  Both
methods give the same bits, so the choice affects only speed.  A kernel processes the sequences whose number of tokens
is in its range, and finds its tiles in the batch's tables in device memory.  A captured launch therefore stays valid
for every batch within the `Work` that it was created for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from localllm.errors import ON_CPU, Argument, KernelError
from localllm.kernels.cache_rounding import VALUES_PER_SCALE
from localllm.kernels.cuda.cache import PAGE, bits_of, padded_head
from localllm.kernels.cuda.driver import Launch
from localllm.kernels.graph import CacheType, KVCache

#: The first FINE_PAGES pages are one KV split each; later splits have SPLIT_PAGES pages.  Each split has separate
#: sums.  With shorter splits more blocks share a short cache, but prefill merges more often.
FINE_PAGES, SPLIT_PAGES = 16, 4
#: Rows computed at once.
ROWS = 16
#: Window length if attention has no window.
NO_WINDOW = 1 << 30
#: More tokens than any sequence of a batch contains.
MAX_TOKENS = (1 << 31) - 1
#: Sequences of at most this many rows (tokens times query heads per key head) can be split.
SPLIT_ROWS = 256

_SPLIT_WARPS, _MERGE_WARPS = 4, 8
#: Bytes of static shared memory of the kernels, and bytes per row in prefill.
_SPLIT_STATIC = ROWS * 4 * (PAGE + 4) + ROWS * 20
_ROW_STATIC = 12
#: Padding of a tile's rows, in values, so that they map to different banks.
_PADDING = 8
#: Two warps share the rows of larger heads; four warps share rows of heads larger than twice this.
_SHARED_ROWS = 128
#: The largest heads, in keys and in values.
MAX_KEY_DIM, MAX_VALUE_DIM = 640, 512
#: Shared memory for pages in `attention_split`, so that usually two blocks fit a multiprocessor, and the maximum
#: number of pages that it prefetches.
_STAGED_BYTES, _MAX_AHEAD = 56 << 10, 3


@dataclass(frozen=True)
class AttentionVariant:
    """The parameters that `attention.cu` is compiled with."""

    # key_dim, value_dim, cache_type, values_in_keys: properties of the cache
    key_dim: int
    value_dim: int
    cache_type: CacheType
    values_in_keys: bool = False
    # chunked, causal, has_spans, part: visibility of positions
    chunked: bool = False
    causal: bool = True
    has_spans: bool = False
    part: int = 0  # the visible part of the sequence: 0 all, 1 the prompt, 2 the reply
    soft_cap: bool = False  # whether scores are capped
    sinks: bool = False  # whether each query head has a sink
    has_slopes: bool = False  # whether scores decrease with the distance
    bias_width: int = 0  # number of distances with a bias per head; 0 without biases
    warps: int = 8  # warps of `attention_prefill`
    # prefill_ahead, split_ahead: pages that each kernel prefetches while it uses another page
    prefill_ahead: int = 1
    split_ahead: int = 1

    @property
    def defines(self) -> dict[str, int | str]:
        fields = {name.upper(): int(value) for name, value in vars(self).items() if name != "cache_type"}
        bits = dict(zip(("KEY_BITS", "VALUE_BITS"), self.bits, strict=True))
        pages = {"FINE_PAGES": FINE_PAGES, "SPLIT_PAGES": SPLIT_PAGES}
        return {**fields, **bits, **pages, "MERGE_WARPS": _MERGE_WARPS}

    @property
    def bits(self) -> tuple[int, int]:
        """Bits per value in keys and in values."""
        return bits_of(KVCache(0, 1, self.key_dim, self.value_dim, self.cache_type, self.values_in_keys))

    @property
    def has_codes(self) -> bool:
        return min(self.bits) < 16

    @property
    def key_head(self) -> int:
        return padded_head(self.key_dim)

    @property
    def value_head(self) -> int:
        return padded_head(self.value_dim)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of `attention_prefill`."""
        return ROWS * self.warps // self._head_parts

    @property
    def _head_parts(self) -> int:
        """Warps of `attention_prefill` that share rows."""
        return 4 if self.value_head > 2 * _SHARED_ROWS else 2 if self.value_head > _SHARED_ROWS else 1

    @property
    def _page_bytes(self) -> tuple[int, int]:
        """Bytes of a page in shared memory: as stored in the cache, and after conversion of pages with scales."""
        row = max(self.key_head, self.value_head)
        halves, groups = 2 * PAGE * (row + _PADDING), -(-row // VALUES_PER_SCALE)
        if not self.has_codes:
            return halves, 0
        heads = self.key_head, self.key_head if self.values_in_keys else self.value_head
        loaded = (
            PAGE * head * bits // 8 + (2 * PAGE * -(-head // VALUES_PER_SCALE) if bits < 16 else 0)
            for head, bits in zip(heads, self.bits, strict=True)
        )
        return max(loaded), halves + 4 * PAGE * groups

    def _pages_bytes(self, ahead: int) -> int:
        """Return the bytes of ``ahead`` prefetched pages and the page in use."""
        loaded, widened = self._page_bytes
        return ahead * loaded + (widened or loaded)

    @property
    def prefill_bytes(self) -> int:
        """Dynamic shared memory of `attention_prefill`."""
        steps, head_parts = self.value_head // 16, self._head_parts
        pairs = steps if head_parts == 1 else (steps + 2 * head_parts - 1) // (2 * head_parts) * 2
        queries = 2 * self.tile_rows * (self.key_head + _PADDING)
        # With four parts, sums are kept in registers.
        sums = 4 * 8 * pairs * 32 * self.warps if head_parts < 4 else 0
        # Queries use the memory of the sums if they are moved to registers at once.
        most = _SHARED_ROWS // 2 if self.has_codes else _SHARED_ROWS
        queries_and_sums = max(queries, sums) if self.key_head <= most and head_parts == 1 else queries + sums
        return self._pages_bytes(self.prefill_ahead) + queries_and_sums

    @property
    def split_bytes(self) -> int:
        """Dynamic shared memory of `attention_split`."""
        return self._pages_bytes(self.split_ahead) + 2 * ROWS * (self.key_head + _PADDING)

    @property
    def largest_block_bytes(self) -> int:
        """Shared memory of a block, including static memory."""
        return max(self.prefill_bytes + _ROW_STATIC * self.tile_rows, self.split_bytes + _SPLIT_STATIC)


def choose_variant(variant: AttentionVariant, shared_bytes: int) -> AttentionVariant:
    """Return a variant's fastest launch geometry on devices with ``shared_bytes`` of shared memory per block."""
    if not (1 <= variant.key_dim <= MAX_KEY_DIM and 1 <= variant.value_dim <= MAX_VALUE_DIM):
        raise KernelError(
            f"attention on CUDA takes heads of up to {MAX_KEY_DIM} values in keys and {MAX_VALUE_DIM} in values, not "
            f"{variant.key_dim} and {variant.value_dim}: use ",
            ON_CPU,
        )
    head_parts, loaded = variant._head_parts, variant._page_bytes[0]
    deep = min(max(1, _STAGED_BYTES // loaded - 1), _MAX_AHEAD)
    prefills = [(warps, ahead) for warps in (8, 4, 2) for ahead in (1, 0) if warps % head_parts == 0]
    if variant.has_codes:  # converting pages directly from global memory is slower than a smaller tile
        prefills.sort(key=lambda warps_and_ahead: -warps_and_ahead[1])
    for split_ahead in (deep, 0):
        for warps, prefill_ahead in prefills:
            candidate = replace(variant, warps=warps, prefill_ahead=prefill_ahead, split_ahead=split_ahead)
            if candidate.largest_block_bytes <= shared_bytes:
                return candidate
    raise KernelError(
        f"attention over heads of {variant.key_dim} values in a {variant.cache_type} cache needs "
        f"{candidate.largest_block_bytes} bytes of shared memory a block, but the device gives {shared_bytes}: use ",
        *((Argument("cache_type", "f16"), ", ") if variant.has_codes else ()),
        ON_CPU,
        " or another device",
    )


@dataclass(frozen=True)
class HeadShape:
    """The heads of a model's attention, and its window (`NO_WINDOW`: all previous positions), in both directions if
    not causal.

    With ``has_spans``, tokens may see later tokens of the same batch.
    """

    n_kv_heads: int
    group_size: int
    window: int = NO_WINDOW
    causal: bool = True
    has_spans: bool = False


@dataclass(frozen=True)
class Work:
    """Maximum sizes of attention's launches."""

    split_tokens: int  # sequences of at most this many tokens are split; 0: no sequence
    # prefill_tiles, split_tiles: maximum tiles of each kind; 0 if the launch is not needed
    prefill_tiles: int
    split_tiles: int
    max_splits: int  # maximum splits that a split tile sees
    partial_rows: int  # maximum rows that are split

    def partial_floats(self, heads: HeadShape, variant: AttentionVariant) -> tuple[int, int]:
        """Return the sizes of ``partial_sums`` and ``partial_states``, in float32 values."""
        rows = heads.n_kv_heads * self.max_splits * self.partial_rows
        return rows * variant.value_head, rows * 2


def work_of_bucket(n_tokens: int, longest: int, heads: HeadShape) -> Work:
    """Return the work of batches of at most ``n_tokens`` tokens, in sequences up to ``longest``; all are split."""
    rows, tiles = n_tokens * heads.group_size, n_tokens * -(-heads.group_size // ROWS)
    return Work(MAX_TOKENS, 0, tiles, _most_splits(n_tokens, longest, heads), rows)


def work_of_batch(
    sequences: Iterable[tuple[int, int]], heads: HeadShape, variant: AttentionVariant, partial_bytes: int
) -> Work:
    """Return the work of a batch; ``sequences`` are (tokens in the batch, length in the cache including them)."""
    tokens = [(n, length) for n, length in sequences]
    # Lower the number of split sequences until their partials fit.
    for limit in (*(SPLIT_ROWS // share // heads.group_size for share in (1, 2, 4, 8, 16)), 1, 0):
        split = [(n, length) for n, length in tokens if n <= limit]
        rows = [n * heads.group_size for n, _ in split]
        work = Work(
            limit,
            sum(-(-n * heads.group_size // variant.tile_rows) for n, _ in tokens if n > limit),
            sum(-(-n // ROWS) for n in rows),
            max((_most_splits(n, length, heads) for n, length in split), default=0),
            sum(rows),
        )
        if 4 * sum(work.partial_floats(heads, variant)) <= partial_bytes:
            break
    return work


def _most_splits(n_tokens: int, longest: int, heads: HeadShape) -> int:
    """Return the maximum splits that a tile sees, if its rows belong to at most ``n_tokens`` tokens."""
    n_new = n_tokens if heads.has_spans else min(n_tokens, ROWS)
    n_seen = min(heads.window - 1, longest) * (1 if heads.causal else 2) + n_new
    n_pages = min(-(-longest // PAGE), -(-n_seen // PAGE) + 1)
    return min(n_pages, FINE_PAGES) + -(-max(0, n_pages - FINE_PAGES) // SPLIT_PAGES)


def launches(work: Work, heads: HeadShape, variant: AttentionVariant, n_multiprocessors: int) -> list[Launch]:
    """Return the launches for some work, in order: `attention_prefill`, `attention_split` and `attention_merge`."""
    result = []
    if work.prefill_tiles:
        grid: tuple[int, ...] = (work.prefill_tiles, heads.n_kv_heads)
        result.append(_launch("attention_prefill", variant, grid, variant.warps, variant.prefill_bytes))
    if work.split_tiles:
        # Enough blocks for several per multiprocessor; with more splits than that, a block processes several splits.
        tiles = heads.n_kv_heads * work.split_tiles
        shares = min(work.max_splits, -(-4 * n_multiprocessors // tiles))
        grid = (shares, heads.n_kv_heads, work.split_tiles)
        result.append(_launch("attention_split", variant, grid, _SPLIT_WARPS, variant.split_bytes))
        n_parts = min(ROWS, work.partial_rows) * -(-variant.value_head // 32)
        grid = (-(-n_parts // _MERGE_WARPS), heads.n_kv_heads, work.split_tiles)
        result.append(_launch("attention_merge", variant, grid, _MERGE_WARPS))
    return result


def _launch(
    kernel: str, variant: AttentionVariant, grid: tuple[int, ...], warps: int, shared_bytes: int = 0
) -> Launch:
    return Launch("attention", kernel, variant.defines, grid, (32 * warps,), shared_bytes)


def token_range(launch: Launch, work: Work) -> dict[str, int]:
    """Return kernel arguments: the range of tokens per sequence that a launch processes."""
    if launch.kernel == "attention_prefill":
        return {"least": work.split_tokens + 1, "most": MAX_TOKENS}
    return {"least": 1, "most": work.split_tokens}
