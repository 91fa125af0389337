"""Which kernels of `attention.cu` compute a batch's attention, how they are compiled and launched.

Sequences of few tokens are split: blocks take splits of what they see, and a second kernel merges those.  The others
are prefilled: a block takes a tile of rows through all that it sees.  Both give the same bits, so this is a matter
of speed alone.  A kernel takes the sequences whose number of tokens lies in its range, and finds its tiles by the
batch's tables in device memory: a captured launch stays valid for every batch within the `Work` it was made for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from localllm.errors import ON_CPU, Argument, KernelError
from localllm.kernels.cache_rounding import VALUES_PER_SCALE
from localllm.kernels.cuda.cache import PAGE, bits_of, padded_head
from localllm.kernels.cuda.driver import Launch
from localllm.kernels.graph import CacheType, KVCache

#: Pages that are a KV split each, and pages in one behind them; sums begin anew after it.  With shorter splits, more
#: blocks share a short cache; prefill merges more.
FINE_PAGES, SPLIT_PAGES = 16, 4
#: Rows that are computed at once.
ROWS = 16
#: Where there is no window.
NO_WINDOW = 1 << 30
#: More tokens than any sequence of a batch has.
MAX_TOKENS = (1 << 31) - 1
#: Sequences of at most so many rows (tokens times query heads of a key head) may be split.
SPLIT_ROWS = 256

_SPLIT_WARPS, _MERGE_WARPS = 4, 8
#: Bytes of shared memory that the kernels declare themselves, and of each row in prefill.
_SPLIT_STATIC = ROWS * 4 * (PAGE + 4) + ROWS * 20
_ROW_STATIC = 12
#: Values of the head in front of which a tile's rows are padded by eight, so that they lie in different banks.
_PADDING = 8
#: Heads of more values: two warps share rows; of twice as many, four.
_SHARED_ROWS = 128
#: The largest heads, in keys and in values.
MAX_KEY_DIM, MAX_VALUE_DIM = 640, 512
#: Shared memory for pages of `attention_split`, so that two blocks fit beside each other mostly, and how many of them
#: it fetches ahead: at most so much.
_STAGED_BYTES, _MAX_AHEAD = 56 << 10, 3


@dataclass(frozen=True)
class Variant:
    """The parameters that `attention.cu` is compiled with."""

    # key_dim, value_dim, cache_type, values_in_keys: of the cache
    key_dim: int
    value_dim: int
    cache_type: CacheType
    values_in_keys: bool = False
    # chunked, causal, has_spans: what a token sees
    chunked: bool = False
    causal: bool = True
    has_spans: bool = False
    soft_cap: bool = False  # whether scores are capped
    sinks: bool = False  # whether each query head has a sink
    has_slopes: bool = False  # whether scores fall with the distance
    bias_width: int = 0  # distances with a bias for scores, of each head
    warps: int = 8  # of `attention_prefill`
    # prefill_ahead, split_ahead: pages that either kernel fetches while it uses another one
    prefill_ahead: int = 1
    split_ahead: int = 1

    @property
    def defines(self) -> dict[str, int | str]:
        return {
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "KEY_BITS": self.bits[0],
            "VALUE_BITS": self.bits[1],
            "VALUES_IN_KEYS": int(self.values_in_keys),
            "CHUNKED": int(self.chunked),
            "CAUSAL": int(self.causal),
            "SPANS": int(self.has_spans),
            "SOFT_CAP": int(self.soft_cap),
            "SINKS": int(self.sinks),
            "ALIBI": int(self.has_slopes),
            "BIASES": self.bias_width,
            "WARPS": self.warps,
            "PREFILL_AHEAD": self.prefill_ahead,
            "SPLIT_AHEAD": self.split_ahead,
            "FINE_PAGES": FINE_PAGES,
            "SPLIT_PAGES": SPLIT_PAGES,
            "MERGE_WARPS": _MERGE_WARPS,
        }

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a value in keys and in values."""
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
        """Of a page in shared memory: as it comes from the cache, and what pages with scales are widened to."""
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
        """Of those that are fetched ahead, and of the one that is used."""
        loaded, widened = self._page_bytes
        return ahead * loaded + (widened or loaded)

    @property
    def prefill_bytes(self) -> int:
        """Dynamic shared memory of `attention_prefill`."""
        steps, parts = self.value_head // 16, self._head_parts
        pairs = steps if parts == 1 else (steps + 2 * parts - 1) // (2 * parts) * 2
        queries = 2 * self.tile_rows * (self.key_head + _PADDING)
        # With most parts, sums are in registers.
        sums = 4 * 8 * pairs * 32 * self.warps if parts < 4 else 0
        # Queries lie in the sums' place if they go to registers at once.
        most = _SHARED_ROWS // 2 if self.has_codes else _SHARED_ROWS
        kept = max(queries, sums) if self.key_head <= most and parts == 1 else queries + sums
        return self._pages_bytes(self.prefill_ahead) + kept

    @property
    def split_bytes(self) -> int:
        """Dynamic shared memory of `attention_split`."""
        return self._pages_bytes(self.split_ahead) + 2 * ROWS * (self.key_head + _PADDING)

    @property
    def largest_block_bytes(self) -> int:
        """The shared memory that a block needs, all in all."""
        return max(self.prefill_bytes + _ROW_STATIC * self.tile_rows, self.split_bytes + _SPLIT_STATIC)


