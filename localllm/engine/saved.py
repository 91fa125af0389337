"""Pages of the cache in a file, so that prompts are not evaluated again after a restart.

A file: `MAGIC`, then pieces, each its length (u64), its CRC-32 (u32) and its bytes, all little-endian.  The first
piece is the header, a `_Header` as JSON; then come, block after block, its pages and its snapshots.  A block stands
behind its parent, so that of a file which was cut short the beginnings are good.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from localllm.engine.cache import PagedCache
from localllm.engine.snapshots import NONE, Block
from localllm.errors import PromptCacheError, path_text
from localllm.files import NewFile

MAGIC = b"llmcach1"
_HEAD = struct.Struct("<QI")


class _Block(msgspec.Struct, array_like=True):
    """A block, as `localllm.engine.snapshots.Block`.

    Attributes:
        parent: the number of the block before it; -1 of the first of a prompt.
        groups: those in which it has a page.
        snapshots: after how many of its tokens there are some.
    """

    parent: int
    ids: list[int]
    groups: list[int]
    snapshots: list[int]


class _Header(msgspec.Struct):
    key: str
    blocks: list[_Block]


def save(cache: PagedCache, path: Path, key: str) -> int:
    """Writes what the cache has, without what adapters have changed; returns the tokens.

    Args:
        key: all that must be the same where it is loaded: the model, the version, the kind of cache.

    Raises:
        OutputError: it cannot be written.
    """
    kept, blocks = cache.kept, cache.blocks()
    numbers = {block: i for i, block in enumerate(blocks)}
    header = _Header(key, [])
    for block in blocks:
        groups = [group for group, page in enumerate(block.pages) if page != NONE]
        parent = NONE if block.parent is None else numbers.get(block.parent, NONE)
        header.blocks.append(_Block(parent, block.ids, groups, sorted(block.snapshots)))
    # Of each block's pages and snapshots.
    holds = [group for block in header.blocks for group in (*block.groups, *(None for _ in block.snapshots))]
    sizes = {group: kept.n_bytes_of(group) for group in set(holds)}
    with NewFile(path, sum(sizes[group] for group in holds)) as file:
        file.put(MAGIC)

        def put(data: bytes) -> None:
            file.put(_HEAD.pack(len(data), zlib.crc32(data)))
            file.put(data)

        put(msgspec.json.encode(header))
        for block, saved in zip(blocks, header.blocks, strict=True):
            for group in saved.groups:
                put(kept.read(group, block.pages[group]))
            for n in saved.snapshots:
                put(kept.read(None, block.snapshots[n]))
    return sum(len(block.ids) for block in blocks)


def load(cache: PagedCache, path: Path, key: str) -> int:
    """Puts what was saved into the cache, as far as it has room; returns the tokens.

    Raises:
        PromptCacheError: there is no such file, it is damaged (what stands before that is loaded), or it was saved
            under another key.
    """
    added: list[Block | None] = []
    try:
        if path.is_fifo():
            raise ValueError("a pipe, which may have no end")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it does not begin as one")
            pieces = _pieces(file, path.stat().st_size)
            header = msgspec.json.decode(next(pieces), type=_Header)
            if header.key != key:
                raise PromptCacheError(
                    f"{path_text(path)} was saved with another model, version, device or type of cache: load that, "
                    "or delete the file"
                )
            for saved in header.blocks:
                pages = {group: next(pieces) for group in saved.groups}
                snapshots = {n: next(pieces) for n in saved.snapshots}
                if not NONE <= saved.parent < len(added):
                    raise ValueError("a block without the one before it")
                parent = cache.root if saved.parent == NONE else added[saved.parent]
                added.append(None if parent is None else cache.restore(parent, saved.ids, pages, snapshots))
    except OSError as error:
        raise PromptCacheError(f"{path_text(path)} cannot be read ({error.strerror or error})") from error
    except (ValueError, IndexError, StopIteration, msgspec.DecodeError) as error:
        raise PromptCacheError(f"{path_text(path)} is no whole file of saved prompts: delete it") from error
    finally:
        blocks = [block for block in added if block is not None]
        cache.restored(blocks)
    return sum(len(block.ids) for block in blocks)


def _pieces(file: BinaryIO, n_left: int) -> Iterator[bytes]:
    """Raises:
    ValueError: one is not what was written.
    """
    while head := file.read(_HEAD.size):
        n, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (n_left + 1, 0)
        data = file.read(n) if n <= n_left else b""
        if len(data) != n or zlib.crc32(data) != crc:
            raise ValueError("a piece is damaged")
        yield data
