"""Saves cache pages and image embeddings in a file, so that prompts need no evaluation after a restart.

File format: `MAGIC`, then pieces. A piece is its length (u64), its CRC-32 (u32) and its bytes, all little-endian. The
first piece is a key, which must be equal when the file is loaded. Then follow, for each image, a `_SavedMedia` as
JSON and its embeddings, and an empty piece. Then, for each block, a `_SavedBlock` as JSON, its pages and its
snapshots. The last piece is empty. Parents precede their children, so a truncated file still contains usable
prefixes.

The engine thread copies a few blocks at a time between two steps, so a large cache does not stall any stream. Pages
that are evicted in the meantime are not saved.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from localllm.engine.cache import PagedCache
from localllm.engine.media import Embeddings
from localllm.engine.snapshots import NONE, Block
from localllm.errors import PromptCacheError, path_text
from localllm.files import NewFile
from localllm.nesting import check_nesting
from localllm.regular_file import open_regular

MAGIC = b"llmcach3"
_HEAD = struct.Struct("<QI")

#: Most blocks and bytes copied between two steps: a few milliseconds.
_BLOCKS_AT_ONCE, _BYTES_AT_ONCE = 64, 4 << 20

#: Fraction of the pages that loading leaves to running requests.
_LEFT_TO_REQUESTS = 1 / 8

_T = TypeVar("_T")


class WithCache(Protocol):
    """Type of `Engine.with_cache`: calls a function with the cache and returns its result."""

    def __call__(self, work: Callable[[PagedCache], _T]) -> _T: ...


class _SavedBlock(msgspec.Struct, array_like=True):
    """A `localllm.engine.snapshots.Block`."""

    parent: int  # index of the preceding block in the file; -1: first block of a prompt
    ids: list[int]
    groups: list[int]  # window groups with a page
    snapshots: list[int]  # token count of each snapshot


class _SavedMedia(msgspec.Struct, array_like=True):
    """An image's key and the shape of its embeddings."""

    key: bytes
    shape: tuple[int, int, int]


def save(with_cache: WithCache, path: Path, key: str) -> int:
    """Save the cache, except for tokens evaluated with adapters. Return the number of tokens.

    ``key`` identifies everything that must be equal when the file is loaded: model, version and cache type.
    """
    remaining, n_bytes = with_cache(_listed)
    media = with_cache(lambda cache: cache.embeddings.items())
    n_bytes += sum(embeddings.nbytes for _, embeddings in media)
    numbers: dict[Block, int] = {}
    n_tokens = 0
    with NewFile(path, n_bytes, is_private=True) as file:
        file.put(MAGIC)

        def put(data: bytes) -> None:
            file.put(_HEAD.pack(len(data), zlib.crc32(data)))
            file.put(data)

        put(key.encode())
        for name, embeddings in media:
            put(msgspec.json.encode(_SavedMedia(name, embeddings.shape)))
            put(embeddings.tobytes())
        put(b"")
        while remaining:
            for block, is_first, saved, pieces in with_cache(partial(_copied, remaining)):
                parent = None if block.parent is None else numbers.get(block.parent)
                if not is_first and parent is None:  # the parent was evicted before it was copied
                    continue
                numbers[block] = len(numbers)
                saved.parent = NONE if parent is None else parent
                for data in (msgspec.json.encode(saved), *pieces):
                    put(data)
                n_tokens += len(saved.ids)
        put(b"")
    return n_tokens


def _listed(cache: PagedCache) -> tuple[deque[Block], int]:
    """Return the blocks to save and the bytes of their pages and snapshots."""
    blocks = deque(cache.blocks())
    n_of_group = Counter(group for block in blocks for group, page in enumerate(block.pages) if page != NONE)
    n_bytes = sum(n * cache.storage.n_bytes_of(group) for group, n in n_of_group.items())
    if n_snapshots := sum(len(block.snapshots) for block in blocks):
        n_bytes += n_snapshots * cache.storage.n_bytes_of(None)
    return blocks, n_bytes


def _copied(remaining: deque[Block], cache: PagedCache) -> list[tuple[Block, bool, _SavedBlock, list[bytes]]]:
    """Remove some blocks from ``remaining`` and copy the blocks that are still cached.

    Returns tuples (block, whether it is the first of a prompt, its header, its pages and snapshots).
    """
    copied, n_bytes = [], 0
    for _ in range(min(len(remaining), _BLOCKS_AT_ONCE)):
        block = remaining.popleft()
        if cache.holds(block):
            groups = [group for group, page in enumerate(block.pages) if page != NONE]
            snapshots = sorted(block.snapshots)
            pieces = [cache.storage.read(group, block.pages[group]) for group in groups]
            pieces += [cache.storage.read(None, block.snapshots[n]) for n in snapshots]
            saved = _SavedBlock(NONE, list(block.ids), groups, snapshots)
            copied.append((block, block.parent is cache.root, saved, pieces))
            n_bytes += sum(map(len, pieces))
        if n_bytes >= _BYTES_AT_ONCE:
            break
    return copied


