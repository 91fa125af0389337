"""Saves cache pages and image embeddings in a file, so that prompts need no evaluation after a restart.

The file consists of records (`localllm.engine.records`): a root whose label must be equal when the file is loaded,
images, blocks, and a root without a label at the end. Parents precede their children, so a truncated file still
contains usable prefixes.

The engine thread copies a few blocks at a time between two steps, so a large cache does not stall any stream. Pages
that are evicted in the meantime are not saved.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from localllm.engine.cache import BYTES_AT_ONCE, RESERVED_SHARE, PagedCache
from localllm.engine.records import (
    MAGIC,
    MEDIA_ROOT,
    NO_PARENT,
    Record,
    digest,
    ids_bytes,
    ids_of,
    pack_embeddings,
    read_data,
    scan,
    unpack_embeddings,
)
from localllm.engine.snapshots import NONE, Block
from localllm.errors import PromptCacheError, path_text
from localllm.files import NewFile
from localllm.regular_file import open_regular

#: Most blocks copied between two steps: a few milliseconds.
_BLOCKS_AT_ONCE = 64

_T = TypeVar("_T")


class WithCache(Protocol):
    """Type of `Engine.with_cache`: calls a function with the cache and returns its result."""

    def __call__(self, work: Callable[[PagedCache], _T]) -> _T: ...


def save(with_cache: WithCache, path: Path, key: str) -> int:
    """Save the cache, except for tokens evaluated with adapters. Return the number of tokens.

    ``key`` identifies everything that must be equal when the file is loaded: model, version and cache type.
    """
    remaining, n_bytes = with_cache(_listed)
    media = with_cache(lambda cache: cache.embeddings.items())
    n_bytes += sum(embeddings.nbytes for _, embeddings in media)
    digests: dict[Block | None, bytes] = {None: digest(NO_PARENT, key.encode())}
    n_tokens = 0
    with NewFile(path, n_bytes, is_private=True) as file:
        file.put(MAGIC)

        def put(parent: bytes, ids: bytes, part: int = 0, data: bytes = b"") -> None:
            file.put(Record.of(parent, ids, part, data).head)
            file.put(data)

        put(NO_PARENT, key.encode())
        for name, embeddings in media:
            put(MEDIA_ROOT, name, 0, pack_embeddings(embeddings))
        while remaining:
            for block, preceding, ids, parts in with_cache(partial(_copied, remaining)):
                if (parent := digests.get(preceding)) is None:  # it was evicted before it was copied
                    continue
                digests[block] = digest(parent, ids)
                for part, data in parts.items():
                    put(parent, ids, part, data)
                n_tokens += len(ids_of(ids))
        put(NO_PARENT, b"")
    return n_tokens


def _listed(cache: PagedCache) -> tuple[deque[Block], int]:
    """Return the blocks to save and the bytes of their pages and snapshots."""
    blocks = deque(cache.blocks())
    n_of_group = Counter(group for block in blocks for group, page in enumerate(block.pages) if page != NONE)
    n_bytes = sum(n * cache.storage.n_bytes_of(group) for group, n in n_of_group.items())
    if n_snapshots := sum(len(block.snapshots) for block in blocks):
        n_bytes += n_snapshots * cache.storage.n_bytes_of(None)
    return blocks, n_bytes


def _copied(remaining: deque[Block], cache: PagedCache) -> list[tuple[Block, Block | None, bytes, dict[int, bytes]]]:
    """Remove some blocks from ``remaining`` and copy the blocks that are still cached.

    Returns tuples (block, preceding block or None, ids, parts).
    """
    copied, n_bytes = [], 0
    for _ in range(min(len(remaining), _BLOCKS_AT_ONCE)):
        block = remaining.popleft()
        if cache.holds(block):
            parts = {part: read() for part, read in cache.parts_of(block)}
            preceding = None if block.parent is cache.root else block.parent
            copied.append((block, preceding, ids_bytes(block.ids), parts))
            n_bytes += sum(map(len, parts.values()))
        if n_bytes >= BYTES_AT_ONCE:
            break
    return copied


@dataclass
class _Loading:
    """Blocks that were loaded. Only the engine thread uses it."""

    root: bytes  # digest of the tree's root
    blocks: dict[bytes, Block] = field(default_factory=dict)  # by digest
    uses: list[tuple[Block, int]] = field(default_factory=list)

    def restore(self, batch: list[tuple[Record, bytes]], cache: PagedCache) -> None:
        """Add blocks to the cache as far as there is room. Raises ValueError if a block does not fit this cache."""
        reserve = RESERVED_SHARE if cache.n_pages - cache.n_available > len(self.blocks) else 0.0
        for record, data in batch:
            if record.parent == MEDIA_ROOT:
                cache.embeddings.put(record.ids, unpack_embeddings(data))
                continue
            parent = cache.root if record.parent == self.root else self.blocks.get(record.parent)
            if parent is None:
                continue
            ids, parts = ids_of(record.ids), {record.part: data}
            block = cache.restore(parent, ids, parts, self.uses, reserve=reserve)
            if block is not None:
                self.blocks[digest(record.parent, record.ids)] = block


def load(with_cache: WithCache, path: Path, key: str) -> int:
    """Load a file into the cache, as far as there is room. Return the number of tokens."""
    loading = _Loading(digest(NO_PARENT, key.encode()))
    try:
        with open_regular(path) as file:
            records = scan(file)
            if next(records)[:2] != (NO_PARENT, key.encode()):
                raise PromptCacheError(
                    f"{path_text(path)} was saved with a different model, version, device or cache type: load that "
                    "one, or delete the file"
                )
            for batch in _batches(file, records):
                with_cache(partial(loading.restore, batch))
    except OSError as error:
        raise PromptCacheError(f"{path_text(path)} cannot be read ({error.strerror or error})") from error
    except (ValueError, StopIteration) as error:
        raise PromptCacheError(f"{path_text(path)} is not a complete file of saved prompts: delete it") from error
    finally:
        with_cache(lambda cache: cache.restored(loading.uses))
    return sum(len(block.ids) for block in loading.blocks.values())


def _batches(file: BinaryIO, records: Iterator[Record]) -> Iterator[list[tuple[Record, bytes]]]:
    """Yield batches of records. Records before a damaged record are yielded before the error is raised."""
    batch, n_bytes, damage = list[tuple[Record, bytes]](), 0, None
    while damage is None:
        try:
            record = next(records)
            data = read_data(file, record)
            if record[:2] == (NO_PARENT, b""):  # the end
                break
            batch.append((record, data))
            n_bytes += len(data)
        except (OSError, ValueError) as error:
            damage = error
        except StopIteration:
            damage = ValueError("the file is truncated")
        if n_bytes >= BYTES_AT_ONCE or len(batch) >= _BLOCKS_AT_ONCE:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch
    if damage is not None:
        raise damage