def choose_variant(variant: Variant, shared_bytes: int) -> Variant:
    """The fastest launch geometry of a variant for a device that gives a block ``shared_bytes`` of shared memory."""
    if not (1 <= variant.key_dim <= MAX_KEY_DIM and 1 <= variant.value_dim <= MAX_VALUE_DIM):
        raise KernelError(
            f"attention on CUDA takes heads of up to {MAX_KEY_DIM} values in keys and {MAX_VALUE_DIM} in values, not "
            f"{variant.key_dim} and {variant.value_dim}: use ",
            ON_CPU,
        )
    parts, loaded = variant._head_parts, variant._page_bytes[0]
    deep = min(max(1, _STAGED_BYTES // loaded - 1), _MAX_AHEAD)
    prefills = [(warps, ahead) for warps in (8, 4, 2) for ahead in (1, 0) if warps % parts == 0]
    if variant.has_codes:  # to widen pages straight from global memory takes longer than a smaller tile
        prefills.sort(key=lambda warps_and_ahead: -warps_and_ahead[1])
    for split_ahead in (deep, 0):
        for warps, prefill_ahead in prefills:
            found = replace(variant, warps=warps, prefill_ahead=prefill_ahead, split_ahead=split_ahead)
            if found.largest_block_bytes <= shared_bytes:
                return found
    raise KernelError(
        f"attention over heads of {variant.key_dim} values in a {variant.cache_type} cache needs "
        f"{found.largest_block_bytes} bytes of shared memory a block, but the device gives {shared_bytes}: use ",
        *((Argument("cache_type", "f16"), ", ") if variant.has_codes else ()),
        ON_CPU,
        " or another device",
    )


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention, and how far it looks back (`NO_WINDOW`: to the beginning), or both ways.

    With ``has_spans``, tokens may see others of the same batch behind them.
    """

    n_kv_heads: int
    group_size: int
    window: int = NO_WINDOW
    causal: bool = True
    has_spans: bool = False


@dataclass(frozen=True)
class Work:
    """The largest sizes of attention's launches."""

    split_tokens: int  # sequences of at most so many tokens are split; 0: none is
    # prefill_tiles, split_tiles: tiles of either kind, at most; 0 if no such launch is needed
    prefill_tiles: int
    split_tiles: int
    max_splits: int  # splits that a tile which is split sees, at most
    partial_rows: int  # rows that are split, at most

    def partial_floats(self, heads: Heads, variant: Variant) -> tuple[int, int]:
        """Sizes of ``partial_sums`` and ``partial_states``, in float32 values."""
        rows = heads.n_kv_heads * self.max_splits * self.partial_rows
        return rows * variant.value_head, rows * 2


def work_of_bucket(n_tokens: int, longest: int, heads: Heads) -> Work:
    """For every batch of at most ``n_tokens`` tokens, in sequences of at most ``longest``: all of it is split."""
    rows, tiles = n_tokens * heads.group_size, n_tokens * -(-heads.group_size // ROWS)
    return Work(MAX_TOKENS, 0, tiles, _most_splits(n_tokens, longest, heads), rows)


def work_of_batch(sequences: Iterable[tuple[int, int]], heads: Heads, variant: Variant, partial_bytes: int) -> Work:
    """The work of a batch; ``sequences`` are (tokens in it, length in the cache with them)."""
    tokens = [(n, length) for n, length in sequences]
    # Fewer and fewer are split, until their partials fit.
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


def _most_splits(n_tokens: int, longest: int, heads: Heads) -> int:
    """Splits that a tile of a sequence sees, at most: its rows are of at most ``n_tokens`` tokens."""
    own = n_tokens if heads.has_spans else min(n_tokens, ROWS)
    seen = min(heads.window - 1, longest) * (1 if heads.causal else 2) + own
    n_pages = min(-(-longest // PAGE), -(-seen // PAGE) + 1)
    return min(n_pages, FINE_PAGES) + -(-max(0, n_pages - FINE_PAGES) // SPLIT_PAGES)


def launches(work: Work, heads: Heads, variant: Variant, n_multiprocessors: int) -> list[Launch]:
    """The launches for some work, in order: of `attention_prefill`, `attention_split` and `attention_merge`."""
    result = []
    if work.prefill_tiles:
        grid: tuple[int, ...] = (work.prefill_tiles, heads.n_kv_heads)
        result.append(_launch("attention_prefill", variant, grid, variant.warps, variant.prefill_bytes))
    if work.split_tiles:
        # Enough blocks for every multiprocessor to have several; where there are more splits, blocks take several.
        tiles = heads.n_kv_heads * work.split_tiles
        shares = min(work.max_splits, -(-4 * n_multiprocessors // tiles))
        grid = (shares, heads.n_kv_heads, work.split_tiles)
        result.append(_launch("attention_split", variant, grid, _SPLIT_WARPS, variant.split_bytes))
        parts = min(ROWS, work.partial_rows) * -(-variant.value_head // 32)
        grid = (-(-parts // _MERGE_WARPS), heads.n_kv_heads, work.split_tiles)
        result.append(_launch("attention_merge", variant, grid, _MERGE_WARPS))
    return result


def _launch(kernel: str, variant: Variant, grid: tuple[int, ...], warps: int, shared_bytes: int = 0) -> Launch:
    return Launch("attention", kernel, variant.defines, grid, (32 * warps,), shared_bytes)


def token_range(launch: Launch, work: Work) -> tuple[int, int]:
    """``least`` and ``most``, the kernel's arguments: the sequences that it takes have so many tokens."""
    return (work.split_tokens + 1, MAX_TOKENS) if launch.kernel == "attention_prefill" else (1, work.split_tokens)