def load(with_cache: WithCache, path: Path, key: str) -> int:
    """Load a file into the cache, as far as there is room. Return the number of tokens."""
    added: list[Block | None] = []  # in the engine's thread
    try:
        with open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("the file does not start with the format's magic number")
            pieces = _pieces(file, path.stat().st_size)
            if next(pieces) != key.encode():
                raise PromptCacheError(
                    f"{path_text(path)} was saved with a different model, version, device or cache type: load that "
                    "one, or delete the file"
                )
            for name, embeddings in _saved_media(pieces):
                with_cache(partial(_put, name, embeddings))
            for batch in _batches(pieces):
                with_cache(partial(_restore, added, batch))
    except OSError as error:
        raise PromptCacheError(f"{path_text(path)} cannot be read ({error.strerror or error})") from error
    except (ValueError, IndexError, StopIteration, msgspec.DecodeError) as error:
        raise PromptCacheError(f"{path_text(path)} is not a complete file of saved prompts: delete it") from error
    finally:
        with_cache(lambda cache: cache.restored([block for block in added if block is not None]))
    return sum(len(block.ids) for block in added if block is not None)


def _saved_media(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, Embeddings]]:
    while head := _next(pieces):
        check_nesting(head)
        saved = msgspec.json.decode(head, type=_SavedMedia)
        if min(saved.shape) < 1:
            raise ValueError("the shape of an image's embeddings is not positive")
        yield saved.key, np.frombuffer(_next(pieces), "<f4").astype(np.float32, copy=False).reshape(saved.shape)


def _put(key: bytes, embeddings: Embeddings, cache: PagedCache) -> None:
    cache.embeddings.put(key, embeddings)


class _Loaded(NamedTuple):
    block: _SavedBlock
    pages: dict[int, bytes]
    snapshots: dict[int, bytes]


def _batches(pieces: Iterator[bytes]) -> Iterator[list[_Loaded]]:
    """Yield batches of blocks. In a damaged file, blocks before the damage are yielded before the error is raised."""
    batch: list[_Loaded] = []
    n_bytes = 0
    damage: Exception | None = None
    while damage is None:
        try:
            head = _next(pieces)
            if not head:
                break
            check_nesting(head)
            block = msgspec.json.decode(head, type=_SavedBlock)
            loaded = _Loaded(
                block, {group: _next(pieces) for group in block.groups}, {n: _next(pieces) for n in block.snapshots}
            )
            batch.append(loaded)
            n_bytes += sum(map(len, (*loaded.pages.values(), *loaded.snapshots.values())))
        except (OSError, ValueError, msgspec.DecodeError) as error:
            damage = error
        if n_bytes >= _BYTES_AT_ONCE or len(batch) >= _BLOCKS_AT_ONCE:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch
    if damage is not None:
        raise damage


def _next(pieces: Iterator[bytes]) -> bytes:
    for piece in pieces:
        return piece
    raise ValueError("the file is truncated")


def _restore(added: list[Block | None], batch: Sequence[_Loaded], cache: PagedCache) -> None:
    """Add blocks to the cache. Raises ValueError if a block does not fit this cache."""
    n_loaded = sum(block is not None for block in added)
    reserve = _LEFT_TO_REQUESTS if cache.n_pages - cache.n_available > n_loaded else 0.0
    for saved, pages, snapshots in batch:
        if not NONE <= saved.parent < len(added):
            raise ValueError("the parent of a block is missing")
        parent = cache.root if saved.parent == NONE else added[saved.parent]
        added.append(None if parent is None else cache.restore(parent, saved.ids, pages, snapshots, reserve=reserve))


def _pieces(file: BinaryIO, n_left: int) -> Iterator[bytes]:
    """Yield the pieces that follow the magic number. Raises ValueError at a damaged piece."""
    while head := file.read(_HEAD.size):
        n, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (n_left + 1, 0)
        data = file.read(n) if n <= n_left else b""
        if len(data) != n or zlib.crc32(data) != crc:
            raise ValueError("a piece is damaged")
        yield data
